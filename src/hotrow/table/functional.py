"""`torch.nn.functional.embedding` and `embedding_bag` for tables.

`Table.__torch_function__` calls these functions instead of torch's. Each function checks the ids,
reads settled rows, and makes autograd produce a `RowGradient`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from hotrow.errors import HotrowError
from hotrow.ids import ID_DTYPES, check_bag, check_range, is_readable, normalize_padding
from hotrow.kernels.batch import DistinctIds
from hotrow.kernels.grouping import find_distinct
from hotrow.kernels.operators import is_compiled, select_rows
from hotrow.table.autograd import LookUp, SelectRows
from hotrow.table.parameter import (
    LOOKUP_FUNCTIONS,
    Table,
    needs_gradient,
    raise_on_all_ranks,
    table_row_count,
)
from hotrow.table.protocols import Distribution


def _renorm(table: Tensor, ids: Tensor, max_norm: float | None, norm_type: float) -> None:
    """Renormalize the settled rows selected by `ids`, as torch does."""
    if max_norm is not None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch.embedding_renorm_(table, ids.long(), max_norm, norm_type)


def _contiguous_rows(table: Table) -> Tensor:
    """Return the storage as (V, D), with contiguous rows unless an alias prevents it."""
    if table.columns:
        table.set_layout()
    return table.raw_rows


def _source(table: Table) -> Tensor:
    """Return the tensor that gets the gradient: the table, or a distributed table's `source`."""
    source: Tensor = table
    if needs_gradient(table):
        distributions: tuple[Distribution[Table] | None, ...] = table.shards, table.replicas
        for distribution in distributions:
            source = source if distribution is None else distribution.source(source)
    return source


def _check_look_up(input: Tensor, table: Table, rows: int) -> None:
    """Check the ids of a lookup, and check that all replicas make the same lookup."""
    failure = None
    try:
        check_range(input, rows, "input")
    except HotrowError as error:
        failure = error
    try:
        if table.replicas is not None and needs_gradient(table):
            table.replicas.prepare_look_up(table, failure)
        if failure is not None:
            raise failure
    finally:
        failure = None  # the error's traceback refers to the rows, which would count as an alias


def _can_select(rows: Tensor, ids: Tensor) -> bool:
    """Return whether `select_rows` supports this lookup."""
    return (
        is_readable(ids)
        and ids.dtype in ID_DTYPES
        and ids.device.type == "cpu"
        and ids.layout is torch.strided
        and not (ids.is_nested or ids.is_neg())
        and is_compiled(rows)
    )


def _select(rows: Tensor, ids: Tensor) -> Tensor:
    """Check the ids and return `rows[ids]`."""
    output = select_rows(rows, ids)
    if output is None:
        check_range(ids, len(rows), "input")
        return F.embedding(ids, rows)  # the ids are in range now, so another thread changed them
    return output


def _stale_row_reader(table: Table, ids: DistinctIds, writes: bool) -> Callable[[], Tensor] | None:
    """Return a function that reads settled rows from a table with stale rows.

    Returns None if it has settled the rows in the table instead. Rows that get a gradient are read
    by `Lag.look_up`, unless the lookup `writes` to them (`max_norm`). Rows of a replica are read by
    `Lag.peek`, which doesn't store them. If only this rank stored the rows, they would differ from
    other ranks' rows in the last bits.
    """
    if table.lag is not None and table.replicas is not None:
        return functools.partial(table.lag.peek, ids)
    if table.lag is not None and needs_gradient(table) and not writes:
        return functools.partial(table.lag.look_up, ids)
    table.settle(ids.rows)
    return None


@_disable_dynamo
def embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """Look up rows of a table, like `torch.nn.functional.embedding`."""
    if weight.shards is not None:
        _refuse_frequency(scale_grad_by_freq)
        _, inverse, compact = weight.shards.fetch(weight, input, padding_idx, max_norm, norm_type)
        return F.embedding(inverse, compact)
    return local_embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def local_embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """Look up rows that this process stores; see `embedding`."""
    rows = _contiguous_rows(weight)
    padding = normalize_padding(padding_idx, len(rows))
    selects = max_norm is None and weight.replicas is None and _can_select(rows, input)
    read: Callable[[], Tensor]
    if selects:  # `_select` checks the ids
        read = functools.partial(_select, rows, input)
    else:
        _check_look_up(input, weight, len(rows))
        read = functools.partial(F.embedding, input, rows)
    distinct_ids = find_distinct(input, len(rows)) if weight.has_stale_rows else None
    if selects and distinct_ids is not None and not distinct_ids.are_in_range(len(rows)):
        check_range(input, len(rows), "input")
    with torch._C.DisableTorchFunctionSubclass():  # avoids a slow call for each attribute access
        if distinct_ids is not None:
            read = _stale_row_reader(weight, distinct_ids, max_norm is not None) or read
        _renorm(weight, input, max_norm, norm_type)
        if not needs_gradient(weight):
            return read()
        output: Tensor = LookUp.apply(  # type: ignore[no-untyped-call]
            _source(weight),
            input,
            distinct_ids,
            read,
            padding,
            scale_grad_by_freq,
            weight.columns,
        )
        return output


@_disable_dynamo
def embedding_bag(
    input: Tensor,
    weight: Table,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """Look up bags of ids in a table, like `torch.nn.functional.embedding_bag`."""
    padding = normalize_padding(padding_idx, table_row_count(weight))
    if weight.spans_processes:  # torch's own checks would raise an error only in this process
        try:
            offsets = check_bag(
                input.shape,
                offsets,
                per_sample_weights,
                mode=mode,
                dtype=weight.dtype,
                last=include_last_offset,
            )
        except HotrowError as error:
            raise_on_all_ranks(weight, error)
    if weight.shards is None:
        rows, inverse, compact = _distinct_rows(input, weight, max_norm, norm_type)
    else:
        _refuse_frequency(scale_grad_by_freq)
        rows, inverse, compact = weight.shards.fetch(
            weight, input, padding_idx, max_norm, norm_type
        )
    padding_indices = [] if weight.is_meta else (rows == padding).nonzero().tolist()
    with torch._C.DisableTorchFunctionSubclass():
        return F.embedding_bag(
            inverse,
            compact,
            None if offsets is None else offsets.long(),
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=padding_indices[0][0] if padding_indices else None,
        )


def _distinct_rows(
    input: Tensor, weight: Table, max_norm: float | None, norm_type: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the distinct ids (R,), the position of each id among them, and their rows (R, D)."""
    table = _contiguous_rows(weight)
    _check_look_up(input, weight, len(table))
    distinct_ids = find_distinct(input, len(table))
    rows, inverse = distinct_ids.rows, distinct_ids.inverse
    read: Callable[[], Tensor] = functools.partial(table.index_select, 0, rows)
    if weight.has_stale_rows:
        row_ids = DistinctIds(rows, torch.arange(len(rows), device=rows.device))
        read = _stale_row_reader(weight, row_ids, max_norm is not None) or read
    _renorm(weight, input, max_norm, norm_type)
    with torch._C.DisableTorchFunctionSubclass():
        compact = SelectRows.apply(_source(weight), rows, read, weight.columns)  # type: ignore[no-untyped-call]
        return rows, inverse, compact


def _refuse_frequency(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise HotrowError(
            "scale_grad_by_freq=True is not supported for a sharded table: it would count only "
            "the ids of one rank, not those of the whole batch",
            fix="leave scale_grad_by_freq out",
        )


LOOKUP_FUNCTIONS.update({F.embedding: embedding, F.embedding_bag: embedding_bag})
