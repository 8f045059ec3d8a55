"""Materialize the one-hots that a converted method returns or stores as parameters."""

from __future__ import annotations

import functools
from dataclasses import FrozenInstanceError, fields, is_dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._pytree import tree_leaves, tree_map

from hotrow.onehot.registry import materialize
from hotrow.onehot.tensor import OneHot

_MAX_DEPTH = 8  # of dataclasses, which may contain themselves


def materialize_outputs(value: Any, depth: int = 0) -> Any:
    """Materialize the one-hots in an output, so that the model returns plain tensors."""
    if isinstance(value, OneHot):
        return _materialize_output(value)
    if isinstance(value, Tensor) or depth > _MAX_DEPTH:
        return value
    leaves = tree_leaves(value)
    if len(leaves) == 1 and leaves[0] is value:  # not a container
        if is_dataclass(value) and not isinstance(value, type):
            _materialize_fields(value, depth)
        return value
    if any(isinstance(leaf, OneHot) or is_dataclass(leaf) for leaf in leaves):
        return tree_map(
            lambda leaf: materialize_outputs(leaf, depth + 1),
            value,
            is_leaf=lambda leaf: isinstance(leaf, torch.Size),
        )
    return value


@functools.cache
def watch_parameters() -> None:
    """Store `nn.Parameter(x)` as an ordinary parameter if a converted method creates the one-hot x.

    A parameter that is a one-hot could not change its dtype or device.
    """
    register_module_parameter_registration_hook(_dense_parameter)  # type: ignore[arg-type]


def _materialize_fields(value: Any, depth: int) -> None:
    for field in fields(value):
        old = getattr(value, field.name, None)
        new = materialize_outputs(old, depth + 1)
        if new is old:
            continue
        try:
            setattr(value, field.name, new)
        except FrozenInstanceError:
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
