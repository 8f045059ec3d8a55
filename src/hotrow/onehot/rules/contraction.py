"""Contractions: products of a one-hot with a tensor, summed over any axes.

The axes have labels, as in `torch.einsum`. These labels determine how the ids are used:

- If the other tensor has the class axis, the ids *gather* its entries along that axis.
- If the result has the class axis, the ids *scatter* the products, adding up those with equal ids.
- The product of two one-hots with different class axes *counts pairs* of ids.

Lookups, which are products `x @ weight` with a (C, D) weight, are in `products.py`. The rules for
the torch functions that compute contractions are in `einsum.py` and `matrix_products.py`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling, is_transforming
from hotrow.onehot.gather import gather_along, gather_from_field
from hotrow.onehot.layout import Layout
from hotrow.onehot.parts import MAX_PAIRS, Field
from hotrow.onehot.registry import USE_TORCH, overloads
from hotrow.onehot.results import sizes_of
from hotrow.onehot.rules.products import autocast_dtype
from hotrow.onehot.scatter_add import scatter_columns, scatter_rows
from hotrow.onehot.size_limits import is_too_small_to_scatter
from hotrow.onehot.tensor import OneHot
from hotrow.table.lookup import look_up, permute


class _Operand:
    """A one-hot in a contraction, with labels for its batch axes and class axes.

    Attributes:
        x: the one-hot.
        batch: the labels of the batch axes.
        classes: the labels of the class axes.
        ids: (*batch, K).
        weights: (*batch, K), or None if all weights are 1.
        sizes: the size of each axis, by label.
    """

    def __init__(self, x: OneHot, field: Field, labels: str) -> None:
        layout = x.axis_layout
        self.x, self.width = x, field.width
        self.batch = [labels[axis] for axis in layout.batch_axes]
        self.classes = [labels[axis] for axis in layout.class_axes]
        self.ids, self.weights = field.ids, field.weights
        self.sizes = dict(zip(labels, x.sizes, strict=True))


def contract(func: Any, operands: Sequence[Any], labels: Sequence[str], output: str) -> Any:
    """Contract two tensors, at least one of them a one-hot, as `torch.einsum` would.

    Args:
        func: the torch function that was called, for the report.
        operands: two tensors.
        labels: a letter for each axis of each tensor.
        output: the letters of the result's axes.

    Returns:
        the result, or NotImplemented or USE_TORCH to leave the operation to torch.
    """
    if any(len(set(each)) < len(each) for each in (*labels, output)) or is_compiling():
        return NotImplemented
    one_hots = [value for value in operands if isinstance(value, OneHot)]
    for x in one_hots:
        if x.field is None or x.fill != 0 or x.grad_proxy is not None or x.is_modified:
            return NotImplemented
        if not (x.cached_dtype.is_floating_point or x.cached_dtype == torch.int64):
            return NotImplemented  # torch's einsum returns int64 for some small integer dtypes
    if not isinstance(operands[0], OneHot):
        operands, labels = operands[::-1], labels[::-1]
    x, other = operands
    dtypes = {dtype_of(t) for t in operands}
    dtype = None
    summed = (set(labels[0]) & set(labels[1])) - set(output)
    if func is torch.einsum:  # to sum over axes of size 1, torch multiplies the entries
        summed -= {each for each, size in zip(labels[0], sizes_of(x), strict=False) if size == 1}
    if func is torch.tensordot or summed:
        dtype = product_dtype(func, operands)  # autocast affects only matrix products
    if (len(dtypes) > 1 and dtype is None) or other.device != x.cached_device:
        return NotImplemented
    if not is_strided(other):
        return NotImplemented
    if any(0 in sizes_of(t) for t in operands):
        return NotImplemented
    if not _sizes_match(operands, labels):
        return NotImplemented  # torch raises an error or broadcasts
    purpose = _purpose(x, other, labels, output)
    if is_too_small_to_scatter(x):
        for origin in x.origins:
            origin.record_small_contraction(func, purpose)
        return USE_TORCH
    assert x.field is not None
    operand = _Operand(x, x.field, labels[0])
    result_dtype = dtype or x.cached_dtype
    if isinstance(other, OneHot):
        assert other.field is not None
        result = _contract_one_hots(operand, _Operand(other, other.field, labels[1]), output)
    else:
        other = other if dtype is None else other.to(dtype)
        result = _contract_dense(operand, other, labels[1], output)
    if result is not NotImplemented:
        result = result.to(result_dtype)
        origins = frozenset[Any]().union(*(each.origins for each in one_hots))
        if isinstance(result, OneHot):
            result.origins = origins
            return result
        # origins is a set, so a line that created both operands is counted only once
        for origin in origins:
            origin.record_contraction(func, purpose, x.entries)
    return result


def _purpose(x: OneHot, other: Any, labels: Sequence[str], output: str) -> str:
    """Describe a contraction for the report."""
    classes = {labels[0][axis] for axis in x.axis_layout.class_axes}
    if isinstance(other, OneHot):
        return "comparison of ids" if classes & set(labels[1]) else "count of pairs of ids"
    if classes & set(labels[1]):
        return "entries at the ids"
    return "sum of rows by id" if classes & set(output) else "sum of rows"


def dtype_of(t: Any) -> torch.dtype:
    """Return the dtype of a one-hot or a dense tensor."""
    return t.cached_dtype if isinstance(t, OneHot) else t.dtype


def product_dtype(func: Any, tensors: Sequence[Any]) -> torch.dtype | None:
    """Return the dtype to which autocast converts the tensors for a matrix product, or None."""
    if func in KEEP_DTYPES:
        return None
    x = next(t for t in tensors if isinstance(t, OneHot))
    return autocast_dtype(x.cached_device, {dtype_of(t) for t in tensors})


KEEP_DTYPES = set(overloads("mv", "dot"))  # autocast doesn't apply to these functions


def _sizes_match(operands: Sequence[Any], labels: Sequence[str]) -> bool:
    sizes: dict[str, int] = {}
    for t, letters in zip(operands, labels, strict=True):
        if len(letters) != len(sizes_of(t)):
            return False
        for letter, size in zip(letters, sizes_of(t), strict=True):
            if sizes.setdefault(letter, size) != size:
                return False
    return True


def _contract_dense(x: _Operand, other: Tensor, labels: str, output: str) -> Any:
    """Contract a one-hot with a dense tensor."""
    gathers, scatters = (_has_all(x.classes, letters) for letters in (labels, output))
    if gathers is None or scatters is None:
        return NotImplemented  # `labels` or `output` has only some of the class axes
    batch = x.batch
    shared = [letter for letter in batch if letter in labels]
    rest = [letter for letter in labels if letter not in batch and letter not in x.classes]
    unsummed = [letter for letter in rest if letter in output]
    sizes = x.sizes | dict(zip(labels, other.shape, strict=True))
    if gathers:
        values = _gather_rows(x, other, labels, shared, rest)  # (*batch, K, *rest)
    else:
        values = _permute(other, [labels.index(letter) for letter in (*shared, *rest)])
        for i, letter in enumerate(batch):
            if letter not in shared:
                values = values.unsqueeze(i)
        values = values.unsqueeze(len(batch))  # (*batch or 1, 1, *rest)
    if len(unsummed) < len(rest):
        first = len(batch) + 1
        values = values.sum([first + i for i, each in enumerate(rest) if each not in output])
        rest = unsummed
    keeps_ids = scatters and not rest and _has_all(batch, output)
    if x.weights is not None:
        values = values * x.weights.to(values.dtype)[(..., *(None,) * len(rest))]
    elif not gathers and (keeps_ids or not scatters):
        values = values.clone()  # the result must not share the memory of `other`
    if keeps_ids:
        return _weighted(x, values.expand(x.ids.shape), other.dtype, output)
    if not scatters:
        values = values.expand(*x.ids.shape, *values.shape[len(batch) + 1 :])
        values = values.squeeze(len(batch)) if x.ids.shape[-1] == 1 else values.sum(len(batch))
        return _sum_to(values, [*batch, *rest], output)
    return _scatter(x, values, rest, sizes, output)


def _weighted(x: _Operand, weights: Tensor, dtype: torch.dtype, output: str) -> OneHot:
    """Return a one-hot with the same ids, new weights, and its axes in the output's order."""
    batch = [letter for letter in output if letter in x.batch]
    order = [*(x.batch.index(letter) for letter in batch), len(batch)]
    axes = [*batch, *x.classes]
    layout = Layout(
        tuple(x.sizes[letter] for letter in x.classes),
        tuple(axes.index(letter) for letter in output),
    )
    field = Field(x.ids.permute(order), weights.permute(order), x.width)
    return OneHot([field], dtype, layout=layout)


def _has_all(classes: Sequence[str], letters: str) -> bool | None:
    """Return whether the letters contain all class axes, or None if they contain only some."""
    count = sum(letter in letters for letter in classes)
    return None if 0 < count < len(classes) else count > 0


def _gather_rows(
    x: _Operand, other: Tensor, labels: str, shared: list[str], rest: list[str]
) -> Tensor:
    """Return the entries of a tensor at the ids along its class axes: (*batch, K, *rest)."""
    order = [labels.index(letter) for letter in (*shared, *x.classes, *rest)]
    other = permute(other, order)
    ids, rest_sizes = x.ids, other.shape[len(order) - len(rest) :]
    if len(x.classes) > 1:
        other = other.flatten(len(shared), len(shared) + len(x.classes) - 1)
    if shared == x.batch and not rest:
        return gather_along(other, other.ndim - 1, ids)
    for i, letter in enumerate(shared):  # convert the ids to row numbers in the flattened tensor
        size = x.sizes[letter]
        shape = [1] * ids.ndim
        shape[x.batch.index(letter)] = size
        step = math.prod(other.shape[i + 1 : len(shared) + 1])
        ids = ids + step * torch.arange(size, device=ids.device).reshape(shape)
    width = math.prod(rest_sizes)
    if not shared and len(rest) == 1:
        return look_up(other, ids)
    return look_up(other.reshape(-1, width), ids).reshape(*ids.shape, *rest_sizes)


def _sum_to(values: Tensor, labels: list[str], output: str) -> Tensor:
    """Sum over the axes that are not in the output, and reorder the others."""
    summed = [i for i, letter in enumerate(labels) if letter not in output]
    if summed:
        values = values.sum(summed)
    kept = [letter for letter in labels if letter in output]
    return values.permute([kept.index(letter) for letter in output]).contiguous()


def _scatter(
    x: _Operand, values: Tensor, rest: list[str], sizes: dict[str, int], output: str
) -> Tensor:
    """Add values, (*batch or 1, K or 1, *rest), to the classes that the ids select."""
    kept = [letter for letter in x.batch if letter in output]
    reduced = [letter for letter in x.batch if letter not in output]
    count, batch_count = len(kept), len(x.batch)
    order = [x.batch.index(letter) for letter in (*kept, *reduced)]
    ids = _permute(x.ids, [*order, batch_count])
    values = _permute(values, [*order, *range(batch_count, values.ndim)])
    rest_sizes = values.shape[batch_count + 1 :]
    sizes_of_values = (*ids.shape, *rest_sizes)
    if values.shape != sizes_of_values:
        values = values.expand(sizes_of_values)
    kept_sizes = ids.shape[:count]
    groups, width = math.prod(kept_sizes), math.prod(rest_sizes)
    if groups > 1:
        first = torch.arange(groups, device=ids.device) * x.width
        ids = ids + first.reshape(*kept_sizes, *(1,) * (ids.ndim - count))
    class_sizes = [x.sizes[letter] for letter in x.classes]
    if rest and output == "".join((*rest, *x.classes)):
        # Add columns, because rows would have to be transposed afterward.
        columns = scatter_columns(ids.reshape(-1), values.reshape(-1, width), x.width)
        return columns.reshape(*rest_sizes, *class_sizes)
    rows = scatter_rows(ids.reshape(-1), values.reshape(-1, width), groups * x.width)
    result_sizes = (*kept_sizes, *class_sizes, *rest_sizes)
    result = rows if rows.shape == result_sizes else rows.reshape(result_sizes)
    labels = [*kept, *x.classes, *rest]
    return _permute(result, [labels.index(letter) for letter in output]).contiguous()


def _permute(t: Tensor, order: list[int]) -> Tensor:
    """Permute the axes, without the cost of a view for autograd if they are already in order."""
    return t if order == sorted(order) else t.permute(order)


def _contract_one_hots(x: _Operand, other: _Operand, output: str) -> Any:
    """Contract two one-hots."""
    dtype = x.x.cached_dtype
    batch = [*x.batch, *(letter for letter in other.batch if letter not in x.batch)]
    if set(x.classes) & set(other.batch) or set(other.classes) & set(x.batch):
        return NotImplemented
    ids, weights = _aligned(x, batch, dtype)
    other_ids, other_weights = _aligned(other, batch, dtype)
    pairs = ids.shape[-1] * other_ids.shape[-1]
    if pairs > MAX_PAIRS:
        return NotImplemented
    if x.classes == other.classes:
        if _has_all(x.classes, output) is not False:
            return NotImplemented
        found = gather_from_field(Field(other_ids, other_weights, other.width), 0, ids, dtype)
        values = (weights * found).sum(-1, dtype=dtype)
        return _sum_to(values, batch, output)
    both = [*x.classes, *other.classes]
    if len(set(both)) < len(both) or _has_all(both, output) is not True:
        return NotImplemented
    sizes = x.sizes | other.sizes
    shape = [sizes[letter] for letter in batch]
    pair_ids = ids.unsqueeze(-1) * other.width + other_ids.unsqueeze(-2)
    pair = _Operand.__new__(_Operand)
    pair.batch, pair.classes, pair.sizes = batch, both, sizes
    pair.width = x.width * other.width
    pair.ids = pair_ids.expand(*shape, *pair_ids.shape[-2:]).flatten(-2)
    is_short = ids.is_cpu and pair.width <= 4 * pair.ids.numel() and not is_transforming()
    are_ones = x.weights is None and other.weights is None
    if is_short and are_ones and not set(batch) & set(output):
        counts = pair.ids.reshape(-1).bincount(minlength=pair.width).to(dtype)
        order = [both.index(letter) for letter in output]
        return counts.reshape([sizes[letter] for letter in both]).permute(order).contiguous()
    products = weights.unsqueeze(-1) * other_weights.unsqueeze(-2)
    values = products.expand(*shape, *products.shape[-2:]).flatten(-2)
    if _has_all(batch, output):
        return _weighted(pair, values, dtype, output)
    return _scatter(pair, values, [], sizes, output)


def _aligned(x: _Operand, batch: list[str], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return the ids and weights, with an axis of size 1 for each missing batch axis."""
    weights = torch.ones_like(x.ids, dtype=dtype) if x.weights is None else x.weights
    order = [x.batch.index(letter) for letter in batch if letter in x.batch]
    result = []
    for t in (x.ids, weights):
        t = t.permute(*order, len(order))
        for i, letter in enumerate(batch):
            if letter not in x.batch:
                t = t.unsqueeze(i)
        result.append(t)
    return result[0], result[1]


def is_strided(t: Tensor) -> bool:
    """Return whether the tensor is a one-hot, or is neither sparse nor nested."""
    return isinstance(t, OneHot) or (t.layout == torch.strided and not t.is_nested)
