"""The CPU versions of the operators in `hotrow.kernels.operators`, run by compiled kernels.

Tensors are passed to the kernels as numpy arrays. numba is imported inside the functions, so that
`import hotrow` doesn't import it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.batch import BatchOrder, DistinctIds, GroupedGradients
from hotrow.kernels.compile_notice import show_compile_notice
from hotrow.kernels.cpu.tasks import LOOK_UP, SETTLE, STEP
from hotrow.kernels.cpu.threads import run_on_threads, thread_count
from hotrow.kernels.program import Program

# Maps each table dtype that has compiled kernels to the dtype in which they compute.
COMPUTE_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.float32,
}


def settle(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    rows: Tensor,
    entries: NDArray[np.float64],
    step_count: int,
) -> None:
    """See `operators.settle`."""
    ids, batch = DistinctIds(rows, rows[:0]), table[:0]
    _run(SETTLE, program, table, slots, row_steps, ids, batch, entries, step_count)


def step(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    grads: GroupedGradients,
    entries: NDArray[np.float64],
    step_count: int,
) -> None:
    """See `operators.step`."""
    batch = grads.values.contiguous()
    _run(STEP, program, table, slots, row_steps, grads.ids, batch, entries, step_count)


def look_up(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    ids: DistinctIds,
    entries: NDArray[np.float64],
    step_count: int,
) -> Tensor:
    """See `operators.look_up`."""
    values = table.new_empty(*ids.inverse.shape, table.shape[1])
    batch = values.view(ids.inverse.numel(), table.shape[1])
    _run(LOOK_UP, program, table, slots, row_steps, ids, batch, entries, step_count)
    return values


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """See `operators.select_rows`."""
    from hotrow.kernels.cpu.look_up import copy_rows  # imports numba

    count, columns = ids.numel(), table.shape[1]
    output = table.new_empty(*ids.shape, columns)
    flat, out_of_range = _as_array(output).reshape(count, columns), np.zeros(1, np.bool_)
    flat_ids = np.ascontiguousarray(ids.numpy().reshape(-1), np.int64)
    # Start at least one thread, so that ids are checked even if rows have no columns.
    threads = max(thread_count(count, columns), min(count, 1))
    run_on_threads(copy_rows, (_as_array(table), flat_ids, flat, out_of_range), threads)
    return None if out_of_range[0] else output


def batch_order(ids: DistinctIds) -> BatchOrder:
    """Return (order, offsets), which group the batch positions; see `DistinctIds.order`."""
    if ids.order is not None:
        return ids.order
    from hotrow.kernels.cpu.grouping import order_by_row  # imports numba

    order: BatchOrder = order_by_row(ids.inverse.reshape(-1).numpy(), len(ids.rows))
    return order


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a numpy array that shares the tensor's memory, with bfloat16 values as int16 bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def _run(
    task: int,
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    ids: DistinctIds,
    batch: Tensor,  # (N, D): the gradients for STEP, the output for LOOK_UP, otherwise empty
    entries: NDArray[np.float64],
    step_count: int,
) -> None:
    from hotrow.kernels.cpu.rows import row_kernel  # imports numba

    kernel = row_kernel(program.update, program.fast_forward, program.flags, program.width)
    dtype = COMPUTE_DTYPES[table.dtype]
    arrays = _as_array(table), tuple(map(_as_array, slots)), row_steps.numpy()
    grouped = ids.rows.numpy(), *batch_order(ids), _as_array(batch)
    missed = entries.astype(dtype, copy=False), program.coefficients, step_count
    threads = thread_count(len(ids.rows), table.shape[1])
    scratch = np.zeros((threads, 3 + len(slots), table.shape[1]), dtype)
    with show_compile_notice((kernel, table.dtype), program.update.__module__):
        run_on_threads(kernel, (task, *arrays, *grouped, *missed, scratch), threads)
