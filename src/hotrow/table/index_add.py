"""Add slices to a tensor of zeros, in the order of the slices; the inverse of a lookup."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_transforming


def index_add(ids: Tensor, values: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """Return zeros to which each slice of the values is added at the position of its id.

    Args:
        ids: (N,) int64, from 0 to `sizes[axis]` - 1.
        values: N slices along the axis.
        axis: the axis along which the ids select slices of the result.
        sizes: the sizes of the result.

    Returns:
        A tensor in the dtype of the values, differentiable with respect to the values.
    """
    if is_transforming():  # vmap cannot write batched values into a tensor without a batch axis
        return values.new_zeros(sizes).index_add(axis, ids, values)
    total: Tensor = _IndexAdd.apply(values, ids, axis, sizes)  # type: ignore[no-untyped-call]
    return total


class _IndexAdd(torch.autograd.Function):
    """Unlike torch's `index_add_`, don't save the values, so that other code may overwrite them."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, ids: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
        ctx.ids, ctx.axis = ids, axis
        return values.new_zeros(sizes).index_add_(axis, ids, values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        return gradient.index_select(ctx.axis, ctx.ids), None, None, None
