"""Use a one-hot mask to choose between tensors, or to select entries of a tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gather import gather, running_count
from hotrow.onehot.registry import USE_TORCH, overloads, rule
from hotrow.onehot.results import meta_result, number_of_dtype, with_strides_of
from hotrow.onehot.rules.elementwise import elementwise
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot


@rule(torch.where, any_layout=True)
def _(func: Any, condition: Any, input: Any = None, other: Any = None) -> Any:
    return _where(condition, input, other)


@rule(Tensor.where, any_layout=True)
def _(func: Any, input: Any, condition: Any, other: Any = None) -> Any:
    return _where(condition, input, other)


@rule(*overloads("masked_fill"), any_layout=True)
def _(func: Any, input: Any, mask: Any, value: Any) -> Any:
    if isinstance(value, int | float):
        number_of_dtype(value, input.dtype)
    result = _where(mask, value, input)
    if not isinstance(result, Tensor) or result.dtype != input.dtype:
        return result if result is USE_TORCH else NotImplemented
    out = meta_result(func, (input, mask, value))  # its strides may differ from those of `where`
    if isinstance(result, OneHot):
        return result if result.strides == out.stride() else NotImplemented
    return with_strides_of(result, out)


def _where(condition: Any, input: Any, other: Any) -> Any:
    """Run `torch.where` with one-hot arguments.

    If the condition is a one-hot, all entries that no id selects come from the same argument.
    """
    if input is None or other is None:
        return NotImplemented
    source = None
    if isinstance(condition, OneHot):
        source = input if condition.fill else other
    return elementwise(torch.where, (condition, input, other), {}, source)


@rule(*overloads("masked_select"), any_layout=True)
def _(func: Any, input: Any, mask: Any) -> Any:
    return select(input, mask)


def select(input: Any, mask: Any) -> Any:
    """Return the entries of a dense tensor where a one-hot mask is true, in order."""
    if isinstance(input, OneHot) and not (input.is_plain and running_count(input)):
        return NotImplemented
    if not isinstance(mask, OneHot) or not mask.is_plain:
        return NotImplemented
    field = mask.field
    if field is None or not field.has_one_id or mask.cached_dtype != torch.bool:
        return NotImplemented
    if tuple(input.shape) != mask.sizes or mask.is_modified or is_compiling():
        return NotImplemented
    if is_too_small(mask):
        return USE_TORCH
    if mask.width == 1:
        return NotImplemented  # the gathered entries would be a view of the input
    record_use(mask, Tensor.masked_select)
    values = gather(input, field.ids, mask.axis_layout)
    return values[field.weights] if field.weights is not None else values.flatten()
