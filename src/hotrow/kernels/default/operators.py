"""The plain torch version of `hotrow.kernels.operators`, for any dtype and device."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Self

from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.default.rows import advance_rows
from hotrow.kernels.grouping import sum_by_row
from hotrow.kernels.program import Program, Steps


class TorchRows:
    """The plain torch implementation of `operators.RowOperators`."""

    def __init__(
        self, program: Program, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
    ) -> None:
        self.program = program
        self.kernel: Hashable = program
        self.target = table.detach(), [slot.detach() for slot in slots], row_steps

    @property
    def is_atomic(self) -> bool:
        """See `operators.RowOperators`."""
        return False

    def with_program(self, program: Program) -> TorchRows:
        """See `operators.RowOperators`."""
        return TorchRows(program, *self.target)

    def settle(self, rows: Tensor | None, steps: Steps) -> None:
        """See `operators.RowOperators`."""
        if rows is None:
            rows = (self.target[-1] < steps.step_count).nonzero()[:, 0]
        if len(rows):
            advance_rows(self.program, *self.target, rows, None, steps)

    @classmethod
    def step_together(
        cls, tables: Sequence[Self], batches: Sequence[GroupedGradients], steps: Steps
    ) -> None:
        """See `operators.RowOperators`."""
        for table, grads in zip(tables, batches, strict=True):
            rows, sums = grads.ids.rows, sum_by_row(grads)
            if len(rows):
                advance_rows(table.program, *table.target, rows, sums, steps)

    def look_up(self, ids: DistinctIds, steps: Steps) -> Tensor:
        """See `operators.RowOperators`; this version stores all settled rows."""
        self.settle(ids.rows, steps)
        return self.target[0][ids.rows[ids.inverse]]
