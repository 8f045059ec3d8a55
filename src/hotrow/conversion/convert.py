"""Convert a model in place: its embeddings become tables, its products with one-hots look-ups."""

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
    """Make a model look rows up: its embeddings, and what it multiplies by one-hots.

    The module, its parameters and its `state_dict` keys stay the same objects and names. Train it
    with an optimizer of `hotrow.optim`; any other works, at its own cost. Converting again changes
    nothing.

    Embeddings of 100,000 entries or more become `Table`s in place, whose gradients and steps cost
    their touched rows; `min_entries` sets another limit. One that something other than an
    embedding holds as well (a tied head) is left: its gradient is dense. Plain torch code around
    the tables stays as it is: reading one, in any way, settles its rows first, and a tensor that
    shares its storage (`weight.data`, `state_dict()`, `.numpy()`) follows the training. A table
    made from a numpy array gets storage of its own. In `torch.compile` a look-up of a table ends a
    graph.

    One-hots that the model's own Python makes, by `F.one_hot`, `torch.eye(V)[ids]`, ones scattered
    into zeros or `ids[..., None] == arange(V)`, become `hotrow.one_hot`s: what is multiplied by one
    looks its rows up instead, `Linear` and `@` first of all. The weight of such a product, if it
    has a million entries or more, becomes a table with the first step of an optimizer of
    `hotrow.optim`; its memory is then that of its transpose, which safetensors has to be given as
    `.contiguous()`. This goes for the methods of the modules in the model, each of which gets a
    subclass of the same name; what leaves them is a plain tensor. In `torch.compile`, for
    `F.one_hot`; in a checkpoint (`use_reentrant=False`), within modules' methods.

    `convert.report(model)` says what was done, where, and why not: of one-hots, once the model has
    run. A copy of the model is converted; of one loaded from a file, or whose parameters were
    replaced (`load_state_dict(assign=True)`, `to_empty`), the embeddings are to be converted again.

    Args:
        model: any module; changed in place.
        to: "lookup", or "matmul" for the other direction: every embedding multiplies its table by
            the one-hot of its ids, for backends where a product is the cheap one.
        min_entries: entries from which on an embedding or a one-hot is converted; 100,000 by
            default. A smaller embedding stays torch's, whose dense gradient and step are about as
            fast (SGD's, and those with `fused=True`, up to a million entries: use 1_000_000 with
            them). So does a product with a smaller one-hot (rows of the batch x columns). A model
            in which no one-hot is larger runs as it was: only its first calls, then one in 64, and
            any with more input than those, look for one-hots. In `torch.compile` all are looked up.
            Of modules within modules the one that is called decides.

    Returns:
        The model.

    Raises:
        HotrowError: not a module; another direction; `min_entries` is not a count.

    Cost: nothing for torch's own layers. In a class of your own, each call of a torch function
    passes through Python, about a microsecond, in models with one-hots worth it; in others, the
    call of the model itself does.

    >>> model = convert(nn.Sequential(nn.Embedding(50_000, 5), nn.Linear(5, 2)))
    >>> print(convert.report(model))
    0  Embedding(50000, 5)  table
    """
    if not isinstance(model, nn.Module):
        raise HotrowError(f"convert takes a torch.nn.Module, not a {type(model).__name__}")
    if to not in DIRECTIONS:
        raise HotrowError(
            f"convert goes to 'lookup' or to 'matmul', not to {to!r}", fix="give one of these"
        )
    min_entries = None if min_entries is None else check_count("min_entries", min_entries)
    for function in (encode, *graph_functions()):
        torch.compiler.allow_in_graph(function)  # type: ignore[no-untyped-call]
    convert_modules(model, to, min_entries)
    if to == "lookup":
        threshold = sampling.MIN_ENTRIES if min_entries is None else min_entries
        for _, module, obstacle in find_embeddings(model):
            # With torch's own table, a sparse gradient is one that most optimizers refuse.
            if not obstacle and (module.weight.numel() >= threshold or module.sparse):
                Table.adopt(module.weight)  # type: ignore[arg-type]
    return model


convert.report = report  # type: ignore[attr-defined]
