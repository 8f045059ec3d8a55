"""Check that the input of a layer is a tensor."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.onehot.tensor import OneHot


def as_input_tensor(input: Any, weight: Tensor) -> Tensor:
    """Return the input; cast an integer `hotrow.one_hot` to the dtype of the weight."""
    if isinstance(input, OneHot) and not input.is_floating_point():
        return input.to(weight.dtype)
    if not isinstance(input, Tensor):
        raise HotrowError(
            f"input is a {type(input).__name__}, but must be a tensor",
            fix="use torch.tensor(input)",
        )
    return input
