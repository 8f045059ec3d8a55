"""Materialize the one-hots that a converted method returns or stores as parameters."""

from __future__ import annotations

import functools
import itertools
from collections import OrderedDict, defaultdict, deque
from dataclasses import fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_flatten, tree_unflatten

from hotrow.onehot.registry import materialize
from hotrow.onehot.tensor import OneHot

_MAX_DEPTH = 20
_ATOMS = Tensor, torch.Size, str, int, float, type, type(None)  # contain no one-hots


def materialize_outputs(value: Any) -> Any:
    """Materialize the one-hots in an output, so that the model returns plain tensors.

    Lists, dicts and dataclasses are changed in place, because the module may keep them too. Other
    containers with a one-hot are copied. Objects inside of more than 20 nested containers and
    dataclasses are left as they are.
    """
    return _materialize(value, 0, {})


@functools.cache
def watch_parameters() -> None:
    """Store `nn.Parameter(x)` as an ordinary parameter if a converted method creates the one-hot x.

    A parameter that is a one-hot could not change its dtype or device.
    """
    register_module_parameter_registration_hook(_dense_parameter)  # type: ignore[arg-type]


def _materialize(value: Any, depth: int, seen: dict[int, tuple[int, Any, Any]]) -> Any:
    """Materialize the one-hots in a value.

    `seen` maps the id of each container and dataclass to the smallest depth at which it was seen,
    the object itself and its copy. An object can contain itself.
    """
    if isinstance(value, OneHot):
        return _materialize_output(value)
    if depth > _MAX_DEPTH or isinstance(value, _ATOMS):
        return value
    earlier_depth, _, result = seen.get(id(value), (_MAX_DEPTH + 1, value, value))
    if depth >= earlier_depth:
        return result
    seen[id(value)] = depth, value, value
    is_first = itertools.chain([True], itertools.repeat(False))
    parts, structure = tree_flatten(value, is_leaf=lambda _: not next(is_first))
    if structure.is_leaf():
        if is_dataclass(value):
            _materialize_fields(value, depth, seen)
        return value
    new_parts = [_materialize(part, depth + 1, seen) for part in parts]
    changes = [(i, new) for i, new in enumerate(new_parts) if new is not parts[i]]
    if type(value) in (list, deque, dict, OrderedDict, defaultdict):  # the module may keep it
        keys = list(value) if isinstance(value, dict) else range(len(value))
        for i, new in changes:
            value[keys[i]] = new
    elif changes:
        seen[id(value)] = depth, value, tree_unflatten(new_parts, structure)
    return seen[id(value)][2]


def _materialize_fields(value: Any, depth: int, seen: dict[int, tuple[int, Any, Any]]) -> None:
    for field in fields(value):
        old = getattr(value, field.name, None)
        new = _materialize(old, depth + 1, seen)
        if new is old:
            continue
        try:
            setattr(value, field.name, new)
        except AttributeError:  # it is frozen
            object.__setattr__(value, field.name, new)


def _materialize_output(value: OneHot) -> Tensor:
    for origin in value.origins:
        origin.record_returned(value)
        origin.record_dense(value.entries)
    return materialize(value)


def _dense_parameter(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
    if not isinstance(parameter, OneHot):
        return None
    if parameter.parameter is None:  # a tied parameter is registered more than once
        dense = parameter.materialize(permanent=True).detach()
        parameter.parameter = nn.Parameter(dense, requires_grad=parameter.requires_grad)
    return parameter.parameter
