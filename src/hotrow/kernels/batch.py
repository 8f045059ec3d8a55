"""The ids and the gradients of a batch, by the rows that they belong to."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray
from torch import Tensor

BatchOrder = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class DistinctIds:
    """The distinct ids of a batch, and the index among them of each id.

    Attributes:
        rows: (R,) int64, the distinct ids, ascending.
        inverse: int64, of the shape of the ids: `rows[inverse]` are the ids.
        order: (order, offsets), where it is a by-product of finding the distinct ids. The ids equal
            to `rows[s]` are at `order[offsets[s] : offsets[s + 1]]`, positions in the batch in its
            order.
    """

    rows: Tensor
    inverse: Tensor
    order: BatchOrder | None = None

    def are_in_range(self, row_count: int) -> bool:
        """Whether all ids are in 0 .. row_count - 1."""
        rows = self.rows.numpy()
        return not len(rows) or bool(rows[0] >= 0 and rows[-1] < row_count)


@dataclass(frozen=True)
class GroupedGradients:
    """The gradients of a batch by the row that they belong to, not added up yet.

    Attributes:
        ids: the N ids of the batch.
        values: (N, D), the gradient of each.
    """

    ids: DistinctIds
    values: Tensor
