"""One kernel on as many threads as torch may use.

On Linux they are torch's own, of the OpenMP library that it has loaded: after an operation of
torch's they wait awake for the next one, so that other threads would have to share the cores with
them. Elsewhere, and in a forked child, where OpenMP's threads are gone, they are Python's (there
torch's own operations on several threads wait for ever, as they do without hotrow).
(numba's own parallel layers forbid calls from two threads at once or a fork, and compile for
seconds.)

Each thread calls the kernel once, without the GIL: OpenMP's never see Python, for which one would
wait while the other begins. The threads share out the rows among themselves (`scalars.take`). Which
of them gets a row depends on chance, what is computed for it does not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch

COMPILED = {torch.float32: np.float32, torch.float64: np.float64}
GRAIN = 32  # rows that a thread takes at once
ENOUGH = 1 << 16  # values for a thread, which are worth 0.1 ms

# What the threads of a crew have in common, an array of int64: rows taken so far, threads that have
# joined, how many may, how many come (see `spread`), where OpenMP's `GOMP_parallel` is.
TAKEN, JOINED, THREADS, TEAM, OPENMP = range(5)


def threads_for(count: int, columns: int) -> int:
    """On how many threads so many rows are done; of few values one does all.

    Waking another takes longer.
    """
    return min(torch.get_num_threads(), -(-count // (2 * GRAIN)), -(-count * columns // ENOUGH))


def spread(kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int) -> None:
    """Call `kernel(*arguments, crew)` on so many threads; 0 for nothing to do.

    The kernel begins with `scalars.join` and gets its rows from `scalars.take`.
    """
    crew = np.zeros(5, np.int64)
    crew[THREADS] = threads
    if threads > 1 and _openmp:
        # All that torch uses: a smaller team would end the others, and torch start them again.
        crew[TEAM], crew[OPENMP] = torch.get_num_threads(), _openmp
        crew[JOINED] = -1
    elif threads > 1:
        _by_python(kernel, (*arguments, crew), threads)
        return
    if threads:
        kernel(*arguments, crew)


def _find_openmp() -> int:
    """Where `GOMP_parallel` of GNU's OpenMP is; 0 where torch has not loaded it."""
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return 0
    return ctypes.cast(library.GOMP_parallel, ctypes.c_void_p).value or 0


def _by_python(kernel: Callable[..., object], arguments: tuple[Any, ...], threads: int) -> None:
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hotrow"))
    others = [pool.submit(kernel, *arguments) for _ in range(threads - 1)]
    try:
        kernel(*arguments)
    finally:
        for other in others:
            other.result()


_pools: dict[int, ThreadPoolExecutor] = {}
_openmp = _find_openmp()


def _in_child() -> None:
    """A forked child has none of its parent's threads: it starts its own."""
    global _openmp
    _openmp = 0
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
