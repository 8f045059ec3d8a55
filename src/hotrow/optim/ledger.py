"""The ledger, which records the scalars of every step so that missed steps can be applied later.

`step.step_together` records an entry before it updates the touched rows.
"""

from __future__ import annotations

import copy
import math
from collections import deque
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.errors import HotrowError
from hotrow.kernels.program import REPLAY, SKIP_IDLE_STEPS, FastForward, Program, Steps
from hotrow.optim.closed_form.base import ClosedForm, Coefficients
from hotrow.optim.rule import ParamGroup, ParamState, Rule, ScalarState

UNDO_STEPS = 256  # enough, because a device is at most about 1,000 kernels behind Python


class Ledger:
    """The recorded steps of one or more tables; entry i contains the scalars of step i + 1.

    Tables that are always updated together share a ledger.

    Each recorded step takes 8 bytes per scalar in its entry, plus 104 bytes for Adam's series.

    Arguments:
        rule: the rule of the optimizer.
        group: the parameter group, whose options select the form of the rule.
        start_step: torch's step count before the first entry; greater than 0 in a resumed run.
        state: the table's state in torch's format, for a resumed run.
        exact: whether to replay every missed step, so that results match torch's bit for bit in
            every dtype. If false, a closed form may apply many steps at once, within the rounding
            error of torch's own arithmetic in that dtype.

    Attributes:
        length: the number of entries.
        table_count: the number of tables that share this ledger.
    """

    def __init__(
        self,
        rule: Rule,
        group: ParamGroup,
        *,
        start_step: int = 0,
        state: ParamState | None = None,
        exact: bool = False,
    ) -> None:
        self.rule = rule
        self.start_step = start_step
        # Copies, because a step changes the scalars of the state in place.
        self.initial_state = {
            key: value.clone() if isinstance(value, torch.Tensor) else value
            for key, value in (state or {}).items()
        }
        # None before the first step: as in torch, the initial scalars depend on that step's lr.
        self.scalar_state: ScalarState | None = None
        self.form = self._form(group)
        self.flags = rule.flags(group)
        self.idle_rows_unchanged = rule.idle_rows_unchanged(group)
        self.length = 0
        self._entries = np.empty((0, 0))
        self._programs: dict[FastForward, Program] = {}
        self._prepared: dict[tuple[int, int, torch.dtype], tuple[Program, Steps]] = {}
        self._copies: dict[Any, Any] = {}  # copies of the entries on other devices
        self._options = {key: value for key, value in group.items() if key != "params"}
        self._exact = exact
        self.closed_form = self._new_closed_form()
        # The length before each of the last steps, and the values that the step changed.
        self._undo: deque[tuple[int, ScalarState | None, bool]] = deque(maxlen=1)
        self.table_count = 1

    def accepts(self, group: ParamGroup) -> bool:
        """Return whether this ledger can record a step with the options of `group`.

        A step that changes idle rows can't follow steps that rows may skip: code may have written
        to a row after the skipped steps, which must not be replayed with the new values.
        """
        changes_skipped_rows = (
            self.length and self.idle_rows_unchanged and not self.rule.idle_rows_unchanged(group)
        )
        return self._form(group) == self.form and not changes_skipped_rows

    def sharing_key(self, group: ParamGroup) -> tuple[Any, ...]:
        """Return the values that must be equal for tables to share a ledger."""
        return self.start_step, *self.scalars(group).items()

    def split(self, table_count: int) -> Ledger:
        """Return a copy for `table_count` tables whose steps will differ from now on."""
        result = copy.copy(self)
        result.closed_form = copy.deepcopy(self.closed_form)
        result._entries, result._copies = self._entries.copy(), {}
        result._programs, result._prepared = {}, {}
        result._undo = copy.copy(self._undo)
        result.table_count = table_count
        self.table_count -= table_count
        return result

    def record_step(self, group: ParamGroup) -> None:
        """Append the entry for the next step; `accepts(group)` must be true.

        Raises:
            HotrowError: before anything changes, if an option or a loaded state makes a scalar
                overflow or divides it by zero.
        """
        entry, scalars = self.next_entry(group)
        before = self.length, self.scalar_state, self.idle_rows_unchanged
        self._undo.append(before)  # do this first: an error may follow any line
        self.append(entry)
        self.scalar_state = scalars
        # Rows may skip all missed steps only if none of these steps changes an idle row.
        if self.idle_rows_unchanged:
            is_finite = all(map(math.isfinite, entry))  # torch computes inf * 0 = NaN
            self.idle_rows_unchanged = is_finite and self.rule.idle_rows_unchanged(group)

    def next_entry(self, group: ParamGroup) -> tuple[tuple[float, ...], ScalarState]:
        """Return the entry for the next step, and the scalars after that step.

        Raises:
            HotrowError: see `record_step`.
        """
        scalars, step = dict(self.scalars(group)), self.start_step + self.length + 1
        try:
            return tuple(map(float, self.rule.ledger_entry(group, step, scalars))), scalars
        except (ArithmeticError, TypeError, ValueError) as error:
            raise HotrowError(
                f"step {step} of {self.rule.name} cannot be computed ({error})",
                fix="check the optimizer's options, such as lr, and the step of a loaded state",
            ) from None

    def allow_undo(self) -> None:
        """Start keeping the data needed to undo steps that a GPU has not run yet."""
        self._undo = deque(self._undo, maxlen=UNDO_STEPS)

    def undo_stopped_steps(self) -> None:
        """Remove the last steps, which the device did not run because an id was out of range.

        This function waits for the device.
        """
        self.undo(self.length)
        self._undo.clear()

    def undo(self, length: int) -> None:
        """Remove all entries after the first `length`, if they are among the last steps.

        This also removes steps that the device did not run. It waits for the device.
        """
        length = min([length, *(int(copy.clock) for copy in self._copies.values())])
        if not 0 < self.length - length <= len(self._undo):
            return
        while self.length > length:
            self.length, self.scalar_state, self.idle_rows_unchanged = self._undo.pop()
        self.closed_form, self._copies, self._prepared = self._new_closed_form(), {}, {}

    def scalars(self, group: ParamGroup) -> ScalarState:
        """Return the scalars after the last entry; without entries, those of the loaded state."""
        if self.scalar_state is None:
            return self.rule.initial_scalars(group, self.initial_state)
        return self.scalar_state

    def torch_scalars(self, group: ParamGroup) -> ScalarState:
        """Return the scalars in torch's state after the last entry."""
        scalars = self.scalars(group)
        public = {name: value for name, value in scalars.items() if not name.startswith("_")}
        if not self.rule.has_step_count:
            return public
        return {"step": float(self.start_step + self.length), **public}

    def append(self, entry: tuple[float, ...]) -> None:
        """Append an entry that has already been computed."""
        self._make_room(len(entry))
        self._entries[self.length] = entry
        self.length += 1
        self._prepared.clear()

    def _make_room(self, width: int) -> None:
        """Allocate memory for another entry."""
        if not len(self._entries):
            self._entries = np.empty((64, width))
        elif self.length == len(self._entries):
            self._entries = np.concatenate([self._entries, np.empty_like(self._entries)])

    def restore(
        self,
        entries: Iterable[tuple[float, ...]],
        scalar_state: ScalarState,
        idle_rows_unchanged: bool,
    ) -> None:
        """Restore the steps of a saved ledger, and the values that depend on them."""
        for entry in entries:
            self.append(entry)
        self.scalar_state = scalar_state if self.length or scalar_state else None
        self.idle_rows_unchanged = idle_rows_unchanged

    def entries(self) -> NDArray[np.float64]:
        """Return a view of all entries, (steps, width)."""
        return self._entries[: self.length]

    def steps(self, end_step: int, step_count: int, dtype: torch.dtype) -> tuple[Program, Steps]:
        """Return the program and the `Steps` that a kernel needs to apply idle steps.

        Arguments:
            end_step: the last step, counted from the start, that is applied as an idle step.
            step_count: each row's total step count once the kernel has run.
            dtype: the table's dtype.
        """
        key = end_step, step_count, dtype
        if key not in self._prepared:
            self._prepared[key] = self._prepare(*key)
        return self._prepared[key]

    def _prepare(self, end_step: int, step_count: int, dtype: torch.dtype) -> tuple[Program, Steps]:
        coefficients: Coefficients | None = ()
        fast_forward = REPLAY
        if self.idle_rows_unchanged:
            fast_forward = SKIP_IDLE_STEPS
        elif (form := self.closed_form) is not None:
            try:
                coefficients = form.compute_coefficients(self._entries, end_step, dtype)
            except (ArithmeticError, TypeError):  # absurd options overflow or give complex numbers
                coefficients, self.closed_form = None, None
            except BaseException:  # it may contain only a part of an entry
                self.closed_form = self._new_closed_form()
                raise
            if coefficients is not None:
                fast_forward = form.fast_forward
        program = self._programs.get(fast_forward)
        if program is None:
            width = self._entries.shape[1]
            program = Program(self.rule.update, self.flags, width, fast_forward)
            self._programs[fast_forward] = program
        steps = Steps(self.entries(), coefficients or (), step_count, end_step, self._copies)
        return program, steps

    def _new_closed_form(self) -> ClosedForm | None:
        return None if self._exact else self.rule.closed_form(self._options)

    def _form(self, group: ParamGroup) -> tuple[Any, ...]:
        return *self.rule.flags(group), *self.rule.initial_slots(group)
