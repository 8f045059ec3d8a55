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
import string
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gather import (
    broadcast_parts,
    gather,
    gather_from_field,
    running_count,
    spans_classes,
)
from hotrow.onehot.gradient import ZerosProxy
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import DenseColumns, Field, Part
from hotrow.onehot.registry import USE_TORCH, materialize, overloads, rule
from hotrow.onehot.results import derive, meta_result, meta_tensor, number_of_dtype, sizes_of
from hotrow.onehot.rules.contraction import contract
from hotrow.onehot.tensor import OneHot

_PRODUCTS = {*overloads("mul", "multiply"), Tensor.__mul__, Tensor.__rmul__}
# Functions that are linear in the first argument.
_LINEAR = _PRODUCTS | {
    *overloads("div", "divide", "true_divide", "neg", "negative"),
    *(Tensor.__truediv__, Tensor.__neg__),
}
# Functions that are zero if one argument is zero.
_ABSORBING = _PRODUCTS | {
    *overloads("logical_and", "bitwise_and"),
    *(Tensor.__and__, Tensor.__rand__),
}
_UNIONS = {*overloads("logical_or", "bitwise_or"), Tensor.__or__, Tensor.__ror__}
_SUMS = {
    **dict.fromkeys((*overloads("add"), Tensor.__add__), 1),
    **dict.fromkeys((*overloads("sub", "subtract"), Tensor.__sub__), -1),
}
# Functions that may be infinite for the fill, even if the result at the ids is finite. Their
# gradient at the ids would be 0 times infinity.
_SINGULAR = {
    *overloads("div", "divide", "true_divide", "pow", "xlogy"),
    *(Tensor.__truediv__, Tensor.__rtruediv__, Tensor.__pow__, Tensor.__rpow__),
}
_NAMES = (
    *("abs", "absolute", "exp", "exp2", "expm1", "log", "log1p", "log2", "log10", "sqrt", "rsqrt"),
    *("square", "reciprocal", "sigmoid", "tanh", "sign", "relu", "logical_not", "bitwise_not"),
    *("isnan", "isinf", "isfinite", "clamp", "clip", "clamp_min", "clamp_max", "nan_to_num", "pow"),
    *("rsub", "maximum", "minimum", "fmax", "fmin", "xlogy"),
    *("eq", "ne", "not_equal", "lt", "less", "le", "less_equal", "gt", "greater", "ge"),
    *("greater_equal", "logical_or", "logical_xor", "bitwise_or", "bitwise_xor"),
)
_METHODS = (
    *(Tensor.__radd__, Tensor.__rsub__, Tensor.__rtruediv__, Tensor.__pow__, Tensor.__rpow__),
    *(Tensor.__abs__, Tensor.__invert__, Tensor.__or__, Tensor.__ror__, Tensor.__xor__),
    *(Tensor.__rxor__, Tensor.__eq__, Tensor.__ne__, Tensor.__lt__, Tensor.__le__),
    *(Tensor.__gt__, Tensor.__ge__, F.relu),
)


@rule(*_LINEAR, *_ABSORBING, *_SUMS, *overloads(*_NAMES), *_METHODS, any_layout=True)
def _(func: Any, *args: Any, **kwargs: Any) -> Any:
    return elementwise(func, args, kwargs)


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
    return result if getattr(result, "dtype", None) == input.dtype else NotImplemented


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
        source: the argument that equals the result at all entries that no id selects; None if
            these entries depend on all arguments.
        absorbs: whether the result is 0 where the one-hot is 0.
    """
    one_hots = [value for value in args if isinstance(value, OneHot)]
    dense = [value for value in args if isinstance(value, Tensor) and not isinstance(value, OneHot)]
    if not one_hots or any(isinstance(value, Tensor) for value in kwargs.values()):
        return NotImplemented
    if not all(isinstance(value, Tensor | int | float | None) for value in args):
        return NotImplemented
    changed = _change_count(func, args, kwargs)
    if changed is not NotImplemented:
        return changed
    counts = [each for each in one_hots if running_count(each)]
    if counts and len(counts) < len(one_hots):  # gather their entries, as from dense tensors
        one_hots = [each for each in one_hots if not running_count(each)]
    else:
        counts = []
    x = one_hots[0]
    if any(value.layout != torch.strided or value.is_nested for value in dense):
        return NotImplemented
    if any(value.ndim and value.device != x.cached_device for value in dense):
        return NotImplemented
    if any(each.is_modified for each in one_hots) or torch._C._are_functorch_transforms_active():
        return NotImplemented
    if x.is_too_small:
        return USE_TORCH
    out = meta_result(func, args, kwargs)
    absorbs = x.fill == 0 and (absorbs or func in _ABSORBING)
    if counts:
        if func in _SUMS and args[0] is counts[0] and not kwargs:
            return _exclude_own_row(x, counts[0], func, out)
        if not (absorbs or isinstance(source, int | float)) or x.grad_proxy is not None:
            return NotImplemented
        if any(each.sizes != out.shape or not each.is_plain for each in (x, *counts)):
            return NotImplemented
    if len(one_hots) > 1:
        return _combine(func, args, kwargs, out)
    if _SUMS.get(func) == 1 and x.difference is not None and len(args) == 2 and not kwargs:
        restored = _add_back(x, args[1] if args[0] is x else args[0])
        if restored is not None:
            return restored
    expanded = broadcast_parts(x, out.shape)
    if expanded is None or out.shape.numel() == 0:
        return NotImplemented
    parts, layout = expanded
    if x.width == 1:
        return NotImplemented  # with a class axis of size 1, broadcasting can't be detected
    takes_one_id = all(isinstance(part, DenseColumns) or part.ids.shape[-1] < 2 for part in parts)
    is_linear = x.fill == 0 and func in _LINEAR and (args[0] is x or func in _PRODUCTS)
    spanning = [value for value in (*dense, *counts) if spans_classes(value, layout)]
    if func in _SINGULAR and (spanning or x.cached_dtype == torch.bool):
        return NotImplemented
    is_sum = not takes_one_id and not (is_linear and (not spanning or func in _PRODUCTS))
    if is_sum:
        if not _is_short(parts) or x.fill != 0 or x.cached_dtype == torch.bool or is_compiling():
            return NotImplemented
        parts = [part.without_repeats(x.cached_dtype) for part in parts if isinstance(part, Field)]
    if not is_linear and (x.grad_proxy is not None or is_compiling()):
        return NotImplemented
    if x.grad_proxy is not None and any(value.requires_grad for value in dense):
        return NotImplemented  # the rule does not support second derivatives

    def run(value: Any) -> Any:
        return func(*(value if each is x else each for each in args), **kwargs)

    if spanning and func in _SUMS and x.fill == 0 and not kwargs and takes_one_id:
        return _add_at_ids(x, parts, layout, args, func, out)
    outside = None
    if not (absorbs and spanning) and not is_compiling():
        if source is None:
            outside = run(_fill_tensor(x, len(layout.order)))
        else:
            outside = torch.as_tensor(source, dtype=out.dtype, device=x.cached_device)
        if outside.requires_grad and not absorbs and not spans_classes(outside, layout):
            return NotImplemented
        if spans_classes(outside, layout):
            return _replace_entries(x, parts, layout, args, kwargs, func, outside, out)
    if spanning and len(parts) > 1:
        return NotImplemented
    has_field = any(isinstance(part, Field) for part in parts)
    fill = _single_value(outside) if has_field and outside is not None else 0
    if fill is None or (fill != 0 and not takes_one_id):
        return NotImplemented

    def at_ids(part: Part) -> Part:
        if isinstance(part, DenseColumns):
            values = [_entries(each, x, part.values, part.values, layout) for each in args]
            return DenseColumns(func(*values, **kwargs))
        weights = part.weights_or_ones(x.cached_dtype)
        values = [_entries(each, x, part.ids, weights, layout) for each in args]
        return Field(part.ids, func(*values, **kwargs).expand(part.ids.shape), part.width)

    if any(isinstance(part, DenseColumns) for part in parts) and spanning:
        return NotImplemented
    rounds = not takes_one_id and not is_sum
    parts = [at_ids(part) for part in parts]
    return derive(x, parts, out, run, rounds, fill=fill, layout=layout, factors=dense)


def _change_count(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Apply an elementwise function to a running count when its entries are needed."""
    x, *others = args
    count = running_count(x) if isinstance(x, OneHot) else None
    if count is None or not x.is_plain or is_compiling():
        return NotImplemented
    operands = [each for each in others if isinstance(each, Tensor)]
    if any(math.prod(sizes_of(each)) >= x.entries or each.requires_grad for each in operands):
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


def _exclude_own_row(x: OneHot, counts: OneHot, func: Callable[..., Any], out: Tensor) -> Any:
    """Return `x.cumsum(dim) - x`, or NotImplemented if this isn't such a difference."""
    count, field = running_count(counts), x.field
    if _SUMS[func] > 0 or count is None or field is None or count.dtype != out.dtype:
        return NotImplemented
    is_same = _are_same_ids(count.field.ids, field.ids) and count.field.weights is field.weights
    if not is_same or count.change is not None or count.is_exclusive or count.is_moved:
        return NotImplemented
    if x.sizes != counts.sizes or not (x.is_plain and counts.is_plain):
        return NotImplemented
    return OneHot([count.exclusive()], out.dtype, None, None, x.origins, out.stride())


def _fill_tensor(x: OneHot, count: int) -> Tensor:
    return torch.full((1,) * count, x.fill, dtype=x.cached_dtype, device=x.cached_device)


def _is_short(parts: list[Part]) -> bool:
    """Return whether all parts are fields with so few ids per row that they can be compared."""
    return all(
        isinstance(part, Field) and part.ids.shape[-1] ** 2 <= MAX_COMPARED for part in parts
    )


def _single_value(values: Tensor) -> float | None:
    """Return the number that all values are equal to, or None if they differ."""
    flat = values.detach().flatten()
    first = flat[:1]
    if len(flat) > 1 and not bool(((flat == first) | (flat.isnan() & first.isnan())).all()):
        return None
    return first.item()


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
    x.record_use(func)
    weights = field.weights_or_ones(x.cached_dtype)
    values = func(*(_entries(each, x, field.ids, weights, layout) for each in args), **kwargs)
    values = values.expand(field.ids.shape).to(out.dtype)
    if len(layout.classes) > 1 or 0 in outside.stride():
        return _arranged(
            layout.arrange(
                layout.restore(outside.expand(out.shape)).scatter(-1, field.ids, values)
            ),
            out,
        )
    # Scatter along the class axis of the tensor, rather than into a permuted view, whose backward
    # pass would copy the tensor.
    (axis,) = layout.class_axes
    ids, values = (t.permute(layout.order) for t in (field.ids, values))
    is_new = outside.shape == out.shape and all(outside is not each for each in args)
    if is_new:
        return _arranged(outside.scatter_(axis, ids, values), out)
    return _arranged(outside.expand(out.shape).scatter(axis, ids, values), out)


def _add_at_ids(
    x: OneHot,
    parts: list[Part],
    layout: Layout,
    args: tuple[Any, ...],
    func: Callable[..., Any],
    out: Tensor,
) -> Any:
    """Add a one-hot to a dense tensor or subtract it; the gradient of the tensor is unchanged."""
    field = parts[0]
    if len(parts) > 1 or not isinstance(field, Field) or len(layout.classes) > 1:
        return NotImplemented
    if x.grad_proxy is not None or torch.bool in (x.cached_dtype, *(each.dtype for each in args)):
        return NotImplemented
    sign, is_first = _SUMS[func], args[0] is x
    dense = args[1 if is_first else 0].to(out.dtype)
    dense = -dense if is_first and sign < 0 else dense
    weights = field.weights_or_ones(x.cached_dtype).to(out.dtype)
    weights = weights if is_first else sign * weights
    x.record_use(func)
    (axis,) = layout.class_axes
    ids, weights = (t.permute(layout.order) for t in (field.ids, weights))
    result = _arranged(dense.expand(out.shape).scatter_add(axis, ids, weights), out)
    if not (is_first and sign < 0) or args[1].shape != out.shape or args[1].is_inference():
        return result
    if not x.cached_dtype == args[1].dtype == out.dtype:
        return result
    difference = OneHot(
        [DenseColumns(layout.restore(result))], out.dtype, None, None, x.origins, out.stride(),
        dense_fn=lambda: result, layout=layout,
    )  # fmt: skip
    difference.difference = x.snapshot(), args[1], args[1]._version
    return difference


def _add_back(x: OneHot, other: Any) -> OneHot | None:
    """Return y for x = y - p and other = p, or None if this isn't such a sum.

    This sum is a straight-through estimator: its value is the one-hot y, and its gradient flows
    to p.
    """
    assert x.difference is not None
    y, p, version = x.difference
    if x.needs_grad or y.needs_grad or not _is_same_memory(p, other) or p._version != version:
        return None
    if not bool((other.detach().abs() <= _MAX_ROUNDED).all()):
        return None  # y - p + p differs visibly from y, or is not finite
    proxy = None
    if other.requires_grad and torch.is_grad_enabled():
        proxy = ZerosProxy.apply(other)  # type: ignore[no-untyped-call]
    return OneHot(y.parts, y.cached_dtype, proxy, None, x.origins, x.strides, layout=y._axis_layout)


_MAX_ROUNDED = 2


def _is_same_memory(one: Tensor, other: Any) -> bool:
    if not isinstance(other, Tensor) or isinstance(other, OneHot) or other.is_inference():
        return False
    fits = one.shape == other.shape and one.stride() == other.stride() and one.dtype == other.dtype
    return fits and one.data_ptr() == other.data_ptr()


def _arranged(result: Tensor, out: Tensor) -> Tensor:
    """Return the result with the strides of `out`."""
    if result.stride() == out.stride():
        return result
    like = torch.empty_strided(out.shape, out.stride(), dtype=out.dtype, device=result.device)
    return like.copy_(result)


MAX_COMPARED = 64  # the maximum number of pairs of ids per row to compare


def _combine(
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
        is_product = func in _PRODUCTS and not (x.fill or other.fill)
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
    if have_one_id and _are_same_ids(field.ids, other_field.ids):
        values = func(weights, other_field.weights_or_ones(other.cached_dtype))
        result = Field(field.ids, values.expand(field.ids.shape), field.width)
        fill = func(_fill_tensor(x, out.ndim), _fill_tensor(other, out.ndim)).item()
    elif func in _ABSORBING and x.fill and not other.fill:
        return _combine(func, args[::-1], kwargs, out)
    elif x.fill or (other.fill and not (func in _ABSORBING and other_field.has_one_id)):
        return NotImplemented
    elif func in _ABSORBING and field.ids.shape[-1] * other_field.ids.shape[-1] <= MAX_COMPARED:
        found = gather_from_field(other_field, other.fill, field.ids, other.cached_dtype)
        result = Field(field.ids, func(weights, found), field.width)
    elif func in _UNIONS and x.cached_dtype == other.cached_dtype == torch.bool:
        both = torch.cat([weights, other_field.weights_or_ones(torch.bool)], -1)
        result = Field(torch.cat([field.ids, other_field.ids], -1), both, field.width)
    elif func in _SUMS and out.dtype != torch.bool and have_one_id:
        other_weights = other_field.weights_or_ones(other.cached_dtype) * _SUMS[func]
        both = torch.cat([weights.to(out.dtype), other_weights.to(out.dtype)], -1)
        result = Field(torch.cat([field.ids, other_field.ids], -1), both, field.width)
    else:
        return NotImplemented
    return OneHot([result], out.dtype, None, None, origins, out.stride(), fill=fill, layout=layout)


def _are_same_ids(one: Tensor, other: Tensor) -> bool:
    """Return whether both tensors of ids use the same memory, which is never modified."""
    return one is other or (
        one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
    )


def _outer_product(func: Callable[..., Any], x: OneHot, other: OneHot, out: Tensor) -> Any:
    """Multiply one-hots with different class axes, each of which has size 1 in the other."""
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
    if mask.is_too_small:
        return USE_TORCH
    mask.record_use(Tensor.masked_select)
    values = gather(input, field.ids, mask.axis_layout)
    return values[field.weights] if field.weights is not None else values.flatten()


@rule(F.dropout)
def _(
    func: Any, input: OneHot, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training:
        return NotImplemented
    func(meta_tensor(input), p, training)  # raises torch's errors
    return input
