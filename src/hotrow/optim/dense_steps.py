"""Decide which tables take torch's dense step, and prepare tables for it.

All gradients are checked before any step.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, MutableMapping
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.optim.lag import RowLag
from hotrow.optim.rule import ParamGroup, Rule
from hotrow.table.autograd import (
    overlaps_itself,
    set_strides,
    storage_use_count,
    stored_values,
    with_strides,
)
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import TABLE_CLASSES, Table

TableStates = MutableMapping[Any, Any]  # an optimizer's state of each parameter
TableGradient = tuple[ParamGroup, Table, Tensor]  # a table with its options and its gradient
# Why a table takes a dense step, and how to avoid it.
Reason = tuple[str, str]


def find_tables(param_groups: list[ParamGroup]) -> list[tuple[ParamGroup, Table]]:
    """Return the tables in these groups, each with its group."""
    return [
        (group, parameter)
        for group in param_groups
        for parameter in group["params"]
        if type(parameter) in TABLE_CLASSES
    ]


def find_reasons(
    rule: Rule, gradients: list[TableGradient], param_groups: list[ParamGroup]
) -> list[Reason | None]:
    """Return for each table why it must take a dense step, or None if it takes a row step.

    Args:
        rule: the rule of the optimizer.
        gradients: each table that has a gradient, with its options.
        param_groups: all parameter groups of the optimizer.

    Raises:
        HotrowError: a gradient doesn't fit its table, or a table on disk would take a dense step
            or has damaged rows.
    """
    reasons = []
    with torch._C.DisableTorchFunctionSubclass():  # saves a call for each attribute
        for group, table, gradient in gradients:
            _check_gradient(gradient, table)
            reasons.append(_find_reason(rule, group, table, gradient, param_groups))
    listed = [id(table) for _, table, _ in gradients] if len(gradients) > 1 else []
    if len(set(listed)) < len(listed):  # torch only warns, and steps such a table several times
        duplicate = "the optimizer lists it more than once", "list each parameter once"
        reasons = [
            duplicate if reason is None and listed.count(each) > 1 else reason
            for reason, each in zip(reasons, listed, strict=True)
        ]
    for (_, table, gradient), reason in zip(gradients, reasons, strict=True):
        if table.backing is None:
            continue
        if reason is not None:
            cause, fix = reason
            raise HotrowError(f"a table on disk cannot take a dense step, but {cause}", fix=fix)
        assert isinstance(gradient, RowGradient)
        table.check_files(gradient.ids)
    return reasons


def _check_gradient(gradient: Tensor, table: Table) -> None:
    """Raise an error if the table was changed after the gradient was computed."""
    if (
        gradient.shape == table.shape
        and gradient.dtype == table.dtype
        and gradient.device == table.device
    ):
        return
    dtype = table.grad_dtype or gradient.dtype
    found = gradient.shape, gradient.device, gradient.dtype
    expected = table.shape, table.device, dtype
    if found != expected:
        pairs = zip(("shape", "device", "dtype"), found, expected, strict=True)
        name, actual, needed = next(each for each in pairs if each[1] != each[2])
        raise HotrowError(
            f"the gradient of a {' x '.join(map(str, table.shape))} table has {name} {actual}, but "
            f"needs {needed}",
            fix="change the table only after optimizer.zero_grad(), and before the forward pass",
        )


def _find_reason(
    rule: Rule,
    group: ParamGroup,
    table: Table,
    gradient: Tensor,
    param_groups: list[ParamGroup],
) -> Reason | None:
    if not isinstance(gradient, RowGradient):
        return "the gradient is dense", "use the weight only in lookups, not in the loss itself"
    if gradient.dtype != table.dtype:
        return f"the gradient is {gradient.dtype}", f"use weight.grad_dtype = {table.dtype}"
    if rule.needs_dense_step(group):
        cause = f"{rule.name} with weight_decay={group['weight_decay']} requires one"
        return cause, "set weight_decay=0"
    # torch updates such parameters one after the other, each in all rows.
    if _is_shared(table) and any(
        _overlaps(table, other) for each in param_groups for other in each["params"]
    ):
        return "another parameter shares its memory", "use the same parameter in both places"
    if overlaps_itself(table):
        return "its rows share memory with each other", "use a copy of the weight (.clone())"
    return None


def _is_shared(table: Table) -> bool:
    """Return whether anything else refers to the table's storage."""
    lag = table.lag
    return lag.is_shared if isinstance(lag, RowLag) else storage_use_count(table) > 1


def _overlaps(table: Tensor, other: Tensor) -> bool:
    """Return whether another parameter with a gradient shares memory with the table."""
    if other is table or other.grad is None or other.layout != torch.strided:
        return False
    (begin, end), (other_begin, other_end) = _address_range(table), _address_range(other)
    return other.device == table.device and begin < other_end and other_begin < end


def _address_range(tensor: Tensor) -> tuple[int, int]:
    if not tensor.numel():
        return 0, 0
    last = sum((n - 1) * step for n, step in zip(tensor.shape, tensor.stride(), strict=True))
    return tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.itemsize


def dense_gradient(
    gradient: Tensor, group: ParamGroup, table: Table, states: TableStates
) -> Tensor:
    """Return the gradient for torch's own step.

    For a fused step, the gradient and the state must have the parameter's strides. torch's
    fused CPU kernels read all three tensors in memory order, and would otherwise mix up values.
    """
    if isinstance(gradient, RowGradient):
        gradient = gradient.as_dense()
    if not group.get("fused"):
        return gradient
    match_strides(states[table], table, shared=True)
    return with_strides(gradient, table.stride())


def check_state_shapes(parameter: Tensor, states: TableStates) -> None:
    """Raise an error if a fused step, which doesn't check shapes, would read other memory."""
    for name, value in dict.items(states.get(parameter, {})):
        has_axes = isinstance(value, Tensor) and value.ndim == parameter.ndim > 0
        if has_axes and value.shape != parameter.shape and name != "step":
            raise HotrowError(
                f"the optimizer state {name!r} of a {' x '.join(map(str, parameter.shape))} weight "
                f"has shape {tuple(value.shape)}",
                fix="create a new optimizer after you change the rows of a weight",
            )


def match_strides(state: dict[str, Any], table: Tensor, shared: bool = False) -> None:
    """Give a state's tensors the strides of its parameter; those with aliases only if `shared`."""
    for name, value in dict.items(state):
        if isinstance(value, Tensor) and value.shape == table.shape:
            stored = stored_values(value)
            dict.__setitem__(state, name, stored)
            set_strides(stored, table.stride(), shared)


def copy_frozen_rows(
    table: Table, states: TableStates, initial: Mapping[str, float]
) -> Callable[[], None]:
    """Return a function that restores the frozen rows after torch's step has changed them."""

    def frozen_rows(tensor: Tensor) -> Tensor:
        return (tensor.t() if table.columns else tensor)[table.frozen_rows]

    values = frozen_rows(table.raw_data)
    state = states.get(table, {})
    slots = {name: frozen_rows(state[name]) for name in initial if name in state}

    def put_back() -> None:
        table.raw_rows[table.frozen_rows] = values
        for name, value in initial.items():
            slot = states[table].get(name)
            if slot is not None:
                rows = slot.t() if table.columns else slot
                rows[table.frozen_rows] = slots.get(name, value)

    return put_back
