"""Run a kernel on as many threads as torch may use.

On Linux, the kernel runs on torch's OpenMP threads. After a torch operation, these threads spin
while they wait for the next operation, so additional threads would compete with them for cores. On
other systems, and in a forked child, where the OpenMP threads no longer exist, the kernel runs on
Python threads. (torch's own multithreaded operations hang in a forked child, with or without
hotrow.) numba's threading layers are not used, because they don't allow concurrent calls or
calls after a fork, and take seconds to compile.

Each thread calls the kernel once, without the GIL. OpenMP threads never enter Python, because each
thread would have to wait for the GIL before it could start. The threads claim rows in small groups
(`intrinsics.claim_rows`). The assignment of rows to threads varies; the results do not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

GRAIN_SIZE = 32  # the number of rows that a thread claims at a time
VALUES_PER_THREAD = 1 << 16  # about 0.1 ms of work, enough to justify waking a thread

# A team of threads shares an int64 array. It contains the number of rows claimed, the number of
# threads that have joined, the maximum number of threads that get work, the number of threads that
# OpenMP starts (see `run_on_threads`), and the address of `GOMP_parallel`.
CLAIMED, JOINED, MAX_THREADS, TEAM_SIZE, GOMP_PARALLEL = range(5)


def thread_count(count: int, columns: int) -> int:
    """Return how many threads to use for `count` rows with `columns` columns.

    Small inputs get one thread, because waking another thread costs more than it saves.
    """
    by_rows, by_values = -(-count // (2 * GRAIN_SIZE)), -(-count * columns // VALUES_PER_THREAD)
    return min(torch.get_num_threads(), by_rows, by_values)


def runs_without_python() -> bool:
    """Return whether kernels run outside of Python, where no signal handler can interrupt them."""
    return bool(_gomp_parallel) or torch.get_num_threads() == 1


def run_on_threads(kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int) -> None:
    """Call `kernel(*arguments, team)` on `threads` threads; do nothing if `threads` is 0.

    The kernel must call `intrinsics.join_team` first, then `intrinsics.claim_rows` to get rows.
    """
    team = np.zeros(5, np.int64)
    team[MAX_THREADS] = threads
    if threads > 1 and _gomp_parallel:
        # Start as many threads as torch uses. If fewer were started, OpenMP would terminate the
        # others, and torch's next operation would have to start them again.
        team[TEAM_SIZE], team[GOMP_PARALLEL] = torch.get_num_threads(), _gomp_parallel
        team[JOINED] = -1
    elif threads > 1:
        _run_on_python_threads(kernel, (*arguments, team), threads)
        return
    if threads:
        kernel(*arguments, team)


def _find_gomp_parallel() -> int:
    """Return the address of `GOMP_parallel`, or 0 if torch has not loaded GNU OpenMP."""
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
    """Make a forked child start its own Python threads; the parent's threads don't exist there."""
    global _gomp_parallel
    _gomp_parallel = 0
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_reset_after_fork)
