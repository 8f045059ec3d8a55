"""How far the rows of one table are behind, and how they catch up before anyone looks."""

from __future__ import annotations

import warnings

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.gradient import RowGradient
from hotrow.optim.ledger import Ledger
from hotrow.optim.rule import Group, Rule
from hotrow.optim.settle import settle, step
from hotrow.optim.state import RowState
from hotrow.rows import Table

PATIENCE = 10  # steps with an alias alive before that is said
LONGEST = 1 << 16  # entries of a ledger; then all rows settle, and a new one begins


def _uses(tensor: Tensor) -> int:
    """How many tensors there are over the storage of this one, arrays of numpy included."""
    return torch._C._storage_Use_Count(tensor.untyped_storage()._cdata) - 1  # the one just made


class RowLag:
    """One table under one rule: its ledger, its state, and what each row has been through.

    `state` is in torch's format but for the rows that lag and the scalars that `refresh` writes.
    """

    def __init__(self, rule: Rule, table: Table, group: Group, state: RowState) -> None:
        self.table, self.state = table, state
        self.values = table.stored
        held = dict(state)
        self.ledger = Ledger(rule, group, start=int(held.get("step", 0)), state=held)
        self.slots: dict[str, Tensor] = {}
        for name, initial in rule.slots(group).items():
            slot = held.get(name)
            if slot is None:
                slot = torch.full_like(self.values, initial)
            self._check(name, slot)
            self.slots[name] = slot.detach()
        if rule.counted:
            held.setdefault("step", torch.tensor(0.0))
        self.last = torch.zeros(len(self.values), dtype=torch.int32, device=self.values.device)
        self.settled = 0  # all rows have been through so many entries
        self.watched = 0  # steps in a row at which an alias was alive
        dict.update(state, held, **self.slots)
        state.lag = self

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

    @property
    def behind(self) -> bool:
        """Whether a row may have missed a step that would have moved it."""
        return self.settled < len(self.ledger) and not self.ledger.still

    def fits(self, group: Group) -> bool:
        """Whether the next step can be one of this ledger's; raises if the table is another."""
        values = self.table.stored
        if values.data_ptr() != self.values.data_ptr() or values.shape != self.values.shape:
            raise HotrowError(
                "the table's storage was replaced while rows of it lagged",
                fix="write into the table (table.data.copy_), or make a new optimizer",
            )
        return self.ledger.fits(group) and len(self.ledger) < LONGEST

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, through every step so far."""
        now = len(self.ledger)
        whole = rows is None
        if rows is None:
            rows = (self.last < now).nonzero()[:, 0]
        settle(self.ledger, self.values, list(self.slots.values()), self.last, rows)
        if whole:
            self.settled = now

    def step(self, group: Group, gradient: RowGradient) -> None:
        """One step of dense training with this gradient."""
        grads = gradient.group()
        self.ledger.record(group)
        step(self.ledger, self.values, list(self.slots.values()), self.last, grads)
        if dict.__contains__(self.state, "step"):
            dict.__getitem__(self.state, "step").add_(1)
        if self.behind and self._is_watched():
            self.settle(None)

    def _is_watched(self) -> bool:
        """Whether someone holds a tensor over the same storage, and could see rows lag."""
        # The table and `values`; a slot and its entry in the state.
        own = ((self.values, 2), *((slot, 1) for slot in self.slots.values()))
        watched = any(
            _uses(tensor) > count or tensor.is_shared()  # type: ignore[no-untyped-call]
            for tensor, count in own
        )
        self.watched = self.watched + 1 if watched else 0
        if self.watched == PATIENCE:
            warnings.warn(
                f"a tensor that shares the storage of a {tuple(self.values.shape)} table or of "
                "its optimizer state is alive, as weight.data, state_dict() and .numpy() give it; "
                "for it to follow the training, every step settles every row, which is slow: "
                "hold a copy (.clone()), or delete it",
                stacklevel=6,
            )
        return watched

    def refresh(self) -> None:
        """Make the state what torch's would be now."""
        if self.behind:
            self.settle(None)
        for name, value in self.ledger.carried.items():
            if not name.startswith("_"):
                dict.__setitem__(self.state, name, torch.tensor(value))

    def close(self) -> None:
        """Settle everything, and leave a state that is torch's."""
        self.refresh()
        self.state.lag = None
        if self.table.lag is self:
            self.table.lag = None
