"""The compiled part of `kernels/grouping.py`."""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

import numpy as np
from numba import njit

from hotrow.kernels.cpu.access import PREFETCH_DISTANCE, prefetch_row, to_float, to_number
from hotrow.kernels.cpu.cache import cached_jit
from hotrow.kernels.cpu.intrinsics import (
    INLINE_OPTIONS,
    JIT_OPTIONS,
    claim_rows,
    join_team,
    view_memory,
)
from hotrow.kernels.cpu.threads import GRAIN_SIZE

HASH_MULTIPLIER = np.uint64(0x9E3779B97F4A7C15)  # 2**64 / golden ratio, rounded to an odd number


@njit(**JIT_OPTIONS)
def number_ids(ids, hash_table, rows, inverse):
    """Number the distinct ids in order of first appearance, and return how many there are.

    Arguments:
        ids: (N,) int64.
        hash_table: int32, initially filled with -1; the function overwrites it. Its length must be
            a power of 2 greater than N.
        rows: (N,); its first entries are set to the distinct ids.
        inverse: (N,); set to the number assigned to each id of the batch.
    """
    shift, mask = np.uint64(65), len(hash_table) - 1
    size = len(hash_table)
    while size:
        size >>= 1
        shift -= np.uint64(1)
    n = 0
    for k, i in enumerate(ids):
        # After two multiplications, the high bits depend on all bits of the id. A single
        # multiplication would map evenly spaced ids to only a few positions.
        mixed = np.uint64(i) * HASH_MULTIPLIER
        position = np.int64(((mixed ^ (mixed >> np.uint64(32))) * HASH_MULTIPLIER) >> shift)
        number = hash_table[position]
        while number >= 0 and rows[number] != i:
            position = (position + 1) & mask
            number = hash_table[position]
        if number < 0:
            number = hash_table[position] = n
            rows[n] = i
            n += 1
        inverse[k] = number
    return n


@njit(**JIT_OPTIONS)
def order_positions(inverse, order, offsets):
    """Group the positions in a batch by distinct id.

    `order[offsets[s] : offsets[s + 1]]` is set to the positions of distinct id s in ascending
    order.
    """
    offsets[:] = 0
    for s in inverse:
        offsets[s + 1] += 1
    for s in range(len(offsets) - 1):
        offsets[s + 1] += offsets[s]
    for k in range(len(inverse) - 1, -1, -1):
        # `offsets[s + 1]` moves backwards, from the end of id s's positions to their start.
        offsets[inverse[k] + 1] -= 1
        order[offsets[inverse[k] + 1]] = k
    for s in range(len(offsets) - 1):
        offsets[s] = offsets[s + 1]
    offsets[len(offsets) - 1] = len(inverse)


@cached_jit
def group_ids(ids_address, row_count, memory):
    """Group the positions in a batch by id, and store them in the `memory` of a `GroupedIds`.

    Arguments:
        ids_address: the address of the ids, int64.
        row_count: see `find_distinct`.
        memory: (4 N + 1,) int64, for N ids.

    Returns the number of distinct ids, whether all ids are between 0 and row_count - 1, and the
    address of `memory`. The distinct ids are in order of first appearance.
    """
    n, size = len(memory) // 4, 2
    ids = view_memory(ids_address, (n,), np.int64)
    while size < 2 * n + 1:
        size *= 2
    rows, inverse = memory[:n], memory[n : 2 * n]
    count = number_ids(ids, np.full(size, -1, np.int32), rows, inverse)
    are_in_range = True
    for i in rows[:count]:
        are_in_range &= 0 <= i < row_count
    order_positions(inverse, memory[2 * n : 3 * n], memory[3 * n : 3 * n + count + 1])
    return count, are_in_range, memory.ctypes.data


@njit(**INLINE_OPTIONS)
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
