"""Multiply a dense tensor by a one-hot whose fill is not 0."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def scale_at_ids(values: Tensor, axis: int, ids: Tensor, factors: Tensor, fill: float) -> Tensor:
    """Multiply the entries at the ids by their factors, and all other entries by `fill`.

    The forward pass and the backward pass each write a single tensor.

    Args:
        values: the tensor.
        axis: the class axis.
        ids: the ids, distinct along the class axis; every other axis has the same size as in
            `values`.
        factors: a factor for each id, without a gradient, in the dtype of the values.
        fill: the factor for all other entries.
    """
    result: Tensor = _ScaleAtIds.apply(values, axis, ids, factors, fill)  # type: ignore[no-untyped-call]
    return result


class _ScaleAtIds(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, values: Tensor, axis: int, ids: Tensor, factors: Tensor, fill: float
    ) -> Tensor:
        ctx.save_for_backward(ids, factors)
        ctx.axis, ctx.fill = axis, fill
        result = values.clone() if fill == 1 else values * fill
        return result.scatter_(axis, ids, values.gather(axis, ids) * factors)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None, None]:
        ids, factors = ctx.saved_tensors
        scaled = scale_at_ids(gradient, ctx.axis, ids, factors, ctx.fill)
        return scaled, None, None, None, None
