"""Convert a model's embeddings to tables and its one-hot products to lookups, in place."""

from __future__ import annotations

import sys

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hotrow.conversion import sampling
from hotrow.conversion.embeddings import find_embeddings, min_entries_of
from hotrow.conversion.modules import DIRECTIONS, convert_modules
from hotrow.conversion.report import report
from hotrow.errors import HotrowError
from hotrow.ids import check_count
from hotrow.onehot.encoding import encode
from hotrow.onehot.registry import graph_functions
from hotrow.table.autograd import storage_use_count
from hotrow.table.parameter import Table


def convert(model: nn.Module, to: str = "lookup", min_entries: int | None = None) -> nn.Module:
    """Convert a model's embeddings to tables and its one-hot products to lookups, in place.

    The module and its parameters stay the same objects, and the `state_dict` keys don't change.
    Train the model with an optimizer from `hotrow.optim`. Other optimizers also work, but are no
    faster than before conversion. Converting a model again changes nothing.

    **Embeddings.** An `nn.Embedding` or `nn.EmbeddingBag` with 100,000 entries or more becomes a
    table, so that the backward pass and the optimizer step process only the rows in the batch. An
    embedding whose weight is also used by another layer (a tied output head) stays plain PyTorch,
    because its gradient is dense. You don't need to change the code that uses a table. Every read
    of a table first applies the optimizer steps that the rows have missed. A tensor that shares the
    table's storage (`weight.data`, `state_dict()`, `.numpy()`) stays up to date during training if
    it was created after conversion. If a tensor or NumPy array outside the model, such as a
    pretrained tensor, already shares the weight's storage, `convert` copies the weight.

    **One-hots.** `convert` finds the one-hots that the model's own Python code creates with
    `F.one_hot`, `torch.eye(V)[ids]`, ones scattered into zeros, or `ids[..., None] == arange(V)`.
    These one-hots become `hotrow.one_hot` tensors, so a `Linear` or `@` looks up rows instead of
    multiplying. If the weight in a one-hot product has a million entries or more, the first step
    of a `hotrow.optim` optimizer turns the weight into a table.

    hotrow searches for one-hots in the methods of the model's modules. The class of each module is
    replaced with a subclass of the same name. After that, `type(module) is Model` and
    `module.method.__func__ is Model.method` are false, `isinstance(other, type(module))` is true
    only for converted modules, and `super(self.__class__, self)` calls the same method without end.
    cloudpickle stores converted modules, but not their class or bound methods. A one-hot that a
    module's method returns to code outside the model becomes a plain tensor. Under `torch.compile`,
    the search finds only one-hots that `F.one_hot` creates, and what a method reads from
    `type(self)` stays constant. With activation checkpointing (`use_reentrant=False`), the search
    finds only one-hots that a module's method creates.

    `convert.report(model)` lists the model's embeddings and one-hots with their locations, and
    says which were converted and why the others were not. One-hots appear in the report after the
    model has run. A copy of a converted model is also converted.
    Convert the model again after you load it from a file or replace its parameters with
    `load_state_dict(assign=True)` or `to_empty`.

    Args:
        model: the module to convert, in place.
        to: "lookup", or "matmul" for the opposite conversion, in which each embedding multiplies
            the one-hot of its ids by its weight. Use "matmul" on backends where a product is
            cheaper than a lookup.
        min_entries: the minimum size, in entries, of an embedding or one-hot to convert (default:
            100,000). Below 100,000 entries, plain PyTorch is about as fast. With fused Adam or
            AdamW, plain PyTorch is just as fast up to 500,000 entries, so pass 500_000.
            A one-hot with N rows and C columns has N x C entries. hotrow searches only some calls
            to the model for one-hots: the first 8 calls, and then fewer and fewer calls, but at
            least one in 1,024. It also searches each call whose input is larger than the inputs of
            all calls that a search didn't speed up (by a margin, if the inputs keep growing), or at
            least as large as the input of a call that a search did speed up. Other calls run the
            original code. Under `torch.compile`, all one-hot products become lookups. If converted
            modules with different `min_entries` are nested, the value of the module that you call
            applies.

    Returns:
        `model` itself.

    Raises:
        HotrowError: `model` is not a module, `to` is neither "lookup" nor "matmul", or
            `min_entries` is not a non-negative int.

    Cost: conversion adds no overhead to torch's own layers. In your own modules, each call to a
    torch function takes about a microsecond longer if the model creates large one-hots. Otherwise,
    only the call to the model itself takes 2 to 9 microseconds longer.

    >>> model = convert(nn.Sequential(nn.Embedding(50_000, 5), nn.Linear(5, 2)))
    >>> print(convert.report(model))
    0  Embedding(50000, 5)  table
    """
    if not isinstance(model, nn.Module):
        raise HotrowError(f"model is a {type(model).__name__}, but convert takes a torch.nn.Module")
    if to not in DIRECTIONS:
        raise HotrowError(f"to = {to!r}, but it must be 'lookup' or 'matmul'", fix="use either")
    min_entries = None if min_entries is None else check_count("min_entries", min_entries)
    for function in (encode, *graph_functions()):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    convert_modules(model, to, min_entries)
    if to == "lookup":
        threshold = sampling.MIN_ENTRIES if min_entries is None else min_entries
        for _, module, obstacle in find_embeddings(model):
            min_entries_of[module] = threshold
            # Most optimizers reject torch's sparse gradients, so an embedding with sparse=True
            # becomes a table at any size.
            if not obstacle and (module.weight.numel() >= threshold or module.sparse):
                weight: nn.Parameter = module.weight  # type: ignore[assignment]
                copies = not isinstance(weight, Table) and _is_held_elsewhere(weight, model)
                if copies:
                    weight.data = weight.data.clone(memory_format=torch.contiguous_format)
                Table.adopt(weight).was_copied |= copies
    return model


def _is_held_elsewhere(weight: nn.Parameter, model: nn.Module) -> bool:
    """Return whether a tensor outside the model shares the whole storage of a trainable weight.

    An example is a pretrained tensor that is still in scope. If a table shared storage with such a
    tensor, every step would have to keep the tensor up to date. The function returns False if
    another tensor in the model or another process shares the storage, or if the storage is larger
    than the weight.
    """
    if not weight.requires_grad or weight.is_meta or storage_use_count(weight) in (1, sys.maxsize):
        return False
    storage = weight.untyped_storage()
    if storage.nbytes() != weight.nbytes:
        return False
    others = [
        each
        for each in (*model.parameters(), *model.buffers())
        if each is not weight and each.layout is torch.strided and not is_lazy(each)
    ]
    return all(each.untyped_storage().data_ptr() != storage.data_ptr() for each in others)


convert.report = report  # type: ignore[attr-defined]
