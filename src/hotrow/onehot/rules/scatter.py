"""Scatter: writing ones into zeros creates a one-hot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.parts import DenseColumns, Field
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import derive, meta_tensor
from hotrow.onehot.tensor import OneHot

_MAX_COMPARED = 64  # the maximum number of ids per row to compare pairwise


@rule(*overloads("scatter"), Tensor.scatter_)
def _(func: Any, x: Any, dim: Any, index: Tensor, src: Any = None, **kwargs: Any) -> Any:
    src = kwargs.pop("value", src)
    if kwargs or not isinstance(x, OneHot) or isinstance(index, OneHot) or isinstance(src, OneHot):
        return NotImplemented
    if isinstance(src, int | float) and src == 1:
        _mark_as_one_hot(x)
    parts, count = x.parts, len(x.sizes)
    if not isinstance(dim, int) or dim % count != count - 1 or len(parts) != 1:
        return NotImplemented
    zeros = parts[0]
    if isinstance(zeros, DenseColumns) or zeros.ids.shape[-1]:
        return NotImplemented
    if index.dtype != torch.int64 or index.shape[:-1] != x.sizes[:-1]:
        return NotImplemented
    if x.cached_device != index.device:
        return NotImplemented
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= zeros.width):
        return NotImplemented  # torch raises
    weights = _scattered_weights(x, index, src)
    if weights is NotImplemented:
        return NotImplemented
    filled = Field(index.clone(), weights, zeros.width)
    _mark_as_one_hot(x)
    if func.__name__ == "scatter":
        return derive(x, [filled], meta_tensor(x), lambda t: t.scatter(-1, index, 0))
    if x._dense is not None or x._parent is not None or x.has_views or x.needs_grad:
        return NotImplemented
    x._parts = (filled,)
    return x


def _mark_as_one_hot(zeros: OneHot) -> None:
    """List the zeros in the report, because the code scatters ones into them."""
    for origin in zeros.origins:
        origin.is_one_hot = True


def _scattered_weights(x: OneHot, index: Tensor, src: Any) -> Any:
    """Return the weights of the scattered ids; None if all weights are 1."""
    if isinstance(src, Tensor):
        fits = src.shape == index.shape and src.dtype == x.cached_dtype and index.shape[-1] == 1
        return src.clone() if fits and x.cached_dtype != torch.bool else NotImplemented
    if not isinstance(src, int | float) or src != 1:
        return NotImplemented
    if index.shape[-1] < 2:
        return None
    if index.shape[-1] > _MAX_COMPARED or x.cached_dtype == torch.bool:
        return NotImplemented
    # An entry that is written twice must be 1, not 2.
    repeated = (index.unsqueeze(-1) == index.unsqueeze(-2)).tril(-1).any(-1)
    return (~repeated).to(x.cached_dtype) if bool(repeated.any()) else None
