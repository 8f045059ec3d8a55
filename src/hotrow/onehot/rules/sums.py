"""Sums and differences of a one-hot and a dense tensor."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_transforming
from hotrow.onehot.gradient import ZerosProxy
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import DenseColumns, Field, Part, have_same_memory
from hotrow.onehot.results import with_strides_of
from hotrow.onehot.rules.elementwise_functions import SUMS
from hotrow.onehot.size_limits import record_use
from hotrow.onehot.tensor import OneHot


def add_at_ids(
    x: OneHot,
    parts: list[Part],
    layout: Layout,
    args: tuple[Any, ...],
    func: Callable[..., Any],
    out: Tensor,
) -> Any:
    """Add a one-hot to a dense tensor, or subtract one from the other, with a scatter."""
    field = parts[0]
    if len(parts) > 1 or not isinstance(field, Field) or len(layout.classes) > 1:
        return NotImplemented
    if x.grad_proxy is not None or torch.bool in (x.cached_dtype, *(each.dtype for each in args)):
        return NotImplemented
    sign, is_first = SUMS[func], args[0] is x
    dense = args[1 if is_first else 0].to(out.dtype)
    is_new = is_first and sign < 0
    dense = -dense if is_new else dense
    weights = field.weights_or_ones(x.cached_dtype).to(out.dtype)
    weights = weights if is_first else sign * weights
    record_use(x, func)
    (axis,) = layout.class_axes
    ids, weights = (t.permute(layout.order) for t in (field.ids, weights))
    if is_new and dense.shape == out.shape and not is_transforming():
        result = dense.scatter_add_(axis, ids, weights)
    else:
        result = dense.expand(out.shape).scatter_add(axis, ids, weights)
    result = with_strides_of(result, out)
    if not (is_first and sign < 0) or args[1].is_inference():
        return result
    if not args[1].shape == x.shape == out.shape:
        return result
    if not x.cached_dtype == args[1].dtype == out.dtype:
        return result
    difference = OneHot(
        [DenseColumns(layout.restore(result))], out.dtype, None, None, x.origins, out.stride(),
        dense_fn=lambda: result, layout=layout,
    )  # fmt: skip
    difference.difference = x.snapshot(), args[1], args[1]._version
    return difference


def add_back(x: OneHot, other: Any, out: Tensor) -> OneHot | None:
    """Return y, with the strides of `out`, if x was computed as y - p and `other` is p.

    Otherwise, return None.

    The sum y - p + p is a straight-through estimator: its value is the one-hot y, and its gradient
    flows to p.
    """
    assert x.difference is not None
    y, p, version = x.difference
    if x.needs_grad or y.needs_grad or not _is_same_memory(p, other) or p._version != version:
        return None
    if other.is_complex() or is_transforming():
        return None
    low, high = other.detach().aminmax()
    if not bool((low >= -_MAX_ROUNDED) & (high <= _MAX_ROUNDED)):
        return None  # y - p + p may have a large rounding error or not be finite
    proxy = None
    if other.requires_grad and torch.is_grad_enabled():
        proxy = ZerosProxy.apply(other)  # type: ignore[no-untyped-call]
    for origin in x.origins:
        origin.record_straight_through()
    return OneHot(
        y.parts, y.cached_dtype, proxy, None, x.origins, out.stride(), layout=y._axis_layout
    )


_MAX_ROUNDED = 2


def _is_same_memory(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or isinstance(other, OneHot) or other.is_inference():
        return False
    return have_same_memory(one, other)
