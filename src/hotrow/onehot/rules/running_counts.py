"""The cumulative sum over a batch axis, which counts the equal ids up to each row."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import USE_TORCH, overloads, rule
from hotrow.onehot.results import meta_result
from hotrow.onehot.running_count import RunningCount
from hotrow.onehot.tensor import OneHot

# The largest sums of integers that are exact in a dtype, whatever the order.
_LARGEST_SUM = {torch.int64: 2**53, torch.float64: 2**53, torch.float32: 2**24}


@rule(*overloads("cumsum"))
def _(func: Any, x: OneHot, dim: Any = None) -> Any:
    """Return a one-hot with a `RunningCount`, whose entries are computed when they are needed."""
    if not isinstance(dim, int) or x.field is None or 0 in x.sizes or x.needs_grad:
        return NotImplemented
    out = meta_result(func, (x, dim))
    axis = dim % len(x.sizes)
    if axis == len(x.sizes) - 1 or is_compiling() or not _adds_exactly(x, x.field, out.dtype):
        return NotImplemented
    if x.is_too_small:
        return USE_TORCH
    x.record_use(func)
    count = RunningCount(x.field, axis, out.dtype)
    return OneHot([count], out.dtype, None, None, x.origins, out.stride())


def _adds_exactly(x: OneHot, field: Field, dtype: torch.dtype) -> bool:
    """Return whether the sums of the weights are integers that the dtype represents exactly."""
    if dtype not in _LARGEST_SUM or not (field.has_one_id or x.cached_dtype == dtype):
        return False
    total: Tensor | int = field.ids.numel()
    if field.weights is not None:
        if bool((field.weights != field.weights.round()).any()):
            return False
        total = field.weights.double().abs().sum()
    return bool(total <= _LARGEST_SUM[dtype])
