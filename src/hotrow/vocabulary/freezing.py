"""Freeze rows, so that no step changes them or their optimizer state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, check_range, digest
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.table.parameter import Table
from hotrow.vocabulary.changing import failing_on_all_ranks
from hotrow.vocabulary.layers import VocabularyLayers, check_in_memory, find_layers


def freeze(layer: nn.Module, ids: Any) -> None:
    """Freeze rows, so that no step changes them, not even through momentum or weight decay.

    The result is the same as in dense training where you restore the frozen rows and their
    optimizer state after every step. Lookups still give frozen rows a gradient, and clipping by
    norm includes it.

    For example, freeze the pretrained rows and train only the rows of new tokens.

    Args:
        layer: an embedding whose weight is a table (see `hotrow.convert`), or a model whose
            embeddings all share one weight.
        ids: the rows to freeze, int64 or int32 of any shape. Rows that are already frozen stay
            frozen. Repeated ids count once.

    Raises:
        HotrowError: before anything changes, if the weight is not a table, an id is out of range,
            or the table is sharded or on disk. Later, a step raises this error if an optimizer from
            `torch.optim` trains the table.

    Cost: settles the rows once. After that, steps just skip the rows. If the gradient is dense
    (for example, because of a tied head), each step saves the frozen rows and then restores them.

    Checkpoints don't record which rows are frozen. After you load a checkpoint into a new model,
    call `freeze` again.

    >>> import torch, hotrow
    >>> layer = hotrow.convert(torch.nn.Embedding(4, 5), min_entries=0)
    >>> optimizer = hotrow.optim.AdamW(layer.parameters())
    >>> hotrow.vocabulary.freeze(layer, [0, 1])
    >>> before = layer.weight[0].clone()
    >>> layer(torch.tensor([0, 2])).sum().backward()
    >>> optimizer.step()
    >>> torch.equal(layer.weight[0], before)
    True
    """
    table, rows = _check_rows(layer, ids, "freeze")
    with ExclusiveAccess():  # so that a signal handler can't interrupt the change
        earlier = table.frozen_rows
        frozen = rows if earlier is None else torch.unique(torch.cat([earlier, rows]))
        if table.lag is not None:
            table.lag.freeze(rows)
        table.frozen_rows = frozen if len(frozen) else None


def unfreeze(layer: nn.Module, ids: Any = None) -> None:
    """Unfreeze rows, so that steps change them again.

    Training continues with the values and the state that the rows had when they were frozen.

    Args:
        layer: see `freeze`.
        ids: the rows, or None for all frozen rows. Rows that are not frozen are ignored.

    Raises:
        HotrowError: before anything changes, if the weight is not a table, or an id is out of
            range.
    """
    table, rows = _check_rows(layer, [] if ids is None else ids, "unfreeze", ids is None)
    with ExclusiveAccess():
        if table.frozen_rows is None:
            return
        is_chosen = torch.isin(table.frozen_rows, rows)
        if ids is None:
            is_chosen = torch.ones_like(is_chosen)
        frozen = table.frozen_rows[~is_chosen]
        if table.lag is not None:
            table.lag.unfreeze(table.frozen_rows[is_chosen])
        table.frozen_rows = frozen if len(frozen) else None


def _check_rows(
    layer: nn.Module, ids: Any, operation: str, is_for_all: bool = False
) -> tuple[Table, Tensor]:
    """Return the table, and the distinct ids in ascending order."""
    layers = find_layers(layer)
    with failing_on_all_ranks([layers.weight]):
        table, rows = _check_table_and_ids(layers, ids, operation)
    if table.replicas is not None:
        chosen = "all rows" if is_for_all else f"{len(rows)} rows (ids {digest(rows)})"
        table.replicas.agree_on_rows(f"{operation} {chosen}", rows)
    return table, rows


def _check_table_and_ids(
    layers: VocabularyLayers, ids: Any, operation: str
) -> tuple[Table, Tensor]:
    table = layers.weight
    if not isinstance(table, Table):
        raise HotrowError(
            f"the {tuple(table.shape)} weight is not a table, so its rows cannot be frozen",
            fix="call hotrow.convert(model, min_entries=0) first, and use an optimizer from "
            "hotrow.optim",
        )
    check_in_memory(table, operation)
    if table.shards is not None:
        raise HotrowError(
            f"{operation} is not supported for a sharded table",
            fix="freeze rows only in tables that one rank stores completely",
        )
    rows = as_ids(ids)
    check_range(rows, layers.row_count)
    return table, torch.unique(rows.reshape(-1).long()).to(table.device)
