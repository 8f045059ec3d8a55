"""Keep the ids of a batch on the device, so that the CPU does not wait for them."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

import torch
from torch import Tensor

from hotrow.kernels.batch import DistinctIds

CHUNK = 32  # the maximum number of gradients of one id that a program adds


class DeviceIds(DistinctIds):
    """The ids of a batch on a GPU, sorted only when a kernel needs their order.

    `original` is a weak reference to the caller's tensor, for error messages.

    An id of -1 selects no row: it stands for an out-of-range or excluded id. Reading `rows` or
    `inverse` waits for the device; the kernels don't use them.

    Arguments:
        flat: (N,) int32 or int64, the ids. The caller must not change them.
        shape: the shape of the batch.
        is_merged: whether every id except -1 occurs only once.
        source: the ids that the lookup checks and copies to `flat`, or None.
    """

    def __init__(
        self,
        flat: Tensor,
        shape: torch.Size,
        is_merged: bool = False,
        source: Tensor | None = None,
    ) -> None:
        self.flat, self.shape, self.is_merged, self.source = flat, shape, is_merged, source
        self.are_in_range = True  # the kernels check the range

    original: weakref.ref[Tensor] | None = None

    @classmethod
    def unchecked(cls, ids: Tensor, row_count: int) -> DeviceIds:
        """Return the ids of a lookup; the lookup's kernel checks and copies them."""
        source = ids.reshape(-1).contiguous()
        flat = torch.empty(len(source), dtype=id_dtype(row_count), device=ids.device)
        result = cls(flat, ids.shape, source=source)
        result.original = weakref.ref(ids)
        return result

    @classmethod
    def of(cls, batch: DistinctIds) -> DeviceIds:
        """Return the batch as `DeviceIds`."""
        return batch if isinstance(batch, cls) else cls(batch.ids(), batch.shape)

    @classmethod
    def copy(cls, ids: Tensor, row_count: int) -> DeviceIds:
        """Return a copy of these ids, in the smallest dtype for a table with `row_count` rows."""
        return cls(ids.reshape(-1).to(id_dtype(row_count), copy=True), ids.shape)

    @classmethod
    def join(cls, batches: Sequence[DeviceIds], row_count: int) -> DeviceIds:
        """Return the ids of n tables as one batch: id i of table k becomes i * n + k.

        Negative ids stay negative.

        Arguments:
            batches: the ids of each table.
            row_count: the number of rows of the largest table.
        """
        n = len(batches)
        dtype = id_dtype(row_count * n)
        ids = torch._foreach_mul([batch.flat.to(dtype) for batch in batches], n)
        torch._foreach_add_(ids, list(range(n)))
        flat = torch.cat(ids)
        return cls(flat, flat.shape, all(batch.is_merged for batch in batches))

    @functools.cached_property
    def sorted(self) -> tuple[Tensor, Tensor]:
        """The ids in ascending order, and their positions; equal ids stay in batch order.

        If the ids are merged, they are not sorted: each occurs only once, so the kernels never
        search for repeats.
        """
        if self.is_merged:
            return self.flat, torch.arange(len(self.flat), device=self.flat.device)
        ids, order = self.flat.sort(stable=True)
        return ids, order

    @functools.cached_property
    def rows(self) -> Tensor:
        """(R,) int64, the distinct ids in ascending order, without -1."""
        rows: Tensor = torch.unique(self.flat[self.flat >= 0])
        return rows.long()

    @functools.cached_property
    def inverse(self) -> Tensor:
        """int64, the position in `rows` of each id in the batch; -1 where the id is -1."""
        positions: Tensor = torch.searchsorted(self.rows, self.flat.long())
        positions = positions.masked_fill(self.flat < 0, -1)
        return positions.reshape(self.shape)

    def ids(self) -> Tensor:
        """Return the batch, (N,) int64."""
        return self.flat.long()

    def without(self, excluded: int) -> DeviceIds:
        """Return the batch with -1 instead of the excluded id."""
        flat = self.flat.masked_fill(self.flat == excluded, -1)
        return DeviceIds(flat, self.shape, self.is_merged)

    def frequencies(self) -> Tensor:
        """Return how often each id occurs, (N,)."""
        ids, _ = self.sorted
        end: Tensor = torch.searchsorted(ids, self.flat, right=True)
        return end - torch.searchsorted(ids, self.flat)


def id_dtype(row_count: int) -> torch.dtype:
    """Return the smallest dtype for the ids of a table; int32 ids sort twice as fast."""
    return torch.int32 if row_count < 2**31 else torch.int64
