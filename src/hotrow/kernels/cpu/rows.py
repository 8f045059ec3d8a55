"""The loop over rows, compiled for each rule. It applies missed steps, then the current step.

numba compiles the loop when a rule is first used, and caches it on disk. The cache key of a closure
consists of its bytecode and its cells. The cells therefore contain only module-level functions
(pickled by name), constants, and a digest of the rule's sources.
"""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
from numba.core.compiler_lock import global_compiler_lock
from numba.extending import register_jitable
from numba.np.unsafe.ndarray import to_fixed_tuple

import hotrow.kernels.cpu.rule_math  # noqa: F401 - registers the operations of a rule
from hotrow.kernels import rule_math
from hotrow.kernels.cpu.access import (
    PREFETCH_DISTANCE,
    copy_row,
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
    view_slots,
)
from hotrow.kernels.cpu.cache import cached_jit, source_digest
from hotrow.kernels.cpu.grouping import sum_row
from hotrow.kernels.cpu.intrinsics import (
    INLINE_OPTIONS,
    claim_rows,
    drop_owner,
    join_team,
    view_memory,
)
from hotrow.kernels.cpu.plans import (
    BATCH,
    COLUMNS,
    DISTINCT_IDS,
    GROUPS,
    IDS,
    IS_TRANSPOSED,
    LOOK_UP,
    ROW_STEPS,
    ROWS,
    SLOTS,
    STEP,
    TABLE,
)
from hotrow.kernels.cpu.threads import GRAIN_SIZE

# A lookup that replays at most this many steps for a row doesn't store the row. The next optimizer
# step replays those steps again.
MAX_UNSAVED_STEPS = 2

FACTOR_SETS = 1024  # the number of sets of factors that a thread keeps; a power of 2
KEY_FACTOR = 1 << 32  # greater than any number of steps


@functools.cache
def row_kernel(
    update: Callable[..., Any],
    flags: tuple[bool, ...],
    width: int,
    advance: Callable[..., Any],
    compute_factors: Callable[..., Any],
    slot_count: int,
) -> Callable[..., None]:
    """Return the kernel of a rule; numba compiles it when it is first called for a dtype.

    Arguments:
        update: see `Program`.
        flags: see `Program`.
        width: see `Program`.
        advance: `FastForward.apply`.
        compute_factors: see `FastForward`. The whole `FastForward` is not an argument, because
            optimizers with the same rule have different ones but should share one kernel.
        slot_count: the number of tensors in the optimizer state of a table.
    """
    functions = [*find_called(update), *find_called(advance), *find_called(compute_factors)]
    with global_compiler_lock:  # another thread may compile, or register the same functions
        for function in functions:
            register(function)
    sources = source_digest({inspect.getfile(function) for function in functions})

    def process_rows(
        task,
        no_items,
        plans,
        entries,
        coefficients,
        step_count,
        scratch,
        factors,
        factor_keys,
        team,
    ):
        _ = sources  # puts the digest into the cache key, so that edited sources are recompiled
        missed = entries, coefficients, step_count, scratch, factors, factor_keys, team
        thread = join_team(team, (task, no_items, plans, *missed))
        if thread < 0:
            return
        end_step = step_count - 1 if task == STEP else step_count
        entries = drop_owner(entries)
        row_scratch = drop_owner(scratch)[thread]
        thread_factors, thread_keys = drop_owner(factors)[thread], drop_owner(factor_keys)[thread]
        scalars = np.empty(width, scratch.dtype)  # a ledger entry in the dtype of the update
        plan, first, last = -1, 0, 0  # a plan, and its range of rows to claim
        while True:
            start = claim_rows(team, GRAIN_SIZE)
            while start >= last and plan + 1 < len(plans):
                plan += 1
                grains = (plans[plan, DISTINCT_IDS] + GRAIN_SIZE - 1) // GRAIN_SIZE
                first, last = last, last + grains * GRAIN_SIZE
            if start >= last:
                break
            start -= first
            count, size = plans[plan, DISTINCT_IDS], plans[plan, IDS]
            columns, groups = plans[plan, COLUMNS], plans[plan, GROUPS]
            stop = min(start + GRAIN_SIZE, count)
            is_transposed, row_count = plans[plan, IS_TRANSPOSED] != 0, plans[plan, ROWS]
            shape = (columns, row_count) if is_transposed else (row_count, columns)
            table = view_memory(plans[plan, TABLE], shape, no_items.dtype)
            addresses = to_fixed_tuple(plans[plan, SLOTS:], slot_count)
            slots = view_slots(addresses, shape, no_items.dtype)
            batch = view_memory(plans[plan, BATCH], (size, columns), no_items.dtype)
            row_steps = view_memory(plans[plan, ROW_STEPS], (row_count,), np.int32)
            rows = view_memory(groups, (count,), np.int64)
            order = view_memory(groups + 8 * 2 * size, (size,), np.int64)
            offsets = view_memory(groups + 8 * 3 * size, (count + 1,), np.int64)
            zeros, total = row_scratch[0][:columns], row_scratch[1][:columns]
            w_scratch = row_scratch[2][:columns]
            slot_scratch = slot_rows(slots, row_scratch[3:], columns)
            for i in range(start, min(start + PREFETCH_DISTANCE, stop)):
                prefetch_item(row_steps, rows[i])
                prefetch_row(table, rows[i], is_transposed)
                prefetch_rows(slots, rows[i], is_transposed)
            for i in range(start, stop):
                if i + PREFETCH_DISTANCE < stop:
                    prefetch_item(row_steps, rows[i + PREFETCH_DISTANCE])
                    prefetch_row(table, rows[i + PREFETCH_DISTANCE], is_transposed)
                    prefetch_rows(slots, rows[i + PREFETCH_DISTANCE], is_transposed)
                # With int32, numba would compile the calls below twice.
                t = np.int64(row_steps[rows[i]])
                in_scratch = task == LOOK_UP and t < end_step
                w, state = (
                    load_row(table, rows[i], w_scratch, in_scratch, is_transposed),
                    load_rows(slots, rows[i], slot_scratch, in_scratch, is_transposed),
                )
                replayed = 0
                needs_step = task == STEP and t < step_count  # false for a frozen row
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
                        store_row(batch, order[k], w, True, False)
                    if replayed <= MAX_UNSAVED_STEPS:
                        continue
                store_row(table, rows[i], w, in_scratch, is_transposed)
                store_rows(slots, rows[i], state, in_scratch, is_transposed)
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
