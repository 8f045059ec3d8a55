"""Add, drop and move the rows of a vocabulary in place, with the optimizer state of each row."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.ids import as_ids, check_count
from hotrow.table.row_change import RowChange
from hotrow.vocabulary.changing import Init, change_rows, failing_on_all_ranks
from hotrow.vocabulary.layers import find_layers
from hotrow.vocabulary.states import unwrap

_M = TypeVar("_M", bound=nn.Module)


def resize(
    layer: _M,
    rows: int,
    optimizer: Any = None,
    *,
    model: nn.Module | None = None,
    init: Init | None = None,
) -> _M:
    """Grow or shrink a vocabulary in place, with the optimizer state of its rows.

    The result is the same as if you resized a dense parameter and its optimizer state by hand::

        weight = cat([weight, init(new rows)])          or weight[:rows]
        state  = cat([state, the optimizer's initial values])

    Existing rows, their state and the step count don't change, so training continues as before. New
    rows get the optimizer's initial state, which is usually zero. torch keeps one step count per
    parameter, so Adam's bias correction for a new row is that of the current step.

    The layer, its parameters, and the optimizer's parameter groups remain the same objects. The
    layer's `num_embeddings`, `in_features` or `out_features` changes. If a linear layer shares the
    weight (a tied head), its `out_features` and its bias change too. A gradient in `grad` is also
    resized.

    A backward pass from before the change raises an error, because its gradient would be for the
    old rows. With `backward(inputs=[layer.weight])`, torch doesn't find the weight in the old
    graph, so it computes no gradient and raises no error.

    Args:
        layer: an `Embedding`, `EmbeddingBag`, `OneHotLinear` or `Linear` layer of torch or hotrow;
            or a model whose embeddings all share one weight. If `hotrow.convert`
            has made the weight a table, its rows are not settled.
        rows: V, the new number of rows; at least 1. In a `Linear` layer, this is the number of
            outputs.
        optimizer: the optimizer that trains the weight, from `hotrow.optim` or `torch.optim`, or a
            wrapper around it. Pass None if you have not created the optimizer yet. The state of
            other optimizers doesn't change, so they can't continue to train the weight. If it is
            a table, the next step of another optimizer that has stepped it raises an error.
        model: the model that contains the layer. It is searched for other layers that share the
            weight. You can omit it if there are none.
        init: the values of the n new rows, as an (n, D) tensor, or a function such as
            `torch.nn.init.normal_` that writes the values into a given (n, D) tensor. By default,
            the layer's own initialization is used. New entries of a bias are 0.

    Returns:
        `layer` itself.

    Raises:
        HotrowError: before anything changes, if the layer has no weight with a row for each id, the
            optimizer does not train the weight, or a removed row is frozen or is the padding row.
            For a sharded or replicated table, every rank raises the error. For a table on disk, the
            error is also raised if the disk has too little space for the new rows, or if another
            tensor shares the memory of the table or of its state.

    Cost: when a table on the CPU grows for the first time, it gets capacity for twice as many rows.
    On Linux, the memory pages of a large table are then moved rather than copied. On other systems,
    growing in many small steps copies each row about once in total. Unused capacity takes no
    physical memory. Other weights are copied each time they grow. No other thread may use the layer
    during the call. The files of a table on disk don't change until the next
    `hotrow.disk.Store.save`, which writes the new rows.

    >>> import torch, hotrow
    >>> layer = hotrow.convert(torch.nn.Embedding(4, 5), min_entries=0)
    >>> optimizer = hotrow.optim.AdamW(layer.parameters())
    >>> layer(torch.tensor([2, 0])).sum().backward()
    >>> optimizer.step()
    >>> hotrow.vocabulary.resize(layer, 6, optimizer)
    Embedding(6, 5)
    >>> optimizer.state[layer.weight]["exp_avg"].shape
    torch.Size([6, 5])
    """
    layers = find_layers(layer, model)
    with failing_on_all_ranks([layers.weight]):
        change = RowChange(layers.row_count, check_count("rows", rows))
        optimizer = unwrap(optimizer)
    with change_rows([(layers, change)], optimizer, init):
        pass
    return layer


def take(
    layer: nn.Module,
    ids: Any,
    optimizer: Any = None,
    *,
    model: nn.Module | None = None,
    init: Init | None = None,
) -> Tensor:
    """Keep, drop and reorder the rows of a vocabulary in place, with their optimizer state.

    The result is the same as if you selected rows of a dense parameter and its optimizer state by
    hand::

        weight = weight[ids]
        state  = state[ids]

    To merge vocabularies or to add rows at any position, use -1 in `ids` for each new row.

    Args:
        layer: see `resize`.
        ids: (V',), the old id of each new row. Ids must be distinct, except for -1. It adds a row,
            the same way `resize` does. Rows that are not listed are dropped.
        optimizer: see `resize`.
        model: see `resize`.
        init: see `resize`.

    Returns:
        (V,) int64: the new id of each old id, or -1 if its row was dropped. Use it to
        translate stored data: `new_ids = remap[old_ids]`.

    Raises:
        HotrowError: before anything changes, if an id is out of range or repeated, and in the same
            cases as `resize`. For a sharded or replicated table, every rank raises the error.

    Cost: copies the rows of the weight and of its state once. Rows are not settled. For a table on
    disk, the copy stays in memory until the next save.

    >>> import torch, hotrow
    >>> layer = torch.nn.Embedding.from_pretrained(torch.tensor([[1.], [2.], [3.]]))
    >>> hotrow.vocabulary.take(layer, [2, 0])
    tensor([ 1, -1,  0])
    >>> layer.weight.flatten()
    tensor([3., 1.])
    """
    layers = find_layers(layer, model)
    with failing_on_all_ranks([layers.weight]):
        sources = _check_sources(ids, layers.row_count)
        change = RowChange(layers.row_count, len(sources), sources)
        optimizer = unwrap(optimizer)
    with change_rows([(layers, change)], optimizer, init):
        pass
    return change.new_ids(torch.arange(change.old_count, device="cpu"))


def _check_sources(ids: Any, row_count: int) -> Tensor:
    """Return the ids of `take` as (V',) int64 on the CPU."""
    sources = as_ids(ids).to("cpu", torch.int64)
    if sources.ndim != 1 or not len(sources):
        raise HotrowError(
            f"ids has shape {tuple(sources.shape)}, but it must list at least one row",
            fix="pass the old id of each new row",
        )
    outside = ((sources < -1) | (sources >= row_count)).nonzero()[:, 0]
    if len(outside):
        position = int(outside[0])
        raise HotrowIndexError(
            f"ids[{position}] is {int(sources[position])}, but this vocabulary's ids are 0 to "
            f"{row_count - 1}",
            fix="use -1 for a new row",
        )
    kept = sources[sources >= 0]
    counts = kept.bincount()
    if len(kept) and int(counts.max()) > 1:
        repeated = int(counts.argmax())
        positions = (sources == repeated).nonzero()[:2, 0].tolist()
        raise HotrowError(
            f"ids[{positions[0]}] and ids[{positions[1]}] are both {repeated}, but a row can have "
            "only one new id",
            fix="list each id once; for a copy of a row, use -1 and pass its values as init",
        )
    return sources
