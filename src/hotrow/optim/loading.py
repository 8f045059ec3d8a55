"""Check a state dict before an optimizer loads any of it."""

from __future__ import annotations

import inspect
from collections.abc import Container, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.optim.rule import ParamGroup
from hotrow.table.parameter import Table, table_row_count

_SCALARS = "step", "eta", "mu", "mu_product"
_MAX_STEP = 1 << 53
_LAST_COUNTS = {torch.bfloat16: 1 << 8, torch.float16: 1 << 11}  # adding 1 changes nothing
# LinearLR with an end factor of 0 ends at about -1e-18 because of rounding.
_ROUNDED_ZERO = -1e-12
# Switches such as `fused` choose how torch computes a step, and some need a parameter on a GPU.
_NOT_CHECKED = "params", "foreach", "fused", "capturable", "differentiable"
# Only for error messages. All other options that torch's optimizers check must be 0 or more.
_RANGES = {
    "betas": "two numbers in [0, 1)",
    "rho": "a number from 0 to 1",
    "etas": "two numbers with 0 < etas[0] < 1 < etas[1]",
    "nesterov": "False unless momentum is above 0 and dampening is 0",
}
_FIX = "load the state dict of an optimizer for the same tables"


def check_structure(state_dict: Any) -> None:
    """Raise an error unless the state dict has the structure of torch's state dicts."""
    is_complete = isinstance(state_dict, Mapping) and isinstance(state_dict.get("state"), Mapping)
    groups = state_dict.get("param_groups") if is_complete else None
    if not isinstance(groups, list | tuple) or not all(
        isinstance(group, Mapping) and isinstance(group.get("params"), Sequence) for group in groups
    ):
        raise HotrowError(
            "the state dict does not have the 'state' and 'param_groups' of an optimizer",
            fix="load the result of optimizer.state_dict()",
        )


def check_group(number: int, saved: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
    """Raise an error if a group lacks an option, or an option differs in type from its default.

    Options that are True, False or None by default may be missing, because older versions of torch
    didn't save all of them. Options without a default were added by the user and aren't checked.
    """
    for name, default in defaults.items():
        if name not in saved and not isinstance(default, bool | None):
            raise HotrowError(f"param_groups[{number}] has no {name!r}", fix=_FIX)
    for name in saved.keys() & defaults.keys():
        if not _is_like(saved[name], defaults[name]):
            raise HotrowError(
                f"param_groups[{number}][{name!r}] is {saved[name]!r:.40}, but must be a value "
                f"such as {defaults[name]!r:.40}",
                fix=_FIX,
            )


def check_ranges(
    number: int, saved: Mapping[str, Any], torch_class: type[torch.optim.Optimizer]
) -> None:
    """Raise an error if torch's constructor rejects an option; call `check_group` first."""
    parameter = nn.Parameter(torch.zeros(1, device="cpu"))
    options: dict[str, Any] = {}
    for name in inspect.signature(torch_class).parameters:  # in order: nesterov needs momentum
        if name not in saved or name in _NOT_CHECKED:
            continue
        options[name] = _as_python(saved[name])
        if name == "lr" and _ROUNDED_ZERO < options[name] < 0:
            options[name] = 0.0
        try:
            torch_class([parameter], **options)
        except ValueError as error:
            raise HotrowError(
                f"param_groups[{number}][{name!r}] is {saved[name]!r:.40}, but must be "
                f"{_RANGES.get(name, '0 or more')} (torch: {error})",
                fix="restore the state dict from a backup, or correct the option",
            ) from None


def _as_python(value: Any) -> Any:
    """Return an option as a Python number or a tuple of numbers."""
    if isinstance(value, bool | None):
        return value
    return float(value) if _is_number(value) else tuple(map(float, value))


def _is_like(value: Any, default: Any) -> bool:
    """Return whether the value has a type that torch accepts in place of the default's type."""
    if isinstance(default, bool | None):
        is_flag = _is_number(value) and not isinstance(value, Tensor) and float(value) in (0, 1)
        return value is None or is_flag
    if _is_number(default):
        return _is_number(value)
    is_sequence = hasattr(value, "__len__") and not isinstance(value, Mapping | str)
    is_sequence &= getattr(value, "ndim", 1) == 1
    return is_sequence and len(value) == len(default) and all(map(_is_number, value))


def _is_number(value: Any) -> bool:
    """Return whether the value is a single real number from Python, NumPy or torch."""
    if isinstance(value, Tensor):
        is_real = not (value.is_complex() or value.is_quantized)
        return (
            value.numel() == 1 and is_real and value.layout == torch.strided and not value.is_meta
        )
    try:
        float("" if isinstance(value, str | bytes) else value)
    except (TypeError, ValueError, OverflowError):
        return False
    return True


def check_state(key: Any, state: Any, table: Table, slots: Container[str]) -> None:
    """Raise an error if the saved state of a table has wrong types, shapes or values.

    Only slots and scalars are checked, because the optimizer doesn't use other entries.
    """
    if not isinstance(state, Mapping):
        raise HotrowError(
            f"state[{key}] is of type {type(state).__name__}, but must be a dict", fix=_FIX
        )
    for name, value in state.items():
        if name in _SCALARS:
            problem = _scalar_problem(name, value)
        else:
            problem = _slot_problem(name, value, table) if name in slots else None
        if problem:
            raise HotrowError(f"state[{key}][{name!r}] {problem}", fix=_FIX)


def check_scalars(state: Mapping[str, Any], names: Iterable[str]) -> None:
    """Raise an error if scalars that other code has written to a table's state are not usable."""
    for name in names:
        if name not in state:
            continue
        value = state[name]
        problem: str | None = f"is of type {type(value).__name__}, but must be a tensor"
        if isinstance(value, Tensor):
            problem = _scalar_problem(name, value)
        if problem:
            raise HotrowError(
                f"optimizer.state[weight][{name!r}] {problem}",
                fix="write a tensor with a single number",
            )


def _scalar_problem(name: str, value: Any) -> str | None:
    if not _is_number(value):
        shape = f" of shape {tuple(value.shape)}" if isinstance(value, Tensor) else ""
        return f"is of type {type(value).__name__}{shape}, but must be a number"
    number = float(value.item() if isinstance(value, Tensor) else value)
    if name == "step" and not (0 <= number <= _MAX_STEP and number.is_integer()):
        return f"is {number}, but must be a whole number in 0..2**53"
    if name == "step" and isinstance(value, Tensor) and value.dtype in _LAST_COUNTS:
        last = _LAST_COUNTS[value.dtype]
        return f"is {value.dtype}, in which torch can't count beyond {last}, but must be float32"
    if name != "step" and isinstance(value, Tensor) and not value.is_floating_point():
        return f"is {value.dtype}, but must be floating point"
    return None


def _slot_problem(name: str, value: Any, table: Table) -> str | None:
    """Return what is wrong with a value that must be a tensor of the table's shape."""
    if not isinstance(value, Tensor):
        # torch stores None for a momentum buffer that it has not created yet.
        return None if value is None else f"is of type {type(value).__name__}, not a tensor"
    expected = table_row_count(table), *table.shape[1:]
    if tuple(value.shape) != expected:
        return f"has shape {tuple(value.shape)}, but its table has shape {expected}"
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
