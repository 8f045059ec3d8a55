"""Run one kernel on as many threads as torch may use.

On Linux these are the OpenMP threads of torch. After a torch operation they spin while they wait
for the next one, so any other threads would share the cores with them. Python threads run the
kernel on other systems, and in a forked child, where OpenMP's threads no longer exist. (torch's own
multithreaded operations hang in a forked child, with or without hotrow.) numba's parallel layers
are not used: they forbid calls from two threads at once or after a fork, and take seconds to
compile.

Each thread calls the kernel once, without the GIL. OpenMP's threads never enter Python, where each
would wait for the GIL to start. The threads claim rows in small groups (`intrinsics.claim_rows`).
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
VALUES_PER_THREAD = 1 << 16  # 0.1 ms of work, enough to be worth waking a thread

# The shared state of a team of threads, an int64 array: the number of rows claimed, of threads that
# have joined, of threads that get work, and of threads that OpenMP starts (see `run_on_threads`),
# and the address of OpenMP's `GOMP_parallel`.
CLAIMED, JOINED, MAX_THREADS, TEAM_SIZE, GOMP_PARALLEL = range(5)


def thread_count(count: int, columns: int) -> int:
    """The number of threads for a table slice of `count` rows and `columns` columns.

    Few values get one thread: waking another thread costs more than it saves.
    """
    by_rows, by_values = -(-count // (2 * GRAIN_SIZE)), -(-count * columns // VALUES_PER_THREAD)
    return min(torch.get_num_threads(), by_rows, by_values)


def run_on_threads(kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int) -> None:
    """Call `kernel(*arguments, team)` on this number of threads; with 0, do nothing.

    The kernel starts with `intrinsics.join_team` and gets its rows from `intrinsics.claim_rows`.
    """
    team = np.zeros(5, np.int64)
    team[MAX_THREADS] = threads
    if threads > 1 and _gomp_parallel:
        # Start all threads that torch uses: OpenMP would end the others, and torch restart them.
        team[TEAM_SIZE], team[GOMP_PARALLEL] = torch.get_num_threads(), _gomp_parallel
        team[JOINED] = -1
    elif threads > 1:
        _run_on_python_threads(kernel, (*arguments, team), threads)
        return
    if threads:
        kernel(*arguments, team)


def _find_gomp_parallel() -> int:
    """The address of `GOMP_parallel` in GNU OpenMP; 0 if torch has not loaded GNU OpenMP."""
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
    """Start new Python threads in a forked child: its parent's threads do not exist there."""
    global _gomp_parallel
    _gomp_parallel = 0
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
