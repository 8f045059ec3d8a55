"""In-place operations that change a one-hot, or that use a one-hot to change a dense tensor.

If the result is a one-hot, its parts replace those of the changed one-hot, unless a view, a dense
tensor or a graph depends on the old parts.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.gather import running_count
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import USE_TORCH, rule
from hotrow.onehot.results import number_of_dtype
from hotrow.onehot.rules.dense_writes import add_in_place, write_at_ids
from hotrow.onehot.rules.elementwise import elementwise
from hotrow.onehot.rules.scatter import scatter_at_classes, scatter_at_rows
from hotrow.onehot.tensor import OneHot

_NAMES = (
    *("mul", "multiply", "div", "divide", "true_divide", "logical_and", "bitwise_and"),
    *("clamp", "clip", "clamp_min", "clamp_max"),
)
# For each in-place function, the function that computes the same result out of place.
_FUNCTIONS = {getattr(Tensor, f"{name}_"): getattr(Tensor, name) for name in _NAMES} | {
    Tensor.__imul__: Tensor.mul,
    Tensor.__itruediv__: Tensor.div,
    Tensor.__iand__: Tensor.__and__,
}
_SIGNS = {
    **dict.fromkeys((Tensor.add_, Tensor.__iadd__), 1),
    **dict.fromkeys((Tensor.sub_, Tensor.__isub__), -1),
}


@rule(*_FUNCTIONS, any_layout=True)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot) or not x.is_unused:
        return NotImplemented
    return _replace(x, elementwise(_FUNCTIONS[func], (x, *args), kwargs))


def _replace(x: OneHot, result: Any) -> Any:
    """Give x the values of the result, or leave the operation to torch."""
    if result is USE_TORCH:
        return USE_TORCH
    if not isinstance(result, OneHot) or result.grad_proxy is not None:
        return NotImplemented
    if (result.sizes, result.strides) != (x.sizes, x.strides):
        return NotImplemented
    if result.cached_dtype != x.cached_dtype:
        return NotImplemented
    x.replace_parts(result)
    return x


@rule(*_SIGNS, any_layout=True)
def _(func: Any, input: Any, other: Any, *, alpha: Any = 1) -> Any:
    if not isinstance(input, OneHot):
        return add_in_place(func, input, other, alpha * _SIGNS[func])
    is_known = isinstance(other, OneHot) or running_count(input) is not None
    if not is_known or not input.is_unused or type(alpha) is not int or alpha != 1:
        return NotImplemented
    function = Tensor.add if _SIGNS[func] > 0 else Tensor.sub
    return _replace(input, elementwise(function, (input, other), {}))


@rule(Tensor.masked_fill_, any_layout=True)
def _(func: Any, input: Any, mask: Any, value: Any) -> Any:
    if not isinstance(value, int | float):
        return NotImplemented
    if not isinstance(input, OneHot):
        return write_at_ids(func, input, mask, value)
    return _fill_where(input, mask, value)


def _fill_where(x: OneHot, mask: Any, value: Any) -> Any:
    """Write a number where a bool mask is True, if the number is the fill of x."""
    if not isinstance(mask, Tensor) or isinstance(mask, OneHot) or mask.numel() >= x.entries:
        return NotImplemented
    if not x.is_unused:
        return NotImplemented
    number = number_of_dtype(value, x.cached_dtype).item()
    return _replace(x, elementwise(torch.where, (mask, number, x), {}))


@rule(Tensor.fill_, Tensor.zero_, any_layout=True)
def _(func: Any, x: Any, value: Any = 0) -> Any:
    """Fill a one-hot with a number; code may scatter into it later, as for label smoothing."""
    if not isinstance(x, OneHot) or not isinstance(value, int | float):
        return NotImplemented
    if not x.is_unused or x._axis_layout is not None:
        return NotImplemented
    number = number_of_dtype(value, x.cached_dtype).real.item()
    ids = torch.empty((*x.sizes[:-1], 0), dtype=torch.int64, device=x.cached_device)
    x.replace_parts(OneHot([Field(ids, None, x.sizes[-1])], x.cached_dtype, fill=number))
    return x


@rule(Tensor.index_fill_)
def _(func: Any, x: Any, dim: Any, index: Any, value: Any) -> Any:
    if not isinstance(x, OneHot) or not isinstance(value, int | float):
        return NotImplemented
    if dim == 0 and len(x.sizes) > 1:
        return _fill_rows(x, index, value)
    return scatter_at_classes(x.scatter_, x, dim, index, value)


def _fill_rows(x: OneHot, rows: Any, value: Any) -> Any:
    """Write a number to the rows that a bool mask or a list of row numbers selects."""
    if not isinstance(rows, Tensor) or isinstance(rows, OneHot) or not rows.ndim:
        return NotImplemented
    if not x.is_unused:
        return NotImplemented
    if rows.dtype == torch.int64 and rows.ndim == 1 and rows.device == x.cached_device:
        if rows.numel() and (int(rows.min()) < 0 or int(rows.max()) >= x.sizes[0]):
            return NotImplemented  # torch raises an error, or counts from the end
        rows = torch.zeros(x.sizes[0], dtype=torch.bool, device=rows.device).index_fill(0, rows, 1)
    missing = len(x.sizes) - rows.ndim
    if rows.dtype != torch.bool or missing < 1 or tuple(rows.shape) != x.sizes[: rows.ndim]:
        return NotImplemented
    return _fill_where(x, rows[(..., *(None,) * missing)], value)


@rule(Tensor.__setitem__)
def _(func: Any, x: Any, index: Any, value: Any) -> Any:
    """Handle `dense[one_hot] = value` and assignments to a one-hot.

    The rule supports assignments to one entry per row, to whole rows, and to a column.
    """
    if not isinstance(x, OneHot):
        written = write_at_ids(func, x, index, value)
    elif not isinstance(index, tuple) or (len(index) == 2 and _is_full(index[1])):
        rows = index[0] if isinstance(index, tuple) else index
        is_number = isinstance(value, int | float)
        written = _fill_rows(x, rows, value) if is_number else NotImplemented
    elif len(index) == 2 and isinstance(index[1], int):
        written = _clear_column(x, *index, value)
    else:
        written = scatter_at_rows(x, *index, value) if len(index) == 2 else NotImplemented
    return None if written is x else written


def _is_full(index: Any) -> bool:
    """Return whether an index selects all entries of an axis."""
    return index is Ellipsis or (isinstance(index, slice) and index == slice(None))


def _clear_column(x: OneHot, rows: Any, column: int, value: Any) -> Any:
    """Write zeros to a column of a one-hot, such as the column of the padding id."""
    field, count = x.field, x.sizes[-1]
    is_column = rows is Ellipsis or (len(x.sizes) == 2 and _is_full(rows))
    is_zero = isinstance(value, int | float) and value == 0
    if field is None or not is_column or not is_zero or not x.is_unused:
        return NotImplemented
    if not -count <= column < count or isinstance(column, bool):
        return NotImplemented  # torch raises an error
    weights = field.weights_or_ones(x.cached_dtype).masked_fill(field.ids == column % count, 0)
    x.replace_parts(OneHot([Field(field.ids, weights, field.width)], x.cached_dtype))
    return x
