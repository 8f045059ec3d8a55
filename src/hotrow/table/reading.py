"""Read settled rows of a table for a lookup, after checking the ids."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.ids import (
    ID_DTYPES,
    check_device,
    check_dtype,
    check_range,
    is_readable,
    plain_ids,
    raise_bad_id,
)
from hotrow.kernels import devices
from hotrow.kernels.batch import DistinctIds
from hotrow.kernels.grouping import find_distinct
from hotrow.kernels.operators import read_rows, select_rows
from hotrow.kernels.tracing import is_make_fx_tracing
from hotrow.kernels.triton.batch import DeviceIds
from hotrow.table.autograd import measure_engine_references
from hotrow.table.parameter import Table, all_tables, needs_gradient

# If the result of a lookup has at least this many bytes, the compiled kernel is faster than torch.
MIN_COMPILED_BYTES = 1 << 23


def renorm(table: Tensor, ids: Tensor, max_norm: float, norm_type: float) -> None:
    """Use torch to renormalize the settled rows selected by `ids`."""
    if not ids.numel():
        return  # torch's CUDA kernel raises an error
    with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
        torch.embedding_renorm_(table, ids.long(), max_norm, norm_type)


def refuse_make_fx() -> None:
    """Raise an error if `make_fx` is tracing."""
    if is_make_fx_tracing():
        raise HotrowError(
            "make_fx can't trace a lookup in a table",
            fix="use torch.export or torch.compile instead",
        )


def check_look_up(input: Tensor, table: Table, rows: int) -> None:
    """Check the ids of a lookup, and check that all replicas make the same lookup."""
    refuse_make_fx()
    failure: Exception | None = None
    try:
        check_range(input, rows, "input")
        check_device(input, table.device)
    except Exception as error:  # also torch's errors, for which the replicas would wait
        failure = error
    try:
        if table.replicas is not None and needs_gradient(table):
            table.replicas.prepare_look_up(table, failure)
        if failure is not None:
            raise failure
        table.check_files(input)
    finally:
        failure = None  # drop the error: its traceback would count as an alias of the rows


def _can_read(table: Table, ids: Tensor) -> bool:
    """Return whether Python can read the ids and torch's CPU lookup would check their range.

    `can_look_up_rows` has checked that no transform or tracer is active; see `is_readable`.
    """
    return (
        type(ids) is Tensor
        and devices.is_on_cpu(ids)
        and devices.is_on_cpu(table)
        and ids.dtype in ID_DTYPES
        and ids.layout is torch.strided
        and not (ids.is_nested or ids.is_neg() or torch._C._len_torch_dispatch_stack())
        and table.numel() > 0
    )


def _read(rows: Tensor, ids: Tensor) -> Tensor:
    """Return `rows[ids]` after torch has checked the ids."""
    try:
        return torch.embedding(rows, ids)
    except IndexError:
        check_range(ids, len(rows), "input")
        raise


def _read_many(rows: Tensor, ids: Tensor) -> Tensor:
    """Use the compiled kernel to check the ids and return `rows[ids]`."""
    output = select_rows(rows, ids)
    return _read(rows, ids) if output is None else output


def stale_row_reader(
    table: Table, ids: DistinctIds, is_trained: bool
) -> Callable[[], Tensor] | None:
    """Return a function that reads settled rows from a table with stale rows.

    For a replica, the function is `Lag.peek`, which doesn't store the rows. If only this rank
    stored the rows, they would differ from other ranks' rows in the last bits. For other tables,
    the function is `Lag.look_up` if the next step will update the rows (`is_trained`). Otherwise,
    the rows are settled in the table, and the result is None.
    """
    if table.lag is not None and table.replicas is not None:
        return functools.partial(table.lag.peek, ids)
    if table.lag is not None and is_trained:
        return functools.partial(table.lag.look_up, ids)
    table.settle(ids.rows)
    return None


def has_gpu_reader(table: Table, ids: Tensor) -> bool:
    """Return whether a Triton kernel can read the rows and check the ids."""
    is_plain = table.replicas is None and is_readable(ids) and not ids.is_nested
    return is_plain and devices.has_triton_kernels(table.raw_rows)


def _gpu_reader(
    table: Table, ids: Tensor, row_count: int
) -> tuple[Callable[[], Tensor], DistinctIds]:
    """Return what `row_reader` returns, without waiting for the GPU."""
    check_dtype(ids, "input")
    check_device(ids, table.device)
    raise_earlier_error(table.device)
    batch = DeviceIds.unchecked(ids, row_count)

    def read() -> Tensor:
        lag = table.lag
        is_stale = lag is not None and lag.has_stale_rows
        values = lag.look_up(batch) if lag and is_stale else read_rows(table.raw_rows, batch)
        raise_earlier_error(table.device)  # finds an error only if the kernel has already run
        return values

    return read, batch


def raise_pending_error(table: Tensor) -> None:
    """Wait for the table's GPU, and raise the error of an earlier lookup.

    Until Python finds an invalid id, it counts steps that the GPU has stopped. So call this
    function before Python's step counts are saved or stored on the GPU, and before an operation
    that the invalid id wouldn't stop.
    """
    if devices.is_on_gpu(table) and not devices.is_capturing(table):
        raise_earlier_error(table.device, wait=True)


def raise_earlier_error(device: torch.device, wait: bool = False) -> None:
    """If an earlier GPU lookup failed, undo the steps that it stopped, and raise its error.

    Without `wait`, this function finds only the errors of lookups that have already run.
    """
    try:
        raise_bad_id(device, wait)
    except HotrowError:
        for table in all_tables():
            if table.lag is not None and table.device == device:
                table.lag.undo_stopped_steps()
        raise


def row_reader(
    table: Table, ids: Tensor, max_norm: float | None, norm_type: float, is_trained: bool
) -> tuple[Callable[[], Tensor], Tensor | DistinctIds]:
    """Check the ids, and return a function that reads their settled rows, (*ids.shape, D).

    Call this function, and the function that it returns, with torch's function protocol disabled.

    Arguments:
        table: a table whose rows this process stores.
        ids: any shape.
        max_norm: the maximum norm of a row, or None. Longer rows are renormalized, as in torch.
        norm_type: the order of the norm for `max_norm`.
        is_trained: whether the rows get a gradient, so that the next step updates them.

    Returns:
        The function, and the ids (or their `DistinctIds` if these have been computed).
    """
    columns, lag = table.columns, table.lag
    row_count = table.shape[columns]
    if not devices.is_on_cpu(table):
        measure_engine_references(table.device)  # the table may be on a new device
        if max_norm is None and devices.is_on_gpu(table) and has_gpu_reader(table, ids):
            return _gpu_reader(table, ids, row_count)
    is_stale = lag is not None and lag.has_stale_rows
    if is_stale and type(ids) is not Tensor and plain_ids(ids) is None:
        table.settle()  # Python can't read the ids
        is_stale = False
    checks_later = (
        max_norm is None
        and table.replicas is None
        and table.backing is None
        and _can_read(table, ids)
    )
    if not checks_later:
        check_look_up(ids, table, row_count)
    distinct_ids = read = None
    is_stepped = lag is not None and is_trained  # the next step needs the distinct ids too
    if is_stale or (checks_later and is_stepped):
        distinct_ids = find_distinct(ids, row_count)
        if not distinct_ids.are_in_range:
            check_range(ids, row_count, "input")
        if is_stale:
            read = stale_row_reader(table, distinct_ids, is_trained and max_norm is None)
    if max_norm is not None:
        renorm(table, ids, max_norm, norm_type)
    if read is None:
        rows = table.raw_rows
        size = ids.numel() * rows.shape[1] * rows.itemsize
        is_large = checks_later and size >= MIN_COMPILED_BYTES and rows.is_contiguous()
        read = functools.partial(_read_many if is_large else _read, rows, ids)
    return read, distinct_ids or ids
