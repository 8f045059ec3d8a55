"""The sizes from which the ids of a one-hot are faster than its dense tensor.

The limits apply only to the one-hots that a converted model creates.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.parts import DenseColumns, Field
from hotrow.onehot.tensor import OneHot

# For lookups to be faster than torch, a one-hot must have at least `min_entries` entries. These
# multiples of `min_entries` are the limits for sums of rows by id and for all other operations.
SCATTER_SIZE, OTHER_SIZE = 10, 30
# The time to select one row or one entry, relative to torch's time for a one-hot of 100,000
# entries.
ROW_COST, ENTRY_COST = 48e-5, 8e-5
# Several ids per row take longer: the limit and the cost per id. With dense columns, a product is
# computed in addition to the lookup.
BAG_SIZE, BAG_COST = 2, 80e-5
_DENSE_COLUMNS_SIZE = 3


def is_too_small(x: OneHot) -> bool:
    """Return whether a converted model created `x`, and torch's operations are just as fast.

    The size limit for products is lower; see `is_too_small_to_look_up`.
    """
    return _is_small(x, OTHER_SIZE, ENTRY_COST)


def is_too_small_to_look_up(x: OneHot) -> bool:
    """Return whether a converted model created `x`, and torch's product is just as fast."""
    creation_cost = min((origin.creation_cost for origin in x.origins), default=1)
    if any(isinstance(part, Field) and part.ids.shape[-1] > 1 for part in x.current_parts):
        return _is_small(x, BAG_SIZE * creation_cost, BAG_COST * creation_cost)
    has_columns = any(isinstance(part, DenseColumns) for part in x.current_parts)
    size = _DENSE_COLUMNS_SIZE if has_columns else 1
    return _is_small(x, size * creation_cost, ROW_COST * creation_cost)


def is_too_small_to_scatter(x: OneHot) -> bool:
    """Like `is_too_small_to_look_up`, but for products that add up rows by id."""
    return _is_small(x, SCATTER_SIZE, ROW_COST)


def _is_small(x: OneHot, size: int, id_cost: float) -> bool:
    if not x.origins or is_compiling():
        return False
    min_entries: int = min(origin.min_entries for origin in x.origins)
    ids = sum(part.ids.numel() for part in x.current_parts if isinstance(part, Field))
    if x.entries >= min_entries * (size + id_cost * ids):
        return False
    for origin in x.origins:
        origin.record_small_size(x.entries, ids, min_entries * size, min_entries * id_cost)
    return True


def record_use(x: OneHot, func: Any) -> None:
    """Record for the report that `func` was computed from the ids of `x`."""
    for origin in x.origins:
        origin.record_use(func, x.entries, x.entries > 0 and not is_too_small(x))
