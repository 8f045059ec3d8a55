"""Read the ids of a one-hot: argmax, max and nonzero."""

from __future__ import annotations

from typing import Any

import torch

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot


@rule(*overloads("argmax"))
def _(func: Any, x: OneHot, dim: int | None = None, keepdim: bool = False) -> Any:
    return _ids(x, dim, keepdim) if x.cached_dtype != torch.bool else NotImplemented


@rule(*overloads("max"))
def _(func: Any, x: Any, dim: Any = None, keepdim: bool = False) -> Any:
    """Return the largest entry of each row, which is 1, and its id."""
    if not isinstance(x, OneHot) or x.needs_grad or is_compiling():
        return NotImplemented
    ids = _ids(x, dim, keepdim)
    if ids is NotImplemented:
        return NotImplemented
    record_use(x, func)
    return torch.return_types.max((torch.ones_like(ids, dtype=x.cached_dtype), ids))


def _ids(x: OneHot, dim: Any, keepdim: bool) -> Any:
    field, count = x.field, len(x.sizes)
    if not isinstance(dim, int) or dim % count != count - 1:
        return NotImplemented
    if field is None or field.weights is not None or not field.has_one_id:
        return NotImplemented
    return field.ids.clone() if keepdim else field.ids[..., 0].clone()


@rule(*overloads("nonzero"))
def _(func: Any, x: OneHot, *, as_tuple: bool = False) -> Any:
    """Return the position of the nonzero entry of each row."""
    field = x.field
    if field is None or not field.has_one_id or is_compiling() or is_too_small(x):
        return NotImplemented
    if len(x.sizes) == 1:
        return NotImplemented  # torch counts the entry of a 0-D tensor as a row
    weights = field.weights_or_ones(x.cached_dtype)[..., 0]
    rows = weights.nonzero(as_tuple=True)
    record_use(x, func)
    positions = *rows, field.ids[..., 0][rows]
    return positions if as_tuple else torch.stack(positions).t()  # torch's columns are contiguous
