"""Scatter-add: add rows of values to the rows that ids select; the inverse of a gather."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.table.index_add import index_add

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
        return index_add(ids, values[:, 0].to(sum_dtype), 0, (count,)).to(dtype).unsqueeze(1)
    if dtype in _ACCUMULATED:
        values = values.float()
    if values.is_cuda and values.is_floating_point():  # index_add would add in any order
        rows: Tensor = torch.ops.aten.embedding_dense_backward(values, ids, count, -1, False)
    else:
        rows = index_add(ids, values, 0, (count, values.shape[1]))
    return rows.to(dtype)


def scatter_columns(ids: Tensor, values: Tensor, count: int) -> Tensor:
    """Return the transpose of `scatter_rows`, (D, count), without making a transposed copy."""
    if values.is_cuda or values.shape[1] == 1:
        return scatter_rows(ids, values, count).t()
    dtype = values.dtype
    if dtype in _ACCUMULATED:
        values = values.float()
    return index_add(ids, values.t(), 1, (values.shape[1], count)).to(dtype)
