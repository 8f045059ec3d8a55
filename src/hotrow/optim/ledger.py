"""The ledger, which records the scalars of every step so that missed steps can be applied later.

`RowLag.step` records an entry before it updates the touched rows.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.errors import HotrowError
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.rule import ParamGroup, ParamState, Rule, ScalarState


class Ledger:
    """The recorded steps of one table under one rule; entry i contains the scalars of step i + 1.

    Each step takes 12 bytes per scalar in its entry, plus 104 bytes for Adam's series.

    Arguments:
        rule: the rule of the optimizer.
        group: the parameter group, whose options select the form of the rule.
        start_step: torch's step count before the first entry; greater than 0 in a resumed run.
        state: the table's state in torch's format, for a resumed run.
        exact: whether to replay every missed step, so that results match torch bit for bit in every
            dtype. If false, a closed form may apply many steps at once, within the rounding error
            of torch's own arithmetic in that dtype.
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
        self.initial_state = dict(state or {})
        self.scalar_state: ScalarState = {}
        self.form = self._form(group)
        self.idle_rows_unchanged = rule.idle_rows_unchanged(group)
        self.closed_form: ClosedForm | None = None if exact else rule.closed_form(group)
        self._length = 0
        self._entries: dict[type, NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._length

    def accepts(self, group: ParamGroup) -> bool:
        """Return whether this ledger can record a step with the options of `group`."""
        return self._form(group) == self.form

    def record_step(self, group: ParamGroup) -> None:
        """Append the entry for the next step, with the current hyperparameters of `group`."""
        if not self.accepts(group):
            raise HotrowError(
                f"the options of {self.rule.name} changed the form of its update from {self.form} "
                f"to {self._form(group)}",
                fix="settle every row, then start a new ledger",
            )
        if not self._length:  # as in torch, the initial scalars depend on the first step's lr
            self.scalar_state = self.rule.initial_scalars(group, self.initial_state)
            self.initial_state = {}  # drop the references to the table's tensors
        step = self.start_step + self._length + 1
        entry = self.rule.ledger_entry(group, step, self.scalar_state)
        self.append(tuple(map(float, entry)))
        # Rows may skip all missed steps only if none of these steps changes an idle row.
        self.idle_rows_unchanged = self.idle_rows_unchanged and self.rule.idle_rows_unchanged(group)

    def torch_scalars(self, group: ParamGroup) -> ScalarState:
        """Return the scalars of torch's state after the last entry."""
        scalars = self.scalar_state
        if not self._length:
            scalars = self.rule.initial_scalars(group, self.initial_state)
        public = {name: value for name, value in scalars.items() if not name.startswith("_")}
        if not self.rule.has_step_count:
            return public
        return {"step": float(self.start_step + self._length), **public}

    def append(self, entry: tuple[float, ...]) -> None:
        """Append an entry that has already been computed."""
        n = self._length
        if not self._entries:
            self._entries = {np.float64: np.empty((64, len(entry)))}
            self._entries[np.float32] = np.empty((64, len(entry)), np.float32)
        if n == len(self._entries[np.float64]):
            for dtype, full in self._entries.items():
                self._entries[dtype] = np.concatenate([full, np.empty_like(full)])
        with np.errstate(over="ignore"):
            for array in self._entries.values():
                array[n] = entry
        self._length = n + 1

    def entries(self, dtype: type = np.float64) -> NDArray[Any]:
        """Return a view of all entries, (steps, width), in float64 or rounded to float32."""
        return self._entries[dtype][: self._length] if self._entries else np.empty((0, 0))

    def _form(self, group: ParamGroup) -> tuple[Any, ...]:
        return *self.rule.flags(group), *self.rule.initial_slots(group)
