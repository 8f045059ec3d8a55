"""The loop over rows, compiled around one rule: replay what a row missed, then step it.

Compiled by numba when a rule is first used and cached on disk. numba caches a closure by its
bytecode and the cells it closes over; so the cells hold functions of modules (pickled by name),
constants, and a digest of the rule's sources.
"""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

from numba.extending import register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

from hotrow.kernels import rule_math as ops
from hotrow.kernels.cpu import scalars
from hotrow.kernels.cpu.access import (
    AHEAD,
    bare_all,
    fetch,
    fetch_all,
    load,
    number,
    numbers,
    plain,
    put,
    put_all,
    rows_for,
    settle_all_to,
    settle_to,
    store,
    take,
    take_all,
)
from hotrow.kernels.cpu.cache import cached, digest
from hotrow.kernels.cpu.grouping import add_up
from hotrow.kernels.cpu.threads import GRAIN
from hotrow.kernels.operators import LOOK_UP, STEP

CHEAP = 2  # steps that a look-up replays without writing them back: the next step does it again


@functools.cache
def compiled(
    update: Callable[..., Any], jump: Callable[..., Any], flags: tuple[bool, ...], width: int
) -> Callable[..., None]:
    """The driver of one rule in one form; compiles when first called with a dtype."""
    functions = [*called(update), *called(jump)]
    for function in functions:
        register(function)
    sources = digest({inspect.getfile(function) for function in functions})

    def drive(
        task, table, slots, last, rows, order, offsets, batch, ledger, memo, now, spare, crew
    ):
        _ = sources  # a cell of its own: edited sources are not found in the cache
        target, given = (task, table, slots, last), (rows, order, offsets, batch)
        entries = ledger, memo, now, spare, crew
        who = scalars.join(crew, target + given + entries)
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
