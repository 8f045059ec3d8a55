"""Shapes: operations that rearrange, repeat or join the rows of a one-hot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.parts import Field, Part, merge_fields
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import Transform, derive_view, map_batch, meta_tensor
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import map_instances

_MAX_COPIES = 64  # the maximum number of rows to join, unless x has only one field


def _reshaped(x: OneHot, out: Tensor, view: Transform) -> Any:
    """Reshape x to the shape of `out`, with the values in the same order."""
    if not out.numel() or not out.ndim or out.dtype != x.cached_dtype:
        return NotImplemented
    batch, columns, width = tuple(out.shape[:-1]), out.shape[-1], x.sizes[-1]
    if columns == width:
        return map_batch(x, out, lambda t: t.reshape(*batch, t.shape[-1]), view)
    if columns % width:
        return NotImplemented
    return _join_rows(x, out, columns // width, view)


def _join_rows(x: OneHot, out: Tensor, copies: int, view: Transform) -> Any:
    """Join every `copies` rows into one row, with their parts side by side."""
    batch, width = tuple(out.shape[:-1]), x.sizes[-1]

    def split_axis(t: Tensor) -> Tensor:
        return t.reshape(*batch, copies, t.shape[-1])

    parts = x.parts
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
)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):  # dense.view_as(one_hot)
        return NotImplemented
    args = map_instances(args, OneHot, meta_tensor)
    before = meta_tensor(x)
    out = func(before, *args, **kwargs)
    if out is before:
        return x
    return _reshaped(x, out, lambda t: func(t, *args, **kwargs))


@rule(*overloads("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"))
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    out = func(meta_tensor(x), *args, **kwargs)
    count = len(x.sizes)
    # The stride of each axis is its index, so the result's strides are the new axis order.
    numbered = torch.empty_strided([1] * count, [*range(count)], device="meta")
    order = func(numbered, *args, **kwargs).stride()
    if order[-1] != count - 1:
        return NotImplemented

    def transform(t: Tensor) -> Tensor:
        return t.permute(*order)

    return map_batch(x, out, transform, transform)


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
