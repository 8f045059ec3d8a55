"""`torch.nn.functional.embedding` and `embedding_bag` for a table, and what both begin with."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._compile import _disable_dynamo

from hotrow.errors import HotrowError
from hotrow.ids import ID_DTYPES, check_bag, check_range, checked_padding, has_values
from hotrow.kernels.grouping import Places, distinct
from hotrow.kernels.operators import is_compiled, select
from hotrow.table.autograd import LookUp, Rows
from hotrow.table.parameter import LOOK_UPS, Table, count_of, raise_everywhere, trains


def _renorm(table: Tensor, ids: Tensor, max_norm: float | None, norm_type: float) -> None:
    """Shorten the settled rows that `ids` select, as torch does."""
    if max_norm is not None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch.embedding_renorm_(table, ids.long(), max_norm, norm_type)


def _rows_of(table: Table) -> Tensor:
    """(V, D), the storage, with each row in one piece if that may be."""
    if table.columns:
        table.lay_out()
    return table.by_rows


def _source(table: Table) -> Tensor:
    """What a look-up differentiates in the table's place: what is spread sees the gradient."""
    source: Tensor = table
    if trains(table):
        for spread in (table.shards, table.replicas):
            source = source if spread is None else spread.source(source)
    return source


def _begin(input: Tensor, table: Table, rows: int) -> None:
    """Check the ids of a look-up, which its replicas make as well, or none of them."""
    failure = None
    try:
        check_range(input, rows, "input")
    except HotrowError as error:
        failure = error
    try:
        if table.replicas is not None and trains(table):
            table.replicas.begin(table, failure)
        if failure is not None:
            raise failure
    finally:
        failure = None  # its traceback holds the rows, and they would seem to have a holder


def _is_selected(rows: Tensor, ids: Tensor) -> bool:
    """Whether `kernels.rows.select` can look up."""
    return (
        has_values(ids)
        and ids.dtype in ID_DTYPES
        and ids.device.type == "cpu"
        and ids.layout is torch.strided
        and not (ids.is_nested or ids.is_neg())
        and is_compiled(rows)
    )


def _select(rows: Tensor, ids: Tensor) -> Tensor:
    """rows[ids], which it checks."""
    output = select(rows, ids)
    if output is None:
        check_range(ids, len(rows), "input")
        return F.embedding(ids, rows)  # someone has put the ids right meanwhile
    return output


def _current(table: Table, at: Places, writes: bool) -> Callable[[], Tensor] | None:
    """How to read the rows of a table that is behind; None if they are settled now.

    Rows that are trained next are not, unless someone `writes` to them before. Nor are those of
    a replica, which would then differ from the others in the last bits.
    """
    if table.lag is not None and table.replicas is not None:
        return functools.partial(table.lag.peek, at)
    if table.lag is not None and trains(table) and not writes:
        return functools.partial(table.lag.look_up, at)
    table.settle(at.rows)
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
    """Torch's `embedding`, whose arguments these are."""
    if weight.shards is not None:
        _refuse_frequency(scale_grad_by_freq)
        _, places, compact = weight.shards.fetch(weight, input, padding_idx, max_norm, norm_type)
        return F.embedding(places, compact)
    return own_embedding(input, weight, padding_idx, max_norm, norm_type, scale_grad_by_freq)


def own_embedding(
    input: Tensor,
    weight: Table,
    padding_idx: int | None,
    max_norm: float | None,
    norm_type: float,
    scale_grad_by_freq: bool = False,
) -> Tensor:
    """`embedding` of the rows of this process."""
    rows = _rows_of(weight)
    padding = checked_padding(padding_idx, len(rows))
    checks = max_norm is None and weight.replicas is None and _is_selected(rows, input)
    read: Callable[[], Tensor]
    if checks:  # the ids, as it finds them out of range
        read = functools.partial(_select, rows, input)
    else:
        _begin(input, weight, len(rows))
        read = functools.partial(F.embedding, input, rows)
    at = distinct(input, len(rows)) if weight.behind else None
    if checks and at is not None and not at.within(len(rows)):
        check_range(input, len(rows), "input")
    with torch._C.DisableTorchFunctionSubclass():  # which asks for each attribute
        if at is not None:
            read = _current(weight, at, max_norm is not None) or read
        _renorm(weight, input, max_norm, norm_type)
        if not trains(weight):
            return read()
        output: Tensor = LookUp.apply(  # type: ignore[no-untyped-call]
            _source(weight), input, at, read, padding, scale_grad_by_freq, weight.columns
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
    """`torch.nn.functional.embedding_bag` for a table: torch's own, over the rows in the batch."""
    padding = checked_padding(padding_idx, count_of(weight))
    if weight.is_spread:  # torch's own checks would be of this process alone
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
            raise_everywhere(weight, error)
    if weight.shards is None:
        rows, places, compact = _distinct_rows(input, weight, max_norm, norm_type)
    else:
        _refuse_frequency(scale_grad_by_freq)
        rows, places, compact = weight.shards.fetch(weight, input, padding_idx, max_norm, norm_type)
    found = [] if weight.is_meta else (rows == padding).nonzero().tolist()
    with torch._C.DisableTorchFunctionSubclass():
        return F.embedding_bag(
            places,
            compact,
            None if offsets is None else offsets.long(),
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=found[0][0] if found else None,
        )


def _distinct_rows(
    input: Tensor, weight: Table, max_norm: float | None, norm_type: float
) -> tuple[Tensor, Tensor, Tensor]:
    """The distinct ids (R,), the place of each id among them, and their rows (R, D)."""
    table = _rows_of(weight)
    _begin(input, weight, len(table))
    at = distinct(input, len(table))
    rows, places = at.rows, at.places
    read: Callable[[], Tensor] = functools.partial(table.index_select, 0, rows)
    if weight.behind:
        each = Places(rows, torch.arange(len(rows), device=rows.device))
        read = _current(weight, each, max_norm is not None) or read
    _renorm(weight, input, max_norm, norm_type)
    with torch._C.DisableTorchFunctionSubclass():
        compact = Rows.apply(_source(weight), rows, read, weight.columns)  # type: ignore[no-untyped-call]
        return rows, places, compact


def _refuse_frequency(scale_grad_by_freq: bool) -> None:
    if scale_grad_by_freq:
        raise HotrowError(
            "scale_grad_by_freq counts the ids of one batch, and a sharded table gets several",
            fix="leave it out for a sharded table",
        )


LOOK_UPS.update({F.embedding: embedding, F.embedding_bag: embedding_bag})
