"""Helpers for converting to and from linear layers."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError

_L = TypeVar("_L", bound=nn.Linear)


def check_linear(linear: Any) -> None:
    """Raise `HotrowError` unless `linear` is a `torch.nn.Linear`."""
    if not isinstance(linear, nn.Linear):
        raise HotrowError(
            f"linear is of type {type(linear).__name__}, but it must be a torch.nn.Linear"
        )


def copy_storage(values: Tensor, copy: bool) -> Tensor:
    """Return the detached values, or a contiguous copy of them if `copy` is True."""
    values = values.detach()
    return values.clone(memory_format=torch.contiguous_format) if copy else values


def build_linear(cls: type[_L], weight: Tensor, bias: Tensor | None, copy: bool) -> _L:
    """Build a linear layer of class `cls` from a (D, V) weight and a bias."""
    columns, rows = weight.shape
    # The "meta" device avoids allocating and initializing a weight that is replaced right away.
    layer = cls(rows, columns, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(copy_storage(weight, copy), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(copy_storage(bias, copy), bias.requires_grad)
    return layer
