"""The compiled lookup of rows that are up to date."""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

from hotrow.kernels.cpu.access import copy_row, prefetch_row
from hotrow.kernels.cpu.cache import cached_jit
from hotrow.kernels.cpu.intrinsics import claim_rows, drop_owner, join_team

# Copying a row is fast, so these values are larger than in the other kernels.
PREFETCH_DISTANCE, GRAIN_SIZE = 8, 256


@cached_jit
def copy_rows(table, ids, output, out_of_range, team):
    """Set `output[k] = table[ids[k]]`; set `out_of_range[0]` if an id is out of range."""
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
