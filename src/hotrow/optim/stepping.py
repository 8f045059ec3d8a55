"""torch's optimizers for dense parameters, the row path for tables: one `step` for both."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, ClassVar

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.gradient import RowGradient
from hotrow.optim.ledger import Ledger
from hotrow.optim.rule import Group, Rule
from hotrow.optim.settle import settle, step
from hotrow.rows import Table


def _plain(group: Group) -> Group:
    """The group with numbers for tensors: a learning rate may be one."""
    return {key: v.item() if isinstance(v, Tensor) else v for key, v in group.items()}


def _values(table: Table) -> Tensor:
    """The table's storage as it is, settled or not."""
    with torch._C.DisableTorchFunctionSubclass():
        return table.data


class RowLag:
    """How far each row of one table is behind, and how to catch up.

    `state` is the optimizer's state of the table, in torch's format but for the rows that lag and
    the scalars that `close` writes.
    """

    def __init__(self, rule: Rule, table: Table, group: Group, state: dict[str, Any]) -> None:
        self.table, self.state = table, state
        self.values = _values(table)
        carried = rule.carry(group) if state else None
        for name in carried or {}:
            if carried is not None and name in state:
                carried[name] = float(state[name])
        if carried is not None and "begun" in carried:
            carried["begun"] = float(state.get("momentum_buffer") is not None)
        start = int(state["step"]) if "step" in state else 0
        self.slots = []
        for name, initial in rule.slots(group).items():
            if state.get(name) is None:
                state[name] = torch.full_like(self.values, initial)
            self.slots.append(state[name])
        if "step" not in state and rule.name != "SGD":  # torch's SGD counts no steps
            state["step"] = torch.tensor(0.0)
        self.ledger = Ledger(rule, group, start=start, carried=carried)
        self.last = torch.zeros(len(self.values), dtype=torch.int32, device=self.values.device)
        self.settled = 0  # all rows have been through so many entries

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, through every step so far."""
        now = len(self.ledger)
        if self.settled == now:
            return
        whole = rows is None
        if rows is None:
            rows = (self.last < now).nonzero()[:, 0]
        settle(self.ledger, self.values, self.slots, self.last, rows)
        if whole:
            self.settled = now

    def step(self, group: Group, gradient: RowGradient) -> None:
        """One step of dense training with this gradient."""
        if _values(self.table).data_ptr() != self.values.data_ptr():
            raise HotrowError(
                "the table's storage was replaced while rows of it lagged",
                fix="write into the table (table.data.copy_), or make a new optimizer",
            )
        gradient.merge()
        self.ledger.record(group)
        step(self.ledger, self.values, self.slots, self.last, gradient.ids, gradient.rows)
        if "step" in self.state:
            self.state["step"] += 1

    def close(self) -> None:
        """Settle everything, and leave a state that is torch's."""
        self.settle(None)
        for name, value in (self.ledger.carried or {}).items():
            if name != "begun":
                self.state[name] = torch.tensor(value)


class RowOptimizer(torch.optim.Optimizer):
    """What every optimizer of `hotrow.optim` adds to torch's of the same name.

    Parameters that are tables and have a `RowGradient` take the row path; all others, and tables
    whose gradient is dense, take torch's own step.
    """

    rule: ClassVar[Rule]
    dense: ClassVar[type[torch.optim.Optimizer]]

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses what cannot be honoured for a table."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        for option in ("capturable", "differentiable"):
            if group.get(option) and any(isinstance(p, Table) for p in group["params"]):
                self.param_groups.pop()
                raise HotrowError(
                    f"{type(self).__name__} cannot honour {option}=True for a table",
                    fix=f"leave {option} out for the groups that hold tables",
                )

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        by_rows = []
        for group, table in self._tables():
            gradient = table.grad
            if isinstance(gradient, RowGradient):
                by_rows.append((group, table, gradient))
            elif gradient is not None:
                self._close(table)
        for _, table, _ in by_rows:
            table.grad = None  # torch leaves it alone
        try:
            # Past torch's hooks, which have run for this step already.
            dense: Callable[..., Any] = self.dense.step
            if getattr(dense, "hooked", False):
                dense = dense.__wrapped__  # type: ignore[attr-defined]
            dense(self)
        finally:
            for _, table, gradient in by_rows:
                table.grad = gradient
        for group, table, gradient in by_rows:
            plain = _plain(group)
            self._lag(table, plain).step(plain, gradient)
        return loss

    def _tables(self) -> Iterator[tuple[Group, Table]]:
        for group in self.param_groups:
            for parameter in group["params"]:
                if isinstance(parameter, Table):
                    yield group, parameter

    def _lag(self, table: Table, group: Group) -> RowLag:
        lag = table.lag
        state = self.state[table]
        if isinstance(lag, RowLag):
            if lag.state is state and lag.ledger.fits(group):
                return lag
            self._close(table)  # another optimizer's, or other options
        lag = table.lag = RowLag(self.rule, table, group, state)
        return lag

    @staticmethod
    def _close(table: Table) -> None:
        if isinstance(table.lag, RowLag):
            table.lag.close()
            table.lag = None

    def settle(self) -> None:
        """Bring every table to its value of now; reading one does it as well."""
        for _, table in self._tables():
            table.settle()

    def state_dict(self) -> dict[str, Any]:
        """In torch's own format: it loads in torch's optimizer of the same name, and back."""
        for _, table in self._tables():
            self._close(table)
        return super().state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From hotrow's or torch's optimizer of the same name."""
        for _, table in self._tables():
            self._close(table)
        super().load_state_dict(state_dict)

    def __getstate__(self) -> dict[str, Any]:
        for _, table in self._tables():
            self._close(table)
        result: dict[str, Any] = super().__getstate__()
        return result
