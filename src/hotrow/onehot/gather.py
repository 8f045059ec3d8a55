"""Gather: read the entries of a tensor at the ids of a one-hot."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling, is_transforming
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import Field, Part
from hotrow.onehot.running_count import RunningCount
from hotrow.onehot.tensor import OneHot


def broadcast_parts(x: OneHot, shape: Sequence[int]) -> tuple[list[Part], Layout] | None:
    """Return the parts and the layout of x after broadcasting its batch axes to this shape.

    Returns None if this shape would broadcast a class axis.
    """
    layout, extra = x.axis_layout, len(shape) - len(x.sizes)
    if extra:
        order = (*range(extra), *(axis + extra for axis in layout.order))
        layout = Layout(layout.classes, order)
    if tuple(shape[axis] for axis in layout.class_axes) != layout.classes:
        return None
    if tuple(shape) == x.sizes:
        return list(x.parts), layout
    batch = layout.batch_sizes(shape)
    return [part.map(lambda t: t.expand(*batch, t.shape[-1])) for part in x.parts], layout


def running_count(x: OneHot) -> RunningCount | None:
    """Return the running count if x consists of one, otherwise None."""
    part = x._parts[0] if len(x._parts) == 1 and not x.is_modified else None
    return part if isinstance(part, RunningCount) else None


def spans_classes(values: Tensor, layout: Layout) -> bool:
    """Return whether each class has its own value, rather than all classes sharing one."""
    missing = len(layout.order) - values.ndim
    return any(axis >= missing and values.shape[axis - missing] != 1 for axis in layout.class_axes)


def gather(values: Tensor, ids: Tensor, layout: Layout) -> Tensor:
    """Return the entries of a tensor at the ids.

    Args:
        values: a tensor that can be broadcast to a one-hot with this layout, or a running count of
            the same shape.
        ids: (*batch, K), the ids of the one-hot.
        layout: the layout of the one-hot.

    Returns:
        (*batch, K), or a tensor that can be broadcast to this shape if the values are the same for
        all classes.
    """
    if isinstance(values, OneHot):
        count = running_count(values)
        assert count is not None
        return count.gather(ids, lambda operand: gather(operand, ids, layout))
    values = values[(None,) * (len(layout.order) - values.ndim)]
    if not spans_classes(values, layout):
        return layout.restore(values)
    sizes = list(values.shape)
    for axis, size in zip(layout.class_axes, layout.classes, strict=True):
        sizes[axis] = size
    values = values.expand(sizes)
    if len(layout.classes) == 1 and layout.batch_sizes(values.shape) == ids.shape[:-1]:
        # Gather along the class axis, so that the gradient has the same strides as the values.
        (axis,) = layout.class_axes
        return layout.restore(gather_along(values, axis, ids.permute(layout.order)))
    values = layout.restore(values)
    if values.shape[:-1] == ids.shape[:-1]:
        return gather_along(values, values.ndim - 1, ids)
    # Some batch axes are broadcast. Don't expand the values, because their gradient would be
    # expanded too.
    *batch, width = values.shape
    if values.numel() > width:
        ids = ids + torch.arange(0, values.numel(), width, device=ids.device).reshape(*batch, 1)
    return values.reshape(-1).index_select(0, ids.flatten()).reshape(ids.shape)


def gather_along(values: Tensor, axis: int, ids: Tensor) -> Tensor:
    """Return `values.gather(axis, ids)`. `values` and `ids` may differ in size only along `axis`.

    Unlike `gather`, this function doesn't save the values for the backward pass, so other code may
    overwrite them.
    """
    if is_compiling() or is_transforming():
        return values.gather(axis, ids)
    result: Tensor = _Gather.apply(values, axis, ids)  # type: ignore[no-untyped-call]
    return result


class _Gather(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, values: Tensor, axis: int, ids: Tensor) -> Tensor:
        ctx.shape, ctx.axis, ctx.ids = values.shape, axis, ids
        return values.gather(axis, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        zeros = gradient.new_zeros(ctx.shape)
        return zeros.scatter_add_(ctx.axis, ctx.ids, gradient), None, None

    @staticmethod
    def jvp(ctx: Any, tangent: Tensor, *_: Any) -> Tensor:
        return tangent.gather(ctx.axis, ctx.ids)


def gather_from_field(field: Field, fill: float, ids: Tensor, dtype: torch.dtype) -> Tensor:
    """For the one-hot with this field and fill, return the entries at `ids`.

    Args:
        field: the field. The batch axes of its ids can be broadcast to those of `ids`.
        fill: the value of the entries that no id of the field selects.
        ids: (*batch, K).
        dtype: the dtype of the one-hot.
    """
    matches = field.ids.unsqueeze(-2) == ids.unsqueeze(-1)  # (*batch, K, K of the field)
    weights = field.weights_or_ones(dtype).unsqueeze(-2)
    if fill != 0:
        return torch.where(matches.any(-1), weights.squeeze(-1), fill)
    if dtype == torch.bool:
        return (matches & weights).any(-1)
    # With a product, an infinite gradient of the result would become NaN where no id matches.
    return torch.where(matches, weights, 0).sum(-1, dtype=dtype)
