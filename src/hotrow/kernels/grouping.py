"""Ids to distinct rows, and the gradients of a batch by row, added in batch order."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.cpu.threads import COMPILED, spread, threads_for

Order = tuple[NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True)
class Places:
    """The distinct ids of a batch, and where among them each id is.

    Attributes:
        rows: (R,) int64, the distinct ids, ascending.
        places: int64, of the shape of the ids: the place of each in `rows`.
        known: `order`, where it was found along with them.
    """

    rows: Tensor
    places: Tensor
    known: Order | None = None

    def within(self, rows: int) -> bool:
        """Whether all ids are in 0 .. rows - 1."""
        found = self.rows.numpy()
        return not len(found) or bool(found[0] >= 0 and found[-1] < rows)

    @functools.cached_property
    def order(self) -> Order:
        """(order, offsets): row s is at `order[offsets[s] : offsets[s + 1]]`, in batch order."""
        from hotrow.kernels.cpu import grouping as adding

        if self.known is not None:
            return self.known
        found: Order = adding.by_place(self.places.reshape(-1).numpy(), len(self.rows))
        return found


def distinct(ids: Tensor, rows: int) -> Places:
    """The distinct ids and the places of all.

    What `torch.unique(ids, return_inverse=True)` gives, without sorting more than those.

    Arguments:
        ids: int64 or int32, 0 .. rows - 1, any shape.
        rows: V, of the table.

    Of ids that are not in range, some may be others, but not `within` it.

    Time and memory follow the ids.
    """
    if ids.is_meta:  # only shapes: all may be distinct
        return Places(ids.long().reshape(-1), ids.long())
    bits = ids.numel().bit_length()  # of a number below that of the ids
    if ids.device.type != "cpu" or rows.bit_length() + bits > 63:
        return Places(*torch.unique(ids.long(), return_inverse=True))
    from hotrow.kernels.cpu import grouping as adding  # numba is imported with the first kernel

    given = ids.numpy()
    flat = np.ascontiguousarray(given.reshape(-1), np.int64)
    packed, numbers, counts = adding.distinct(flat, np.full(2 << bits, -1, np.int32), bits)
    found, places, *order = adding.placed(np.sort(packed), numbers, counts, bits)
    at = torch.from_numpy(places.reshape(given.shape))
    return Places(torch.from_numpy(found), at, tuple(order))


@dataclass(frozen=True)
class Grouped:
    """The gradients of a batch by the row that they belong to, not added up yet.

    Attributes:
        at: (N,) places of N ids.
        grads: (N, D), the gradient of each.
    """

    at: Places
    grads: Tensor

    def sums(self) -> Tensor:
        """(R, D), the sum of each row's gradients.

        Bit for bit the rows of `torch.nn.functional.embedding`'s dense gradient: the sum begins at
        0 and adds the gradients in batch order, each addition rounded to their dtype.
        """
        grads, count = self.grads, len(self.at.rows)
        sums: Tensor
        if not (grads.device.type == "cpu" and grads.dtype in COMPILED):
            # torch's own kernel, on as many rows as there are distinct ids.
            sums = torch.ops.aten.embedding_dense_backward(grads, self.at.places, count, -1, False)
            return sums
        from hotrow.kernels.cpu import grouping as adding  # numba is imported with the first kernel

        sums = torch.empty((count, grads.shape[1]), dtype=grads.dtype)
        given = grads.contiguous().numpy(), *self.at.order, sums.numpy()
        spread(adding.sum_all, given, threads_for(count, grads.shape[1]))
        return sums


def group(ids: Tensor, grads: Tensor, rows: int) -> Grouped:
    """The gradients (N, D) of the ids (N,) of a table of so many rows; cost as for `distinct`."""
    return Grouped(distinct(ids, rows), grads.detach())
