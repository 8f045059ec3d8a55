"""A map from int64 keys to rows, based on numba's hash map."""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

from numba import types
from numba.typed import Dict

from hotrow.kernels.cpu.cache import cached_jit


def empty_map():
    """Return an empty map."""
    return Dict.empty(types.int64, types.int64)


@cached_jit
def insert_keys(rows_by_key, keys, first_row):
    """Map `keys[i]` to row `first_row + i`."""
    for i in range(len(keys)):
        rows_by_key[keys[i]] = first_row + i


@cached_jit
def find_rows(rows_by_key, keys, rows):
    """Set `rows[i]` to the row of `keys[i]`, or to -1 if there is none."""
    for i in range(len(keys)):
        rows[i] = rows_by_key.get(keys[i], -1)
