"""Look up rows or columns of any tensor, one by one or in bags.

Layers and one-hots call these. A large plain parameter is marked here, and becomes a table after
the next optimizer step.
"""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.kernels.tracing import is_compiling
from hotrow.table.functional import embedding, embedding_bag
from hotrow.table.parameter import Table, can_look_up_rows, needs_gradient

# A plain parameter with at least this many entries becomes a table once it is looked up. For a
# smaller one, a dense step is about as fast.
MIN_TABLE_ENTRIES = 1 << 20


def look_up(weight: Tensor, ids: Tensor, columns: bool = False) -> Tensor:
    """Return weight[ids]; with `columns`, weight[:, ids] with the first dimension moved last.

    A table gets a gradient with only the touched rows, any other tensor a dense gradient. A large
    plain parameter gets the attribute `lookup_axis`, so that `hotrow.optim` makes it a table.

    Arguments:
        weight: (V, D), any dtype; (D, V) with `columns`.
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
    """Return the sum of the rows that each bag of ids selects, weighted if there are weights.

    Arguments:
        weight: as in `look_up`.
        ids: (B, K), int64 or int32, 0 .. V - 1.
        per_sample_weights: (B, K), the weight of each id; all 1 if None.
        columns: as in `look_up`.

    Returns:
        (B, D), differentiable in `weight` and `per_sample_weights`.
    """
    scales = per_sample_weights
    same_dtype = scales is None or scales.dtype == weight.dtype
    # torch's embedding_bag does not support other dtypes and empty bags.
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
    """Set `lookup_axis` on a large plain parameter that is trained; settle a table."""
    if isinstance(weight, Table):
        weight.settle()  # `__torch_function__` also settles, but a caller may have disabled it
    elif is_compiling() or type(weight) is not nn.Parameter:
        pass
    elif weight.ndim == 2 and weight.numel() >= MIN_TABLE_ENTRIES and _is_trained(weight):
        weight.lookup_axis = "columns" if columns else "rows"  # type: ignore[attr-defined]
