"""The loop over rows, compiled around one rule: replay what a row missed, then step it.

Compiled by numba when a rule is first used and cached on disk. numba caches a closure by its
bytecode and the cells it closes over, and looks only at this file for changes; so the cells hold
functions of modules (pickled by name), constants, and a digest of every source that takes part.
"""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import functools
import hashlib
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

from numba import njit, types
from numba.extending import overload, register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

from hotrow.kernels import ops, scalars
from hotrow.kernels.cache import cached
from hotrow.kernels.pool import GRAIN
from hotrow.kernels.rounded import (
    Rounded,
    as_rounded,
    from_bits,
    rounded,
    single,
    to_bits,
)
from hotrow.kernels.rows import LOOK_UP, STEP

AHEAD = 4  # rows: scattered over the table, they would be waited for one after the other
LINE = 64  # bytes
CHEAP = 2  # steps that a look-up replays without writing them back: the next step does it again


@functools.cache
def compiled(
    update: Callable[..., Any], jump: Callable[..., Any], flags: tuple[bool, ...], width: int
) -> Callable[..., None]:
    """The driver of one rule in one form; compiles when first called with a dtype."""
    functions = [*called(update), *called(jump)]
    for function in functions:
        register(function)
    sources = digest(*sorted({inspect.getfile(function) for function in functions}))

    def drive(
        task, table, slots, last, rows, order, offsets, batch, ledger, memo, now, spare, crew
    ):
        _ = sources  # a cell of its own: edited sources are not found in the cache
        every = (
            task,
            table,
            slots,
            last,
            rows,
            order,
            offsets,
            batch,
            ledger,
            memo,
            now,
            spare,
            crew,
        )
        who = scalars.join(crew, every)
        if who < 0:
            return
        upto = now - 1 if task == STEP else now
        count = len(rows)
        table, last, batch = scalars.bare(table), scalars.bare(last), scalars.bare(batch)
        rows, order, offsets = scalars.bare(rows), scalars.bare(order), scalars.bare(offsets)
        ledger, slots = scalars.bare(ledger), bare_all(slots)
        own = scalars.bare(spare)[who]
        zeros, total, other = own[0], own[1], own[2]
        others = rows_for(slots, own[3:])
        while True:
            start = scalars.take(crew, GRAIN)
            if start >= count:
                break
            stop = min(start + GRAIN, count)
            for i in range(start, min(start + AHEAD, stop)):
                fetch(table, rows[i])
                fetch_all(slots, rows[i])
            for i in range(start, stop):
                if i + AHEAD < stop:
                    fetch(table, rows[i + AHEAD])
                    fetch_all(slots, rows[i + AHEAD])
                t = last[rows[i]]
                apart = task == LOOK_UP and t < upto
                w, state = (
                    take(table, rows[i], other, apart),
                    take_all(slots, rows[i], others, apart),
                )
                replayed = 0
                steps = task == STEP
                while t < upto or steps:
                    grad = zeros
                    if t < upto:
                        arrived = jump(w, state, t, upto, memo)
                        if arrived > t:
                            settle_to(table, w)
                            settle_all_to(table, state)
                            t = arrived
                            continue
                    else:
                        add_up(batch, order, offsets, i, stop, total)
                        grad, steps = total, False
                    # The only place of the update: each costs seconds to compile.
                    entry = to_fixed_tuple(ledger[min(t, upto)], width)
                    for j in range(len(w)):
                        now_w, now_state = number(table, w[j]), numbers(table, load(state, j))
                        new, others_new = update(
                            now_w, number(table, grad[j]), now_state, entry, flags
                        )
                        w[j] = plain(new)
                        store(state, j, others_new)
                    t += 1
                    replayed += 1
                if task == LOOK_UP:
                    for k in range(offsets[i], offsets[i + 1]):
                        if k + AHEAD < offsets[stop]:
                            fetch(batch, order[k + AHEAD])
                        put(batch, order[k], w, True)
                    if replayed <= CHEAP:
                        continue
                put(table, rows[i], w, apart)
                put_all(slots, rows[i], state, apart)
                last[rows[i]] = max(t, now)

    return cached(drive)


def called(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """A plain function and those of modules that it calls, but for the operations of `ops.py`."""
    found = [function]
    for each in found:
        for name in each.__code__.co_names:
            other = each.__globals__.get(name)
            if (
                inspect.isfunction(other)
                and other not in found
                and other.__module__ != ops.__name__
            ):
                found.append(other)
    return found


@functools.cache
def register(function: Callable[..., Any]) -> None:
    """Make a plain function callable from compiled code; from Python it stays what it was."""
    # Into the loop over columns, which is then done several at a time.
    register_jitable(**scalars.OPTIONS, forceinline=True)(function)


def digest(*files: str) -> str:
    """A short name for the sources of the kernels and of `files`."""
    own = sorted(Path(__file__).parent.glob("*.py"))
    text = b"".join(Path(file).read_bytes() for file in [*own, *files])
    return hashlib.sha256(text).hexdigest()[:16]


@njit(**scalars.OPTIONS)
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
