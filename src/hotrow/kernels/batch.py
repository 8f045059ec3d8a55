"""The ids and the gradients of a batch, grouped by row."""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


class GroupedIds(NamedTuple):
    """The ids of a batch and their positions, grouped by id, in one block of memory.

    Attributes:
        memory: (4 N + 1,) int64, the arrays that the properties return, one after another.
        address: the address of `memory`.
        size: N, the number of ids in the batch.
        distinct_count: R, the number of distinct ids.
    """

    memory: NDArray[np.int64]
    address: int
    size: int
    distinct_count: int

    @property
    def rows(self) -> NDArray[np.int64]:
        """(R,), the distinct ids."""
        return self.memory[: self.distinct_count]

    @property
    def inverse(self) -> NDArray[np.int64]:
        """(N,), the position in `rows` of each id of the batch."""
        return self.memory[self.size : 2 * self.size]

    @property
    def order(self) -> NDArray[np.int64]:
        """(N,), the positions in the batch, grouped by id.

        `order[offsets[s] : offsets[s + 1]]` lists the positions of the id `rows[s]` in ascending
        order.
        """
        return self.memory[2 * self.size : 3 * self.size]

    @property
    def offsets(self) -> NDArray[np.int64]:
        """(R + 1,), where the positions of each distinct id begin in `order`."""
        return self.memory[3 * self.size : 3 * self.size + self.distinct_count + 1]

    @classmethod
    def empty(cls, size: int, distinct_count: int) -> GroupedIds:
        """Allocate uninitialized memory for `size` ids, of which `distinct_count` are distinct."""
        memory = np.empty(4 * size + 1, np.int64)
        return cls(memory, memory.ctypes.data, size, distinct_count)


class DistinctIds:
    """The distinct ids of a batch, and each batch id's position among them.

    Arguments:
        rows: (R,) int64, the distinct ids, in any order.
        inverse: int64, same shape as the batch; `rows[inverse]` equals the batch.
        are_in_range: whether every id selects a row of the table. Ids that are not on the CPU are
            not checked, and this is True.
    """

    def __init__(self, rows: Tensor, inverse: Tensor, are_in_range: bool = True) -> None:
        self.rows, self.inverse = rows, inverse
        self.shape, self.are_in_range = inverse.shape, are_in_range

    @classmethod
    def from_groups(
        cls, groups: GroupedIds, shape: torch.Size, are_in_range: bool = True
    ) -> DistinctIds:
        """Return the distinct ids of a batch of this shape."""
        result = cls.__new__(cls)
        result.groups, result.shape, result.are_in_range = groups, shape, are_in_range
        return result

    # For a small batch, creating these tensors takes longer than running a kernel, so create them
    # only when they are needed.

    @functools.cached_property
    def rows(self) -> Tensor:
        """(R,) int64, the distinct ids."""
        return torch.from_numpy(self.groups.rows)

    @functools.cached_property
    def inverse(self) -> Tensor:
        """int64, the position in `rows` of each id of the batch."""
        return torch.from_numpy(self.groups.inverse.reshape(self.shape))

    @functools.cached_property
    def groups(self) -> GroupedIds:
        """The same ids, with their positions in the batch grouped by id."""
        rows, inverse = self.rows.numpy(), self.inverse.reshape(-1).numpy()
        groups = GroupedIds.empty(len(inverse), len(rows))
        groups.rows[:], groups.inverse[:] = rows, inverse
        groups.order[:] = np.argsort(inverse, stable=True)
        groups.offsets[0] = 0
        np.cumsum(np.bincount(inverse, minlength=len(rows)), out=groups.offsets[1:])
        return groups

    def sort(self) -> tuple[Tensor, Tensor]:
        """Return the sorted `rows`, and the `inverse` that matches them."""
        rows, places = self.rows.sort()
        ranks = torch.empty_like(places)
        ranks[places] = torch.arange(len(places), device=places.device)
        return rows, ranks[self.inverse]

    def ids(self) -> Tensor:
        """Return the ids of the batch, (N,) int64."""
        if "groups" in self.__dict__:
            return torch.from_numpy(self.groups.rows[self.groups.inverse])
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
