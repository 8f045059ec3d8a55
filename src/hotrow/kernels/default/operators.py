"""Plain torch versions of the operators in `hotrow.kernels.operators`, for any dtype and device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.default.rows import advance_rows
from hotrow.kernels.grouping import sum_by_row
from hotrow.kernels.program import Program


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
    if len(rows):
        advance_rows(program, table, slots, row_steps, rows, None, entries, step_count)


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
    rows, sums = grads.ids.rows, sum_by_row(grads)
    if len(rows):
        advance_rows(program, table, slots, row_steps, rows, sums, entries, step_count)


def look_up(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    ids: DistinctIds,
    entries: NDArray[np.float64],
    step_count: int,
) -> Tensor:
    """See `operators.look_up`; this version stores all settled rows."""
    settle(program, table, slots, row_steps, ids.rows, entries, step_count)
    return table[ids.rows[ids.inverse]]
