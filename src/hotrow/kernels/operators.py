"""The operations on rows of a table, and the choice of the device's kernels.

`cpu/` has compiled kernels for contiguous float32, float64 and bfloat16 tables on the CPU,
`default/` has plain torch for everything else. Grouping ids is in `grouping.py`.
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
    """Whether the compiled kernels take this table: on the CPU, of their dtypes, contiguous."""
    return (
        table.device.type == "cpu" and table.dtype in cpu.COMPUTE_DTYPES and table.is_contiguous()
    )


def _are_compiled(table: Tensor, slots: Sequence[Tensor]) -> bool:
    return is_compiled(table) and all(map(is_compiled, slots))


def entry_dtype(table: Tensor) -> type:
    """The numpy dtype in which the kernels of this table read ledger entries."""
    return cpu.COMPUTE_DTYPES[table.dtype if is_compiled(table) else torch.float64]


def settle(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    rows: Tensor,
    ledger: NDArray[np.float64],
    step_count: int,
) -> None:
    """Apply the entries `row_steps[row]` .. `step_count - 1` to each row, without a gradient.

    Arguments:
        program: the rule.
        table: (V, D). Changed in place.
        slots: (V, D) each. Changed in place.
        row_steps: (V,) integer, the count of steps that each row has been through. Changed in
            place.
        rows: (R,) int64, distinct.
        ledger: (step_count or more, width), the scalars of each step.
        step_count: the count of steps to apply in all.
    """
    kernels = cpu if _are_compiled(table, slots) else default
    kernels.settle(program, table, slots, row_steps, rows, ledger, step_count)


def step(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    grads: GroupedGradients,
    ledger: NDArray[np.float64],
    step_count: int,
) -> None:
    """As `settle`, for the rows of `grads`, and entry `step_count - 1` with their gradients."""
    kernels = cpu if _are_compiled(table, slots) else default
    kernels.step(program, table, slots, row_steps, grads, ledger, step_count)


def look_up(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    ids: DistinctIds,
    ledger: NDArray[np.float64],
    step_count: int,
) -> Tensor:
    """(..., D): the rows of the ids as `settle` leaves them.

    The compiled kernels store a row only if they replayed several steps for it; the next step
    repeats the others, which costs less than a second write. Plain torch stores all rows.
    """
    kernels = cpu if _are_compiled(table, slots) else default
    values: Tensor = kernels.look_up(program, table, slots, row_steps, ids, ledger, step_count)
    return values


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """(*ids.shape, D): table[ids]; None if an id is out of range.

    Arguments:
        table: (V, D), one that `is_compiled`.
        ids: int64 or int32, on the CPU, any shape.
    """
    return cpu.select_rows(table, ids)
