"""Compiled code on disk, which several processes may fill at once."""
# mypy: ignore-errors
# (numba's dispatchers have no types)

from __future__ import annotations

import functools
import hashlib
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock
from numba import njit
from numba.core.runtime import rtsys

from hotrow.kernels.cpu.scalars import OPTIONS


def digest(files: Iterable[str | Path]) -> str:
    """A short name for what is in these files."""
    text = b"".join(Path(file).read_bytes() for file in sorted(files))
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def _kernels() -> str:
    """The digest of all sources of kernels, but for the rules'."""
    return digest(Path(__file__).parents[1].rglob("*.py"))


def cached(function: Callable[..., Any]) -> Callable[..., Any]:
    """`njit(cache=True)`, one process at a time, with the options of every kernel.

    What was compiled from other sources is not used: numba itself would look at the date of the
    function's own file, and not at the files that it takes part of its code from.

    Where there is no folder to write into, each process compiles; NUMBA_CACHE_DIR may name one.

    numba itself reads and writes the index of a cache without a lock: of two processes that save
    at the same moment, as the ranks of a first run, one may find the other's code under its key.
    And it imports its whole compiler before it loads a kernel, which needs the runtime alone: that
    was most of what a later start took.
    """
    try:
        dispatcher = njit(cache=True, **OPTIONS)(function)
    except RuntimeError:  # nowhere to write, as in a read-only system: compiled in each process
        return njit(**OPTIONS)(function)
    cache = dispatcher._cache
    cache._cache_file._source_stamp = _kernels()
    lock = Path(cache.cache_path) / "hotrow.lock"

    def alone(work: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):  # made here, as a forked child cannot use its parent's
                return work(*args)

        return run

    def load(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)
        return cache._load_overload(signature, context)

    cache.load_overload = alone(load)
    cache.save_overload = alone(cache.save_overload)
    return dispatcher
