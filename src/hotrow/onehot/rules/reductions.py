"""Sums and means of a one-hot, over batch axes or over the class axis."""

from __future__ import annotations

import functools
import math
import operator
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import DenseColumns, Field, Part, keeps_sums
from hotrow.onehot.registry import USE_TORCH, overloads, rule
from hotrow.onehot.results import derive, meta_result
from hotrow.onehot.rules.dtypes import cast
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot

_LOW_PRECISION = torch.float16, torch.bfloat16


@rule(*overloads("sum", "mean"), any_layout=True)
def _(func: Any, x: OneHot, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    if kwargs or x.is_modified:
        return NotImplemented
    is_mean = func.__name__ == "mean"
    if is_mean and not (x.cached_dtype.is_floating_point or x.cached_dtype.is_complex):
        return NotImplemented  # on the meta device, torch would raise a different error
    if isinstance(dim, list):
        dim = tuple(dim)
    out = meta_result(func, (x, dim, keepdim) if dim is not None else (x,))
    if not keeps_sums(x.cached_dtype, out.dtype):
        counts = cast(x, out.dtype, None, copy=False)
        return func(counts, dim, keepdim) if isinstance(counts, OneHot) else NotImplemented
    dims = _axes(dim, len(x.sizes))
    if dims is None:
        return NotImplemented
    terms = math.prod(x.sizes[d] for d in dims)
    class_axes = x.axis_layout.class_axes
    if not terms:
        return NotImplemented
    if dims >= set(class_axes):
        return _sum_classes(x, func, dims, keepdim, terms if is_mean else None, out)
    if dims & set(class_axes) or x.fill != 0:
        return NotImplemented
    if out.dtype in _LOW_PRECISION:  # torch rounds after each addition
        return NotImplemented
    sums = _sum_batch(x, dims, keepdim)
    sums.origins = _total_origins(x, func, sums)
    total: Tensor = sums
    has_more_ids = all(part.batch_tensor.shape[-1] >= part.width for part in sums.parts)
    if has_more_ids and not is_compiling():  # the dense sum has no more entries than there are ids
        for origin in sums.origins:
            origin.record_counts()
        total = sums.compute_dense()
    return total / terms if is_mean else total


def _axes(dim: Any, count: int) -> set[int] | None:
    """Return the axes to sum, or None if `dim` has an unusual type."""
    if dim is None or (isinstance(dim, tuple | list) and not dim):
        return set(range(count))
    dims = (dim,) if isinstance(dim, int) else dim
    if not isinstance(dims, tuple | list) or not all(isinstance(d, int) for d in dims):
        return None
    return {d % count for d in dims}


def _sum_batch(x: OneHot, dims: set[int], keepdim: bool) -> OneHot:
    """Sum over batch axes: each row of the result contains the ids of all summed rows."""
    layout = x.axis_layout
    summed = sorted(layout.order[d] for d in dims)
    kept = [axis for axis in range(layout.batch_count) if axis not in summed]

    def merge_axes(t: Tensor) -> Tensor:
        """Flatten the summed axes and the last axis into a single last axis."""
        merged = t.permute(*kept, *summed, layout.batch_count).flatten(len(kept))
        for axis in summed if keepdim else ():
            merged = merged.unsqueeze(axis)
        return merged

    axes = tuple(sorted(dims))

    def reduce(t: Tensor) -> Tensor:
        return t.sum(axes, keepdim)

    parts: list[Part] = []
    for part in x.parts:
        if isinstance(part, DenseColumns):
            parts.append(DenseColumns(part.values.sum(summed, keepdim)))
        else:
            parts.append(part.map(merge_axes))
    if not keepdim:
        axes_left = [axis for i, axis in enumerate(layout.order) if i not in dims]
        renamed = tuple(sorted(axes_left).index(axis) for axis in axes_left)
        layout = Layout(layout.classes, renamed)
    return derive(x, parts, meta_result(torch.sum, (x, axes, keepdim)), reduce, layout=layout)


def _sum_classes(
    x: OneHot, func: Any, dims: set[int], keepdim: bool, terms: int | None, out: Tensor
) -> Any:
    """Sum over the class axis, and possibly over batch axes, by adding up the weights.

    Args:
        x: the one-hot.
        func: the torch function, which computes the gradient of the one-hot itself.
        dims: the axes to sum.
        keepdim: whether to keep the summed axes, with size 1.
        terms: the number to divide by, for a mean; None for a sum.
        out: a tensor with the shape and the dtype of the result.
    """
    if is_too_small(x):
        return USE_TORCH
    dtype = torch.float32 if out.dtype in _LOW_PRECISION else out.dtype
    total = functools.reduce(operator.add, (_class_sum(part, x, dtype) for part in x.parts))
    record_use(x, func)
    axes = tuple(sorted(dims))
    result = x.axis_layout.arrange(total).sum(axes, keepdim, dtype=dtype)
    if terms is not None:
        result = result / terms
    result = result.to(out.dtype)
    if x.grad_proxy is not None:
        result = result + func(x.grad_proxy, axes, keepdim)
    return result


def _class_sum(part: Part, x: OneHot, dtype: torch.dtype) -> Tensor:
    """Return the sum of each row of a part, (*batch, 1)."""
    if isinstance(part, DenseColumns):
        return part.values.sum(-1, keepdim=True, dtype=dtype)
    if part.has_one_id and part.weights is not None:
        total = part.weights.to(dtype)
    else:
        total = part.weights_or_ones(x.cached_dtype).sum(-1, keepdim=True, dtype=dtype)
    if x.fill == 0:
        return total
    return total + x.fill * (part.width - part.ids.shape[-1])


@rule(*overloads("amax", "any"), any_layout=True)
def _(func: Any, x: OneHot, dim: Any = None, keepdim: bool = False) -> Any:
    """Combine the rows of a batch into a multi-hot, in which equal ids count once."""
    if isinstance(dim, tuple | list) and not dim:
        return NotImplemented  # unlike other reductions, `any` then keeps all axes
    dims = _axes(dim, len(x.sizes))
    if func.__name__ == "any" and dims == set(x.axis_layout.class_axes):
        return _any_class(x, func, dim, keepdim)
    if x.field is None or x.fill != 0 or x.needs_grad or is_compiling():
        return NotImplemented
    if not dims or dims & set(x.axis_layout.class_axes) or x.cached_dtype == torch.uint8:
        return NotImplemented
    if x.field.weights is not None or not x.field.has_one_id or 0 in x.sizes:
        return NotImplemented
    out = meta_result(func, (x, tuple(dims), keepdim))
    total = _sum_batch(x, dims, keepdim)
    assert total.field is not None
    field = total.field
    if out.dtype != torch.bool:
        ids = field.ids.sort(-1).values
        is_first = torch.ones_like(ids, dtype=out.dtype)
        is_first[..., 1:] = ids[..., 1:] != ids[..., :-1]
        field = Field(ids, is_first, field.width)
    origins = _total_origins(x, func, total)
    return OneHot([field], out.dtype, None, None, origins, out.stride(), layout=total._axis_layout)


def _total_origins(x: OneHot, func: Any, total: OneHot) -> frozenset[Any]:
    """Return the origins of a total over batch axes, which `func` computed, for the report."""
    is_single = total.entries == total.width
    return frozenset(origin.total(func, x.entries, is_single) for origin in x.origins)


def _any_class(x: OneHot, func: Any, dim: Any, keepdim: bool) -> Any:
    """Return whether each row has a nonzero entry."""
    field = x.field
    if field is None or field.ids.shape[-1] == 0 or x.is_modified or is_compiling():
        return NotImplemented
    if not field.has_one_id and x.cached_dtype != torch.bool:
        return NotImplemented  # the weights of equal ids may cancel out
    if is_too_small(x):
        return USE_TORCH
    out = meta_result(func, (x, dim, keepdim))
    found = field.weights_or_ones(x.cached_dtype).bool().any(-1)
    if x.fill != 0 and x.width > 1:
        found = torch.ones_like(found)
    record_use(x, func)
    return x.axis_layout.arrange(found.unsqueeze(-1)).reshape(out.shape).to(out.dtype)
