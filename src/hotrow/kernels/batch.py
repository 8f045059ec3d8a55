"""The ids and the gradients of a batch, grouped by row."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BatchOrder = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class DistinctIds:
    """The distinct ids of a batch, and the position of each id among them.

    Attributes:
        rows: (R,) int64, the distinct ids in ascending order.
        inverse: int64, same shape as the batch; `rows[inverse]` equals the batch.
        order: (order, offsets), or None if not computed yet. `order[offsets[s] : offsets[s + 1]]`
            lists the batch positions of the id `rows[s]` in ascending order.
    """

    rows: Tensor
    inverse: Tensor
    order: BatchOrder | None = None

    def are_in_range(self, row_count: int) -> bool:
        """Return whether all ids are between 0 and row_count - 1."""
        rows = self.rows.numpy()
        return not len(rows) or bool(rows[0] >= 0 and rows[-1] < row_count)


@dataclass(frozen=True)
class GroupedGradients:
    """The gradients of a batch with their ids, before the gradients of each row are summed.

    Attributes:
        ids: the N ids of the batch.
        values: (N, D), one gradient per id.
    """

    ids: DistinctIds
    values: Tensor
