"""Ones scattered into zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.parts import Columns, Field
from hotrow.onehot.registry import derived, meta, methods, needs_grad, rule
from hotrow.onehot.tensor import OneHot

_MOST_AT_ONCE = 64  # ids of one row, held against each other


@rule(*methods("scatter"), Tensor.scatter_)
def _(func: Any, x: Any, dim: Any, index: Tensor, src: Any = None, **kwargs: Any) -> Any:
    src = kwargs.pop("value", src)
    if kwargs or not isinstance(x, OneHot) or isinstance(index, OneHot) or isinstance(src, OneHot):
        return NotImplemented
    parts, count = x.parts, len(x.sizes)
    if not isinstance(dim, int) or dim % count != count - 1 or len(parts) != 1:
        return NotImplemented
    zeros = parts[0]
    if isinstance(zeros, Columns) or zeros.ids.shape[-1]:
        return NotImplemented
    if index.dtype != torch.int64 or index.shape[:-1] != x.sizes[:-1] or x.place != index.device:
        return NotImplemented
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= zeros.width):
        return NotImplemented  # torch's error
    weights = _scattered(x, index, src)
    if weights is NotImplemented:
        return NotImplemented
    filled = Field(index.clone(), weights, zeros.width)
    if func.__name__ == "scatter":
        return derived(x, [filled], meta(x), lambda t: t.scatter(-1, index, 0))
    if x._written is not None or x._parent is not None or x.viewed or needs_grad(x):
        return NotImplemented
    x._parts = (filled,)
    return x


def _scattered(x: OneHot, index: Tensor, src: Any) -> Any:
    """The weights of what is scattered; None for ones."""
    if isinstance(src, Tensor):
        fits = src.shape == index.shape and src.dtype == x.kind and index.shape[-1] == 1
        return src.clone() if fits and x.kind != torch.bool else NotImplemented
    if not isinstance(src, int | float) or src != 1:
        return NotImplemented
    if index.shape[-1] < 2:
        return None
    if index.shape[-1] > _MOST_AT_ONCE or x.kind == torch.bool:
        return NotImplemented
    # Writing the same place twice writes it once.
    again = (index.unsqueeze(-1) == index.unsqueeze(-2)).tril(-1).any(-1)
    return (~again).to(x.kind) if bool(again.any()) else None
