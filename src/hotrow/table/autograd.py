"""Autograd functions for lookups, whose gradient is a `RowGradient`.

This module also counts the references to a tensor's storage. The counts show whether other code can
still write to a gradient.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.batch import DistinctIds
from hotrow.kernels.grouping import find_distinct
from hotrow.table.gradient import RowGradient


def storage_use_count(tensor: Tensor) -> int:
    """Count the tensors, numpy arrays and storage objects that refer to a tensor's storage.

    Returns `sys.maxsize` for storage that is shared with another process.
    """
    if tensor.untyped_storage().is_shared():
        return sys.maxsize
    return _raw_use_count(tensor) - _OWN_USE_COUNT


def _raw_use_count(tensor: Tensor) -> int:
    """Return the use count, including the references that this function itself creates."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


# The number of references that counting itself creates; Python 3.14 creates fewer than 3.13.
_OWN_USE_COUNT = _raw_use_count(torch.empty(1, device="cpu")) - 1


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return a copy of the tensor with these strides, or the tensor if it already has them."""
    if tensor.layout != torch.strided or tensor.stride() == strides:
        return tensor
    values = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return values.copy_(tensor.detach())


def set_strides(tensor: Tensor, strides: tuple[int, ...], force: bool = False) -> None:
    """Change the strides in place; without `force`, only if nothing else uses the storage."""
    ordered = with_strides(tensor, strides)
    if ordered is not tensor and (force or storage_use_count(tensor) == 1):
        tensor.data = ordered


def row_gradient(
    ids: Tensor,
    gradient: Tensor,
    shape: Sequence[int],
    padding_idx: int,
    scale_by_frequency: bool,
    columns: bool,
    distinct_ids: DistinctIds | None = None,
) -> RowGradient:
    """Return the row gradient of a lookup, without copying the ids or the rows.

    Arguments:
        ids: (N,) int64.
        gradient: the gradient of the lookup's output, (..., D), N rows in all.
        shape: the table's shape.
        padding_idx: an id without a gradient; -1 for none.
        scale_by_frequency: whether to divide each row by the number of times its id occurs.
        columns: whether ids select columns.
        distinct_ids: the distinct ids in `ids`, if already computed.
    """
    rows = gradient.reshape(len(ids), shape[0 if columns else 1])
    if scale_by_frequency:
        distinct_ids = distinct_ids or find_distinct(ids, shape[1 if columns else 0])
        rows = rows / _frequencies(distinct_ids)
    if padding_idx >= 0:
        indices = (ids != padding_idx).nonzero()[:, 0]
        ids, rows, distinct_ids = ids[indices], rows[indices], None
    return RowGradient(ids, rows, shape, distinct_ids=distinct_ids, columns=columns)


def _frequencies(ids: DistinctIds) -> Tensor:
    """Return how often each id occurs, (N, 1)."""
    inverse = ids.inverse.reshape(-1)
    return inverse.bincount()[inverse].unsqueeze(-1)


class _DifferentiableRowGradient(torch.autograd.Function):
    """Return a lookup's row gradient for a second differentiation, with `create_graph=True`."""

    @staticmethod
    def forward(
        ctx: Any,
        gradient: Tensor,
        ids: Tensor,
        shape: Sequence[int],
        padding_idx: int,
        scale_by_frequency: bool,
        columns: bool,
    ) -> Tensor:
        """Return the gradient, with a copy of the rows."""
        ctx.save_for_backward(ids)
        ctx.shape, ctx.table_shape = gradient.shape, shape
        ctx.options = padding_idx, scale_by_frequency, columns
        return row_gradient(ids, gradient.clone(), shape, *ctx.options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the rows of `gradient`, a gradient with respect to the row gradient."""
        (ids,), (padding_idx, scale_by_frequency, columns) = ctx.saved_tensors, ctx.options
        rows = F.embedding(ids, gradient.t() if columns else gradient)
        if scale_by_frequency:
            rows = rows / _frequencies(find_distinct(ids, ctx.table_shape[1 if columns else 0]))
        if padding_idx >= 0:
            rows = rows * (ids != padding_idx).unsqueeze(-1)
        return rows.reshape(ctx.shape), None, None, None, None, None


def _needs_graph(gradient: Tensor) -> bool:
    """Return whether autograd records the backward pass, because of `create_graph=True`."""
    return torch.is_grad_enabled() and gradient.requires_grad


class LookUp(torch.autograd.Function):
    """Look up rows, or columns if `columns` is true, with a `RowGradient` as the gradient."""

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        distinct_ids: DistinctIds | None,  # the distinct ids in `ids`, if already computed
        read: Callable[[], Tensor],
        padding_idx: int,
        scale_by_frequency: bool,
        columns: bool,
    ) -> Tensor:
        """Return the result of `read`, (..., D)."""
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:  # copy, because the caller may write the next batch to `ids`
            ctx.save_for_backward(ids.to(torch.int64, copy=True))
        ctx.shape, ctx.distinct_ids, ctx.columns = table.shape, distinct_ids, columns
        ctx.padding_idx, ctx.scale_by_frequency = padding_idx, scale_by_frequency
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a row gradient that assigns one row of `gradient` to each id."""
        if gradient is None:
            return (None,) * 7
        ids, distinct_ids = ctx.saved_tensors[0].reshape(-1), ctx.distinct_ids
        options = ctx.shape, ctx.padding_idx, ctx.scale_by_frequency, ctx.columns
        if _needs_graph(gradient):
            result = _DifferentiableRowGradient.apply(gradient, ids, *options)  # type: ignore[no-untyped-call]
            return result, None, None, None, None, None, None
        reference_counts = (
            sys.getrefcount(gradient),
            gradient._use_count(),  # type: ignore[attr-defined]
            storage_use_count(gradient),
        )
        if not _engine_reference_counts:
            _engine_reference_counts.append(reference_counts)
        is_exclusive = all(map(operator.le, reference_counts, _engine_reference_counts[0]))
        result = row_gradient(ids, gradient, *options, distinct_ids)
        # If other code holds `gradient`, sum the rows before that code can change them.
        return result if is_exclusive else result.merge(), None, None, None, None, None, None


# The number of references to a gradient in `LookUp.backward` if only the autograd engine uses it.
# The counts are for the Python object, the tensor and the storage.
_engine_reference_counts: list[tuple[int, int, int]] = []


@torch.enable_grad()
def measure_engine_references() -> None:
    """Measure the reference counts of a gradient to which only the autograd engine refers."""
    if not _engine_reference_counts:
        table, ids = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, dtype=torch.int64)
        read = functools.partial(F.embedding, ids, table)
        output: Tensor = LookUp.apply(table, ids, None, read, -1, False, False)  # type: ignore[no-untyped-call]
        output.mul(1).sum().backward()  # type: ignore[no-untyped-call]


class SelectRows(torch.autograd.Function):
    """Select distinct rows, or columns if `columns` is true, with a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, rows: Tensor, read: Callable[[], Tensor], columns: bool
    ) -> Tensor:
        """Return the result of `read`, (R, D)."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        ctx.shape, ctx.columns = table.shape, columns
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a row gradient with the rows of `gradient`, whose ids are distinct."""
        if gradient is None:
            return (None,) * 4
        (rows,) = ctx.saved_tensors
        if _needs_graph(gradient):
            options = ctx.shape, -1, False, ctx.columns
            result = _DifferentiableRowGradient.apply(gradient, rows, *options)  # type: ignore[no-untyped-call]
            return result, None, None, None
        result = RowGradient(rows, gradient.clone(), ctx.shape, True, columns=ctx.columns)
        return result, None, None, None
