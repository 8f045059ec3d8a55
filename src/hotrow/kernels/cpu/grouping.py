"""The compiled part of `kernels/grouping.py`."""
# mypy: ignore-errors
# (numba infers the types of compiled code; mypy cannot check them)

from __future__ import annotations

import numpy as np
from numba import njit

from hotrow.kernels.cpu.access import PREFETCH_DISTANCE, prefetch_row, to_float, to_number
from hotrow.kernels.cpu.cache import cached_jit
from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS, claim_rows, join_team
from hotrow.kernels.cpu.threads import GRAIN_SIZE

HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, rounded to an odd number


@cached_jit
def hash_ids(ids, hash_table, bits):
    """Number the distinct ids in order of first appearance.

    Arguments:
        ids: (N,) int64.
        hash_table: int32, initially filled with -1; the function overwrites it. Its length must be
            a power of 2 greater than N.
        bits: the number of low bits of a packed id that store the id's number.

    Returns:
        The distinct ids, each packed with its number into one int64, so that sorting the packed
        values sorts the ids. The number assigned to each id of the batch, (N,). How often each
        number occurs, (N,).
    """
    shift, mask = np.uint64(65), len(hash_table) - 1
    size = len(hash_table)
    while size:
        size >>= 1
        shift -= np.uint64(1)
    distinct = np.empty(len(ids), np.int64)
    numbers = np.empty(len(ids), np.int32)
    counts = np.zeros(len(ids), np.int32)
    n = 0
    for k, i in enumerate(ids):
        # After two multiplications, the high bits depend on all bits of the id. A single
        # multiplication would map evenly spaced ids to only a few positions.
        mixed = np.uint64(i) * HASH_MULTIPLIER
        position = np.int64(((mixed ^ (mixed >> np.uint64(32))) * HASH_MULTIPLIER) >> shift)
        number = hash_table[position]
        while number >= 0 and distinct[number] != i:
            position = (position + 1) & mask
            number = hash_table[position]
        if number < 0:
            number = hash_table[position] = n
            distinct[n] = i
            n += 1
        numbers[k] = number
        counts[number] += 1
    for number in range(n):
        i = distinct[number]
        fits = ((i << bits) >> bits) == i
        distinct[number] = ((i if fits else -1) << bits) | number
    return distinct[:n], numbers, counts


@njit(**JIT_OPTIONS)
def fill_order(inverse, offsets):
    """Return the batch positions grouped by row; the group for row s starts at `offsets[s]`."""
    order = np.empty(len(inverse), np.int64)
    ends = offsets.copy()
    for k, s in enumerate(inverse):
        order[ends[s]] = k
        ends[s] += 1
    return order


@cached_jit
def sort_distinct(packed, numbers, counts, bits):
    """Renumber the result of `hash_ids` in ascending order of the ids.

    Returns the distinct ids, the position of each id among them, and `order` and `offsets` as
    computed by `order_by_row`.
    """
    rows = np.empty(len(packed), np.int64)
    index_of = np.empty(len(packed), np.int32)
    offsets = np.zeros(len(packed) + 1, np.int64)
    for s, each in enumerate(packed):
        number = each & ((1 << bits) - 1)
        rows[s] = each >> bits
        index_of[number] = s
        offsets[s + 1] = offsets[s] + counts[number]
    inverse = np.empty(len(numbers), np.int64)
    for k, number in enumerate(numbers):
        inverse[k] = index_of[number]
    return rows, inverse, fill_order(inverse, offsets), offsets


@cached_jit
def order_by_row(inverse, count):
    """Return (order, offsets), the batch positions grouped by distinct id.

    `order[offsets[s] : offsets[s + 1]]` lists the positions of distinct id s in ascending order.
    """
    offsets = np.zeros(count + 1, np.int64)
    for s in inverse:
        offsets[s + 1] += 1
    for s in range(count):
        offsets[s + 1] += offsets[s]
    return fill_order(inverse, offsets), offsets


@njit(**JIT_OPTIONS)
def sum_row(grads, order, offsets, s, stop, total):
    """Sum the gradients of row s in batch order, and write the sum to `total`.

    Gradients are prefetched up to row `stop`. The sum starts at 0, so that -0.0 becomes 0.0.
    """
    zero = to_number(grads, total.dtype.type(0))
    first, end, prefetch_end = offsets[s], offsets[s + 1], offsets[stop]
    for k in range(first, end):
        if k + PREFETCH_DISTANCE < prefetch_end:
            prefetch_row(grads, order[k + PREFETCH_DISTANCE])
        grad = grads[order[k]]
        if k == first:
            for j in range(len(total)):
                total[j] = to_float(zero + to_number(grads, grad[j]))
        else:
            for j in range(len(total)):
                total[j] = to_float(to_number(grads, total[j]) + to_number(grads, grad[j]))


@cached_jit
def sum_rows(grads, order, offsets, sums, team):
    """Sum the gradients of each row, and write the sums to `sums`."""
    thread = join_team(team, (grads, order, offsets, sums, team))
    if thread < 0:
        return
    count = len(sums)
    while True:
        start = claim_rows(team, GRAIN_SIZE)
        if start >= count:
            break
        stop = min(start + GRAIN_SIZE, count)
        for s in range(start, stop):
            sum_row(grads, order, offsets, s, stop, sums[s])
