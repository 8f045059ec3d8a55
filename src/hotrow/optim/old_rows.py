"""Find optimizer state whose rows belong to a table before a change of its rows."""

from __future__ import annotations

import weakref

import torch

from hotrow.errors import HotrowError
from hotrow.locks import ForkSafeLock
from hotrow.optim.state import RowState
from hotrow.table.parameter import Table

_optimizers: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_lock = ForkSafeLock()


def register(optimizer: torch.optim.Optimizer) -> None:
    """Let `mark_old_rows` find the optimizer, as long as it exists."""
    with _lock.lock:
        _optimizers.add(optimizer)


def mark_old_rows(table: Table, optimizer: torch.optim.Optimizer | None) -> None:
    """After a change of the table's rows, mark the state of all optimizers but the given one."""
    current = None if optimizer is None else optimizer.state.get(table)
    with _lock.lock:
        optimizers = list(_optimizers)
    for other in optimizers:
        state = other.state.get(table)
        if state and state is not current:  # two optimizers may share a state
            if not isinstance(state, RowState):
                state = other.state[table] = RowState(state)
            state.is_old = True


def refuse_old_rows(optimizer: torch.optim.Optimizer, table: Table) -> None:
    """Raise an error if the rows of the table changed, but not those of the optimizer's state."""
    state = optimizer.state.get(table)
    if isinstance(state, RowState) and state.has_old_rows:
        raise HotrowError(
            f"the rows of a {tuple(table.shape)} table changed after this "
            f"{type(optimizer).__name__}'s last step, but the rows of its state did not",
            fix="del optimizer.state[weight], or create a new optimizer",
        )
