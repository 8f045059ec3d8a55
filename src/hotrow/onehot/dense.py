"""The dense tensor that consists of the parts of a one-hot."""

from __future__ import annotations

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.layout import Layout, contiguous_strides
from hotrow.onehot.parts import Field, Part


def build_dense(
    parts: tuple[Part, ...],
    layout: Layout | None,
    sizes: tuple[int, ...],
    strides: tuple[int, ...],
    dtype: torch.dtype,
    fill: float,
) -> Tensor:
    """Return the dense tensor that consists of these parts.

    Args:
        parts: the parts, in column order.
        layout: the arrangement of the axes, or None if the class axis is the last axis.
        sizes: the shape of the dense tensor.
        strides: its strides.
        dtype: its dtype.
        fill: the value of all entries that no id selects.
    """
    field = parts[0]
    if (
        layout is not None
        and len(parts) == len(layout.classes) == 1
        and isinstance(field, Field)
        and field.has_one_id
        and strides == contiguous_strides(sizes)
        and not is_compiling()
    ):
        return _scatter(field, layout, sizes, dtype, fill)
    blocks = [part.to_dense(dtype, fill) for part in parts]
    values = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
    if layout is not None:
        values = layout.arrange(values)
    if values.stride() != strides and 0 not in strides:
        values = torch.empty_strided(
            sizes, strides, dtype=values.dtype, device=values.device
        ).copy_(values)
    return values


def _scatter(
    field: Field, layout: Layout, sizes: tuple[int, ...], dtype: torch.dtype, fill: float
) -> Tensor:
    """Return the dense tensor of a field, without rearranging its axes."""
    (axis,) = layout.class_axes
    result = field.ids.new_full(sizes, fill, dtype=dtype)
    weights = field.weights_or_ones(dtype)
    return result.scatter_(axis, field.ids.permute(layout.order), weights.permute(layout.order))
