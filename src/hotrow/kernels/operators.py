"""Choose the kernels for a table, and use them to settle, update or look up rows.

`cpu/` has compiled kernels for contiguous float32, float64 and bfloat16 tables on the CPU.
`default/` has plain torch kernels for all other tables. `grouping.py` groups ids.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.cpu import operators as cpu
from hotrow.kernels.default import operators as default
from hotrow.kernels.program import Program


def is_compiled(table: Tensor) -> bool:
    """Return whether the compiled kernels support this table's device, dtype and layout."""
    return (
        table.device.type == "cpu" and table.dtype in cpu.COMPUTE_DTYPES and table.is_contiguous()
    )


def _are_compiled(table: Tensor, slots: Sequence[Tensor]) -> bool:
    return is_compiled(table) and all(map(is_compiled, slots))


def entry_dtype(table: Tensor) -> type:
    """Return the numpy dtype in which the kernels for this table read ledger entries."""
    return cpu.COMPUTE_DTYPES[table.dtype if is_compiled(table) else torch.float64]


def settle(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    rows: Tensor,
    entries: NDArray[np.float64],
    step_count: int,
) -> None:
    """Apply each row's missed steps, which have a zero gradient, up to `step_count`.

    Arguments:
        program: the rule.
        table: (V, D). Changed in place.
        slots: the tensors of the optimizer state, each (V, D). Changed in place.
        row_steps: (V,) integer, the number of steps applied to each row. Changed in place.
        rows: (R,) int64, the distinct rows to settle.
        entries: (at least step_count, width), the scalars of each step.
        step_count: the total number of steps applied to each row after the call.
    """
    kernels = cpu if _are_compiled(table, slots) else default
    kernels.settle(program, table, slots, row_steps, rows, entries, step_count)


def step(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    grads: GroupedGradients,
    entries: NDArray[np.float64],
    step_count: int,
) -> None:
    """Settle the rows of `grads`, then apply step `step_count - 1` with their gradients."""
    kernels = cpu if _are_compiled(table, slots) else default
    kernels.step(program, table, slots, row_steps, grads, entries, step_count)


def look_up(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    ids: DistinctIds,
    entries: NDArray[np.float64],
    step_count: int,
) -> Tensor:
    """Return the settled rows selected by the ids, (..., D).

    The compiled kernels store a row only if they replay more than two steps for it. The next
    optimizer step settles the other rows again, which costs less than writing them twice. The plain
    torch kernels store all rows.
    """
    kernels = cpu if _are_compiled(table, slots) else default
    values: Tensor = kernels.look_up(program, table, slots, row_steps, ids, entries, step_count)
    return values


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """Return `table[ids]`, (*ids.shape, D), or None if an id is out of range.

    Arguments:
        table: (V, D); `is_compiled(table)` must be true.
        ids: int64 or int32, on the CPU, any shape.
    """
    return cpu.select_rows(table, ids)
