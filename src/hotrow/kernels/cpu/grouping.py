"""The compiled half of `grouping.py`."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import numpy as np
from numba import njit

from hotrow.kernels.cpu.access import AHEAD, fetch, number, plain
from hotrow.kernels.cpu.cache import cached
from hotrow.kernels.cpu.scalars import OPTIONS, join, take
from hotrow.kernels.cpu.threads import GRAIN

MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, odd


@cached
def distinct(ids, table, bits):
    """The distinct ids, each with its number in order of appearance; those of all; how often.

    By a hash table, which gets more places than there are ids: a power of 2, each -1. An id and
    its number are packed into one int64, the number in the last `bits`: to sort the ids is to
    sort those.
    """
    shift, last = np.uint64(65), len(table) - 1
    size = len(table)
    while size:
        size >>= 1
        shift -= np.uint64(1)
    found = np.empty(len(ids), np.int64)
    numbers = np.empty(len(ids), np.int32)
    counts = np.zeros(len(ids), np.int32)
    n = 0
    for k, i in enumerate(ids):
        mixed = np.uint64(i) * MIX  # the high bits depend on all; once more for regular ids
        at = np.int64(((mixed ^ (mixed >> np.uint64(32))) * MIX) >> shift)
        number = table[at]
        while number >= 0 and found[number] != i:
            at = (at + 1) & last
            number = table[at]
        if number < 0:
            number = table[at] = n
            found[n] = i
            n += 1
        numbers[k] = number
        counts[number] += 1
    for number in range(n):
        i = found[number]
        fits = ((i << bits) >> bits) == i
        found[number] = ((i if fits else -1) << bits) | number
    return found[:n], numbers, counts


@njit(**OPTIONS)
def arranged(places, offsets):
    """The positions in the batch of each place, those of place s from `offsets[s]` on."""
    order = np.empty(len(places), np.int64)
    free = offsets.copy()
    for k, place in enumerate(places):
        order[free[place]] = k
        free[place] += 1
    return order


@cached
def placed(packed, numbers, counts, bits):
    """What `distinct` found, by the sorted ids: they, the place of each id, and `by_place`'s."""
    rows = np.empty(len(packed), np.int64)
    places_of = np.empty(len(packed), np.int32)
    offsets = np.zeros(len(packed) + 1, np.int64)
    for place, each in enumerate(packed):
        number = each & ((1 << bits) - 1)
        rows[place] = each >> bits
        places_of[number] = place
        offsets[place + 1] = offsets[place] + counts[number]
    places = np.empty(len(numbers), np.int64)
    for k, number in enumerate(numbers):
        places[k] = places_of[number]
    return rows, places, arranged(places, offsets), offsets


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
    return arranged(places, offsets), offsets


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
