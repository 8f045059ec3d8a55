"""Look-ups in any tensor: of rows or columns, one by one or in bags."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.kernels.tracing import is_compiling
from hotrow.table.functional import embedding, embedding_bag
from hotrow.table.parameter import Table, can_look_up_rows, needs_gradient

# A plain parameter that is looked up becomes a table if it has as many entries; for a smaller one
# a dense step is about as fast.
MIN_TABLE_ENTRIES = 1 << 20


def look_up(weight: Tensor, ids: Tensor, columns: bool = False) -> Tensor:
    """weight[ids], or with `columns` weight[:, ids] with its first dimension last.

    A table gets a gradient of the touched rows, any other tensor a dense one. A large plain
    parameter gets the attribute `lookup_axis`, so that `hotrow.optim` can make it a table.

    Arguments:
        weight: (V, D), of any dtype; (D, V) with `columns`.
        ids: int64 or int32, any shape, 0 .. V - 1.
        columns: whether ids select columns.

    Returns:
        (*ids.shape, D), differentiable in `weight`.
    """
    if can_look_up_rows(weight, columns):
        return embedding(ids, weight)
    _record_lookup_axis(weight, columns)
    return F.embedding(ids, weight.t() if columns else weight)


def look_up_bags(
    weight: Tensor, ids: Tensor, per_sample_weights: Tensor | None = None, columns: bool = False
) -> Tensor:
    """The sum of the rows that each bag of ids selects, weighted if there are weights.

    Arguments:
        weight: as for `look_up`.
        ids: (B, K), int64 or int32, 0 .. V - 1.
        per_sample_weights: (B, K).
        columns: as for `look_up`.

    Returns:
        (B, D), differentiable in `weight` and `per_sample_weights`.
    """
    scales = per_sample_weights
    same_dtype = scales is None or scales.dtype == weight.dtype
    # torch's own function does not support these.
    if not (same_dtype and weight.is_floating_point() and ids.shape[1]):
        rows = look_up(weight, ids, columns)
        rows = rows if scales is None else rows * scales.unsqueeze(-1)
        return rows.sum(1, dtype=rows.dtype)
    if can_look_up_rows(weight, columns):
        return embedding_bag(ids, weight, mode="sum", per_sample_weights=scales)
    _record_lookup_axis(weight, columns)
    table = weight.t() if columns else weight
    return F.embedding_bag(ids, table, mode="sum", per_sample_weights=scales)


def _is_trained(weight: Tensor) -> bool:
    return weight.is_floating_point() and needs_gradient(weight)


def _record_lookup_axis(weight: Tensor, columns: bool) -> None:
    """Set `lookup_axis` of a large plain parameter that is trained, before torch looks up in it."""
    if isinstance(weight, Table):
        weight.settle()  # a caller may have disabled `__torch_function__`, which settles
    elif is_compiling() or type(weight) is not nn.Parameter:
        pass
    elif weight.ndim == 2 and weight.numel() >= MIN_TABLE_ENTRIES and _is_trained(weight):
        weight.lookup_axis = "columns" if columns else "rows"  # type: ignore[attr-defined]
