"""Check the type of a layer's input."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.onehot.tensor import OneHot


def as_input_tensor(input: Any, weight: Tensor) -> Tensor:
    """Return the input; cast an integer `hotrow.one_hot` to the weight's dtype."""
    if isinstance(input, OneHot) and not input.is_floating_point():
        return input.to(weight.dtype)
    if not isinstance(input, Tensor):
        raise HotrowError(
            f"input is a {type(input).__name__}, but it must be a tensor",
            fix="use torch.tensor(input)",
        )
    return input
