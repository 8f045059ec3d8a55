"""The result of an operation on a one-hot: a one-hot of other parts, with torch's shape and stride.

Shape, stride and dtype come from torch, which runs the operation on a meta tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gradient import transform_proxy
from hotrow.onehot.parts import Part
from hotrow.onehot.tensor import OneHot

Transform = Callable[[Tensor], Tensor]


def meta_tensor(x: OneHot) -> Tensor:
    """A meta tensor like x: torch computes the result's shape from it, or raises its error."""
    return empty_meta(x.sizes, x.strides, x.cached_dtype)


def empty_meta(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    """A meta tensor of these sizes and strides; not to be written to."""
    if is_compiling():  # sizes may be symbols
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return _cached_meta(sizes, strides, dtype)


@functools.lru_cache(256)
def _cached_meta(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False):
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def derive(
    x: OneHot,
    parts: Sequence[Part],
    out: Tensor,
    transform: Transform,
    rounds_differently: bool = False,
) -> OneHot:
    """The one-hot of these parts, a copy made of x by `transform`; dtype and strides of `out`.

    With `rounds_differently` the parts round where torch does not, or the other way round; then
    materializing runs `transform` on the dense x.
    """
    proxy, dense_fn = None, None
    if x.is_grad_leaf or x._grad_proxy is not None:
        proxy = transform_proxy(transform, out, x.grad_proxy)
    if rounds_differently:
        source = x.snapshot()
        dense_fn = lambda: transform(source.materialize())  # noqa: E731
    return OneHot(parts, out.dtype, proxy, None, x.origins, out.stride(), dense_fn)


def map_batch(x: OneHot, out: Tensor, transform: Transform, view: Transform) -> OneHot:
    """`transform` of the ids, weights and columns; a view of x where torch's result is one."""
    return derive_view(x, [part.map(transform) for part in x.parts], out, transform, view)


def derive_view(
    x: OneHot, parts: Sequence[Part], out: Tensor, transform: Transform, view: Transform
) -> OneHot:
    """As `derive`; where `out` is a view, the result is a view of x, taken by `view`."""
    result = derive(x, parts, out, transform)
    if out._is_view():
        x.has_views, result._parent = True, (x, view)
    return result
