"""Shapes: operations that rearrange, repeat or join the rows of a one-hot."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.layout import Layout, split_layout
from hotrow.onehot.parts import Field, Part, merge_fields
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import (
    Transform,
    derive,
    derive_view,
    empty_meta,
    map_batch,
    meta_tensor,
)
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import map_instances

_MAX_COPIES = 64  # the maximum number of rows to join, unless x has only one field


def _reshaped(x: OneHot, out: Tensor, view: Transform) -> Any:
    """Reshape x to the shape of `out`, with the values in the same order."""
    if not out.numel() or not out.ndim or out.dtype != x.cached_dtype:
        return NotImplemented
    parts = x.parts
    if not out._is_view():  # later writes to x must not change the result
        parts = tuple(_copied(part) for part in parts)
    width, layout = x.width, split_layout(out.shape, x.width)
    if x.axis_layout.order != tuple(range(len(x.sizes))):
        layout = _around_class_axis(x, out)
        if layout is None:
            return NotImplemented
    if layout is None:
        joins = x.is_plain and out.shape[-1] % width == 0
        return _join_rows(x, parts, out, out.shape[-1] // width, view) if joins else NotImplemented
    batch = layout.batch_sizes(out.shape)
    reshaped = [part.map(lambda t: t.reshape(*batch, t.shape[-1])) for part in parts]
    return derive_view(x, reshaped, out, view, view, layout)


def _copied(part: Part) -> Part:
    """Return the part with its own memory; ids and running counts never change."""
    return part if isinstance(part, Field) or not part.is_stored else part.map(torch.clone)


def _around_class_axis(x: OneHot, out: Tensor) -> Layout | None:
    """Return the layout of a reshaped tensor if it keeps the class axis, otherwise None."""
    axes = x.axis_layout.class_axes
    if len(axes) > 1:
        return None
    before, width, after = x.sizes[: axes[0]], x.sizes[axes[0]], x.sizes[axes[0] + 1 :]
    count = out.ndim
    for axis, size in enumerate(out.shape):
        splits = math.prod(out.shape[:axis]) == math.prod(before)
        if size == width and splits and math.prod(out.shape[axis + 1 :]) == math.prod(after):
            order = (*range(axis), count - 1, *range(axis, count - 1))
            return Layout((width,), order)
    return None


def _join_rows(
    x: OneHot, parts: tuple[Part, ...], out: Tensor, copies: int, view: Transform
) -> Any:
    """Join each group of `copies` rows into one row, with their parts side by side."""
    batch, width = tuple(out.shape[:-1]), x.sizes[-1]

    def split_axis(t: Tensor) -> Tensor:
        return t.reshape(*batch, copies, t.shape[-1])

    if len(parts) == 1 and isinstance(parts[0], Field):
        field = parts[0].map(split_axis)
        starts = width * torch.arange(copies, device=field.ids.device).unsqueeze(-1)
        weights = None if field.weights is None else field.weights.flatten(-2)
        joined: list[Part] = [Field((field.ids + starts).flatten(-2), weights, copies * width)]
    elif copies <= _MAX_COPIES:
        split_parts = [part.map(split_axis) for part in parts]
        joined = []
        for i in range(copies):
            joined += [part.map(lambda t, i=i: t.select(-2, i)) for part in split_parts]  # type: ignore[misc]
        joined = merge_fields(joined)
    else:
        return NotImplemented
    return derive_view(x, joined, out, lambda t: t.reshape(out.shape), view)


@rule(
    *overloads("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"),
    *(Tensor.view, Tensor.view_as, Tensor.reshape_as),
    any_layout=True,
)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):  # dense.view_as(one_hot)
        return NotImplemented
    if any(isinstance(value, torch.dtype) for value in (*args, *kwargs.values())):
        return NotImplemented  # `x.view(dtype)` shows the same memory as another dtype
    if func.__name__ == "ravel":  # unlike `flatten`, it always copies a tensor with gaps
        return x.contiguous().view(-1)
    args, kwargs = map_instances((args, kwargs), OneHot, meta_tensor)  # also copies lists
    before = meta_tensor(x)
    out = func(before, *args, **kwargs)
    if out is before:
        return x
    return _reshaped(x, out, lambda t: func(t, *args, **kwargs))


@rule(
    *overloads(
        "permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims", "t", "adjoint"
    ),
    *(Tensor.T.__get__, Tensor.mT.__get__),  # type: ignore[attr-defined]
    any_layout=True,
)
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    out = func(meta_tensor(x), *args, **kwargs)
    if not x.sizes or out.is_conj():
        return NotImplemented
    # The stride of each axis is its index, so the result's strides are the new axis order.
    numbered = empty_meta((1,) * len(x.sizes), tuple(range(len(x.sizes))), torch.float32)
    order = func(numbered, *args, **kwargs).stride()
    layout, batch_order = x.axis_layout.permuted(order)

    def view(t: Tensor) -> Tensor:
        return t.permute(*order)

    parts = [part.map(lambda t: t.permute(*batch_order, t.ndim - 1)) for part in x.parts]
    return derive_view(x, parts, out, view, view, layout)


@rule(*overloads("repeat", "tile", "repeat_interleave"))
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    out = func(meta_tensor(x), *args, **kwargs)
    if func.__name__ == "repeat_interleave":
        dim = kwargs.get("dim", args[1] if len(args) > 1 else None)
        is_batch = isinstance(dim, int) and dim % len(x.sizes) != len(x.sizes) - 1
        keeps_classes = is_batch and isinstance(kwargs.get("repeats", args[0] if args else 0), int)
    else:
        keeps_classes = out.shape[-1:] == x.sizes[-1:]
    if not keeps_classes or not out.numel():
        return NotImplemented

    # The backward pass calls `transform`, and the caller may change a list of sizes before that.
    args, kwargs = map_instances((args, kwargs), list, list)

    def transform(t: Tensor) -> Tensor:
        repeated: Tensor = func(t, *args, **kwargs)
        return repeated

    return derive(x, [part.map(transform) for part in x.parts], out, transform)


@rule(F.pad)
def _(
    func: Any, input: OneHot, pad: Any, mode: str = "constant", value: float | None = None
) -> Any:
    """Add rows or classes of zeros, such as the first row of an exclusive `cumsum`."""
    pad = tuple(pad)
    if mode != "constant" or value not in (None, 0) or len(pad) < 2 or min(pad[:2]) < 0:
        return NotImplemented
    if not all(isinstance(each, int) for each in pad) or is_compiling():
        return NotImplemented
    out = func(meta_tensor(input), pad)
    field = input.field
    if field is None or not out.numel():
        return NotImplemented
    rows = 0, 0, *pad[2:]
    weights = field.weights
    if any(rows):
        weights = func(field.weights_or_ones(input.cached_dtype), rows)
    padded = Field(func(field.ids + pad[0], rows), weights, field.width + sum(pad[:2]))
    return derive(input, [padded], out, lambda t: func(t, pad))


@rule(Tensor.expand, Tensor.expand_as, *overloads("broadcast_to"))
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):
        return NotImplemented
    args = map_instances(args, OneHot, meta_tensor)
    out = func(meta_tensor(x), *args, **kwargs)
    if out.shape[-1] != x.sizes[-1]:
        return NotImplemented
    shape = out.shape

    def transform(t: Tensor) -> Tensor:
        return t.expand(*shape[:-1], t.shape[-1])

    return map_batch(x, out, transform, transform)


@rule(
    *overloads("t_", "transpose_", "swapaxes_", "swapdims_", "squeeze_", "unsqueeze_"),
    any_layout=True,
)
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    """Change the shape in place."""
    if x.is_leaf_or_view_of_leaf and torch.is_grad_enabled():
        return NotImplemented  # torch raises an error
    name = func.__name__.removesuffix("_")
    is_supported = not (x.has_views or x.has_own_grad or is_compiling())
    result = getattr(Tensor, name)(x, *args, **kwargs)
    if not (is_supported and isinstance(result, OneHot)):
        raise RuntimeError(
            f"{func.__name__} cannot change the shape of a one-hot that has views or comes from an "
            f"autograd.Function, or in compiled code; use x = x.{name}(...)"
        )
    x.reshape_in_place(result, lambda t: func(t, *args, **kwargs))
    return x
