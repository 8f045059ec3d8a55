"""Scatter operations, which create a one-hot from zeros or write at the ids of a one-hot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gather import gather_along, running_count
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import derive, meta_tensor, number_of_dtype
from hotrow.onehot.tensor import OneHot

_MAX_COMPARED = 64  # the maximum number of ids per row to compare pairwise


@rule(*overloads("scatter"), Tensor.scatter_, any_layout=True)
def _(func: Any, x: Any, dim: Any, index: Tensor, src: Any = None, **kwargs: Any) -> Any:
    src = kwargs.pop("value", src)
    if kwargs or not isinstance(x, OneHot) or isinstance(index, OneHot) or isinstance(src, OneHot):
        return NotImplemented
    if isinstance(src, int | float) and src == 1:
        _mark_as_one_hot(x)
    count = len(x.sizes)
    if not isinstance(dim, int) or not -count <= dim < count or not _has_no_ids(x):
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
    if func.__name__ == "scatter":
        at_axis = filled.ids.movedim(-1, axis)
        return derive(
            x, [filled], meta_tensor(x), lambda t: t.scatter(axis, at_axis, 0), layout=layout
        )
    if not _is_unused(x):
        return NotImplemented
    x._parts = (filled,)
    x._axis_layout = None if layout.is_plain else layout
    return x


def _has_no_ids(x: OneHot) -> bool:
    """Return whether all entries are equal, because nothing has been scattered yet."""
    return x.field is not None and not x.field.ids.shape[-1]


def _is_unused(x: OneHot) -> bool:
    """Return whether no view, dense tensor or graph depends on the parts, so they may change."""
    return not (x._dense is not None or x._parent is not None or x.has_views or x.needs_grad)


@rule(Tensor.fill_, any_layout=True)
def _(func: Any, x: Any, value: Any) -> Any:
    """Fill zeros into which code scatters later, such as the targets of label smoothing."""
    if not isinstance(x, OneHot) or not isinstance(value, int | float) or is_compiling():
        return NotImplemented
    if not _has_no_ids(x) or x._axis_layout is not None or not _is_unused(x):
        return NotImplemented
    x.fill = number_of_dtype(value, x.cached_dtype).item()
    return x


@rule(*overloads("index_fill"), Tensor.index_fill_)
def _(func: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    """Fill the same classes in each row of zeros."""
    if not isinstance(x, OneHot) or not isinstance(index, Tensor) or isinstance(index, OneHot):
        return NotImplemented
    if dim not in (-1, len(x.sizes) - 1) or index.ndim != 1 or index.dtype != torch.int64:
        return NotImplemented
    if not isinstance(value, int | float) or not _has_no_ids(x):
        return NotImplemented
    if index.numel() and (int(index.min()) < 0 or int(index.max()) >= x.sizes[-1]):
        return NotImplemented  # torch raises an error, or counts from the end
    index = index.expand(*x.sizes[:-1], len(index))
    return (x.scatter_ if func.__name__.endswith("_") else x.scatter)(dim, index, value)


@rule(Tensor.__setitem__)
def _(func: Any, x: Any, index: Any, value: Any) -> Any:
    """Match `zeros[arange(N), ids] = 1`, and `dense[one_hot] = values`."""
    if isinstance(index, OneHot) and not isinstance(x, OneHot):
        written = _write_at_ids(func, x, index, value)
        return None if written is x else written
    if not isinstance(x, OneHot) or not isinstance(index, tuple) or len(index) != 2:
        return NotImplemented
    rows, ids = index
    if len(x.sizes) != 2 or not isinstance(value, int | float) or value != 1:
        return NotImplemented
    if not isinstance(ids, Tensor) or ids.shape != x.sizes[:1] or ids.dtype != torch.int64:
        return NotImplemented
    if not is_range(rows, x.sizes[0]) or ids.device != x.cached_device or is_compiling():
        return NotImplemented
    if ids.numel() and (int(ids.min()) < -x.sizes[1] or int(ids.max()) >= x.sizes[1]):
        return NotImplemented  # torch raises an error
    return x.scatter_(1, (ids % x.sizes[1]).unsqueeze(1), 1)


def is_range(rows: Any, count: int) -> bool:
    """Return whether an index selects each of `count` rows once, in order."""
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
    count, is_bool = index.shape[-1], x.cached_dtype == torch.bool
    if count > _MAX_COMPARED or (is_bool and (count > 1 or isinstance(src, Tensor) or src != 1)):
        return NotImplemented
    if not isinstance(src, Tensor | int | float):
        return NotImplemented
    # An entry that is written twice keeps one of the values, but the weights of equal ids add up.
    repeated = None
    if count > 1:
        repeated = (index.unsqueeze(-1) == index.unsqueeze(-2)).tril(-1).any(-1)
        repeated = repeated if bool(repeated.any()) else None
    if isinstance(src, Tensor):
        fits = src.shape == index.shape and src.dtype == x.cached_dtype and repeated is None
        return src.clone() if fits else NotImplemented
    if src == 1 and repeated is None:
        return None
    number = number_of_dtype(src, x.cached_dtype).to(index.device).expand(index.shape)
    return number.clone() if repeated is None else number.masked_fill(repeated, 0)


@rule(*overloads("masked_fill_"), any_layout=True)
def _(func: Any, input: Any, mask: Any, value: Any) -> Any:
    if isinstance(input, OneHot) or not isinstance(value, int | float):
        return NotImplemented
    return _write_at_ids(func, input, mask, value)


def _write_at_ids(func: Any, dense: Tensor, mask: Any, values: Any) -> Any:
    """Write values at the ids of a mask; return the dense tensor, or leave the write to torch."""
    field = mask.field if isinstance(mask, OneHot) else None
    if field is None or not _fits(dense, mask) or mask.cached_dtype != torch.bool:
        return NotImplemented
    order, weights = mask.axis_layout.order, field.weights
    if isinstance(values, Tensor):
        is_list = mask.is_plain and values.shape == (field.ids.numel(),)
        if not is_list or isinstance(values, OneHot) or values.dtype != dense.dtype:
            return NotImplemented
        if weights is not None and not bool(weights.all()):
            return NotImplemented
        values = values.reshape(field.ids.shape).permute(order)
    elif isinstance(values, int | float):
        number = number_of_dtype(values, dense.dtype)
        if weights is not None:
            (axis,) = mask.axis_layout.class_axes
            now = gather_along(dense, axis, field.ids.permute(order))
            values = torch.where(weights.permute(order), number.to(dense.device), now)
    else:
        return NotImplemented
    return _scattered(func, Tensor.scatter_, dense, mask, field, values)


_SIGNS = {
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), 1),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), -1),
}


@rule(*_SIGNS, any_layout=True)
def _(func: Any, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    """Add a one-hot to a dense tensor in place, or subtract it."""
    if isinstance(input, OneHot):
        return _add_to_count(input, other, alpha * _SIGNS[func])
    field = other.field if isinstance(other, OneHot) else None
    if field is None or not _fits(input, other):
        return NotImplemented
    is_number = isinstance(alpha, int | float) and not isinstance(alpha, bool)
    if not is_number or other.cached_dtype != input.dtype or input.dtype == torch.bool:
        return NotImplemented
    if not (input.is_floating_point() or isinstance(alpha, int)) or other.grad_proxy is not None:
        return NotImplemented
    weights = field.weights_or_ones(input.dtype) * (alpha * _SIGNS[func])
    values = weights.permute(other.axis_layout.order)
    return _scattered(func, Tensor.scatter_add_, input, other, field, values)


def _add_to_count(x: OneHot, other: Any, factor: Any) -> Any:
    """Add numbers, such as the counts of another one-hot, to a running count in place."""
    if running_count(x) is None or factor not in (1, -1) or isinstance(factor, bool):
        return NotImplemented
    if not _is_unused(x):
        return NotImplemented
    result = x + other if factor == 1 else x - other
    if not isinstance(result, OneHot) or running_count(result) is None:
        return NotImplemented
    if result.cached_dtype != x.cached_dtype or result.sizes != x.sizes:
        return NotImplemented
    x._parts = result.parts
    return x


def _fits(dense: Any, x: OneHot) -> bool:
    """Return whether writing at the ids of x is equivalent to writing where x is 1."""
    return (
        isinstance(dense, Tensor)
        and tuple(dense.shape) == x.sizes
        and dense.device == x.cached_device
        and dense.layout == torch.strided
        and 0 not in dense.stride()
        and x.fill == 0
        and x.field is not None
        and x.field.has_one_id
        and len(x.axis_layout.classes) == 1
        and not (x.is_modified or x.is_too_small or is_compiling())
    )


def _scattered(
    func: Any, write: Any, dense: Tensor, x: OneHot, field: Field, values: Any
) -> Tensor:
    (axis,) = x.axis_layout.class_axes
    write(dense, axis, field.ids.permute(x.axis_layout.order), values)
    x.record_use(func)
    return dense
