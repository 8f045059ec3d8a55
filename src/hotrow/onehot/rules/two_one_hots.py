"""Elementwise functions of two one-hots."""

from __future__ import annotations

import string
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gather import broadcast_parts, gather_from_field
from hotrow.onehot.parts import MAX_PAIRS, Field, have_same_memory, keeps_sums
from hotrow.onehot.results import fill_tensor, single_value
from hotrow.onehot.rules.contraction import contract
from hotrow.onehot.rules.elementwise_functions import ABSORBING, PRODUCTS, SUMS, UNIONS
from hotrow.onehot.tensor import OneHot


def combine(
    func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Any:
    """Run an elementwise function of two one-hots."""
    if len(args) != 2 or kwargs or not all(isinstance(value, OneHot) for value in args):
        return NotImplemented
    x, other = args
    if is_compiling():
        return NotImplemented
    expanded = [broadcast_parts(each, out.shape) for each in args]
    if None in expanded:
        is_product = func in PRODUCTS and not (x.fill or other.fill)
        return _outer_product(func, x, other, out) if is_product else NotImplemented
    (parts, layout), (other_parts, other_layout) = expanded  # type: ignore[misc]
    if layout != other_layout or len(parts) > 1 or len(other_parts) > 1:
        return NotImplemented
    field, other_field = parts[0], other_parts[0]
    if not (isinstance(field, Field) and isinstance(other_field, Field)):
        return NotImplemented
    if x.grad_proxy is not None or other.grad_proxy is not None:
        return NotImplemented
    origins = x.origins | other.origins
    weights, fill = field.weights_or_ones(x.cached_dtype), 0.0
    have_one_id = field.has_one_id and other_field.has_one_id
    if have_one_id and have_same_memory(field.ids, other_field.ids):
        values = func(weights, other_field.weights_or_ones(other.cached_dtype))
        result = Field(field.ids, values.expand(field.ids.shape), field.width)
        number = single_value(func(fill_tensor(x, out.ndim), fill_tensor(other, out.ndim)))
        if number is None:
            return NotImplemented  # the fill is complex
        fill = number
    elif func in ABSORBING and x.fill and not other.fill:
        return combine(func, args[::-1], kwargs, out)
    elif x.fill or (other.fill and not (func in ABSORBING and other_field.has_one_id)):
        return NotImplemented
    elif func in ABSORBING and field.ids.shape[-1] * other_field.ids.shape[-1] <= MAX_PAIRS:
        is_linear = func in PRODUCTS or x.cached_dtype == torch.bool
        if not field.has_one_id and not (is_linear and keeps_sums(x.cached_dtype, out.dtype)):
            if not field.is_short or field.may_round_sums():
                return NotImplemented
            field = field.without_repeats(x.cached_dtype)
        if not (is_linear or other_field.has_one_id) and other_field.may_round_sums():
            return NotImplemented
        found = gather_from_field(other_field, other.fill, field.ids, other.cached_dtype)
        values = func(field.weights_or_ones(x.cached_dtype), found)
        result = Field(field.ids, values, field.width)
    elif func in UNIONS and x.cached_dtype == other.cached_dtype == torch.bool:
        both = torch.cat([weights, other_field.weights_or_ones(torch.bool)], -1)
        result = Field(torch.cat([field.ids, other_field.ids], -1), both, field.width)
    elif func in SUMS and out.dtype != torch.bool and have_one_id:
        other_weights = other_field.weights_or_ones(other.cached_dtype).to(out.dtype) * SUMS[func]
        both = torch.cat([weights.to(out.dtype), other_weights], -1)
        result = Field(torch.cat([field.ids, other_field.ids], -1), both, field.width)
    else:
        return NotImplemented
    return OneHot([result], out.dtype, None, None, origins, out.stride(), fill=fill, layout=layout)


def _outer_product(func: Callable[..., Any], x: OneHot, other: OneHot, out: Tensor) -> Any:
    """Multiply one-hots with different class axes; each has size 1 in the other one-hot."""
    if not len(x.sizes) == len(other.sizes) == out.ndim:
        return NotImplemented
    letters = string.ascii_letters[: out.ndim]
    operands, labels = [], []
    for one, another in ((x, other), (other, x)):
        axes = [axis for axis in another.axis_layout.class_axes if another.sizes[axis] > 1]
        if any(one.sizes[axis] != 1 for axis in axes):
            return NotImplemented
        squeezed: Tensor = one
        for axis in sorted(axes, reverse=True):
            squeezed = squeezed.squeeze(axis)
        operands.append(squeezed)
        labels.append("".join(each for i, each in enumerate(letters) if i not in axes))
    if not all(isinstance(each, OneHot) for each in operands):
        return NotImplemented
    return contract(func, operands, labels, letters)
