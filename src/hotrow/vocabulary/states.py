"""The optimizer state of a vocabulary's rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from hotrow import optim
from hotrow.errors import HotrowError
from hotrow.optim.lag import RowLag, last_run
from hotrow.optim.optimizer import RowOptimizer
from hotrow.optim.rule import ParamGroup, Rule, numeric_group
from hotrow.optim.state import RowState
from hotrow.table.autograd import storage_use_count
from hotrow.table.parameter import Table
from hotrow.table.protocols import ChangedFiles
from hotrow.table.row_change import RowChange

_RULES: dict[type[torch.optim.Optimizer], Rule] = {
    getattr(optim, name).torch_class: getattr(optim, name).rule for name in optim.__all__
}


def unwrap(optimizer: Any) -> torch.optim.Optimizer | None:
    """Return the optimizer inside a wrapper, such as the wrappers of accelerate and Lightning."""
    while isinstance(getattr(optimizer, "optimizer", None), torch.optim.Optimizer):
        optimizer = optimizer.optimizer
    if optimizer is not None and not isinstance(optimizer, torch.optim.Optimizer):
        raise HotrowError(
            f"optimizer is a {type(optimizer).__name__}, but it must be a torch.optim.Optimizer"
        )
    return optimizer


def group_of(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> ParamGroup | None:
    """Return the optimizer's group that contains this parameter, or None."""
    for group in optimizer.param_groups:
        if any(parameter is other for other in group["params"]):
            return numeric_group(group, optimizer.defaults)
    return None


def check_owner(optimizer: torch.optim.Optimizer | None, weight: nn.Parameter) -> None:
    """Raise an error if this is not the optimizer that trains the weight."""
    shape = tuple(weight.shape)
    run = last_run(weight) if isinstance(weight, Table) else None
    last = weight.last_optimizer if isinstance(weight, Table) else None
    if isinstance(weight, Table) and weight.backing is None and last is None:
        run = None  # the optimizer no longer exists
    # Without a lag, the last optimizer may still have state.
    has_state = last is not None and bool(row_tensors(last, weight))
    if optimizer is None:
        if run is not None or has_state:
            raise HotrowError(
                f"the optimizer that trains the {shape} table has state for each row",
                fix="pass the optimizer too",
            )
        return
    name = type(optimizer).__name__
    if group_of(optimizer, weight) is None:
        raise HotrowError(
            f"the {name} does not train the {shape} weight: none of its groups has this parameter",
            fix="pass the optimizer that was created with this layer's parameters",
        )
    if isinstance(weight, Table) and isinstance(optimizer, RowOptimizer):
        # Raises an error if the state has old rows; reads it from the files if not done yet.
        optimizer.table_state(weight)
    if isinstance(weight, Table) and last is optimizer and weight.backing is None:
        return  # other code may have replaced or deleted the state after the last step
    if (run is not None and run.state is not optimizer.state.get(weight)) or (
        has_state and optimizer is not last and not row_tensors(optimizer, weight)
    ):
        if last is optimizer:
            raise HotrowError(
                f"other code replaced the {name}'s state of the {shape} table on disk",
                fix="run a step before you change the rows",
            )
        raise HotrowError(
            f"this {name} did not take the last step of the {shape} table",
            fix="pass the optimizer that took the last step",
        )


def row_tensors(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> dict[str, Tensor]:
    """Return a parameter's state tensors that aren't 0-D, including their spare memory."""
    state = optimizer.state.get(parameter, {})
    values = {name: dict.__getitem__(state, name) for name in state}
    return {k: v for k, v in values.items() if isinstance(v, Tensor) and v.ndim}


def prepare_state(
    optimizer: torch.optim.Optimizer,
    parameter: nn.Parameter,
    shape: torch.Size,
    change: RowChange,
    columns: bool,
    files: ChangedFiles | None = None,
) -> Callable[[], None]:
    """Compute the changed state of a parameter without a lag, and return a function that stores it.

    Arguments:
        optimizer: the optimizer; this function does not change its state.
        parameter: the parameter.
        shape: the parameter's shape before the change.
        change: the change.
        columns: whether ids select columns.
        files: the parameter's files, or None if it is in memory.

    Raises:
        HotrowError: a state tensor is not 0-D and doesn't have the parameter's shape.
    """
    initial = initial_slots(optimizer, parameter)
    new_state: dict[str, Tensor] = {}
    for name, value in row_tensors(optimizer, parameter).items():
        if value.shape != shape:
            raise HotrowError(
                f"the optimizer state {name!r} has shape {tuple(value.shape)}, but the parameter "
                f"has shape {tuple(shape)}, so its rows cannot change with the parameter's rows",
                fix=f"create a new {type(optimizer).__name__} after the change",
            )
        first = initial.get(name, 0.0)
        if files is not None:
            new_state[name] = files.apply(value, first, 1)
        else:
            new_state[name] = change.apply_to(value, first, columns=columns)

    def store() -> None:
        state = optimizer.state.get(parameter, {})
        dict.update(state, new_state)
        if isinstance(state, RowState):
            state.is_old = False

    return store


def prepare_change(
    optimizer: torch.optim.Optimizer | None,
    parameter: nn.Parameter,
    change: RowChange,
    added: Tensor,
    columns: bool,
) -> tuple[Tensor, Callable[[], None]]:
    """Compute the changed rows of a parameter and of its state.

    Added rows get the initial values of the optimizer's state, and share the parameter's step
    count. The caller must postpone signals until the change is complete.

    Returns:
        The new values of the parameter, and a function that stores the state. Call the
        function after the parameter has its new values.
    """
    table = parameter if isinstance(parameter, Table) else None
    group = None if optimizer is None else group_of(optimizer, parameter)
    unused_state: RowState | None = None  # of an optimizer that no longer exists
    if table is not None:
        lag = table.lag
        if isinstance(lag, RowLag):
            has_lag = optimizer is not None and lag.state is optimizer.state.get(table)
            # A save of a table on disk needs the lag, even if its ledger is empty.
            is_needed = lag.ledger.length > 0 or table.backing is not None
            if optimizer and group and has_lag and columns == table.columns and is_needed:
                return lag.change_rows(change, added, initial_slots(optimizer, parameter))
            if not has_lag and not change.is_identity:
                unused_state = lag.state
        table.close_lag()
        lag = None  # drop the lag, which refers to the table's memory
    backing = None if table is None else table.backing
    files = None if backing is None else backing.change_rows(change)
    complete_state: Callable[[], None] = lambda: None  # noqa: E731
    if optimizer is not None and group is not None:
        complete_state = prepare_state(
            optimizer, parameter, parameter.shape, change, columns, files
        )
    with torch._C.DisableTorchFunctionSubclass():
        if files is not None:
            # 2 uses of the memory: the parameter and its `data`
            values = files.apply(parameter.data, added, 2)
        else:
            is_alone = table is not None and storage_use_count(table) == 1
            values = change.apply_to(parameter.data, added, columns=columns, extend=is_alone)

    def complete() -> None:
        complete_state()
        if unused_state is not None:
            unused_state.is_old = True
        if files is not None:
            files.complete()

    return values, complete


def initial_slots(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> Mapping[str, float]:
    """Return the initial values of a parameter's state tensors; omitted tensors start at 0."""
    rule, group = rule_of(optimizer), group_of(optimizer, parameter)
    return {} if rule is None or group is None else rule.initial_slots(group)


def rule_of(optimizer: torch.optim.Optimizer) -> Rule | None:
    """Return the rule of an optimizer from `hotrow.optim` or of its torch counterpart, or None.

    With a rule, each state tensor is 0-D or has the parameter's shape.
    """
    return next((_RULES[cls] for cls in type(optimizer).__mro__ if cls in _RULES), None)
