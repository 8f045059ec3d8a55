"""The compiled look-up of rows that need no settling."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

from hotrow.kernels.cpu.access import copy_row, prefetch_row
from hotrow.kernels.cpu.cache import cached_jit
from hotrow.kernels.cpu.intrinsics import claim_rows, drop_owner, join_team

# A copy takes little time: more rows than elsewhere are prefetched, and claimed at once.
PREFETCH_DISTANCE, GRAIN_SIZE = 8, 256


@cached_jit
def copy_rows(table, ids, output, out_of_range, team):
    """output[k] = table[ids[k]]; sets `out_of_range[0]` if there is no such row."""
    thread = join_team(team, (table, ids, output, out_of_range, team))
    if thread < 0:
        return
    table, ids = drop_owner(table), drop_owner(ids)
    output, out_of_range = drop_owner(output), drop_owner(out_of_range)
    count = len(ids)
    while True:
        start = claim_rows(team, GRAIN_SIZE)
        if start >= count:
            break
        stop = min(start + GRAIN_SIZE, count)
        for k in range(start, min(start + PREFETCH_DISTANCE, stop)):
            prefetch_row(table, ids[k])
        for k in range(start, stop):
            if k + PREFETCH_DISTANCE < stop:
                prefetch_row(table, ids[k + PREFETCH_DISTANCE])
            if 0 <= ids[k] < len(table):
                copy_row(table[ids[k]], output[k])
            else:
                out_of_range[0] = 1
