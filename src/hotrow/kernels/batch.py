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
        rows: (R,) int64, the distinct ids, ascending.
        inverse: int64, the shape of the ids; `rows[inverse]` are the ids.
        order: (order, offsets), or None if not computed yet. The ids equal to `rows[s]` are at
            the batch positions `order[offsets[s] : offsets[s + 1]]`, ascending.
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
    """The gradients of a batch and their rows, before the gradients of each row are summed.

    Attributes:
        ids: the N ids of the batch.
        values: (N, D), the gradient of each id.
    """

    ids: DistinctIds
    values: Tensor
