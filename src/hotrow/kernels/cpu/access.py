"""Load and store rows of a table and of its slots in compiled code, for each dtype.

Functions with plural names take tuples with one item per slot. At compile time, numba chooses the
overload of each function from the argument types.
"""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

from numba import njit, types
from numba.extending import overload

from hotrow.kernels.cpu.bfloat16 import (
    BFloat16,
    as_bfloat16,
    from_bits,
    round_bf16,
    to_bits,
    to_f32,
)
from hotrow.kernels.cpu.intrinsics import INLINE_OPTIONS, prefetch, view_memory

PREFETCH_DISTANCE = 4  # in rows; without prefetching, each row of a batch causes a cache miss
CACHE_LINE = 64  # bytes


@njit(**INLINE_OPTIONS)
def copy_row(source, target):
    """Copy one row to another."""
    for j in range(len(source)):
        target[j] = source[j]


def from_stored(x):  # pragma: no cover - replaced by the overload
    """Convert a value from the table to a float."""


def to_stored(table, x):  # pragma: no cover - replaced by the overload
    """Convert a float to a value of the table."""


def view_slots(addresses, shape, dtype):  # pragma: no cover - replaced by the overload
    """Apply `view_memory` to each address in a tuple."""


def slot_rows(slots, rows, columns):  # pragma: no cover - replaced by the overload
    """Return a tuple of the first `len(slots)` rows, each shortened to `columns` items."""


def to_number(table, x):  # pragma: no cover - replaced by the overload
    """Convert a value from the table or its scratch space to the type used for arithmetic."""


def to_numbers(table, values):  # pragma: no cover - replaced by the overload
    """Apply `to_number` to each value in a tuple."""


def to_float(x):  # pragma: no cover - replaced by the overload
    """Convert a number to a float, the type stored in scratch space."""


def round_row(table, w):  # pragma: no cover - replaced by the overload
    """Round a row in scratch space to the table's dtype, in place."""


def round_rows(table, state):  # pragma: no cover - replaced by the overload
    """Apply `round_row` to each row in a tuple."""


# In these four functions, row r of a transposed table, (D, V), is `table[:, r]`.


def load_row(table, r, scratch, in_scratch, is_transposed):  # pragma: no cover
    """Return row r as floats.

    The row is copied to `scratch` if `in_scratch` is set, or if it is bfloat16 or transposed.
    """


def load_rows(tables, r, scratch, in_scratch, is_transposed):  # pragma: no cover
    """Apply `load_row` to each slot."""


def store_row(table, r, w, in_scratch, is_transposed):  # pragma: no cover
    """Write a row returned by `load_row` back to the table."""


def store_rows(tables, r, rows, in_scratch, is_transposed):  # pragma: no cover
    """Apply `store_row` to each slot."""


@njit(**INLINE_OPTIONS)
def prefetch_item(array, i):
    """Prefetch item i of a 1-D array."""
    prefetch(array, (i,))


def prefetch_row(array, r, is_transposed=False):  # pragma: no cover - replaced by the overload
    """Prefetch every cache line of row r."""


def prefetch_rows(arrays, r, is_transposed):  # pragma: no cover - replaced by the overload
    """Apply `prefetch_row` to each slot."""


def get_items(arrays, i):  # pragma: no cover - replaced by the overload
    """Return item i of each row in a tuple: `(arrays[0][i], ...)`."""


def set_items(rows, j, values):  # pragma: no cover - replaced by the overload
    """Set item j of each row in a tuple: `rows[k][j] = values[k]`."""


@overload(view_slots, jit_options=INLINE_OPTIONS)
def _view_slots(addresses, shape, dtype):
    return (
        lambda addresses, shape, dtype: (),
        lambda addresses, shape, dtype: (view_memory(addresses[0], shape, dtype),),
        lambda addresses, shape, dtype: (
            view_memory(addresses[0], shape, dtype),
            view_memory(addresses[1], shape, dtype),
        ),
        lambda addresses, shape, dtype: (
            view_memory(addresses[0], shape, dtype),
            view_memory(addresses[1], shape, dtype),
            view_memory(addresses[2], shape, dtype),
        ),
    )[len(addresses)]


@overload(slot_rows, jit_options=INLINE_OPTIONS)
def _slot_rows(slots, rows, columns):
    return (
        lambda slots, rows, columns: (),
        lambda slots, rows, columns: (rows[0][:columns],),
        lambda slots, rows, columns: (rows[0][:columns], rows[1][:columns]),
        lambda slots, rows, columns: (rows[0][:columns], rows[1][:columns], rows[2][:columns]),
    )[len(slots)]


def is_bfloat16(array):
    """Return whether an array stores bfloat16 values (as int16 bits)."""
    return array.dtype == types.int16


@overload(to_number, jit_options=INLINE_OPTIONS)
def _to_number(table, x):
    if not is_bfloat16(table):
        return lambda table, x: x
    return (
        (lambda table, x: from_bits(x)) if x == types.int16 else (lambda table, x: as_bfloat16(x))
    )


@overload(to_float, jit_options=INLINE_OPTIONS)
def _to_float(x):
    return (lambda x: to_f32(x)) if isinstance(x, BFloat16) else (lambda x: x)


@overload(to_numbers, jit_options=INLINE_OPTIONS)
def _to_numbers(table, values):
    return (
        lambda table, values: (),
        lambda table, values: (to_number(table, values[0]),),
        lambda table, values: (to_number(table, values[0]), to_number(table, values[1])),
        lambda table, values: (
            to_number(table, values[0]),
            to_number(table, values[1]),
            to_number(table, values[2]),
        ),
    )[len(values)]


@overload(round_row, jit_options=INLINE_OPTIONS)
def _round_row(table, w):
    def to_bfloat16(table, w):
        for j in range(len(w)):
            w[j] = to_f32(round_bf16(w[j]))

    return to_bfloat16 if is_bfloat16(table) else (lambda table, w: None)


@overload(round_rows, jit_options=INLINE_OPTIONS)
def _round_rows(table, state):
    def round_all(table, state):
        for k in range(len(state)):
            round_row(table, state[k])

    return round_all if len(state) and is_bfloat16(table) else (lambda table, state: None)


@overload(from_stored, jit_options=INLINE_OPTIONS)
def _from_stored(x):
    return (lambda x: to_float(from_bits(x))) if x == types.int16 else (lambda x: x)


@overload(to_stored, jit_options=INLINE_OPTIONS)
def _to_stored(table, x):
    return (lambda table, x: to_bits(x)) if is_bfloat16(table) else (lambda table, x: x)


@njit(**INLINE_OPTIONS)
def _gather_row(table, r, scratch, is_transposed):
    if is_transposed:
        for j in range(len(scratch)):
            scratch[j] = from_stored(table[j, r])
    else:
        row = table[r]
        for j in range(len(scratch)):
            scratch[j] = from_stored(row[j])


@njit(**INLINE_OPTIONS)
def _scatter_row(table, r, w, is_transposed):
    if is_transposed:
        for j in range(len(w)):
            table[j, r] = to_stored(table, w[j])
    else:
        row = table[r]
        for j in range(len(w)):
            row[j] = to_stored(table, w[j])


@overload(load_row, jit_options=INLINE_OPTIONS)
def _load_row(table, r, scratch, in_scratch, is_transposed):
    def load_bfloat16(table, r, scratch, in_scratch, is_transposed):
        _gather_row(table, r, scratch, is_transposed)
        return scratch

    def load_float(table, r, scratch, in_scratch, is_transposed):
        if not (in_scratch or is_transposed):
            return table[r]
        _gather_row(table, r, scratch, is_transposed)
        return scratch

    return load_bfloat16 if is_bfloat16(table) else load_float


@overload(load_rows, jit_options=INLINE_OPTIONS)
def _load_rows(tables, r, scratch, in_scratch, is_transposed):
    return (
        lambda tables, r, scratch, in_scratch, is_transposed: (),
        lambda tables, r, scratch, in_scratch, is_transposed: (
            load_row(tables[0], r, scratch[0], in_scratch, is_transposed),
        ),
        lambda tables, r, scratch, in_scratch, is_transposed: (
            load_row(tables[0], r, scratch[0], in_scratch, is_transposed),
            load_row(tables[1], r, scratch[1], in_scratch, is_transposed),
        ),
        lambda tables, r, scratch, in_scratch, is_transposed: (
            load_row(tables[0], r, scratch[0], in_scratch, is_transposed),
            load_row(tables[1], r, scratch[1], in_scratch, is_transposed),
            load_row(tables[2], r, scratch[2], in_scratch, is_transposed),
        ),
    )[len(tables)]


@overload(store_row, jit_options=INLINE_OPTIONS)
def _store_row(table, r, w, in_scratch, is_transposed):
    def store_bfloat16(table, r, w, in_scratch, is_transposed):
        _scatter_row(table, r, w, is_transposed)

    def store_float(table, r, w, in_scratch, is_transposed):
        if in_scratch or is_transposed:
            _scatter_row(table, r, w, is_transposed)

    return store_bfloat16 if is_bfloat16(table) else store_float


@overload(store_rows, jit_options=INLINE_OPTIONS)
def _store_rows(tables, r, rows, in_scratch, is_transposed):
    def none(tables, r, rows, in_scratch, is_transposed):
        pass

    def store_all(tables, r, rows, in_scratch, is_transposed):
        for k in range(len(tables)):
            store_row(tables[k], r, rows[k], in_scratch, is_transposed)

    return store_all if len(tables) else none


@overload(prefetch_row, jit_options=INLINE_OPTIONS)
def _prefetch_row(array, r, is_transposed=False):
    step = CACHE_LINE * 8 // array.dtype.bitwidth

    def prefetch_lines(array, r, is_transposed=False):
        if is_transposed:
            for j in range(array.shape[0]):
                prefetch(array, (j, r))
        else:
            for j in range(0, array.shape[1], step):
                prefetch(array, (r, j))

    return prefetch_lines


@overload(prefetch_rows, jit_options=INLINE_OPTIONS)
def _prefetch_rows(arrays, r, is_transposed):
    def none(arrays, r, is_transposed):
        pass

    def prefetch_all(arrays, r, is_transposed):
        for k in range(len(arrays)):
            prefetch_row(arrays[k], r, is_transposed)

    return prefetch_all if len(arrays) else none


@overload(get_items, jit_options=INLINE_OPTIONS)
def _get_items(arrays, i):
    return (
        lambda arrays, i: (),
        lambda arrays, i: (arrays[0][i],),
        lambda arrays, i: (arrays[0][i], arrays[1][i]),
        lambda arrays, i: (arrays[0][i], arrays[1][i], arrays[2][i]),
    )[len(arrays)]


@overload(set_items, jit_options=INLINE_OPTIONS)
def _set_items(rows, j, values):
    def none(rows, j, values):
        pass

    def one(rows, j, values):
        rows[0][j] = to_float(values[0])

    def two(rows, j, values):
        rows[0][j] = to_float(values[0])
        rows[1][j] = to_float(values[1])

    def three(rows, j, values):
        rows[0][j] = to_float(values[0])
        rows[1][j] = to_float(values[1])
        rows[2][j] = to_float(values[2])

    return (none, one, two, three)[len(rows)]
