"""Scatter-add: add rows of values to the rows that ids select; the inverse of a gather."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.gradient import is_transforming

_ACCUMULATED = torch.float16, torch.bfloat16


def scatter_rows(ids: Tensor, values: Tensor, count: int) -> Tensor:
    """Add each row of values, in order, to the row of the result that its id selects.

    The backward pass of a lookup computes the same sums.

    Args:
        ids: (N,) int64, from 0 to `count` - 1.
        values: (N, D).
        count: the number of rows of the result.

    Returns:
        (count, D), in the dtype of the values.
    """
    dtype = values.dtype
    if values.shape[1] == 1 and values.is_floating_point():
        # Sum a short result in float64, which is more precise and costs little extra.
        sum_dtype = torch.float64 if count <= 4 * len(ids) else dtype
        return _add(ids, values[:, 0].to(sum_dtype), 0, (count,)).to(dtype).unsqueeze(1)
    if dtype in _ACCUMULATED:
        values = values.float()
    if values.is_cuda and values.is_floating_point():  # index_add would add in any order
        rows: Tensor = torch.ops.aten.embedding_dense_backward(values, ids, count, -1, False)
    else:
        rows = _add(ids, values, 0, (count, values.shape[1]))
    return rows.to(dtype)


def scatter_columns(ids: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the transpose of `scatter_rows`, (D, count), without making a transposed copy."""
    if values.is_cuda or values.shape[1] == 1:
        return scatter_rows(ids, values, count).t()
    dtype = values.dtype
    if dtype in _ACCUMULATED:
        values = values.float()
    return _add(ids, values.t(), 1, (values.shape[1], count)).to(dtype)


def _add(ids: Tensor, values: Tensor, axis: int, sizes: tuple[int, ...]) -> Tensor:
    """Add slices of values along an axis, in order, to a tensor of zeros."""
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
