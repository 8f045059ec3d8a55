"""Check a state dict before an optimizer loads any of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.optim.rule import ParamGroup
from hotrow.table.parameter import Table

_SCALARS = "step", "eta", "mu", "mu_product"  # of a parameter; all other values are (V, D) tensors
_MAX_STEP = 1 << 53
_FIX = "load the state dict of an optimizer for the same tables"


def check_structure(state_dict: Any) -> None:
    """Raise an error unless the state dict has the structure of torch's state dicts."""
    is_complete = isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping)
    groups = state_dict.get("param_groups") if is_complete else None
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), list | tuple)
        for group in groups
    ):
        raise HotrowError(
            "the state dict has no 'state' and 'param_groups' of an optimizer",
            fix="load the result of optimizer.state_dict()",
        )


def check_group(number: int, saved: Mapping[str, Any], group: ParamGroup) -> None:
    """Raise an error if an option of a saved group has another type than in the group."""
    for name in (saved.keys() & group.keys()) - {"params"}:
        kind, expected = _kind(saved[name]), _kind(group[name])
        if kind != expected and not {kind, expected} <= {"None", "bool"}:
            raise HotrowError(
                f"param_groups[{number}][{name!r}] is {saved[name]!r:.40}, but must be a value "
                f"such as {group[name]!r:.40}",
                fix=_FIX,
            )


def _kind(value: Any) -> str:
    if isinstance(value, bool | None):
        return "None" if value is None else "bool"
    if isinstance(value, int | float) or (isinstance(value, Tensor) and _is_number(value)):
        return "number"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(_kind, value))})"
    return type(value).__name__


def _is_number(value: Tensor) -> bool:
    is_real = not (value.is_complex() or value.is_quantized)
    return value.numel() == 1 and is_real and value.layout == torch.strided and not value.is_meta


def check_state(key: Any, state: Any, table: Table) -> None:
    """Raise an error if the saved state of a table has wrong names, types, shapes or values."""
    if not isinstance(state, Mapping):
        raise HotrowError(
            f"state[{key}] is of type {type(state).__name__}, but must be a dict", fix=_FIX
        )
    for name, value in state.items():
        problem = _scalar_problem(name, value) if name in _SCALARS else _slot_problem(value, table)
        if problem:
            raise HotrowError(f"state[{key}][{name!r}] {problem}", fix=_FIX)


def _scalar_problem(name: str, value: Any) -> str | None:
    if _kind(value) != "number":
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        return f"is of type {type(value).__name__}{shape}, but must be a number"
    number = float(value)
    if name == "step" and not (0 <= number <= _MAX_STEP and number.is_integer()):
        return f"is {number}, but must be a whole number in 0..2**53"
    return None


def _slot_problem(value: Any, table: Table) -> str | None:
    """Return what is wrong with a value that must be a tensor of the table's shape."""
    if not isinstance(value, Tensor):
        # torch stores None for a momentum that it has not created yet.
        return None if value is None else f"is of type {type(value).__name__}, not a tensor"
    if value.shape != table.shape:
        return f"has shape {tuple(value.shape)}, but its table has shape {tuple(table.shape)}"
    if value.layout != torch.strided or value.is_meta or value.is_complex():
        layout = str(value.layout).removeprefix("torch.")
        return f"is a {layout} {value.dtype} tensor on {value.device}, but must be dense and real"
    return None


def saved_tables(
    groups: Iterable[ParamGroup], saved_groups: Iterable[Mapping[str, Any]]
) -> list[tuple[Any, Table]]:
    """Return (state key, table) for each table; parameters are matched by order, as in torch."""
    return [
        (key, parameter)
        for group, saved in zip(groups, saved_groups, strict=False)
        for parameter, key in zip(group["params"], saved["params"], strict=False)
        if isinstance(parameter, Table)
    ]
