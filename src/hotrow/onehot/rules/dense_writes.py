"""Write to a dense tensor at the ids of a one-hot."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gather import gather_along
from hotrow.onehot.parts import Field
from hotrow.onehot.results import number_of_dtype
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot


def write_at_ids(func: Any, dense: Tensor, mask: Any, values: Any) -> Any:
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


def add_in_place(func: Any, dense: Tensor, other: Any, factor: Any) -> Any:
    """Add a multiple of a one-hot to a dense tensor, or leave the sum to torch."""
    field = other.field if isinstance(other, OneHot) else None
    if field is None or not _fits(dense, other):
        return NotImplemented
    is_number = isinstance(factor, int | float) and not isinstance(factor, bool)
    if not is_number or other.cached_dtype != dense.dtype or dense.dtype == torch.bool:
        return NotImplemented
    if not (dense.is_floating_point() or isinstance(factor, int)) or other.grad_proxy is not None:
        return NotImplemented
    weights = field.weights_or_ones(dense.dtype) * factor
    values = weights.permute(other.axis_layout.order)
    return _scattered(func, Tensor.scatter_add_, dense, other, field, values)


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
        and not (x.is_modified or is_too_small(x) or is_compiling())
    )


def _scattered(
    func: Any, write: Any, dense: Tensor, x: OneHot, field: Field, values: Any
) -> Tensor:
    (axis,) = x.axis_layout.class_axes
    write(dense, axis, field.ids.permute(x.axis_layout.order), values)
    record_use(x, func)
    return dense
