"""Build the result of an operation on a one-hot: another one-hot with new parts.

To get the shape, strides and dtype of the result, torch runs the operation on a meta tensor.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import at_transform_level, is_compiling, outside_inference_mode
from hotrow.onehot.gradient import transform_proxy
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import Part
from hotrow.onehot.tensor import OneHot

Transform = Callable[[Tensor], Tensor]


def meta_tensor(x: OneHot) -> Tensor:
    """Return a meta tensor like x, to find out a result's shape or raise torch's error."""
    return empty_meta(x.sizes, x.strides, x.cached_dtype)


def empty_meta(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    """Return a meta tensor with these sizes and strides; callers must not modify it."""
    if is_compiling():  # sizes may be symbolic
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")
    return _cached_meta(sizes, strides, dtype)


@functools.lru_cache(256)
def _cached_meta(sizes: Any, strides: Any, dtype: torch.dtype) -> Tensor:
    with torch.inference_mode(False), at_transform_level(0):
        return torch.empty_strided(sizes, strides, dtype=dtype, device="meta")


def sizes_of(t: Tensor) -> tuple[int, ...]:
    """Return the shape of a one-hot or a dense tensor."""
    return t.sizes if isinstance(t, OneHot) else tuple(t.shape)


def number_of_dtype(value: float, dtype: torch.dtype) -> Tensor:
    """Return the number as a 0-D tensor of this dtype, or raise torch's error for an overflow."""
    # A constant would fail in torch.compile.
    is_set = torch.ones((), dtype=torch.bool, device="cpu")
    return is_set.to(dtype).masked_fill(is_set, value)


def meta_result(func: Any, args: Sequence[Any], kwargs: dict[str, Any] | None = None) -> Any:
    """Return the result of `func` on meta tensors, or raise the error that torch raises.

    The result is cached, because operations on meta tensors are slow. Callers must not modify it.

    Args:
        func: a function whose result depends only on shapes, strides, dtypes and hashable values.
        args: one-hots, dense tensors, and hashable values.
        kwargs: hashable values.
    """
    signature = tuple(_signature(value) for value in args)
    options = tuple((name, type(value), value) for name, value in (kwargs or {}).items())
    if is_compiling():
        return _run_on_meta(func, signature, options)
    # The default dtype is only a part of the key of the cache.
    return _meta_result(func, signature, options, torch.get_default_dtype())


def _signature(value: Any) -> tuple[Any, ...]:
    if isinstance(value, OneHot):
        return Tensor, value.sizes, value.strides, value.cached_dtype
    if isinstance(value, Tensor):
        return Tensor, tuple(value.shape), value.stride(), value.dtype
    return type(value), value


@functools.lru_cache(1024)
def _meta_result(func: Any, signature: Any, options: Any, default_dtype: Any) -> Any:
    with at_transform_level(0):
        return _run_on_meta(func, signature, options)


def _run_on_meta(func: Any, signature: Any, options: Any) -> Any:
    values = [empty_meta(*each[1:]) if each[0] is Tensor else each[1] for each in signature]
    with torch.inference_mode(False):
        return func(*values, **{name: value for name, _, value in options})


def derive(
    x: OneHot,
    parts: Sequence[Part],
    out: Tensor,
    transform: Transform,
    dense_transform: Transform | None = None,
    fill: float | None = None,
    layout: Layout | None = None,
    factors: Sequence[Tensor] = (),
    view: Transform | None = None,
) -> OneHot:
    """Return a one-hot with these parts and the dtype and strides of `out`.

    `transform` computes the same result from the dense x. If the parts are rounded differently than
    in torch, materializing the result runs `dense_transform` on the dense x. It runs later, so it
    must not read tensors that other code may write to. By default, the result has the fill and the
    layout of x. `factors` are the tensors that `transform` reads. If the result is a view of x,
    `view` creates it from the dense x.
    """
    proxy: Tensor | None = None
    dense_fn: Callable[[], Tensor] | None = None
    source_proxy = x.grad_proxy
    if source_proxy is not None:
        proxy = transform_proxy(transform, out, source_proxy, factors=factors)
    if dense_transform is not None:
        source, has_graph = x.snapshot(), torch.is_grad_enabled()

        def dense_fn() -> Tensor:
            with outside_inference_mode(has_graph):
                return dense_transform(source.materialize())

    fill = x.fill if fill is None else fill
    layout = x._axis_layout if layout is None else layout
    parent = None if view is None else (x, view)
    result = OneHot(
        parts, out.dtype, proxy, parent, x.origins, out.stride(), dense_fn, fill=fill, layout=layout
    )
    if view is not None:
        x.add_view(result)
    return result


def map_batch(
    x: OneHot,
    out: Tensor,
    transform: Transform,
    view: Transform,
    factors: Sequence[Tensor] = (),
) -> OneHot:
    """Apply `transform` to the tensors of all parts; return a view of x if torch would."""
    parts = [part.map(transform) for part in x.parts]
    return derive_view(x, parts, out, transform, view, factors=factors)


def derive_view(
    x: OneHot,
    parts: Sequence[Part],
    out: Tensor,
    transform: Transform,
    view: Transform,
    layout: Layout | None = None,
    factors: Sequence[Tensor] = (),
) -> OneHot:
    """Call `derive`; if `out` is a view, record that `view` creates the result from x."""
    created_by = view if out._is_view() else None
    return derive(x, parts, out, transform, layout=layout, factors=factors, view=created_by)


def fill_tensor(x: OneHot, count: int) -> Tensor:
    """Return the value of the entries that no id selects, as a tensor with `count` axes."""
    return torch.full((1,) * count, x.fill, dtype=x.cached_dtype, device=x.cached_device)


def single_value(values: Tensor) -> float | None:
    """If all values are the same real number, return it, otherwise None."""
    flat = values.detach().flatten()
    first = flat[:1]
    if len(flat) > 1 and not bool(((flat == first) | (flat.isnan() & first.isnan())).all()):
        return None
    value = first.item()
    if isinstance(value, complex):
        return value.real if value.imag == 0 else None
    return value


def with_strides_of(result: Tensor, out: Tensor) -> Tensor:
    """Return the result with the strides of `out`."""
    if result.stride() == out.stride():
        return result
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=result.device)
    return like.copy_(result)
