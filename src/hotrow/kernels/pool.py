"""One thread's work per row, on as many threads as torch may use.

Plain threads, since the kernels release the GIL: numba's own parallel layers forbid calls from two
threads at once or a fork, and compile for seconds. Each thread calls its kernel once, and the
kernels share out the rows among themselves (`scalars.take`): coming back to Python between parts
would have the threads wait for the GIL, and for each other to wake. Which thread gets a row
depends on chance, what is computed for it does not.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import torch
from numpy.typing import NDArray

COMPILED = {torch.float32: np.float32, torch.float64: np.float64}
GRAIN = 32  # rows that a thread takes at once

_pools: dict[int, ThreadPoolExecutor] = {}
if hasattr(os, "register_at_fork"):
    # A forked child has none of its parent's threads: it starts its own.
    os.register_at_fork(after_in_child=_pools.clear)


def spread(work: Callable[[NDArray[np.int64]], object], count: int) -> None:
    """Call `work(taken)` on each thread, `taken` being the shared count of rows begun."""
    taken = np.zeros(1, np.int64)
    threads = min(torch.get_num_threads(), -(-count // (2 * GRAIN)))
    if threads <= 1:
        if count:
            work(taken)
        return
    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hotrow"))
    others = [pool.submit(work, taken) for _ in range(threads - 1)]
    try:
        work(taken)
    finally:
        for other in others:
            other.result()
