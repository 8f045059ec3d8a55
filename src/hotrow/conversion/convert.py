"""Convert a model in place: its embeddings to tables, its one-hot products to lookups."""

from __future__ import annotations

import torch
from torch import nn

from hotrow.conversion import sampling
from hotrow.conversion.embeddings import find_embeddings
from hotrow.conversion.modules import DIRECTIONS, convert_modules
from hotrow.conversion.report import report
from hotrow.errors import HotrowError
from hotrow.ids import check_count
from hotrow.onehot.registry import graph_functions
from hotrow.onehot.tensor import encode
from hotrow.table.parameter import Table


def convert(model: nn.Module, to: str = "lookup", min_entries: int | None = None) -> nn.Module:
    """Convert a model in place: its embeddings to tables, its one-hot products to lookups.

    The module, its parameters and its `state_dict` keys stay the same objects and names. Train the
    model with an optimizer of `hotrow.optim`; any other optimizer works too, at its own cost.
    Converting a model again changes nothing.

    **Embeddings.** An `nn.Embedding` or `nn.EmbeddingBag` of 100,000 entries or more becomes a
    table: its gradient and its optimizer step cost only the touched rows. An embedding whose weight
    is also used by another layer (a tied output head) stays plain PyTorch, because its gradient is
    dense. The code around a table needs no change. Every read of a table settles its rows first,
    and a tensor that shares its storage (`weight.data`, `state_dict()`, `.numpy()`) follows the
    training. A table whose weight was made from a NumPy array gets new storage. In `torch.compile`,
    a table lookup breaks the graph.

    **One-hots.** `convert` finds the one-hots that the model's own Python code makes with
    `F.one_hot`, `torch.eye(V)[ids]`, ones scattered into zeros, or `ids[..., None] == arange(V)`.
    They become `hotrow.one_hot` tensors, so a `Linear` or `@` looks up rows instead of multiplying.
    If the weight of such a product has a million entries or more, the first step of a
    `hotrow.optim` optimizer makes it a table. Its memory layout is then transposed, so pass it to
    safetensors as `.contiguous()`.

    The search covers the methods of the modules in the model. The class of each module becomes a
    subclass of the same name, and a one-hot that leaves these methods becomes a plain tensor. In
    `torch.compile`, only `F.one_hot` is found. In a checkpoint (`use_reentrant=False`), only
    one-hots inside modules' methods are found.

    `convert.report(model)` lists what was converted and what was not, where, and why. One-hots
    appear in it once the model has run. A copy of a converted model is converted. Convert the model
    again after you load it from a file, or replace its parameters with
    `load_state_dict(assign=True)` or `to_empty`.

    Args:
        model: any module; changed in place.
        to: "lookup", or "matmul" for the opposite: each embedding multiplies its table by the
            one-hot of its ids, for backends where a product is cheaper than a lookup.
        min_entries: the size from which an embedding or a one-hot is converted, in entries; 100,000
            by default. At a smaller size, torch's dense gradient and step are about as fast. With
            SGD or `fused=True` they are as fast up to a million entries, so pass 1_000_000 there.
            The entries of a one-hot are the rows of its batch times its columns. If a model makes
            no one-hot of that size, only a sample of its calls searches for one-hots: the first
            calls, then one in 64, and each call with a larger input than before. In
            `torch.compile`, all one-hot products are looked up. If converted modules with different
            limits are nested, the limit of the outermost call applies.

    Returns:
        The same model.

    Raises:
        HotrowError: `model` is not a module, `to` is unknown, or `min_entries` is not an int of 0
            or more.

    Cost: none in torch's own layers. In your own modules, each torch function call takes about a
    microsecond longer if the model makes large one-hots. Otherwise only the call of the model does.

    >>> model = convert(nn.Sequential(nn.Embedding(50_000, 5), nn.Linear(5, 2)))
    >>> print(convert.report(model))
    0  Embedding(50000, 5)  table
    """
    if not isinstance(model, nn.Module):
        raise HotrowError(f"model is a {type(model).__name__}, but convert takes a torch.nn.Module")
    if to not in DIRECTIONS:
        raise HotrowError(f"to = {to!r}, but must be 'lookup' or 'matmul'", fix="pass one of these")
    min_entries = None if min_entries is None else check_count("min_entries", min_entries)
    for function in (encode, *graph_functions()):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    convert_modules(model, to, min_entries)
    if to == "lookup":
        threshold = sampling.MIN_ENTRIES if min_entries is None else min_entries
        for _, module, obstacle in find_embeddings(model):
            # Most optimizers refuse torch's own sparse gradients, so a sparse embedding of any size
            # becomes a table.
            if not obstacle and (module.weight.numel() >= threshold or module.sparse):
                Table.adopt(module.weight)  # type: ignore[arg-type]
    return model


convert.report = report  # type: ignore[attr-defined]
