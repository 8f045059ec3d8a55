"""The loop over rows, compiled for each rule. It applies missed steps, then the current step.

numba compiles the loop when a rule is first used, and caches it on disk. The cache key of a closure
consists of its bytecode and its cells. The cells therefore contain only module-level functions
(pickled by name), constants, and a digest of the rule's sources.
"""
# mypy: ignore-errors
# (numba infers the types of compiled code; mypy cannot check them)

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.extending import register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

import hotrow.kernels.cpu.rule_math  # noqa: F401 - registers the operations of a rule
from hotrow.kernels import rule_math
from hotrow.kernels.cpu.access import (
    PREFETCH_DISTANCE,
    copy_row,
    drop_owners,
    get_items,
    load_row,
    load_rows,
    prefetch_item,
    prefetch_row,
    prefetch_rows,
    round_row,
    round_rows,
    set_items,
    slot_rows,
    store_row,
    store_rows,
    to_float,
    to_number,
    to_numbers,
)
from hotrow.kernels.cpu.cache import cached_jit, source_digest
from hotrow.kernels.cpu.grouping import sum_row
from hotrow.kernels.cpu.intrinsics import INLINE_OPTIONS, claim_rows, drop_owner, join_team
from hotrow.kernels.cpu.tasks import LOOK_UP, STEP
from hotrow.kernels.cpu.threads import GRAIN_SIZE
from hotrow.kernels.program import FastForward

# A lookup that replays at most this many steps for a row doesn't store the row. The next optimizer
# step replays those steps again.
MAX_UNSAVED_STEPS = 2

FACTOR_SETS = 1024  # how many sets of factors a thread keeps; a power of 2
KEY_FACTOR = 1 << 32  # greater than any number of steps


@functools.cache
def row_kernel(
    update: Callable[..., Any], flags: tuple[bool, ...], width: int, fast_forward: FastForward
) -> Callable[..., None]:
    """Return the kernel of a rule; numba compiles it when it is first called for a dtype."""
    advance, compute_factors = fast_forward.apply, fast_forward.compute_factors
    functions = [*find_called(update), *find_called(advance), *find_called(compute_factors)]
    for function in functions:
        register(function)
    sources = source_digest({inspect.getfile(function) for function in functions})

    def process_rows(
        task,
        table,
        slots,
        row_steps,
        rows,
        order,
        offsets,
        batch,
        entries,
        coefficients,
        step_count,
        scratch,
        factors,
        factor_keys,
        team,
    ):
        _ = sources  # puts the digest into the cache key, so that edited sources are recompiled
        target, grouped = (task, table, slots, row_steps), (rows, order, offsets, batch)
        missed = entries, coefficients, step_count, scratch, factors, factor_keys, team
        thread = join_team(team, target + grouped + missed)
        if thread < 0:
            return
        end_step = step_count - 1 if task == STEP else step_count
        count = len(rows)
        table, row_steps, batch = drop_owner(table), drop_owner(row_steps), drop_owner(batch)
        rows, order, offsets = drop_owner(rows), drop_owner(order), drop_owner(offsets)
        entries, slots = drop_owner(entries), drop_owners(slots)
        thread_scratch = drop_owner(scratch)[thread]
        zeros, total, w_scratch = thread_scratch[0], thread_scratch[1], thread_scratch[2]
        thread_factors = drop_owner(factors)[thread]
        thread_keys = drop_owner(factor_keys)[thread]
        scalars = np.empty(width, scratch.dtype)  # an entry, rounded to the dtype of the update
        slot_scratch = slot_rows(slots, thread_scratch[3:])
        while True:
            start = claim_rows(team, GRAIN_SIZE)
            if start >= count:
                break
            stop = min(start + GRAIN_SIZE, count)
            for i in range(start, min(start + PREFETCH_DISTANCE, stop)):
                prefetch_item(row_steps, rows[i])
                prefetch_row(table, rows[i])
                prefetch_rows(slots, rows[i])
            for i in range(start, stop):
                if i + PREFETCH_DISTANCE < stop:
                    prefetch_item(row_steps, rows[i + PREFETCH_DISTANCE])
                    prefetch_row(table, rows[i + PREFETCH_DISTANCE])
                    prefetch_rows(slots, rows[i + PREFETCH_DISTANCE])
                t = row_steps[rows[i]]
                in_scratch = task == LOOK_UP and t < end_step
                w, state = (
                    load_row(table, rows[i], w_scratch, in_scratch),
                    load_rows(slots, rows[i], slot_scratch, in_scratch),
                )
                replayed = 0
                needs_step = task == STEP
                while t < end_step or needs_step:
                    grad = zeros
                    if t < end_step:
                        # Rows at the same step share their factors.
                        k = t & (FACTOR_SETS - 1)
                        key = end_step * KEY_FACTOR + t
                        if thread_keys[k] != key:
                            compute_factors(t, end_step, coefficients, thread_factors[k])
                            thread_keys[k] = key
                        reached = advance(w, state, t, end_step, coefficients, thread_factors[k])
                        if reached > t:
                            round_row(table, w)
                            round_rows(table, state)
                            t = reached
                            continue
                    else:
                        sum_row(batch, order, offsets, i, stop, total)
                        grad, needs_step = total, False
                    # Call `update` in one place only: each call site takes seconds to compile.
                    copy_row(entries[min(t, end_step)], scalars)
                    entry = to_fixed_tuple(scalars, width)
                    for j in range(len(w)):
                        old_w = to_number(table, w[j])
                        old_state = to_numbers(table, get_items(state, j))
                        new_w, new_state = update(
                            old_w, to_number(table, grad[j]), old_state, entry, flags
                        )
                        w[j] = to_float(new_w)
                        set_items(state, j, new_state)
                    t += 1
                    replayed += 1
                if task == LOOK_UP:
                    for k in range(offsets[i], offsets[i + 1]):
                        if k + PREFETCH_DISTANCE < offsets[stop]:
                            prefetch_row(batch, order[k + PREFETCH_DISTANCE])
                        store_row(batch, order[k], w, True)
                    if replayed <= MAX_UNSAVED_STEPS:
                        continue
                store_row(table, rows[i], w, in_scratch)
                store_rows(slots, rows[i], state, in_scratch)
                row_steps[rows[i]] = max(t, step_count)

    return cached_jit(process_rows)


def find_called(function: Callable[..., Any]) -> list[Callable[..., Any]]:
    """Return `function` and the module-level functions it calls, except those in `rule_math.py`."""
    found = [function]
    for caller in found:
        for name in caller.__code__.co_names:
            callee = caller.__globals__.get(name)
            if (
                inspect.isfunction(callee)
                and callee not in found
                and callee.__module__ != rule_math.__name__
            ):
                found.append(callee)
    return found


@functools.cache
def register(function: Callable[..., Any]) -> None:
    """Make a function callable from compiled code; Python code still calls the original."""
    # Inline the function so that LLVM can vectorize the loop over columns.
    register_jitable(**INLINE_OPTIONS)(function)
