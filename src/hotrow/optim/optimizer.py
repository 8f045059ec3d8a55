"""torch's optimizers for dense parameters, the row path for tables: one `step` for both."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch._compile import _disable_dynamo

from hotrow.compilation import is_compiling
from hotrow.errors import HotrowError
from hotrow.optim.lag import RowLag
from hotrow.optim.rule import Group, Rule
from hotrow.optim.state import RowState
from hotrow.table.autograd import in_order, put_in_order
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table

_REFUSED = ("capturable", "differentiable")


def _plain(group: Group) -> Group:
    """The group with numbers for tensors: a learning rate may be one."""
    return {key: v.item() if isinstance(v, Tensor) else v for key, v in group.items()}


def _contiguous(state: Mapping[str, Any], table: Table) -> dict[str, Any]:
    """The state of a table, each tensor as torch lays it out; of a shard, as a part."""
    return {
        k: table.whole(v.contiguous()) if isinstance(v, Tensor) else v for k, v in state.items()
    }


def _lay_out(state: dict[str, Any], table: Table, held: bool = False) -> None:
    """Bring a state in memory into the table's order; `held`, whoever else holds its memory."""
    for value in dict.values(state):
        if isinstance(value, Tensor) and value.shape == table.shape:
            put_in_order(value, table.stride(), held)


class RowOptimizer(torch.optim.Optimizer):
    """What every optimizer of `hotrow.optim` adds to torch's of the same name.

    Parameters that are tables and have a `RowGradient` take the row path; all others, and tables
    whose gradient is dense, take torch's own step. A step ends by making tables of the parameters
    that `hotrow.table.lookup.look_up` has met since.
    """

    rule: ClassVar[Rule]
    dense: ClassVar[type[torch.optim.Optimizer]]

    def __init_subclass__(cls) -> None:
        """The formula, which stands in the rule's file, belongs to the docstring."""
        super().__init_subclass__()
        rule = sys.modules[cls.rule.update.__module__].__doc__ or ""
        cls.__doc__ = f"{cls.__doc__}\n\n{rule.partition(chr(10) * 2)[2]}"

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        """As torch's; refuses what cannot be honoured for a table."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        if any(isinstance(parameter, Table) for parameter in group["params"]):
            try:
                self._check(group)
            except HotrowError:
                self.param_groups.pop()
                raise

    def _check(self, group: Group) -> None:
        for option in filter(group.get, _REFUSED):
            raise HotrowError(
                f"{type(self).__name__} cannot honour {option}=True for a table",
                fix=f"leave {option} out for the groups that hold tables",
            )

    @property
    def _step_supports_amp_scaling(self) -> bool:
        """Whether a GradScaler leaves unscaling to the step; not to that of a table."""
        fused = self.__dict__.get("_scales_itself", False)
        return fused and not self._tables()

    @_step_supports_amp_scaling.setter
    def _step_supports_amp_scaling(self, value: bool) -> None:  # torch sets it
        self.__dict__["_scales_itself"] = value

    @_disable_dynamo
    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's."""
        with torch._C.DisableTorchFunctionSubclass():  # a table would be asked for each `.grad`
            super().zero_grad(set_to_none)

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step of every parameter that has a gradient; returns the closure's loss."""
        run = self._run_in_eager if is_compiling() else self._run
        return run(closure)

    @_disable_dynamo
    def _run_in_eager(self, closure: Callable[[], Any] | None) -> Any:
        return self._run(closure)

    def _run(self, closure: Callable[[], Any] | None) -> Any:
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        tables = self._tables()
        if tables:
            with torch.no_grad():
                self._step(tables)
        else:
            self._step_as_torch()
        self._adopt()
        return loss

    def _step(self, tables: list[tuple[Group, Table]]) -> None:
        with torch._C.DisableTorchFunctionSubclass():  # which would ask each time
            gradients = [table.grad for _, table in tables]
        ours = [
            (group, table, gradient)
            for (group, table), gradient in zip(tables, gradients, strict=True)
            if gradient is not None
        ]
        for group, table, gradient in ours:
            if table.backing is not None:
                self._check_rows(group, gradient)
        by_rows = []
        for group, table, gradient in ours:
            if table.replicas is not None:
                table.replicas.agree(table)
            if not isinstance(gradient, RowGradient):
                table.was_dense = True
                self._close(table)
            elif self.rule.dense(plain := _plain(group)):
                self._close(table)
            else:
                self._check(group)
                by_rows.append((self._lag(table, plain), plain, gradient.group()))
        if self._has_dense() or any(table.lag is None for _, table, _ in ours):
            for group, table, gradient in ours:  # what has a lag now torch leaves alone
                table.grad = self._dense(group, table, gradient) if table.lag is None else None
            try:
                self._step_as_torch()
            finally:
                for _, table, gradient in ours:
                    table.grad = gradient
        for lag, group, grads in by_rows:
            lag.step(group, grads)

    def _step_as_torch(self) -> None:
        """Past torch's hooks, which have run for this step already."""
        dense: Callable[..., Any] = self.dense.step
        if getattr(dense, "hooked", False):
            dense = dense.__wrapped__  # type: ignore[attr-defined]
        dense(self)

    def _dense(self, group: Group, table: Table, gradient: Tensor) -> Tensor:
        """The gradient for torch's own step.

        torch's fused steps on the CPU mix up values where the gradient or the state is laid out
        in memory otherwise than the parameter.
        """
        if isinstance(gradient, RowGradient):
            gradient = gradient.dense()
        if not group.get("fused"):
            return gradient
        _lay_out(self.state[table], table, held=True)
        return in_order(gradient, table.stride())

    def _adopt(self) -> None:
        """Make tables of what look-ups have met, in the groups that may hold them."""
        for group in self.param_groups:
            if not any(map(group.get, _REFUSED)):
                for parameter in group["params"]:
                    met = parameter.__dict__.get("looked_up")
                    if met and not isinstance(parameter, Table):
                        Table.adopt(parameter, columns=met == "columns")

    def _tables(self) -> list[tuple[Group, Table]]:
        # isinstance would ask the metaclass of Parameter: three times as long, in each step.
        return [
            (group, parameter)
            for group in self.param_groups
            for parameter in group["params"]
            if type(parameter) is Table
        ]

    def _has_dense(self) -> bool:
        """Whether there is a gradient of what is no table."""
        return any(
            parameter.grad is not None
            for group in self.param_groups
            for parameter in group["params"]
            if type(parameter) is not Table
        )

    def _lag(self, table: Table, group: Group) -> RowLag:
        """The lag of a table, ready for a step of this group."""
        lag, state = table.lag, self._state_of(table)
        if isinstance(lag, RowLag) and lag.state is state and lag.fits(group):
            return lag
        self._close(table)  # another optimizer's, or other options
        if not isinstance(state, RowState):
            state = self.state[table] = RowState(state)
        _lay_out(state, table)
        table.lag = lag = RowLag(self.rule, table, group, state)
        return lag

    def _state_of(self, table: Table) -> Any:
        """The state of a table; of one in files, theirs, unless this optimizer has its own."""
        state = self.state[table]
        fresh = not isinstance(state, RowState) and not (state and float(state.get("step", 1)))
        if table.backing is not None and fresh:
            lag, state = table.lag, {}
            if isinstance(lag, RowLag) and lag.ledger.rule is self.rule:
                state = lag.state
            self.state[table] = state
        return state

    def _check_rows(self, group: Group, gradient: Tensor) -> None:
        """Raise unless a step, of a table in files, touches single rows."""
        if not isinstance(gradient, RowGradient):
            what = "a gradient of more than look-ups"
            fix = "leave the weight itself out of the loss"
        elif self.rule.dense(_plain(group)):
            what, fix = f"{self.rule.name} with these options", "leave weight_decay out"
        else:
            return
        raise HotrowError(f"{what} takes a dense step, of all rows of a table in files", fix=fix)

    @staticmethod
    def _close(table: Table) -> None:
        if table.lag is not None:
            table.lag.close()

    def settle(self) -> None:
        """Bring every table to its value of now; reading one does it as well."""
        for _, table in self._tables():
            table.settle()

    def state_dict(self) -> dict[str, Any]:
        """In torch's own format: it loads in torch's optimizer of the same name, and back.

        What belongs to a table by columns is a copy, as torch would have it in memory.
        """
        for _, table in self._tables():
            if table.backing is not None and table.lag is not None:
                self._state_of(table)
            self._close(table)
        result: dict[str, Any] = super().state_dict()
        tables = dict(self._match(result))
        result["state"] = {
            index: _contiguous(state, tables[index]) if index in tables else state
            for index, state in result["state"].items()
        }
        return result

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """From hotrow's or torch's optimizer of the same name; the tables' state is copied.

        Raises:
            HotrowError: a table's state has another shape than the table. Nothing has changed.
        """
        tables = dict(self._match(state_dict))
        state_dict = {**state_dict, "state": dict(state_dict["state"])}
        for index, table in tables.items():
            state = state_dict["state"].get(index, {})
            own = {k: table.part(v) if isinstance(v, Tensor) else v for k, v in state.items()}
            if own:
                state_dict["state"][index] = own
            for name, value in own.items():
                if isinstance(value, Tensor) and value.ndim and value.shape != table.shape:
                    raise HotrowError(
                        f"state[{index}][{name!r}] has shape {tuple(value.shape)}, but the table "
                        f"it is for {tuple(table.shape)}",
                        fix="load the state dict of a model with the same tables",
                    )
        for table in tables.values():
            self._close(table)
        # A table's state is read and written apart from whoever holds the dict.
        own = {
            index: {k: v.clone() if isinstance(v, Tensor) else v for k, v in state.items()}
            if index in tables
            else state
            for index, state in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": own})

    def _match(self, state_dict: dict[str, Any]) -> Iterator[tuple[Any, Table]]:
        """(the key of its state, table) of each, as torch matches them: by order."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            for parameter, index in zip(group["params"], saved["params"], strict=False):
                if isinstance(parameter, Table):
                    yield index, parameter

    def __getstate__(self) -> dict[str, Any]:
        for _, table in self._tables():
            self._close(table)
        result: dict[str, Any] = super().__getstate__()
        result["state"] = result["state"].copy()
        for _, table in self._tables():
            if table in result["state"]:
                result["state"][table] = _contiguous(result["state"][table], table)
        return result
