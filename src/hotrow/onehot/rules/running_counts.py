"""The cumulative sum over a batch axis, which counts how often each id occurs up to each row."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import has_derivative, is_compiling
from hotrow.onehot.gather import running_count
from hotrow.onehot.parts import Field, have_same_memory
from hotrow.onehot.registry import USE_TORCH, materialize, overloads, rule
from hotrow.onehot.results import meta_result, sizes_of
from hotrow.onehot.rules.elementwise_functions import SUMS
from hotrow.onehot.running_count import RunningCount
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot

# For each dtype, the limit up to which sums of integers are exact in any order.
_LARGEST_SUM = {torch.int64: 2**53, torch.float64: 2**53, torch.float32: 2**24}


@rule(*overloads("cumsum"))
def _(func: Any, x: OneHot, dim: Any = None) -> Any:
    """Return a one-hot with a `RunningCount`, which computes its entries when they are needed."""
    if not isinstance(dim, int) or x.field is None or 0 in x.sizes or x.needs_grad:
        return NotImplemented
    out = meta_result(func, (x, dim))
    axis = dim % len(x.sizes)
    if axis == len(x.sizes) - 1 or is_compiling() or not _adds_exactly(x, x.field, out.dtype):
        return NotImplemented
    if is_too_small(x):
        return USE_TORCH
    record_use(x, func)
    count = RunningCount(x.field, axis, out.dtype)
    return OneHot([count], out.dtype, None, None, x.origins, out.stride())


def _adds_exactly(x: OneHot, field: Field, dtype: torch.dtype) -> bool:
    """Return whether the sums of the weights are integers that the dtype represents exactly."""
    if dtype not in _LARGEST_SUM or not (field.has_one_id or x.cached_dtype == dtype):
        return False
    total: Tensor | int = field.ids.numel()
    if field.weights is not None:
        weights = field.weights
        if weights.is_floating_point() and bool((weights != weights.round()).any()):
            return False
        total = field.weights.double().abs().sum()
    return bool(total <= _LARGEST_SUM[dtype])


def change_count(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return a running count that applies an elementwise function to its entries when needed."""
    x, *others = args
    count = running_count(x) if isinstance(x, OneHot) else None
    if count is None or not x.is_plain or is_compiling():
        return NotImplemented
    operands = [each for each in others if isinstance(each, Tensor)]
    if any(math.prod(sizes_of(each)) >= x.entries or has_derivative(each) for each in operands):
        return NotImplemented
    out = meta_result(func, args, kwargs)
    if tuple(out.shape) != x.sizes:
        return NotImplemented
    copies = [materialize(each) if isinstance(each, OneHot) else each for each in operands]
    copies = [each.detach().clone() for each in copies]  # the caller may overwrite an operand

    def function(entries: Tensor, *values: Tensor) -> Tensor:
        remaining = iter(values)
        rest = (next(remaining) if isinstance(each, Tensor) else each for each in others)
        result: Tensor = func(entries, *rest, **kwargs)
        return result

    part = count.apply(function, *copies)
    return OneHot([part], out.dtype, None, None, x.origins, out.stride())


def exclude_own_row(x: OneHot, counts: OneHot, func: Callable[..., Any], out: Tensor) -> Any:
    """Return `x.cumsum(dim) - x`, or NotImplemented if `counts` isn't that cumulative sum."""
    count, field = running_count(counts), x.field
    if SUMS[func] > 0 or count is None or field is None or count.dtype != out.dtype:
        return NotImplemented
    is_same = have_same_memory(count.field.ids, field.ids) and count.field.weights is field.weights
    if not is_same or count.change is not None or count.is_exclusive or count.is_moved:
        return NotImplemented
    if x.sizes != counts.sizes or not (x.is_plain and counts.is_plain):
        return NotImplemented
    return OneHot([count.exclusive()], out.dtype, None, None, x.origins, out.stride())
