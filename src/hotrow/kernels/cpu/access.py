"""How a compiled loop gets at the rows of a table, in each dtype, and at those of its slots.

What has `all` in its name, and `numbers`, `load` and `store`, does it for a tuple, a part for each
slot. numba chooses by type, when it compiles, what is below each name.
"""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

from numba import njit, types
from numba.extending import overload

from hotrow.kernels.cpu import scalars
from hotrow.kernels.cpu.bfloat16 import (
    Rounded,
    as_rounded,
    from_bits,
    rounded,
    single,
    to_bits,
)

AHEAD = 4  # rows: scattered over the table, they would be waited for one after the other
LINE = 64  # bytes


@njit(**scalars.OPTIONS)
def copy(source, target):
    """A row to another."""
    for j in range(len(source)):
        target[j] = source[j]


@njit(**scalars.OPTIONS)
def widen(source, target):
    """A row of bits to one of the numbers that they are."""
    for j in range(len(source)):
        target[j] = plain(from_bits(source[j]))


@njit(**scalars.OPTIONS)
def narrow(source, target):
    """A row of numbers to one of their bits."""
    for j in range(len(source)):
        target[j] = to_bits(source[j])


def bare_all(arrays):  # pragma: no cover - replaced by the overload
    """`bare` for a tuple of arrays."""


def rows_for(slots, rows):  # pragma: no cover - replaced by the overload
    """A tuple with one of the rows for each slot."""


def number(table, x):  # pragma: no cover - replaced by the overload
    """What a table has at a place, or a float of its scratch space, to compute with."""


def numbers(table, values):  # pragma: no cover - replaced by the overload
    """`number` for a tuple."""


def plain(x):  # pragma: no cover - replaced by the overload
    """A number as a float, for scratch space."""


def settle_to(table, w):  # pragma: no cover - replaced by the overload
    """Round a row of scratch space to what the table can hold."""


def settle_all_to(table, state):  # pragma: no cover - replaced by the overload
    """`settle_to` for a tuple of rows."""


def take(table, r, spare, apart):  # pragma: no cover - replaced by the overload
    """Row r to compute with: itself, or in `spare` if it is to be `apart`, or has to be."""


def take_all(tables, r, spares, apart):  # pragma: no cover - replaced by the overload
    """`take` for tuples."""


def put(table, r, w, apart):  # pragma: no cover - replaced by the overload
    """Write back what `take` gave."""


def put_all(tables, r, rows, apart):  # pragma: no cover - replaced by the overload
    """`put` for tuples."""


def fetch(array, r):  # pragma: no cover - replaced by the overload
    """Ask for row r of an array."""


def fetch_all(arrays, r):  # pragma: no cover - replaced by the overload
    """Ask for row r of each of a tuple of arrays."""


def load(arrays, i):  # pragma: no cover - replaced by the overload
    """`(a[i], ...)` of a tuple: rows of arrays, or numbers of rows."""


def store(rows, j, values):  # pragma: no cover - replaced by the overload
    """`a[j] = value` in each of a tuple of rows."""


@overload(bare_all, jit_options=scalars.OPTIONS)
def _bare_all(arrays):
    return (
        lambda arrays: (),
        lambda arrays: (scalars.bare(arrays[0]),),
        lambda arrays: (scalars.bare(arrays[0]), scalars.bare(arrays[1])),
        lambda arrays: (scalars.bare(arrays[0]), scalars.bare(arrays[1]), scalars.bare(arrays[2])),
    )[len(arrays)]


@overload(rows_for, jit_options=scalars.OPTIONS)
def _rows_for(slots, rows):
    return (
        lambda slots, rows: (),
        lambda slots, rows: (rows[0],),
        lambda slots, rows: (rows[0], rows[1]),
        lambda slots, rows: (rows[0], rows[1], rows[2]),
    )[len(slots)]


def is_low(array):
    """Whether these are the bits of bfloat16."""
    return array.dtype == types.int16


@overload(number, jit_options=scalars.OPTIONS)
def _number(table, x):
    if not is_low(table):
        return lambda table, x: x
    return (lambda table, x: from_bits(x)) if x == types.int16 else (lambda table, x: as_rounded(x))


@overload(plain, jit_options=scalars.OPTIONS)
def _plain(x):
    return (lambda x: single(x)) if isinstance(x, Rounded) else (lambda x: x)


@overload(numbers, jit_options=scalars.OPTIONS)
def _numbers(table, values):
    return (
        lambda table, values: (),
        lambda table, values: (number(table, values[0]),),
        lambda table, values: (number(table, values[0]), number(table, values[1])),
        lambda table, values: (
            number(table, values[0]),
            number(table, values[1]),
            number(table, values[2]),
        ),
    )[len(values)]


@overload(settle_to, jit_options=scalars.OPTIONS)
def _settle_to(table, w):
    def to_bfloat16(table, w):
        for j in range(len(w)):
            w[j] = single(rounded(w[j]))

    return to_bfloat16 if is_low(table) else (lambda table, w: None)


@overload(settle_all_to, jit_options=scalars.OPTIONS)
def _settle_all_to(table, state):
    def each(table, state):
        for k in range(len(state)):
            settle_to(table, state[k])

    return each if len(state) and is_low(table) else (lambda table, state: None)


@overload(take, jit_options=scalars.OPTIONS)
def _take(table, r, spare, apart):
    def low(table, r, spare, apart):
        widen(table[r], spare)
        return spare

    def high(table, r, spare, apart):
        if not apart:
            return table[r]
        copy(table[r], spare)
        return spare

    return low if is_low(table) else high


@overload(take_all, jit_options=scalars.OPTIONS)
def _take_all(tables, r, spares, apart):
    return (
        lambda tables, r, spares, apart: (),
        lambda tables, r, spares, apart: (take(tables[0], r, spares[0], apart),),
        lambda tables, r, spares, apart: (
            take(tables[0], r, spares[0], apart),
            take(tables[1], r, spares[1], apart),
        ),
        lambda tables, r, spares, apart: (
            take(tables[0], r, spares[0], apart),
            take(tables[1], r, spares[1], apart),
            take(tables[2], r, spares[2], apart),
        ),
    )[len(tables)]


@overload(put, jit_options=scalars.OPTIONS)
def _put(table, r, w, apart):
    def low(table, r, w, apart):
        narrow(w, table[r])

    def high(table, r, w, apart):
        if apart:
            copy(w, table[r])

    return low if is_low(table) else high


@overload(put_all, jit_options=scalars.OPTIONS)
def _put_all(tables, r, rows, apart):
    def none(tables, r, rows, apart):
        pass

    def some(tables, r, rows, apart):
        for k in range(len(tables)):
            put(tables[k], r, rows[k], apart)

    return some if len(tables) else none


@overload(fetch, jit_options=scalars.OPTIONS)
def _fetch(array, r):
    step = LINE * 8 // array.dtype.bitwidth

    def each(array, r):
        for j in range(0, array.shape[1], step):
            scalars.prefetch(array, r, j)

    return each


@overload(fetch_all, jit_options=scalars.OPTIONS)
def _fetch_all(arrays, r):
    def none(arrays, r):
        pass

    def some(arrays, r):
        for k in range(len(arrays)):
            fetch(arrays[k], r)

    return some if len(arrays) else none


@overload(load, jit_options=scalars.OPTIONS)
def _load(arrays, i):
    return (
        lambda arrays, i: (),
        lambda arrays, i: (arrays[0][i],),
        lambda arrays, i: (arrays[0][i], arrays[1][i]),
        lambda arrays, i: (arrays[0][i], arrays[1][i], arrays[2][i]),
    )[len(arrays)]


@overload(store, jit_options=scalars.OPTIONS)
def _store(rows, j, values):
    def none(rows, j, values):
        pass

    def one(rows, j, values):
        rows[0][j] = plain(values[0])

    def two(rows, j, values):
        rows[0][j] = plain(values[0])
        rows[1][j] = plain(values[1])

    def three(rows, j, values):
        rows[0][j] = plain(values[0])
        rows[1][j] = plain(values[1])
        rows[2][j] = plain(values[2])

    return (none, one, two, three)[len(rows)]
