"""The compiled half of `grouping.py`."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import numpy as np
from numba import njit

from hotrow.kernels.driver import AHEAD, fetch
from hotrow.kernels.pool import GRAIN
from hotrow.kernels.scalars import take


@njit(cache=True, nogil=True)
def distinct(ids, head):
    """The distinct ids in order of appearance, each marked in `head`."""
    found = np.empty(len(ids), np.int64)
    n = 0
    for i in ids:
        if head[i] < 0:
            head[i] = 0
            found[n] = i
            n += 1
    return found[:n]


@njit(cache=True, nogil=True)
def by_row(ids, rows, head):
    """The positions in the batch of each of `rows`, in batch order, one row after the other.

    Row s has `order[offsets[s] : offsets[s + 1]]`. Sets the marked entries of `head` to -1 again.
    """
    for slot, row in enumerate(rows):
        head[row] = slot
    offsets = np.zeros(len(rows) + 1, np.int64)
    for i in ids:
        offsets[head[i] + 1] += 1
    for slot in range(len(rows)):
        offsets[slot + 1] += offsets[slot]
    order = np.empty(len(ids), np.int64)
    free = offsets.copy()
    for position, i in enumerate(ids):
        slot = head[i]
        order[free[slot]] = position
        free[slot] += 1
    for row in rows:
        head[row] = -1
    return order, offsets


@njit(cache=True, nogil=True)
def sort_by_slot(inverse, counts):
    """As `by_row`, from what `torch.unique` returns."""
    offsets = np.zeros(len(counts) + 1, np.int64)
    for slot, count in enumerate(counts):
        offsets[slot + 1] = offsets[slot] + count
    order = np.empty(len(inverse), np.int64)
    free = offsets.copy()
    for position, slot in enumerate(inverse):
        order[free[slot]] = position
        free[slot] += 1
    return order, offsets


@njit(cache=True, nogil=True)
def add_up(grads, order, offsets, sums, taken):
    """The sum of every slot; each begins at 0, so that -0.0 becomes 0.0."""
    columns, count = grads.shape[1], len(sums)
    zero = grads.dtype.type(0)
    while True:
        start = take(taken, GRAIN)
        if start >= count:
            break
        stop = min(start + GRAIN, count)
        last = offsets[stop]
        for slot in range(start, stop):
            first = offsets[slot]
            if first + AHEAD < last:
                fetch(grads, order[first + AHEAD])
            for j in range(columns):
                sums[slot, j] = zero + grads[order[first], j]
            for k in range(first + 1, offsets[slot + 1]):
                if k + AHEAD < last:
                    fetch(grads, order[k + AHEAD])
                position = order[k]
                for j in range(columns):
                    sums[slot, j] += grads[position, j]
