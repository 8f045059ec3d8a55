"""Compiled code on disk, which several processes may fill at once."""
# mypy: ignore-errors
# (numba's dispatchers have no types)

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import njit
from numba.core.runtime import rtsys

from hotrow.kernels.scalars import OPTIONS


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """`njit(cache=True)`, one process at a time, with the options of every kernel.

    numba itself reads and writes the index of a cache without a lock: of two processes that save
    at the same moment, as the ranks of a first run, one may find the other's code under its key.
    And it imports its whole compiler before it loads a kernel, which needs the runtime alone: that
    was most of what a later start took.
    """
    dispatcher = njit(cache=True, **OPTIONS)(function)
    cache = dispatcher._cache
    lock = FileLock(Path(cache.cache_path) / "hotrow.lock")

    def alone(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            Path(lock.lock_file).parent.mkdir(parents=True, exist_ok=True)
            with lock:
                return work(*args)

        return run

    def load(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)
        return cache._load_overload(signature, context)

    cache.load_overload = alone(load)
    cache.save_overload = alone(cache.save_overload)
    return dispatcher
