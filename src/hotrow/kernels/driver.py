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

from numba import njit
from numba.extending import overload, register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

from hotrow.kernels import ops, scalars
from hotrow.kernels.cache import cached
from hotrow.kernels.pool import GRAIN
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
        task, table, slots, last, rows, order, offsets, batch, ledger, memo, now, taken, spare
    ):
        _ = sources  # a cell of its own: edited sources are not found in the cache
        columns = range(table.shape[1])
        zero = table.dtype.type(0)
        upto = now - 1 if task == STEP else now
        count = len(rows)
        total, other, others = spare
        while True:
            start = scalars.take(taken, GRAIN)
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
                w, state = table[rows[i]], load(slots, rows[i])
                if task == LOOK_UP and t < upto:
                    copy(w, other)
                    copy_all(state, others)
                    w, state = other, others
                replayed = 0
                while t < upto:
                    arrived = jump(w, state, t, upto, memo)
                    if arrived > t:
                        t = arrived
                        continue
                    entry = to_fixed_tuple(ledger[t], width)
                    for j in columns:
                        w[j], new = update(w[j], zero, load(state, j), entry, flags)
                        store(state, j, new)
                    t += 1
                    replayed += 1
                if task == LOOK_UP:
                    for k in range(offsets[i], offsets[i + 1]):
                        if k + AHEAD < offsets[stop]:
                            fetch(batch, order[k + AHEAD])
                        copy(w, batch[order[k]])
                    if replayed <= CHEAP:
                        continue
                    copy(w, table[rows[i]])
                    copy_all(state, load(slots, rows[i]))
                elif task == STEP:
                    add_up(batch, order, offsets, i, stop, total)
                    entry = to_fixed_tuple(ledger[upto], width)
                    for j in columns:
                        w[j], new = update(w[j], total[j], load(state, j), entry, flags)
                        store(state, j, new)
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
    register_jitable(**scalars.OPTIONS)(function)


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
    zero = grads.dtype.type(0)
    first, end, last = offsets[slot], offsets[slot + 1], offsets[stop]
    for k in range(first, end):
        if k + AHEAD < last:
            fetch(grads, order[k + AHEAD])
        one = grads[order[k]]
        if k == first:
            for j in range(len(total)):
                total[j] = zero + one[j]
        else:
            for j in range(len(total)):
                total[j] += one[j]


@njit(**scalars.OPTIONS)
def copy(source, target):
    """A row to another."""
    for j in range(len(source)):
        target[j] = source[j]


def copy_all(sources, targets):  # pragma: no cover - replaced by the overload
    """`copy` for tuples of rows."""


def fetch(array, r):  # pragma: no cover - replaced by the overload
    """Ask for row r of an array."""


def fetch_all(arrays, r):  # pragma: no cover - replaced by the overload
    """Ask for row r of each of a tuple of arrays."""


def load(arrays, i):  # pragma: no cover - replaced by the overload
    """`(a[i], ...)` of a tuple: rows of arrays, or numbers of rows."""


def store(rows, j, values):  # pragma: no cover - replaced by the overload
    """`a[j] = value` in each of a tuple of rows."""


@overload(copy_all, jit_options=scalars.OPTIONS)
def _copy_all(sources, targets):
    def none(sources, targets):
        pass

    def some(sources, targets):
        for k in range(len(sources)):
            copy(sources[k], targets[k])

    return some if len(sources) else none


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
        rows[0][j] = values[0]

    def two(rows, j, values):
        rows[0][j] = values[0]
        rows[1][j] = values[1]

    def three(rows, j, values):
        rows[0][j] = values[0]
        rows[1][j] = values[1]
        rows[2][j] = values[2]

    return (none, one, two, three)[len(rows)]
