"""The `RowUpdater` settles, updates and looks up rows. A ledger records the steps."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.default.operators import TorchRows
from hotrow.kernels.operators import RowOperators, prepare
from hotrow.kernels.operators import step_together as step_rows_together
from hotrow.kernels.program import Program, Steps
from hotrow.kernels.triton.operators import TritonRows
from hotrow.optim.ledger import Ledger


class RowUpdater:
    """Settle, update and look up the rows of a table and of its optimizer state.

    The first operation prepares the kernels, which then keep using the tensors' current memory. The
    kernels add one reference to the storage of each tensor.

    Arguments:
        ledger: the ledger of all steps.
        table: (V, D). Changed in place.
        slots: tensors of shape (V, D), in the order of `rule.initial_slots`. Changed in place.
        row_steps: (V,) int32 or int64, the number of steps applied to each row. Changed in place.
            All tensors must be on the same device.
    """

    _tensors: tuple[Tensor, Sequence[Tensor]] | None  # None after the first operation
    _operators: RowOperators | None

    def __init__(
        self, ledger: Ledger, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
    ) -> None:
        self.ledger, self.row_steps, self._dtype = ledger, row_steps, table.dtype
        self._tensors, self._operators = (table, slots), None
        self._ready_steps = -1  # the number of steps for which `_ready` was prepared
        self.has_stepped = False  # if true, only the ledger needs to be uploaded before a step

    def _prepare(self, end_step: int, step_count: int) -> tuple[RowOperators, Steps]:
        program, steps = self.ledger.steps(end_step, step_count, self._dtype)
        if self._tensors is not None:
            self._operators = prepare(program, *self._tensors, self.row_steps)
            self._tensors = None
        assert self._operators is not None
        if program is not self._operators.program:
            self._operators = self._operators.with_program(program)
        return self._operators, steps

    @property
    def program(self) -> Program:
        """The program of the latest operation."""
        assert self._operators is not None
        return self._operators.program

    @property
    def can_stop_halfway(self) -> bool:
        """Whether an error, such as too little memory, can leave a row with some old values."""
        return isinstance(self._operators, TorchRows)

    @property
    def looks_up_atomically(self) -> bool:
        """Whether `look_up` changes rows without running Python signal handlers in between."""
        return self._ready_steps == self.ledger.length and self._ready[0].is_atomic

    def settle(self, rows: Tensor | None, step_count: int | None = None) -> None:
        """Apply the missed steps to `rows`, like dense training with zero gradients.

        For each row, apply the rule with g = 0 for entries `row_steps[row]` to `step_count - 1`,
        then set `row_steps[row] = step_count`.

        The cost is proportional to R and, without a closed form, to the number of missed steps.

        Arguments:
            rows: (R,) int64, distinct, from 0 to V - 1; None for all rows.
            step_count: each row's total step count after the call. Defaults to the length of the
                ledger.
        """
        step_count = self.ledger.length if step_count is None else step_count
        operators, steps = self._prepare(step_count, step_count)
        operators.settle(rows, steps)

    def _prepare_look_up(self) -> None:
        step_count = self.ledger.length
        self._ready = self._prepare(step_count, step_count)
        self._ready_steps = step_count

    def look_up(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by `ids`, (..., D).

        `RowOperators.look_up` describes which rows are stored.
        """
        if self._ready_steps != self.ledger.length:
            self._prepare_look_up()
        operators, steps = self._ready
        return operators.look_up(ids, steps)

    def reserve(self, step_count: int) -> None:
        """Copy all steps to the GPU, with room for more, before a CUDA graph is captured."""
        self._prepare_look_up()
        operators, steps = self._ready
        assert isinstance(operators, TritonRows)
        operators.upload(steps)
        operators.reserve(steps, step_count)

    def upload(self) -> Program:
        """Copy the new steps to the GPU, and return the current program."""
        end_step = self.ledger.length
        operators, steps = self._prepare(end_step, end_step)
        assert isinstance(operators, TritonRows)
        operators.upload(steps)
        return operators.program

    def upload_entry(self) -> None:
        """Copy the last entry to the GPU, before the graph that applies it is replayed."""
        step_count = self.ledger.length
        operators, steps = self._prepare(step_count - 1, step_count)
        assert isinstance(operators, TritonRows)
        operators.upload(steps)


def step_together(
    tables: Sequence[tuple[RowUpdater, GroupedGradients]], is_recorded: bool = True
) -> None:
    """Settle the rows of each batch, and apply the ledger's last entry with the rows' gradients.

    The updaters share a ledger. The caller must record the entry first. Each row's gradients are
    summed in the table's dtype. If `is_recorded` is false, the kernels become part of a CUDA graph,
    and the entry is recorded before each replay instead.
    """
    ledger = tables[0][0].ledger
    step_count = ledger.length
    end_step = step_count - 1 if is_recorded else step_count
    step_rows_together(
        [(*updater._prepare(end_step, step_count), grads) for updater, grads in tables]
    )
    if not is_recorded:
        return
    for updater, _ in tables:
        if not ledger.idle_rows_unchanged:  # otherwise, lookups don't settle rows
            updater._prepare_look_up()
        updater.has_stepped = True
