"""The ledger: the scalars of every step, which is all that an idle row misses."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from hotrow.errors import HotrowError
from hotrow.optim.closed_form.shortcut import Shortcut
from hotrow.optim.rule import Carried, Group, Rule, State


class Ledger:
    """The steps of one table under one rule; entry i is what turned step count i into i + 1.

    Arguments:
        rule: the optimizer.
        group: its parameter group; read now for the form and the state, and at each `record`.
        start: torch's step count before the first entry, for a run that was resumed.
        state: of the table in torch's format, for a run that was resumed.
        exact: replay every missed step, in every dtype: torch's own bits. Otherwise rows may jump
            over many at once, no further from the truth than torch in their dtype is.

    12 bytes a step for each number of an entry, and 104 more for Adam's series.
    """

    def __init__(
        self,
        rule: Rule,
        group: Group,
        *,
        start: int = 0,
        state: State | None = None,
        exact: bool = False,
    ) -> None:
        self.rule = rule
        self.start = start
        self.state = dict(state or {})
        self.carried: Carried = {}
        self.form = self._form(group)
        self.still = rule.still(group)
        self.shortcut: Shortcut | None = None if exact else rule.shortcut(group)
        self._length = 0
        self._entries: dict[type, NDArray[Any]] = {}

    def __len__(self) -> int:
        return self._length

    def fits(self, group: Group) -> bool:
        """Whether a step with these options can be recorded here."""
        return self._form(group) == self.form

    def record(self, group: Group) -> None:
        """Add the entry of the next step, from the hyperparameters of this moment."""
        if not self.fits(group):
            raise HotrowError(
                f"the form of {self.rule.name} changed from {self.form} to {self._form(group)}",
                fix="settle every row, then begin a new ledger",
            )
        if not self._length:  # as late as torch: with the learning rate of the first step
            self.carried = self.rule.carry(group, self.state)
            self.state = {}  # its tensors are the table's to hold
        entry = self.rule.entry(group, self.start + self._length + 1, self.carried)
        self.append(tuple(map(float, entry)))
        # Rows that do not move without a gradient need no replay, as long as that stays true.
        self.still = self.still and self.rule.still(group)

    def kept(self, group: Group) -> Carried:
        """The scalars that torch would have in its state before the next step."""
        carried = self.carried if self._length else self.rule.carry(group, self.state)
        kept = {name: value for name, value in carried.items() if not name.startswith("_")}
        return {"step": float(self.start + self._length), **kept} if self.rule.counted else kept

    def append(self, entry: tuple[float, ...]) -> None:
        """Add an entry as it is."""
        n = self._length
        if not self._entries:
            self._entries = {np.float64: np.empty((64, len(entry)))}
            self._entries[np.float32] = np.empty((64, len(entry)), np.float32)
        if n == len(self._entries[np.float64]):
            for kind, old in self._entries.items():
                self._entries[kind] = np.concatenate([old, np.empty_like(old)])
        with np.errstate(over="ignore"):
            for array in self._entries.values():
                array[n] = entry
        self._length = n + 1

    def entries(self, kind: type = np.float64) -> NDArray[Any]:
        """The entries so far, (steps, width): a view, in float64 or rounded to float32."""
        return self._entries[kind][: self._length] if self._entries else np.empty((0, 0))

    def _form(self, group: Group) -> tuple[Any, ...]:
        return *self.rule.flags(group), *self.rule.slots(group)
