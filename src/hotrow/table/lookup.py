"""Look up rows or columns of any tensor, one by one or in bags.

Layers and one-hots call these functions. The functions also mark each large plain parameter, so
that it becomes a table after the next optimizer step.
"""

from __future__ import annotations

from typing import Any, TypeGuard

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.kernels.tracing import is_compiling, is_jit_tracing, is_transforming
from hotrow.table.functional import embedding, embedding_bag
from hotrow.table.index_add import index_add
from hotrow.table.parameter import Table, can_look_up_rows, find_taken_name, needs_gradient

# A plain parameter with at least this many entries becomes a table after its first lookup and the
# next optimizer step. For smaller parameters, a dense step is about as fast.
MIN_TABLE_ENTRIES = 1 << 20


def look_up(weight: Tensor, ids: Tensor, columns: bool = False) -> Tensor:
    """Return `weight[ids]` or, with `columns`, `weight[:, ids]` with the first axis moved last.

    A table's gradient stores only the touched rows; any other tensor gets a dense gradient. The
    function also sets `lookup_axis` on a large plain parameter, so that `hotrow.optim` converts the
    parameter to a table.

    Arguments:
        weight: (V, D), any dtype; (D, V) with `columns`.
        ids: int64 or int32, any shape, from 0 to V - 1.
        columns: whether ids select columns.

    Returns:
        (*ids.shape, D), differentiable with respect to `weight`.
    """
    if _is_lookup_table(weight, columns):
        return embedding(ids, weight)
    _record_lookup_axis(weight, columns)
    if not _can_select(weight, ids):
        return F.embedding(ids, permute(weight, [1, 0]) if columns else weight)
    # The backward pass computes the same sums in the same order as that of F.embedding. It is
    # faster, and the gradient has the same strides as the weight.
    flat = ids.reshape(-1).long()  # the backward pass is slow for int32
    if _is_transposed(weight):
        weight, columns = weight.t(), not columns
    rows = weight.index_select(1, flat).t() if columns else weight.index_select(0, flat)
    return rows.contiguous().view(*ids.shape, rows.shape[1])


def look_up_bags(
    weight: Tensor, ids: Tensor, per_sample_weights: Tensor | None = None, columns: bool = False
) -> Tensor:
    """For each bag of ids, return the sum or the weighted sum of the selected rows.

    Arguments:
        weight: see `look_up`.
        ids: (B, K), int64 or int32, from 0 to V - 1.
        per_sample_weights: (B, K), the weight of each id. If None, all weights are 1.
        columns: see `look_up`.

    Returns:
        (B, D), differentiable with respect to `weight` and `per_sample_weights`.
    """
    scales = per_sample_weights
    same_dtype = scales is None or scales.dtype == weight.dtype
    # torch's embedding_bag does not support mixed or integer dtypes, empty bags, forward mode, or
    # second derivatives with respect to the weights of the ids.
    has_plain_weights = scales is None or not scales.requires_grad or isinstance(weight, Table)
    supported = same_dtype and weight.is_floating_point() and has_plain_weights
    if not (supported and ids.shape[1]) or is_transforming():
        rows = look_up(weight, ids, columns)
        rows = rows if scales is None else rows * scales.unsqueeze(-1)
        return rows.sum(1, dtype=rows.dtype)
    if _is_lookup_table(weight, columns):
        return embedding_bag(ids, weight, mode="sum", per_sample_weights=scales)
    _record_lookup_axis(weight, columns)
    table = permute(weight, [1, 0]) if columns else weight
    only_table = table.requires_grad and (scales is None or not scales.requires_grad)
    if is_compiling() or not (only_table and torch.is_grad_enabled()):
        return F.embedding_bag(ids, table, mode="sum", per_sample_weights=scales)
    by_columns = _is_transposed(table)
    result: Tensor = _Bags.apply(table, ids, scales, by_columns)  # type: ignore[no-untyped-call]
    return result


def _is_lookup_table(weight: Tensor, columns: bool) -> TypeGuard[Table]:
    """Return whether to look up rows of a table; raise an error if this rank has only some rows.

    The ids select rows of the matrix that this rank stores, but a lookup would use all ranks' rows.
    """
    if not can_look_up_rows(weight, columns):
        return False
    if weight.shards is not None and weight.shards.rows != weight.shape[1 if columns else 0]:
        raise HotrowError(
            "a one-hot cannot be multiplied by a sharded table, because each rank stores only some "
            "of its rows",
            fix="call the embedding layer, or torch.nn.functional.embedding(ids, weight)",
        )
    return True


class _Permute(torch.autograd.Function):
    """Permute the axes of a weight; its gradient is contiguous, as that of a dense product."""

    @staticmethod
    def forward(ctx: Any, weight: Tensor, order: list[int]) -> Tensor:
        ctx.order = order
        return weight.permute(order)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        inverse = [ctx.order.index(axis) for axis in range(len(ctx.order))]
        return gradient.permute(inverse).contiguous(), None


def permute(weight: Tensor, order: list[int]) -> Tensor:
    """Return `weight.permute(order)`; the gradient of a contiguous weight is contiguous.

    On the CPU, torch's fused optimizers need a gradient in the memory order of its parameter.
    """
    moves = not isinstance(weight, Table) and weight.is_contiguous() and order != sorted(order)
    if not (moves and needs_gradient(weight)) or is_transforming() or is_jit_tracing():
        return weight.permute(order)
    result: Tensor = _Permute.apply(weight, order)  # type: ignore[no-untyped-call]
    return result


class _Bags(torch.autograd.Function):
    """torch's embedding_bag, but with second derivatives and a faster backward pass on the CPU.

    With `columns`, the gradient is stored by columns, in the memory order of the table.
    """

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, scales: Tensor | None, columns: bool
    ) -> Tensor:
        flat = None if scales is None else _flatten(scales)
        starts = torch.arange(0, ids.numel(), ids.shape[1], dtype=ids.dtype, device=ids.device)
        sums, *saved = torch.ops.aten._embedding_bag(
            table, _flatten(ids), starts, per_sample_weights=flat
        )
        ctx.save_for_backward(ids, scales, starts, *saved)
        ctx.count, ctx.columns = len(table), columns
        result: Tensor = sums
        return result

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None, None]:
        ids, scales, *saved = ctx.saved_tensors
        if not (torch.is_grad_enabled() or _can_select(gradient, ids)):
            dense: Tensor = torch.ops.aten._embedding_bag_backward(
                gradient, _flatten(ids), *saved, ctx.count, False, 0, False,
                None if scales is None else _flatten(scales),
            )  # fmt: skip
            return dense, None, None, None
        rows = gradient.unsqueeze(1).expand(*ids.shape, -1)
        rows = rows if scales is None else rows * scales.unsqueeze(-1)
        rows = rows.reshape(ids.numel(), gradient.shape[1])  # -1 refuses 0 columns
        axis, rows = (1, rows.t()) if ctx.columns else (0, rows)
        sizes = list(rows.shape)
        sizes[axis] = ctx.count
        # Use int64 ids, because index_add_ is slow for int32.
        total = index_add(ids.reshape(-1).long(), rows, axis, tuple(sizes))
        return total.t() if ctx.columns else total, None, None, None


def _flatten(tensor: Tensor) -> Tensor:
    """Return a contiguous 1-D tensor; torch's kernels read other strides as contiguous memory."""
    return tensor.reshape(-1).contiguous()


def _can_select(weight: Tensor, ids: Tensor) -> bool:
    """Return whether `index_select` adds up the gradients of equal ids in the order of the ids.

    On a GPU, it adds them in any order. In low precision, it rounds the sums differently.
    """
    is_plain = type(weight) in (Tensor, nn.Parameter) and type(ids) is Tensor
    return is_plain and weight.ndim == 2 and weight.is_cpu and weight.dtype in _SELECTED


_SELECTED = torch.float32, torch.float64


def _is_transposed(weight: Tensor) -> bool:
    """Return whether the columns are contiguous in memory, as in the result of `t()`."""
    return not weight.is_contiguous() and weight.t().is_contiguous()


def _is_trained(weight: Tensor) -> bool:
    return weight.is_floating_point() and needs_gradient(weight)


def _record_lookup_axis(weight: Tensor, columns: bool) -> None:
    """Set `lookup_axis` on a large trainable parameter; if `weight` is a table, settle it."""
    if isinstance(weight, Table):
        weight.settle()  # `__torch_function__` also settles rows, but a caller may have disabled it
    elif is_compiling() or type(weight) is not nn.Parameter:
        pass
    elif (
        weight.ndim == 2
        and weight.numel() >= MIN_TABLE_ENTRIES
        and _is_trained(weight)
        and find_taken_name(weight) is None
    ):
        weight.lookup_axis = "columns" if columns else "rows"  # type: ignore[attr-defined]
