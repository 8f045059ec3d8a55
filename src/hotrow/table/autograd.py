"""What autograd makes of a look-up: a gradient of the rows that it touched; and their memory."""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.grouping import Places, distinct
from hotrow.table.gradient import RowGradient


def uses(tensor: Tensor) -> int:
    """How many hold the storage of a tensor: tensors, arrays of numpy, the storage's own object.

    Storage that another process shares is held by more than can be counted.
    """
    return sys.maxsize if tensor.untyped_storage().is_shared() else _count(tensor) - _OTHERS


def _count(tensor: Tensor) -> int:
    """The holders, and the object that is made here with the references to it."""
    storage = tensor.untyped_storage()
    return torch._C._storage_Use_Count(storage._cdata) + sys.getrefcount(storage)


_OTHERS = _count(torch.empty(1, device="cpu")) - 1  # in Python 3.14 fewer than before


def in_order(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """The tensor with its values in memory in this order; itself where they are."""
    if tensor.layout != torch.strided or tensor.stride() == strides:
        return tensor
    values = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return values.copy_(tensor.detach())


def put_in_order(tensor: Tensor, strides: tuple[int, ...], held: bool = False) -> None:
    """`in_order`, in place, unless someone else holds the memory; `held`, even then."""
    ordered = in_order(tensor, strides)
    if ordered is not tensor and (held or uses(tensor) == 1):
        tensor.data = ordered


class LookUp(torch.autograd.Function):
    """table[ids], or its columns, whose gradient is a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        at: Places | None,  # of the ids, if they are known
        read: Callable[[], Tensor],
        padding_idx: int,
        by_frequency: bool,
        columns: bool,
    ) -> Tensor:
        """(..., D), what `read` gives."""
        ctx.set_materialize_grads(False)
        if ctx.needs_input_grad[0]:  # the caller may fill the same ids with the next batch
            ctx.save_for_backward(ids.to(torch.int64, copy=True))
        ctx.shape, ctx.at, ctx.columns = table.shape, at, columns
        ctx.padding_idx, ctx.by_frequency = padding_idx, by_frequency
        return read()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """The rows of `gradient`, one for each id."""
        if gradient is None:
            return (None,) * 7
        ids, at = ctx.saved_tensors[0].reshape(-1), ctx.at
        holders = sys.getrefcount(gradient), gradient._use_count(), uses(gradient)  # type: ignore[attr-defined]
        if not _engines_own:
            _engines_own.append(holders)
        mine = all(map(operator.le, holders, _engines_own[0]))
        rows = gradient.reshape(len(ids), ctx.shape[0 if ctx.columns else 1])
        if ctx.by_frequency:
            at = at or distinct(ids, ctx.shape[0])
            places = at.places.reshape(-1)
            rows = rows / places.bincount()[places].unsqueeze(-1)
        if ctx.padding_idx >= 0:
            kept = (ids != ctx.padding_idx).nonzero()[:, 0]
            ids, rows, at = ids[kept], rows[kept], None
        found = RowGradient(ids, rows, ctx.shape, at=at, columns=ctx.columns)
        # Someone else may write into it before the step: then it is added up now.
        return found if mine else found.merge(), None, None, None, None, None, None


# How many hold a gradient in `LookUp.backward` if nobody but the engine does: its Python object,
# the tensor, the storage.
_engines_own: list[tuple[int, int, int]] = []


@torch.enable_grad()
def learn_engines_own() -> None:
    """Find out how many hold a gradient that only the engine does."""
    if not _engines_own:
        table, ids = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, dtype=torch.int64)
        read = functools.partial(F.embedding, ids, table)
        found: Tensor = LookUp.apply(table, ids, None, read, -1, False, False)  # type: ignore[no-untyped-call]
        found.mul(1).sum().backward()  # type: ignore[no-untyped-call]


class Rows(torch.autograd.Function):
    """table[rows] of distinct rows, or its columns, whose gradient is a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, rows: Tensor, read: Callable[[], Tensor], columns: bool
    ) -> Tensor:
        """(R, D), what `read` gives."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        ctx.shape, ctx.columns = table.shape, columns
        return read()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """The rows of `gradient`, which are distinct."""
        if gradient is None:
            return (None,) * 4
        (rows,) = ctx.saved_tensors
        found = RowGradient(rows, gradient.clone(), ctx.shape, True, columns=ctx.columns)
        return found, None, None, None
