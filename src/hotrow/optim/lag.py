"""How far the rows of one table are behind, and how they catch up before anyone looks."""

from __future__ import annotations

import os
import sys
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels.grouping import Grouped, Places
from hotrow.optim.ledger import Ledger
from hotrow.optim.rule import Group, Rule, scalar_dtype
from hotrow.optim.settle import look_up, settle, step
from hotrow.optim.state import RowState
from hotrow.table.autograd import uses
from hotrow.table.parameter import Table

PATIENCE = 10  # steps with an alias alive before that is said
LONGEST = 1 << 16  # entries of a ledger; then all rows settle, and a new one begins


def _callers() -> int:
    """The stack level of who called the optimizer, for a warning."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("hotrow.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level


def _place(tensor: Tensor) -> tuple[Any, ...]:
    """Where a tensor's values are."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


# Readers in several threads settle one after the other, and not the same rows twice.
_lock = threading.RLock()


def _new_lock() -> None:
    """A forked child may have come from a moment at which another thread held the lock."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_new_lock)


class RowLag:
    """One table under one rule: its ledger, its state, and what each row has been through.

    `state` is in torch's format but for the rows that lag. It and the slots are of the table's
    shape, and seen by rows only while they are worked on.
    """

    def __init__(self, rule: Rule, table: Table, group: Group, state: RowState) -> None:
        self._table, self.state = weakref.ref(table), state
        self.options = {key: value for key, value in group.items() if key != "params"}
        self.values = table.stored
        held = dict(state)
        self.ledger = Ledger(rule, group, start=int(held.get("step", 0)), state=held)
        self.slots: dict[str, Tensor] = {}
        for name, initial in rule.slots(group).items():
            self.slots[name] = self._slot(name, initial, held.get(name)).detach()
        # What torch keeps as scalars, written at each step as torch does.
        self.scalars: dict[str, Tensor] = {
            name: held.get(name, torch.tensor(value, dtype=scalar_dtype()))
            for name, value in self.ledger.kept(group).items()
        }
        self._written = {name: float(scalar) for name, scalar in self.scalars.items()}
        self._columns, count = table.columns, len(table.by_rows)
        if table.backing is None:
            self.last = torch.zeros(count, dtype=torch.int32, device=self.values.device)
        else:
            self.last = table.backing.last()
        self.settled = 0  # all rows have been through so many entries
        self._at_it = False
        self.watched = 0  # steps in a row at which an alias was alive
        dict.update(state, held, **self.slots, **self.scalars)
        state.lag = self

    @property
    def table(self) -> Table:
        """The table, which holds this and not the other way round."""
        table = self._table()
        assert table is not None
        return table

    def _slot(self, name: str, initial: float, held: Tensor | None) -> Tensor:
        """As it is held, or new; in the files of a table in files."""
        backing = self.table.backing
        if held is not None:
            self._check(name, held)
            return held if backing is None else backing.keep(name, held)
        if self.ledger.rule.counted and self.ledger.start:
            raise HotrowError(
                f"the state has no {name!r}, but counts {self.ledger.start} steps",
                fix="load all of a state with the options that it was made with, or begin anew",
            )
        if backing is None:
            return torch.full_like(self.values, initial)
        return backing.slot(name, initial)

    def _check(self, name: str, slot: Tensor) -> None:
        for what, found, needed in (
            ("shape", tuple(slot.shape), tuple(self.values.shape)),
            ("dtype", slot.dtype, self.values.dtype),
            ("device", slot.device, self.values.device),
        ):
            if found != needed:
                raise HotrowError(
                    f"the state {name!r} has {what} {found}, but the table {needed} by now",
                    fix="make a new optimizer after a table is resized, moved or cast",
                )

    def _by_rows(self) -> tuple[Tensor, list[Tensor]]:
        """The table and its slots, (V, D) each: for the moment, as views are counted."""
        every = [self.values, *self.slots.values()]
        if self._columns:
            every = [each.t() for each in every]
        return every[0], every[1:]

    @property
    def behind(self) -> bool:
        """Whether a row may have missed a step that would have moved it."""
        return self.settled < len(self.ledger) and not self.ledger.still

    def fits(self, group: Group) -> bool:
        """Whether the next step can be one of this ledger's; raises if the table is another."""
        self._check_storage()
        return (
            self.ledger.fits(group) and len(self.ledger) < LONGEST and not self._scalars_changed()
        )

    def _check_storage(self) -> None:
        """Raise if the table is over other storage by now, as after `set_`."""
        values = self.table.stored
        if _place(values) != _place(self.values):
            raise HotrowError(
                "the table's storage was replaced while rows of it lagged",
                fix="write into the table (table.data.copy_), or make a new optimizer",
            )

    def _scalars_changed(self) -> bool:
        """Whether someone wrote into the step count, or into what else torch keeps as a scalar."""
        return any(float(s) != self._written[name] for name, s in self.scalars.items())

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """Around what reads and writes rows: one at a time, also within a thread."""
        with _lock:
            if self._at_it:
                raise HotrowError(
                    "a table was read in the middle of its step, as a signal handler does",
                    fix="set a flag in the handler, and read the table after optimizer.step()",
                )
            self._at_it = True
            try:
                yield
            finally:
                self._at_it = False

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, through every step so far."""
        with self._alone():
            now = len(self.ledger)
            whole = rows is None
            if rows is None:
                rows = (self.last < now).nonzero()[:, 0]
            settle(self.ledger, *self._by_rows(), self.last, rows)
            if whole:
                self.settled = now

    def look_up(self, at: Places) -> Tensor:
        """(..., D): the rows of now at `at`, which are about to be trained."""
        self._check_storage()
        with self._alone():
            return look_up(self.ledger, *self._by_rows(), self.last, at)

    def peek(self, at: Places) -> Tensor:
        """(..., D): the rows of now at `at`, worked out in a copy; none is settled."""
        self._check_storage()
        with self._alone():
            table, slots = self._by_rows()
            rows, *others = (each[at.rows] for each in (table, *slots))
            every = torch.arange(len(at.rows), device=rows.device)
            settle(self.ledger, rows, others, self.last[at.rows], every)
        return rows[at.places]

    def step(self, group: Group, grads: Grouped) -> None:
        """One step of dense training with these gradients."""
        with self._alone():
            self.ledger.record(group)
            step(self.ledger, *self._by_rows(), self.last, grads)
        self.write_scalars(group)
        torch.autograd.graph.increment_version([self.table, *self.slots.values()])
        if self.behind and self._is_watched():
            self.settle(None)

    def write_scalars(self, group: Group) -> None:
        """Make what torch keeps as scalars what it is after the ledger's last entry."""
        for name, value in self.ledger.kept(group).items():
            self._written[name] = float(self.scalars[name].fill_(value))

    def _is_watched(self) -> bool:
        """Whether someone holds a tensor over the same storage, and could see rows lag."""
        # The table and `values`; a slot, which the state has as well.
        own = ((self.values, 2), *((slot, 1) for slot in self.slots.values()))
        watched = any(uses(tensor) > count for tensor, count in own)
        self.watched = self.watched + 1 if watched else 0
        if self.watched == PATIENCE:
            warnings.warn(
                f"a tensor that shares the storage of a {tuple(self.values.shape)} table or of "
                "its optimizer state is alive, as weight.data, state_dict() and .numpy() give it; "
                "for it to follow the training, every step settles every row, which is slow: "
                "hold a copy (.clone()), or delete it",
                stacklevel=_callers(),
            )
        return watched

    def refresh(self) -> None:
        """Make the state what torch's would be now."""
        if self.behind:
            self.settle(None)

    def close(self) -> None:
        """Settle everything, and let go of table and state."""
        self.refresh()
        self.state.lag = None
        table = self._table()
        if table is not None and table.lag is self:
            table.lag = None
