"""Elementwise functions, which act on a one-hot's weights and on its fill.

For an elementwise function f, the entry of `f(x, other)` at an id is `f(weight, other[id])`. Every
other entry is `f(fill, other)`, where the fill is usually 0.

- If `f(0, other)` is 0, as for a product, the result is a one-hot with the weights
  `f(weight, other[id])`: the ids *gather* the weights from `other`.
- If `f(fill, other)` is the same number for all entries, the result is a one-hot with this fill.
- Otherwise, the result is `f(fill, other)` with the entries at the ids replaced.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import has_derivative, is_compiling, is_transforming
from hotrow.onehot.gather import broadcast_parts, gather, running_count, spans_classes
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import DenseColumns, Field, Part, keeps_sums
from hotrow.onehot.registry import USE_TORCH, rule
from hotrow.onehot.results import (
    derive,
    fill_tensor,
    meta_result,
    single_value,
    with_strides_of,
)
from hotrow.onehot.rules.contraction import dtype_of
from hotrow.onehot.rules.elementwise_functions import (
    ABSORBING,
    ELEMENTWISE,
    LINEAR,
    PRODUCTS,
    SEVERAL_NUMBERS,
    SINGULAR,
    SUMS,
)
from hotrow.onehot.rules.running_counts import change_count, exclude_own_row
from hotrow.onehot.rules.sums import add_at_ids, add_back
from hotrow.onehot.rules.two_one_hots import combine
from hotrow.onehot.scaling import scale_at_ids
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot


@rule(*ELEMENTWISE, any_layout=True)
def _(func: Any, *args: Any, **kwargs: Any) -> Any:
    return elementwise(func, args, kwargs)


def elementwise(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    source: Any = None,
    absorbs: bool = False,
) -> Any:
    """Run an elementwise function of one-hots, dense tensors and numbers.

    Args:
        func: the function; torch computes its gradient.
        args: the arguments of the function.
        kwargs: the options of the function, which must not be tensors.
        source: the argument that supplies the result's entries outside the ids; None if these
            entries depend on all arguments.
        absorbs: whether the result is 0 where the one-hot is 0.
    """
    one_hots = [value for value in args if isinstance(value, OneHot)]
    dense = [value for value in args if isinstance(value, Tensor) and not isinstance(value, OneHot)]
    if not one_hots or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if not all(isinstance(value, Tensor | int | float | None) for value in args):
        return NotImplemented
    if SUMS.get(func) == -1 and any(
        isinstance(each, Tensor) and dtype_of(each) == torch.bool for each in args
    ):
        return NotImplemented  # torch raises an error, but not on the meta device
    changed = change_count(func, args, kwargs)
    if changed is not NotImplemented:
        return changed
    counts = [each for each in one_hots if running_count(each)]
    if counts and len(counts) < len(one_hots):  # gather from counts as from dense tensors
        one_hots = [each for each in one_hots if not running_count(each)]
    else:
        counts = []
    x = one_hots[0]
    if any(value.layout != torch.strided or value.is_nested for value in dense):
        return NotImplemented
    if any(value.ndim and value.device != x.cached_device for value in dense):
        return NotImplemented
    if func in SUMS and len(args) > 2:
        return NotImplemented  # deprecated: torch.add(x, alpha, other)
    if func in SEVERAL_NUMBERS and any(not value.ndim for value in dense):
        return NotImplemented  # a tensor on the meta device has no number
    if any(each.is_modified for each in one_hots) or torch._C._are_functorch_transforms_active():
        return NotImplemented
    if is_too_small(x):
        return USE_TORCH
    out = meta_result(func, args, kwargs)
    absorbs = x.fill == 0 and (absorbs or func in ABSORBING)
    if counts:
        if func in SUMS and args[0] is counts[0] and not kwargs:
            return exclude_own_row(x, counts[0], func, out)
        if not (absorbs or isinstance(source, int | float)) or x.grad_proxy is not None:
            return NotImplemented
        if any(each.sizes != out.shape or not each.is_plain for each in (x, *counts)):
            return NotImplemented
    if len(one_hots) > 1:
        return combine(func, args, kwargs, out)
    if SUMS.get(func) == 1 and x.difference is not None and len(args) == 2 and not kwargs:
        restored = add_back(x, args[1] if args[0] is x else args[0], out)
        if restored is not None:
            return restored
    expanded = broadcast_parts(x, out.shape)
    if expanded is None or out.shape.numel() == 0:
        return NotImplemented
    parts, layout = expanded
    if x.width == 1:
        return NotImplemented  # broadcasting is undetectable along a class axis of size 1
    takes_one_id = all(isinstance(part, DenseColumns) or part.ids.shape[-1] < 2 for part in parts)
    is_linear = x.fill == 0 and func in LINEAR and (args[0] is x or func in PRODUCTS)
    is_linear = is_linear and kwargs.keys() <= {"other"}  # div with a rounding mode isn't linear
    spanning = [value for value in (*dense, *counts) if spans_classes(value, layout)]
    if func in SINGULAR and (spanning or x.cached_dtype == torch.bool):
        return NotImplemented
    adds_up = is_linear and keeps_sums(x.cached_dtype, out.dtype)
    is_sum = not takes_one_id and not (adds_up and (not spanning or func in PRODUCTS))
    if is_sum:
        are_short = all(isinstance(part, Field) and part.is_short for part in parts)
        if not are_short or x.fill != 0 or is_compiling():
            return NotImplemented
        if x.cached_dtype == out.dtype == torch.bool:
            return NotImplemented
        fields = [part for part in parts if isinstance(part, Field)]
        if any(field.may_round_sums() for field in fields):
            return NotImplemented
        parts = [field.without_repeats(x.cached_dtype) for field in fields]
    if not is_linear and (x.grad_proxy is not None or is_compiling()):
        return NotImplemented
    if x.grad_proxy is not None and any(has_derivative(value) for value in dense):
        return NotImplemented  # the rule does not support second derivatives
    if not math.isfinite(x.fill) and any(value.requires_grad for value in dense):
        return NotImplemented  # the gradient at the ids would be 0 * inf

    def run(value: Any) -> Any:
        return func(*(value if each is x else each for each in args), **kwargs)

    if spanning and func in SUMS and x.fill == 0 and not kwargs and takes_one_id:
        return add_at_ids(x, parts, layout, args, func, out)
    if spanning and func in PRODUCTS and x.fill != 0 and not counts:
        product = _scale(x, parts, layout, dense, func, out)
        if product is not None:
            return product
    outside = None
    if not (absorbs and spanning) and not is_compiling():
        if source is None:
            outside = run(fill_tensor(x, len(layout.order)))
        else:
            outside = torch.as_tensor(source, dtype=out.dtype, device=x.cached_device)
        if has_derivative(outside) and not absorbs and not spans_classes(outside, layout):
            return NotImplemented
        if spans_classes(outside, layout):
            return _replace_entries(x, parts, layout, args, kwargs, func, outside, out)
    if spanning and len(parts) > 1:
        return NotImplemented
    has_field = any(isinstance(part, Field) for part in parts)
    fill = single_value(outside) if has_field and outside is not None else 0
    if fill is None or (fill != 0 and not takes_one_id):
        return NotImplemented

    # If all weights are 1, the products are the gathered entries themselves.
    takes_entries = func in PRODUCTS and fill == 0 and len(args) == 2 and not (kwargs or counts)
    takes_entries = takes_entries and len(spanning) == 1 and spanning[0].dtype == out.dtype

    def at_ids(part: Part) -> Part:
        if isinstance(part, DenseColumns):
            values = [_entries(each, x, part.values, part.values, layout) for each in args]
            return DenseColumns(func(*values, **kwargs))
        if part.weights is None and takes_entries:
            return Field(part.ids, gather(spanning[0], part.ids, layout), part.width)
        weights = part.weights_or_ones(x.cached_dtype)
        values = [_entries(each, x, part.ids, weights, layout) for each in args]
        result = func(*values, **kwargs).expand(part.ids.shape)
        if is_sum and weights.dtype == torch.bool:
            result = result.masked_fill(~weights, 0)  # a repeat times infinity would be NaN
        return Field(part.ids, result, part.width)

    if any(isinstance(part, DenseColumns) for part in parts) and spanning:
        return NotImplemented
    parts = [at_ids(part) for part in parts]
    compute = None if takes_one_id or is_sum else _for_later(x, func, args, kwargs, out)
    return derive(x, parts, out, run, compute, fill=fill, layout=layout, factors=dense)


def _for_later(
    x: OneHot, func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], out: Tensor
) -> Callable[[Tensor], Tensor]:
    """Return a linear function of the dense x that gives the same result at any later time."""
    # The version counter of a tensor misses writes to its memory, such as `p.data.mul_(2)`.
    copies = [each if each is x or not isinstance(each, Tensor) else each.clone() for each in args]

    def compute(t: Tensor) -> Tensor:
        t = t.to(out.dtype)  # otherwise, the result's dtype may depend on torch's default dtype
        result: Tensor = func(*(t if each is x else each for each in copies), **kwargs)
        return result

    return compute


def _scale(
    x: OneHot,
    parts: list[Part],
    layout: Layout,
    dense: list[Tensor],
    func: Callable[..., Any],
    out: Tensor,
) -> Tensor | None:
    """Multiply a dense tensor by a one-hot whose fill is not 0, or return None."""
    field, (values,) = parts[0], dense
    if len(parts) > 1 or not isinstance(field, Field):
        return None
    factors = field.weights_or_ones(x.cached_dtype)
    needs_more = factors.requires_grad or x.grad_proxy is not None or is_transforming()
    if needs_more or len(layout.classes) > 1 or values.dtype != out.dtype or values.is_complex():
        return None
    if values.shape != out.shape or 0 in values.stride() or not field.has_one_id:
        return None
    record_use(x, func)
    (axis,) = layout.class_axes
    ids, factors = (t.permute(layout.order) for t in (field.ids, factors.to(out.dtype)))
    return with_strides_of(scale_at_ids(values, axis, ids, factors, x.fill), out)


def _entries(value: Any, x: OneHot, ids: Tensor, weights: Tensor, layout: Layout) -> Any:
    """Return the entries of an argument at the ids."""
    if value is x:
        return weights
    return gather(value, ids, layout) if isinstance(value, Tensor) and value.ndim else value


def _replace_entries(
    x: OneHot,
    parts: list[Part],
    layout: Layout,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    func: Callable[..., Any],
    outside: Tensor,
    out: Tensor,
) -> Any:
    """Return `outside` with the entries at the ids replaced by the function's values."""
    field = parts[0]
    if len(parts) > 1 or not isinstance(field, Field) or x.grad_proxy is not None:
        return NotImplemented
    if not field.has_one_id and (not field.ids.shape[-1] or field.has_repeats()):
        return NotImplemented  # an entry would be written twice
    record_use(x, func)
    weights = field.weights_or_ones(x.cached_dtype)
    values = func(*(_entries(each, x, field.ids, weights, layout) for each in args), **kwargs)
    values = values.expand(field.ids.shape).to(out.dtype)
    if len(layout.classes) > 1 or 0 in outside.stride():
        rows = layout.restore(outside.expand(out.shape)).scatter(-1, field.ids, values)
        return with_strides_of(layout.arrange(rows), out)
    # Scatter along the tensor's class axis. If this scattered into a permuted view instead, the
    # backward pass would copy the tensor.
    (axis,) = layout.class_axes
    ids, values = (t.permute(layout.order) for t in (field.ids, values))
    is_new = outside.shape == out.shape and all(outside is not each for each in args)
    if is_new:
        return with_strides_of(outside.scatter_(axis, ids, values), out)
    return with_strides_of(outside.expand(out.shape).scatter(axis, ids, values), out)
