"""The loop over rows in plain torch, for any dtype and device. It works on copies of rows.

`FastForward.apply_batch` applies as many missed steps to each row as it can. The number of torch
operations that it runs doesn't depend on the number of steps. For bfloat16 and float16 tables, it
computes in float32 and rounds the result once. The remaining steps are replayed one by one, oldest
first, with the same operations as torch.optim. Rows are sorted by the step at which they were last
settled, so the rows that missed step t are contiguous.

On the CPU, torch rounds bfloat16 and float16 differently in the last elements of an array, and in
the last elements of each thread's share of a large array. torch rounds `a + alpha * b` twice in
these elements, but only once in all other elements. So rows are padded to whole vectors, and
processed in chunks too small to be split among threads. Every element is then rounded the way
a dense step rounds most elements, for any batch and any number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels import devices
from hotrow.kernels.program import Program, Steps

VECTOR_COLUMNS = 128  # two SIMD vectors or more; torch's loops process two per iteration
TORCH_GRAIN_SIZE = 32768  # at::internal::GRAIN_SIZE; torch splits larger arrays among threads
CHUNK_ENTRIES = 1 << 24  # limits the memory for copies of rows on devices other than the CPU


def advance_rows(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    rows: Tensor,
    grads: Tensor | None,
    steps: Steps,
) -> None:
    """Apply each row's missed steps up to `steps.step_count`; the last one uses `grads`, if any."""
    entries, coefficients, step_count, *_ = steps
    sorted_steps, order = row_steps[rows].sort(stable=True)
    rows, all_steps = rows[order], sorted_steps.cpu().numpy().astype(np.int64)
    # Rows that have reached the step count, such as frozen rows, come last.
    stale_count = int(np.searchsorted(all_steps, step_count))
    rows, order, all_steps = rows[:stale_count], order[:stale_count], all_steps[:stale_count]
    columns, width, entries_per_chunk = table.shape[1], table.shape[1], CHUNK_ENTRIES
    if devices.is_on_cpu(table):
        width = -(-width // VECTOR_COLUMNS) * VECTOR_COLUMNS
        entries_per_chunk = TORCH_GRAIN_SIZE
    chunk = max(1, entries_per_chunk // max(width, 1))

    def gather(source: Tensor, indices: Tensor) -> Tensor:
        if width == columns:
            return source[indices]
        padded = source.new_zeros((len(indices), width))
        padded[:, :columns] = source[indices]
        return padded

    end_step = step_count if grads is None else step_count - 1
    for begin in range(0, len(rows), chunk):
        chunk_rows = rows[begin : begin + chunk]
        chunk_steps = all_steps[begin : begin + chunk]
        state = tuple(gather(tensor, chunk_rows) for tensor in (table, *slots))
        fast_forward(program, state, slice(None), chunk_steps, end_step, coefficients, columns)
        while (remaining := np.flatnonzero(chunk_steps < end_step)).size:
            t = chunk_steps[remaining].min()
            oldest = remaining[chunk_steps[remaining] == t]
            index: slice | Tensor = slice(oldest[0], oldest[-1] + 1)
            if oldest[-1] - oldest[0] >= len(oldest):  # some rows of the slice don't need step t
                index = torch.from_numpy(oldest).to(table.device)
            replay(program, state, index, entries[t].tolist())
            chunk_steps[oldest] += 1
            fast_forward(program, state, index, chunk_steps, end_step, coefficients, columns)
        if grads is not None:
            w, *slot_values = state
            g = gather(grads, order[begin : begin + chunk])
            entry = entries[end_step].tolist()
            w, slot_values = program.update(w, g, tuple(slot_values), entry, program.flags)
            state = w, *slot_values
        row_steps[chunk_rows] = step_count  # first: if a write fails, the step is incomplete
        for target, value in zip((table, *slots), state, strict=True):
            target[chunk_rows] = value[:, :columns]


def replay(program: Program, state: tuple[Tensor, ...], index: Any, entry: list[float]) -> None:
    """Apply one step with a zero gradient to the rows selected by `index`, in place."""
    w, *slots = (tensor[index] for tensor in state)
    w, slots = program.update(w, torch.zeros_like(w), tuple(slots), entry, program.flags)
    for target, value in zip(state, (w, *slots), strict=True):
        target[index] = value


def fast_forward(
    program: Program,
    state: tuple[Tensor, ...],
    index: Any,
    steps: NDArray[np.int64],
    end_step: int,
    coefficients: tuple[Any, ...],
    columns: int,
) -> None:
    """Fast-forward rows to `end_step` where possible, and update `steps`, both in place."""
    array_index = index.cpu().numpy() if isinstance(index, Tensor) else index
    needed = steps[array_index] < end_step
    if program.fast_forward.apply_batch is None or not needed.any():
        return
    old_state = tuple(tensor[index][:, :columns] for tensor in state)
    low_precision = old_state[0].dtype not in (torch.float32, torch.float64)
    w, *slots = (tensor.float() for tensor in old_state) if low_precision else old_state
    row_steps = steps[array_index].clip(max=end_step)
    w, slots, reached = program.fast_forward.apply_batch(
        w, tuple(slots), row_steps, end_step, coefficients
    )
    reached = reached & torch.from_numpy(needed).to(reached.device)
    for target, old, new in zip(state, old_state, (w, *slots), strict=True):
        target[index, :columns] = torch.where(reached[:, None], new.to(old.dtype), old)
    steps[array_index] = np.where(reached.cpu().numpy(), end_step, steps[array_index])
