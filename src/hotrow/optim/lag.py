"""`RowLag`, which tracks the steps that each row of a table has missed.

A `RowLag` connects a table to its optimizer. The optimizer's step calls `RowLag.step`; reads of the
table and of its state call `settle`, `look_up` or `peek`.
"""

from __future__ import annotations

import os
import threading
import warnings
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.optim.interrupts import PostponedSignals
from hotrow.optim.ledger import Ledger
from hotrow.optim.rule import ParamGroup, Rule, scalar_dtype
from hotrow.optim.settle import look_up, settle, step
from hotrow.optim.state import RowState
from hotrow.table.autograd import storage_use_count
from hotrow.table.parameter import Table
from hotrow.table.stack import caller_stack_level

ALIAS_WARNING_STEPS = 10  # warn after this many consecutive steps with a live alias
MAX_LEDGER_ENTRIES = 1 << 16  # after this many steps, settle all rows and start a new ledger


def _memory_layout(tensor: Tensor) -> tuple[Any, ...]:
    """Return the address, shape and strides of a tensor."""
    return tensor.data_ptr(), tensor.shape, tensor.stride()


# Only one thread settles rows at a time, so that no row is settled twice.
_lock = threading.RLock()


def _replace_lock() -> None:
    """Create a new lock in a forked child; a thread of the parent may have held the old one."""
    global _lock
    _lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


class RowLag:
    """The ledger, the state, and each row's step count for one table under one rule.

    `state` has torch's format, and only its stale rows differ from torch's values. The state's
    tensors and the slots have the table's shape. (V, D) views exist only during an operation.
    """

    def __init__(self, rule: Rule, table: Table, group: ParamGroup, state: RowState) -> None:
        self._table, self.state = weakref.ref(table), state
        self.group_options = {key: value for key, value in group.items() if key != "params"}
        self.values = table.raw_data
        loaded = dict(state)
        self.ledger = Ledger(rule, group, start_step=int(loaded.get("step", 0)), state=loaded)
        self.slots: dict[str, Tensor] = {}
        for name, initial in rule.initial_slots(group).items():
            self.slots[name] = self._make_slot(name, initial, loaded.get(name)).detach()
        # The scalars in torch's state. Each step updates them in place, as torch does.
        self.scalar_tensors: dict[str, Tensor] = {
            name: loaded.get(name, torch.tensor(value, dtype=scalar_dtype()))
            for name, value in self.ledger.torch_scalars(group).items()
        }
        self._scalar_values = {name: float(scalar) for name, scalar in self.scalar_tensors.items()}
        self._by_columns, count = table.columns, len(table.raw_rows)
        if table.backing is None:
            self.row_steps = torch.zeros(count, dtype=torch.int32, device=self.values.device)
        else:
            self.row_steps = table.backing.row_steps()
        self.settled_steps = 0  # the number of ledger entries already applied to all rows
        self._is_busy = False
        self.alias_steps = 0  # the number of consecutive steps with a live alias so far
        dict.update(state, loaded, **self.slots, **self.scalar_tensors)
        state.lag = self

    @property
    def table(self) -> Table:
        """The table that owns this lag."""
        table = self._table()
        assert table is not None
        return table

    def _make_slot(self, name: str, initial: float, loaded: Tensor | None) -> Tensor:
        """Return the loaded slot or a new slot, which is on disk if the table is on disk."""
        backing = self.table.backing
        if loaded is not None:
            self._check_slot(name, loaded)
            return loaded if backing is None else backing.store_slot(name, loaded)
        if self.ledger.rule.has_step_count and self.ledger.start_step:
            raise HotrowError(
                f"the optimizer state has no {name!r}, but its step count is "
                f"{self.ledger.start_step}",
                fix="load a complete state, saved by an optimizer with the same options",
            )
        if backing is None:
            return torch.full_like(self.values, initial)
        return backing.create_slot(name, initial)

    def _check_slot(self, name: str, slot: Tensor) -> None:
        for prop, actual, expected in (
            ("shape", tuple(slot.shape), tuple(self.values.shape)),
            ("dtype", slot.dtype, self.values.dtype),
            ("device", slot.device, self.values.device),
        ):
            if actual != expected:
                raise HotrowError(
                    f"the optimizer state {name!r} has {prop} {actual}, but the table has {prop} "
                    f"{expected}",
                    fix="create a new optimizer after you resize, move or cast a table",
                )

    def _row_views(self) -> tuple[Tensor, list[Tensor]]:
        """Return (V, D) views of the table and its slots; storing a view would create an alias."""
        tensors = [self.values, *self.slots.values()]
        if self._by_columns:
            tensors = [tensor.t() for tensor in tensors]
        return tensors[0], tensors[1:]

    @property
    def has_stale_rows(self) -> bool:
        """Return whether any row may have missed a step that would have changed it."""
        return self.settled_steps < len(self.ledger) and not self.ledger.idle_rows_unchanged

    def accepts(self, group: ParamGroup) -> bool:
        """Return whether the ledger can record the next step; raise if the storage has changed."""
        self._check_storage()
        return (
            self.ledger.accepts(group)
            and len(self.ledger) < MAX_LEDGER_ENTRIES
            and not self._scalars_changed()
        )

    def _check_storage(self) -> None:
        """Raise an error if the table's storage was replaced, for example by `set_`."""
        values = self.table.raw_data
        if _memory_layout(values) != _memory_layout(self.values):
            raise HotrowError(
                "the table's storage was replaced while some of its rows were stale",
                fix="write the values with table.data.copy_(...), or create a new optimizer",
            )

    def _scalars_changed(self) -> bool:
        """Return whether the user changed the step count or another scalar in torch's state."""
        return any(float(s) != self._scalar_values[name] for name, s in self.scalar_tensors.items())

    @contextmanager
    def _exclusive_access(self) -> Iterator[None]:
        """Allow only one operation on rows at a time, across threads and within a thread."""
        with PostponedSignals(), _lock:
            if self._is_busy:
                raise HotrowError(
                    "a table was read during its own step, for example by a signal handler",
                    fix="set a flag in the handler, and read the table after optimizer.step()",
                )
            self._is_busy = True
            try:
                yield
            finally:
                self._is_busy = False

    def settle(self, rows: Tensor | None) -> None:
        """Apply every missed step to the distinct `rows`, or to all rows if `rows` is None."""
        with self._exclusive_access():
            step_count = len(self.ledger)
            settles_all = rows is None
            if rows is None:
                rows = (self.row_steps < step_count).nonzero()[:, 0]
            settle(self.ledger, *self._row_views(), self.row_steps, rows)
            if settles_all:
                self.settled_steps = step_count

    def look_up(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by `ids`, (..., D); the next step updates these rows.

        `operators.look_up` describes which rows are stored.
        """
        self._check_storage()
        with self._exclusive_access():
            return look_up(self.ledger, *self._row_views(), self.row_steps, ids)

    def peek(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by `ids`, (..., D), without storing them."""
        self._check_storage()
        with self._exclusive_access():
            table, slots = self._row_views()
            rows, *row_slots = (tensor[ids.rows] for tensor in (table, *slots))
            indices = torch.arange(len(ids.rows), device=rows.device)
            settle(self.ledger, rows, row_slots, self.row_steps[ids.rows], indices)
        return rows[ids.inverse]

    def step(self, group: ParamGroup, grads: GroupedGradients) -> None:
        """Record a step, and apply it to the rows of `grads`."""
        with self._exclusive_access():
            self.ledger.record_step(group)
            step(self.ledger, *self._row_views(), self.row_steps, grads)
        self.write_scalars(group)
        torch.autograd.graph.increment_version([self.table, *self.slots.values()])
        if self.has_stale_rows and self._has_alias():
            self.settle(None)

    def write_scalars(self, group: ParamGroup) -> None:
        """Set the scalars in torch's state to their values after the ledger's last entry."""
        for name, value in self.ledger.torch_scalars(group).items():
            self._scalar_values[name] = float(self.scalar_tensors[name].fill_(value))

    def _has_alias(self) -> bool:
        """Return whether another tensor, whose reads wouldn't settle rows, shares the storage."""
        # The table's storage has two expected uses (`values` and the table); a slot's storage has
        # one.
        expected_uses = ((self.values, 2), *((slot, 1) for slot in self.slots.values()))
        has_alias = any(storage_use_count(tensor) > count for tensor, count in expected_uses)
        self.alias_steps = self.alias_steps + 1 if has_alias else 0
        if self.alias_steps == ALIAS_WARNING_STEPS:
            warnings.warn(
                "a tensor, such as the result of weight.data, state_dict() or .numpy(), shares the "
                f"storage of a {tuple(self.values.shape)} table or of its optimizer state. To keep "
                "that tensor up to date, every step settles all rows, which is slow. Keep a copy "
                "(.clone()) instead, or delete the tensor",
                stacklevel=caller_stack_level(),
            )
        return has_alias

    def settle_all(self) -> None:
        """Settle all rows, so that the state equals torch's."""
        if self.has_stale_rows:
            self.settle(None)

    def close(self) -> None:
        """Settle all rows, then detach this lag from the table and the state."""
        self.settle_all()
        self.state.lag = None
        table = self._table()
        if table is not None and table.lag is self:
            table.lag = None
