"""Scatter operations, which create a one-hot from zeros."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import has_derivative, is_compiling
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import derive, meta_tensor, number_of_dtype
from hotrow.onehot.tensor import OneHot

_MAX_IDS = 64  # the maximum number of ids per row
_MAX_PAIRWISE = 8  # with more ids per row, sorting is faster than comparing all pairs


@rule(*overloads("scatter"), Tensor.scatter_, any_layout=True)
def _(func: Any, x: Any, dim: Any, index: Tensor, src: Any = None, **kwargs: Any) -> Any:
    src = kwargs.pop("value", src)
    if kwargs or not isinstance(x, OneHot) or isinstance(index, OneHot) or isinstance(src, OneHot):
        return NotImplemented
    if isinstance(src, int | float) and src == 1:
        _mark_as_one_hot(x)
    count = len(x.sizes)
    if not isinstance(dim, int) or not -count <= dim < count or not has_no_ids(x):
        return NotImplemented
    if x._axis_layout is not None or index.dtype != torch.int64 or index.ndim != count:
        return NotImplemented
    # The zeros have no class axis yet. The axis `dim` becomes the class axis.
    axis, batch = dim % count, [i for i in range(count) if i != dim % count]
    order = tuple(count - 1 if i == axis else batch.index(i) for i in range(count))
    layout = Layout((x.sizes[axis],), order)
    index = index.movedim(axis, -1)
    if tuple(index.shape[:-1]) != layout.batch_sizes(x.sizes):
        return NotImplemented
    if x.cached_device != index.device:
        return NotImplemented
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= x.sizes[axis]):
        return NotImplemented  # torch raises an error
    if isinstance(src, Tensor) and src.ndim == count:
        src = src.movedim(axis, -1)
    if x.fill != 0 and index.shape[-1] != 1:
        return NotImplemented
    weights = _scattered_weights(x, index, src)
    if weights is NotImplemented:
        return NotImplemented
    filled = Field(index.clone(), weights, x.sizes[axis])
    _mark_as_one_hot(x)
    for origin in x.origins:
        origin.replace_width(x.sizes[-1], x.sizes[axis])
    if func.__name__ == "scatter":
        at_axis = filled.ids.movedim(-1, axis)
        return derive(
            x, [filled], meta_tensor(x), lambda t: t.scatter(axis, at_axis, 0), layout=layout
        )
    if not x.is_unused:
        return NotImplemented
    x.replace_parts(OneHot([filled], x.cached_dtype, fill=x.fill, layout=layout))
    return x


def has_no_ids(x: OneHot) -> bool:
    """Return whether x has no ids yet, in which case all its entries are equal."""
    return x.field is not None and not x.field.ids.shape[-1]


@rule(*overloads("index_fill"))
def _(func: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    return scatter_at_classes(x.scatter, x, dim, index, value)


def scatter_at_classes(scatter: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Write a number to the same classes in every row of a one-hot that has no ids yet."""
    if not isinstance(x, OneHot) or not isinstance(index, Tensor) or isinstance(index, OneHot):
        return NotImplemented
    if dim not in (-1, len(x.sizes) - 1) or index.ndim != 1 or index.dtype != torch.int64:
        return NotImplemented
    if not isinstance(value, int | float) or not has_no_ids(x):
        return NotImplemented
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= x.sizes[-1]):
        return NotImplemented  # torch raises an error, or counts from the end
    return scatter(dim, index.expand(*x.sizes[:-1], len(index)), value)


def scatter_at_rows(x: OneHot, rows: Any, ids: Any, value: Any) -> Any:
    """In a one-hot that has no ids yet, write a value to the entry (i, ids[i]) of each row i."""
    if len(x.sizes) != 2 or not isinstance(ids, Tensor) or isinstance(ids, OneHot):
        return NotImplemented
    if ids.shape != x.sizes[:1] or ids.dtype != torch.int64 or ids.device != x.cached_device:
        return NotImplemented
    if not has_no_ids(x) or not is_range(rows, x.sizes[0]) or is_compiling():
        return NotImplemented
    if ids.numel() and (int(ids.min()) < -x.sizes[1] or int(ids.max()) >= x.sizes[1]):
        return NotImplemented  # torch raises an error
    if isinstance(value, Tensor):
        fits = value.ndim == 0 or value.shape == ids.shape
        if isinstance(value, OneHot) or not fits or value.dtype != x.cached_dtype:
            return NotImplemented  # torch may cast the value
        if has_derivative(value):
            return NotImplemented
        value = value.unsqueeze(1) if value.ndim else value.item()
    elif value != 1:
        return NotImplemented
    return x.scatter_(1, (ids % x.sizes[1]).unsqueeze(1), value)


@rule(Tensor.index_put_)
def _(func: Any, x: Any, indices: Any, values: Any, accumulate: bool = False) -> Any:
    if not isinstance(x, OneHot) or accumulate or len(indices) != 2:
        return NotImplemented
    rows, ids = indices
    return scatter_at_rows(x, rows, ids, values)


def is_range(rows: Any, count: int) -> bool:
    """Return whether an index selects each of `count` rows once, in order."""
    if isinstance(rows, range | list):
        return list(rows) == list(range(count))
    if not isinstance(rows, Tensor) or rows.dtype != torch.int64 or rows.shape != (count,):
        return False
    return torch.equal(rows, torch.arange(count, device=rows.device))


def _mark_as_one_hot(zeros: OneHot) -> None:
    """Make the report list the zeros as a one-hot, because the code scatters ones into them."""
    for origin in zeros.origins:
        origin.is_one_hot = True


def _scattered_weights(x: OneHot, index: Tensor, src: Any) -> Any:
    """Return the weights of the scattered ids; None if all weights are 1."""
    count, is_bool = index.shape[-1], x.cached_dtype == torch.bool
    if count > _MAX_IDS or (is_bool and (count > 1 or isinstance(src, Tensor) or src != 1)):
        return NotImplemented
    if not isinstance(src, Tensor | int | float):
        return NotImplemented
    # If torch writes an entry twice, the entry keeps one of the values. In a field, however, the
    # weights of equal ids add up.
    repeated = _find_repeats(index) if count > 1 else None
    if isinstance(src, Tensor):
        fits = src.shape == index.shape and src.dtype == x.cached_dtype and repeated is None
        return src.clone() if fits else NotImplemented
    if src == 1 and repeated is None:
        return None
    number = number_of_dtype(src, x.cached_dtype).to(index.device).expand(index.shape)
    return number.clone() if repeated is None else number.masked_fill(repeated, 0)


def _find_repeats(ids: Tensor) -> Tensor | None:
    """Return which ids occur earlier in their row, or None if no id does."""
    if ids.shape[-1] <= _MAX_PAIRWISE:
        repeats = (ids.unsqueeze(-1) == ids.unsqueeze(-2)).tril(-1).any(-1)
        return repeats if bool(repeats.any()) else None
    values, order = ids.sort(dim=-1, stable=True)
    is_repeated = values[..., 1:] == values[..., :-1]
    if not bool(is_repeated.any()):
        return None
    return torch.zeros_like(ids, dtype=torch.bool).scatter_(-1, order[..., 1:], is_repeated)
