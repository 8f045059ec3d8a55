"""Choose the kernels for a table, and use them to settle, update or look up rows.

`cpu/` has compiled kernels for contiguous float32, float64 and bfloat16 tables on the CPU.
`default/` has plain torch kernels for all other tables. `grouping.py` groups ids.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, Self

from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.cpu import operators as cpu
from hotrow.kernels.default import operators as default
from hotrow.kernels.program import Program, Steps


class RowOperators(Protocol):
    """The kernels of one program, ready to run on the rows of one table.

    They refer to the memory of the table, the slots and the step counts, and change it in place.
    """

    program: Program

    @property
    def is_atomic(self) -> bool:
        """Whether a Python signal handler can't run in the middle of an operation."""

    def with_program(self, program: Program) -> Self:
        """Return the kernels of another program for the same rows."""

    def settle(self, rows: Tensor, steps: Steps) -> None:
        """Apply the missed steps of the distinct `rows` (R,) int64, with a zero gradient."""

    def step(self, grads: GroupedGradients, steps: Steps) -> None:
        """Settle the rows of `grads`, then apply the last of the `steps` with their gradients."""

    def look_up(self, ids: DistinctIds, steps: Steps) -> Tensor:
        """Return the settled rows selected by the ids, (..., D).

        The compiled kernels store a row only if they replay more than two steps for it. The next
        optimizer step settles the other rows again, which costs less than writing them twice. The
        plain torch kernels store all rows.
        """


def is_compiled(table: Tensor) -> bool:
    """Return whether the compiled kernels support this table's device, dtype and layout."""
    return table.is_cpu and table.dtype in cpu.COMPUTE_DTYPES and table.is_contiguous()


def prepare(
    program: Program, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
) -> RowOperators:
    """Return the kernels of a program for the rows of a table.

    Arguments:
        program: the rule.
        table: (V, D).
        slots: the tensors of the optimizer state, each (V, D).
        row_steps: (V,) integer, the number of steps applied to each row.
    """
    compiled = is_compiled(table) and all(map(is_compiled, slots))
    kernels = cpu.CompiledRows if compiled else default.TorchRows
    return kernels(program, table, slots, row_steps)
