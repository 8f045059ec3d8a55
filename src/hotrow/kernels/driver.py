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

import numpy as np
from numba import njit
from numba.extending import overload, register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

from hotrow.kernels import ops, scalars
from hotrow.kernels.pool import GRAIN

AHEAD = 4  # rows: scattered over the table, they would be waited for one after the other
LINE = 64  # bytes


@functools.cache
def compiled(
    update: Callable[..., Any], jump: Callable[..., Any], flags: tuple[bool, ...], width: int
) -> Callable[..., None]:
    """The driver of one rule in one form; compiles when first called with a dtype."""
    functions = [*called(update), *called(jump)]
    for function in functions:
        register(function)
    sources = digest(*sorted({inspect.getfile(function) for function in functions}))

    def drive(table, slots, last, rows, grads, order, offsets, graded, ledger, memo, now, taken):
        _ = sources  # a cell of its own: edited sources are not found in the cache
        columns = table.shape[1]
        zero = table.dtype.type(0)
        upto = now - 1 if graded else now
        count = len(rows)
        total = np.empty(columns, table.dtype)
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
                r = rows[i]
                t = last[r]
                while t < upto:
                    arrived = jump(table, slots, r, t, upto, memo)
                    if arrived > t:
                        t = arrived
                        continue
                    entry = to_fixed_tuple(ledger[t], width)
                    for j in range(columns):
                        w, s = update(table[r, j], zero, load(slots, r, j), entry, flags)
                        table[r, j] = w
                        store(slots, r, j, s)
                    t += 1
                if graded:
                    add_up(grads, order, offsets, i, stop, total)
                    entry = to_fixed_tuple(ledger[upto], width)
                    for j in range(columns):
                        w, s = update(table[r, j], total[j], load(slots, r, j), entry, flags)
                        table[r, j] = w
                        store(slots, r, j, s)
                last[r] = max(t, now)

    return njit(cache=True, **scalars.OPTIONS)(drive)


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
        position = order[k]
        if k == first:
            for j in range(len(total)):
                total[j] = zero + grads[position, j]
        else:
            for j in range(len(total)):
                total[j] += grads[position, j]


def fetch(array, r):  # pragma: no cover - replaced by the overload
    """Ask for row r of an array."""


def fetch_all(arrays, r):  # pragma: no cover - replaced by the overload
    """Ask for row r of each of a tuple of arrays."""


def load(arrays, r, j):  # pragma: no cover - replaced by the overload
    """`(a[r, j], ...)` of a tuple of arrays."""


def store(arrays, r, j, values):  # pragma: no cover - replaced by the overload
    """`a[r, j] = value` in each of a tuple of arrays."""


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
def _load(arrays, r, j):
    return (
        lambda arrays, r, j: (),
        lambda arrays, r, j: (arrays[0][r, j],),
        lambda arrays, r, j: (arrays[0][r, j], arrays[1][r, j]),
        lambda arrays, r, j: (arrays[0][r, j], arrays[1][r, j], arrays[2][r, j]),
    )[len(arrays)]


@overload(store, jit_options=scalars.OPTIONS)
def _store(arrays, r, j, values):
    def none(arrays, r, j, values):
        pass

    def one(arrays, r, j, values):
        arrays[0][r, j] = values[0]

    def two(arrays, r, j, values):
        arrays[0][r, j] = values[0]
        arrays[1][r, j] = values[1]

    def three(arrays, r, j, values):
        arrays[0][r, j] = values[0]
        arrays[1][r, j] = values[1]
        arrays[2][r, j] = values[2]

    return (none, one, two, three)[len(arrays)]
