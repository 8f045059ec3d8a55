"""The compiled half of `rows.select`."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

from hotrow.kernels.cpu.access import copy, fetch
from hotrow.kernels.cpu.cache import cached
from hotrow.kernels.cpu.scalars import bare, join, take

# A copy is soon done: more rows than elsewhere are asked for ahead, and taken at once.
AHEAD, MANY = 8, 256


@cached
def rows_at(table, ids, output, wrong, crew):
    """output[k] = table[ids[k]]; sets `wrong[0]` if there is no such row."""
    who = join(crew, (table, ids, output, wrong, crew))
    if who < 0:
        return
    table, ids, output, wrong = bare(table), bare(ids), bare(output), bare(wrong)
    count = len(ids)
    while True:
        start = take(crew, MANY)
        if start >= count:
            break
        stop = min(start + MANY, count)
        for k in range(start, min(start + AHEAD, stop)):
            fetch(table, ids[k])
        for k in range(start, stop):
            if k + AHEAD < stop:
                fetch(table, ids[k + AHEAD])
            if 0 <= ids[k] < len(table):
                copy(table[ids[k]], output[k])
            else:
                wrong[0] = 1
