"""One kernel on as many threads as torch may use.

On Linux they are torch's own, taken from the OpenMP library that it has loaded: after an operation
of torch's they wait awake for the next one, so that other threads would have to share the cores
with them. Elsewhere, and in a forked child, where OpenMP's threads are gone, they are Python's.
(numba's own parallel layers forbid calls from two threads at once or a fork, and compile for
seconds.)

Each thread calls its kernel once, without the GIL, and the kernels share out the rows among
themselves (`scalars.take`): coming back to Python between parts would have the threads wait for
each other. Which thread gets a row depends on chance, what is computed for it does not.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

COMPILED = {torch.float32: np.float32, torch.float64: np.float64}
GRAIN = 32  # rows that a thread takes at once
ENOUGH = 1 << 16  # values for a thread, which are worth 0.1 ms

Work = Callable[[NDArray[np.int64]], object]


def spread(work: Work, count: int, columns: int) -> None:
    """Call `work(taken)` on each thread, `taken` being the shared count of rows begun.

    There are `count` rows; of few values one thread takes all, as waking another takes longer.
    """
    threads = min(torch.get_num_threads(), -(-count // (2 * GRAIN)), -(-count * columns // ENOUGH))
    if threads > 1:
        (_by_torch or _by_python)(work, np.zeros(1, np.int64), threads)
    elif count:
        work(np.zeros(1, np.int64))


def _openmp() -> Callable[[Work, NDArray[np.int64], int], None] | None:
    """`_by_python` with the threads of GNU's OpenMP; None where torch has not loaded it."""
    try:
        library = ctypes.CDLL("libgomp.so.1", mode=os.RTLD_NOLOAD | os.RTLD_NOW)
    except (OSError, AttributeError):
        return None
    function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)
    parallel = library.GOMP_parallel  # (function, its argument, threads, flags)
    parallel.argtypes = function, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint
    parallel.restype = None

    def run(work: Work, taken: NDArray[np.int64], threads: int) -> None:
        errors: list[BaseException] = []
        begun: list[object] = []

        def part(_: object) -> None:
            begun.append(_)
            if len(begun) > threads:
                return
            try:
                work(taken)
            except BaseException as error:  # which could not leave through C
                errors.append(error)

        # All that torch uses: a smaller team would end the others, and torch start them again.
        parallel(function(part), None, torch.get_num_threads(), 0)
        if errors:
            raise errors[0]

    return run


def _by_python(work: Work, taken: NDArray[np.int64], threads: int) -> None:
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hotrow"))
    others = [pool.submit(work, taken) for _ in range(threads - 1)]
    try:
        work(taken)
    finally:
        for other in others:
            other.result()


_pools: dict[int, ThreadPoolExecutor] = {}
_by_torch = _openmp()


def _in_child() -> None:
    """A forked child has none of its parent's threads: it starts its own."""
    global _by_torch
    _by_torch = None
    _pools.clear()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_in_child)
