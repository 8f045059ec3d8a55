"""The look-up in any tensor: of rows, or of columns; of single ones, or of bags."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.compilation import is_compiling
from hotrow.table.functional import embedding, embedding_bag
from hotrow.table.parameter import Table, takes_rows, trains

WORTHWHILE = 1 << 20  # entries; of a smaller parameter, a dense step is about as quick


def look_up(weight: Tensor, ids: Tensor, columns: bool = False) -> Tensor:
    """weight[ids], or with `columns` weight[:, ids] with its first dimension last.

    A table of that kind gets a gradient of the touched rows, any other tensor a dense one. A plain
    parameter notes what ids select of it, in `looked_up`, for `hotrow.optim` to make it a table, if
    it is a large one.

    Arguments:
        weight: (V, D), of any dtype; (D, V) with `columns`.
        ids: int64 or int32, any shape, 0 .. V - 1.
        columns: whether ids select columns.

    Returns:
        (*ids.shape, D), differentiable in `weight`.
    """
    if takes_rows(weight, columns):
        return embedding(ids, weight)
    _note(weight, columns)
    return F.embedding(ids, weight.t() if columns else weight)


def look_up_bags(
    weight: Tensor, ids: Tensor, per_sample_weights: Tensor | None = None, columns: bool = False
) -> Tensor:
    """The sum of the rows that each bag of ids selects, each times its weight if there are some.

    Arguments:
        weight: as for `look_up`.
        ids: (B, K), int64 or int32, 0 .. V - 1.
        per_sample_weights: (B, K).
        columns: as for `look_up`.

    Returns:
        (B, D), differentiable in `weight` and `per_sample_weights`.
    """
    scales = per_sample_weights
    same = scales is None or scales.dtype == weight.dtype
    if not (same and weight.is_floating_point() and ids.shape[1]):  # torch's own refuses these
        rows = look_up(weight, ids, columns)
        rows = rows if scales is None else rows * scales.unsqueeze(-1)
        return rows.sum(1, dtype=rows.dtype)
    if takes_rows(weight, columns):
        return embedding_bag(ids, weight, mode="sum", per_sample_weights=scales)
    _note(weight, columns)
    table = weight.t() if columns else weight
    return F.embedding_bag(ids, table, mode="sum", per_sample_weights=scales)


def _learns(weight: Tensor) -> bool:
    return weight.is_floating_point() and trains(weight)


def _note(weight: Tensor, columns: bool) -> None:
    """How a plain parameter is used, before torch's own means look up in it."""
    if isinstance(weight, Table):
        weight.settle()  # where a caller has disabled `__torch_function__`, that does not
    elif is_compiling() or type(weight) is not nn.Parameter:
        pass
    elif weight.ndim == 2 and weight.numel() >= WORTHWHILE and _learns(weight):
        weight.looked_up = "columns" if columns else "rows"  # type: ignore[attr-defined]
