"""Scatter: writing ones into zeros creates a one-hot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import Field
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
    zeros, count = x.field, len(x.sizes)
    if not isinstance(dim, int) or not -count <= dim < count:
        return NotImplemented
    if zeros is None or zeros.ids.shape[-1] or index.dtype != torch.int64 or index.ndim != count:
        return NotImplemented
    # Zeros have no class axis yet. The ones are along the axis `dim`.
    axis, batch = dim % count, [i for i in range(count) if i != dim % count]
    order = tuple(count - 1 if i == axis else batch.index(i) for i in range(count))
    layout = Layout((x.sizes[axis],), order)
    index = index.movedim(axis, -1)
    if tuple(index.shape[:-1]) != layout.batch_sizes(x.sizes):
        return NotImplemented
    if x.cached_device != index.device:
        return NotImplemented
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= x.sizes[axis]):
        return NotImplemented  # torch raises
    if isinstance(src, Tensor) and src.ndim == count:
        src = src.movedim(axis, -1)
    weights = _scattered_weights(x, index, src)
    if weights is NotImplemented:
        return NotImplemented
    filled = Field(index.clone(), weights, x.sizes[axis])
    _mark_as_one_hot(x)
    if func.__name__ == "scatter":
        at_axis = filled.ids.movedim(-1, axis)
        return derive(
            x, [filled], meta_tensor(x), lambda t: t.scatter(axis, at_axis, 0), layout=layout
        )
    if x._dense is not None or x._parent is not None or x.has_views or x.needs_grad:
        return NotImplemented
    x._parts = (filled,)
    x._axis_layout = None if layout.is_plain else layout
    return x


@rule(Tensor.__setitem__)
def _(func: Any, x: Any, index: Any, value: Any) -> Any:
    """Match `zeros[arange(N), ids] = 1`."""
    if not isinstance(x, OneHot) or not isinstance(index, tuple) or len(index) != 2:
        return NotImplemented
    rows, ids = index
    if len(x.sizes) != 2 or not isinstance(value, int | float) or value != 1:
        return NotImplemented
    if not isinstance(ids, Tensor) or ids.shape != x.sizes[:1] or ids.dtype != torch.int64:
        return NotImplemented
    if not _is_range(rows, x.sizes[0]) or ids.device != x.cached_device or is_compiling():
        return NotImplemented
    if ids.numel() and (int(ids.min()) < -x.sizes[1] or int(ids.max()) >= x.sizes[1]):
        return NotImplemented  # torch raises
    return x.scatter_(1, (ids % x.sizes[1]).unsqueeze(1), 1)


def _is_range(rows: Any, count: int) -> bool:
    if isinstance(rows, range | list):
        return list(rows) == list(range(count))
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.shape != (count,):
        return False
    return torch.equal(rows, torch.arange(count, device=rows.device))


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
