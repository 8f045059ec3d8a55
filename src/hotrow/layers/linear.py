"""Linear layers to convert from and to."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError

_L = TypeVar("_L", bound=nn.Linear)


def check_linear(linear: Any) -> None:
    """Raise `HotrowError` unless it is a `torch.nn.Linear`."""
    if not isinstance(linear, nn.Linear):
        raise HotrowError(f"from_linear takes a torch.nn.Linear, not a {type(linear).__name__}")


def copy_storage(values: Tensor, copy: bool) -> Tensor:
    """The values in their own storage: with `copy` a new contiguous one."""
    values = values.detach()
    return values.clone(memory_format=torch.contiguous_format) if copy else values


def build_linear(cls: type[_L], weight: Tensor, bias: Tensor | None, copy: bool) -> _L:
    """A linear layer of this class with a given (D, V) weight and bias."""
    columns, rows = weight.shape
    # On "meta" nothing is allocated or initialised only to be replaced.
    layer = cls(rows, columns, bias=bias is not None, device="meta", dtype=weight.dtype)
    layer.weight = nn.Parameter(copy_storage(weight, copy), weight.requires_grad)
    if bias is not None:
        layer.bias = nn.Parameter(copy_storage(bias, copy), bias.requires_grad)
    return layer
