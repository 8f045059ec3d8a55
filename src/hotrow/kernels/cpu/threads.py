"""Run one kernel on as many threads as torch may use.

On Linux they are torch's own, of the OpenMP library that it has loaded: after an operation of
torch's they spin while they wait for the next one, so that other threads would have to share the
cores with them. Elsewhere, and in a forked child, where OpenMP's threads are gone, they are
Python's (there torch's own multithreaded operations hang, with or without hotrow).
(numba's own parallel layers forbid calls from two threads at once or after a fork, and take
seconds to compile.)

Each thread calls the kernel once, without the GIL: OpenMP's never enter Python, where one would
wait while the other begins. The threads share the rows among themselves (`intrinsics.claim_rows`).
The assignment of rows to threads varies; the results do not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

GRAIN_SIZE = 32  # rows that a thread claims at once
VALUES_PER_THREAD = 1 << 16  # enough for a thread to be worth waking: they take 0.1 ms

# The shared state of a team of threads, an array of int64: rows claimed so far, threads that have
# joined, how many may, how many come (see `run_on_threads`), the address of OpenMP's
# `GOMP_parallel`.
CLAIMED, JOINED, MAX_THREADS, TEAM_SIZE, GOMP_PARALLEL = range(5)


def thread_count(count: int, columns: int) -> int:
    """The number of threads for so many rows; a few values take one.

    Waking another thread costs more than it saves.
    """
    by_rows, by_values = -(-count // (2 * GRAIN_SIZE)), -(-count * columns // VALUES_PER_THREAD)
    return min(torch.get_num_threads(), by_rows, by_values)


def run_on_threads(kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int) -> None:
    """Call `kernel(*arguments, team)` on so many threads; 0 for nothing to do.

    The kernel begins with `intrinsics.join_team` and gets its rows from `intrinsics.claim_rows`.
    """
    team = np.zeros(5, np.int64)
    team[MAX_THREADS] = threads
    if threads > 1 and _gomp_parallel:
        # All that torch uses: a smaller team would end the others, and torch start them again.
        team[TEAM_SIZE], team[GOMP_PARALLEL] = torch.get_num_threads(), _gomp_parallel
        team[JOINED] = -1
    elif threads > 1:
        _run_on_python_threads(kernel, (*arguments, team), threads)
        return
    if threads:
        kernel(*arguments, team)


def _find_gomp_parallel() -> int:
    """The address of `GOMP_parallel` of GNU's OpenMP; 0 if torch has not loaded it."""
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0


def _run_on_python_threads(
    kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int
) -> None:
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hotrow"))
    futures = [pool.submit(kernel, *arguments) for _ in range(threads - 1)]
    try:
        kernel(*arguments)
    finally:
        for future in futures:
            future.result()


_pools: dict[int, ThreadPoolExecutor] = {}
_gomp_parallel = _find_gomp_parallel()


def _reset_after_fork() -> None:
    """A forked child has none of its parent's threads: it starts its own."""
    global _gomp_parallel
    _gomp_parallel = 0
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
