"""The ids and the gradients of a batch, grouped by row."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class BatchArrays(NamedTuple):
    """The distinct ids of a batch as numpy arrays.

    Attributes:
        rows: (R,) int64, the distinct ids.
        inverse: (N,) int64, the position of each id of the batch among `rows`.
        order: (N,) int64; `order[offsets[s] : offsets[s + 1]]` lists the batch positions of the id
            `rows[s]` in ascending order.
        offsets: (R + 1,) int64.
    """

    rows: NDArray[np.int64]
    inverse: NDArray[np.int64]
    order: NDArray[np.int64]
    offsets: NDArray[np.int64]


class DistinctIds:
    """The distinct ids of a batch, and the position of each id among them.

    Arguments:
        rows: (R,) int64, the distinct ids, in any order.
        inverse: int64, same shape as the batch; `rows[inverse]` equals the batch.
        are_in_range: whether each id selects a row of the table.
    """

    def __init__(self, rows: Tensor, inverse: Tensor, are_in_range: bool = True) -> None:
        self.rows, self.inverse = rows, inverse
        self.shape, self.are_in_range = inverse.shape, are_in_range

    @classmethod
    def from_arrays(
        cls, arrays: BatchArrays, shape: torch.Size, are_in_range: bool = True
    ) -> DistinctIds:
        """Return the distinct ids of a batch of this shape."""
        result = cls.__new__(cls)
        result.arrays, result.shape, result.are_in_range = arrays, shape, are_in_range
        return result

    # Creating tensors takes longer than a kernel for a small batch, so create them when needed.

    @functools.cached_property
    def rows(self) -> Tensor:
        """(R,) int64, the distinct ids."""
        return torch.from_numpy(self.arrays.rows)

    @functools.cached_property
    def inverse(self) -> Tensor:
        """int64, the position of each id of the batch among `rows`."""
        return torch.from_numpy(self.arrays.inverse.reshape(self.shape))

    @functools.cached_property
    def arrays(self) -> BatchArrays:
        """The same ids as numpy arrays, with the batch positions grouped by id."""
        rows, inverse = self.rows.numpy(), self.inverse.reshape(-1).numpy()
        order = np.argsort(inverse, stable=True)
        offsets = np.zeros(len(rows) + 1, np.int64)
        np.cumsum(np.bincount(inverse, minlength=len(rows)), out=offsets[1:])
        return BatchArrays(rows, inverse, order, offsets)

    def sort(self) -> tuple[Tensor, Tensor]:
        """Return `rows` in ascending order, and `inverse` for this order."""
        rows, places = self.rows.sort()
        ranks = torch.empty_like(places)
        ranks[places] = torch.arange(len(places), device=places.device)
        return rows, ranks[self.inverse]

    def ids(self) -> Tensor:
        """Return the batch, (N,) int64."""
        if "arrays" in self.__dict__:
            return torch.from_numpy(self.arrays.rows[self.arrays.inverse])
        return self.rows[self.inverse.reshape(-1)]


@dataclass(frozen=True)
class GroupedGradients:
    """The gradients of a batch with their ids, before the gradients of each row are summed.

    Attributes:
        ids: the N ids of the batch.
        values: (N, D), one gradient per id.
    """

    ids: DistinctIds
    values: Tensor
