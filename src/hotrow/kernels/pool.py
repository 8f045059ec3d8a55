"""One thread's work per row, on as many threads as torch may use.

Plain threads, since the kernels release the GIL: numba's own parallel layers forbid calls from two
threads at once or a fork, and compile for seconds. What a thread gets depends on the number of
threads, what is computed for a row does not.
"""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

import torch

_pools: dict[int, ThreadPoolExecutor] = {}
# A forked child has none of its parent's threads: it starts its own.
os.register_at_fork(after_in_child=_pools.clear)

CHUNKS = 8  # per thread: rows that cost more than others are evened out


def spread(work: Callable[[int, int], object], count: int, grain: int = 64) -> None:
    """Call `work(start, stop)` until 0 .. count is covered, each part once.

    Parts are at least `grain` long, and taken by whichever thread is free.
    """
    threads = min(torch.get_num_threads(), -(-count // grain))
    if threads <= 1:
        if count:
            work(0, count)
        return
    size = max(grain, -(-count // (threads * CHUNKS)))
    parts = itertools.count()

    def run() -> None:
        # next() on a count is atomic under the GIL, and locked without one.
        while (start := next(parts) * size) < count:
            work(start, min(start + size, count))

    pool = _pools.get(threads)
    if pool is None:
        pool = _pools.setdefault(threads, ThreadPoolExecutor(threads - 1, "hotrow"))
    others = [pool.submit(run) for _ in range(threads - 1)]
    try:
        run()
    finally:
        for other in others:
            other.result()
