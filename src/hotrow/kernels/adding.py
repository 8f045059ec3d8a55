"""The compiled half of `grouping.py`."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import numpy as np
from numba import njit

from hotrow.kernels.access import AHEAD, fetch, number, plain
from hotrow.kernels.cache import cached
from hotrow.kernels.pool import GRAIN
from hotrow.kernels.scalars import OPTIONS, join, take


@cached
def distinct(ids, head):
    """The distinct ids in order of appearance, each marked in `head`."""
    found = np.empty(len(ids) + 1, np.int64)
    n = 0
    for i in ids:  # no branch, which could not be foreseen
        found[n] = i
        n += head[i] < 0
        head[i] = 0
    return found[:n]


@cached
def places_of(ids, rows, head):
    """For each id its place in `rows`. Sets the marked entries of `head` to -1 again."""
    for place, row in enumerate(rows):
        head[row] = place
    places = np.empty(len(ids), np.int64)
    for k, i in enumerate(ids):
        places[k] = head[i]
    for row in rows:
        head[row] = -1
    return places


@cached
def by_place(places, count):
    """The positions in the batch of each place, in batch order, one place after the other.

    Place s has `order[offsets[s] : offsets[s + 1]]`.
    """
    offsets = np.zeros(count + 1, np.int64)
    for place in places:
        offsets[place + 1] += 1
    for place in range(count):
        offsets[place + 1] += offsets[place]
    order = np.empty(len(places), np.int64)
    free = offsets.copy()
    for k, place in enumerate(places):
        order[free[place]] = k
        free[place] += 1
    return order, offsets


@njit(**OPTIONS)
def add_up(grads, order, offsets, slot, stop, total):
    """Into `total` the gradients of one of the rows before `stop`, in order.

    The sum begins at 0, so that -0.0 becomes 0.0.
    """
    zero = number(grads, total.dtype.type(0))
    first, end, last = offsets[slot], offsets[slot + 1], offsets[stop]
    for k in range(first, end):
        if k + AHEAD < last:
            fetch(grads, order[k + AHEAD])
        one = grads[order[k]]
        if k == first:
            for j in range(len(total)):
                total[j] = plain(zero + number(grads, one[j]))
        else:
            for j in range(len(total)):
                total[j] = plain(number(grads, total[j]) + number(grads, one[j]))


@cached
def sum_all(grads, order, offsets, sums, crew):
    """The sum of each row's gradients."""
    who = join(crew, (grads, order, offsets, sums, crew))
    if who < 0:
        return
    count = len(sums)
    while True:
        start = take(crew, GRAIN)
        if start >= count:
            break
        stop = min(start + GRAIN, count)
        for slot in range(start, stop):
            add_up(grads, order, offsets, slot, stop, sums[slot])
