"""The cache of compiled code on disk, which several processes may write at once."""
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

from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS


def source_digest(files: Iterable[str | Path]) -> str:
    """A short hash of the content of these files."""
    text = b"".join(Path(file).read_bytes() for file in sorted(files))
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def _kernel_digest() -> str:
    """The digest of all kernel sources; the rules have their own."""
    return source_digest(Path(__file__).parents[1].rglob("*.py"))


def cached_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`njit(cache=True)`, one process at a time, with the options of every kernel.

    Code that was compiled from other sources is not used. numba itself compares the date of the
    function's own file only, and not of the files that the function is also compiled from.

    If no folder is writable, each process compiles. NUMBA_CACHE_DIR may name a folder.

    numba itself reads and writes the index of a cache without a lock: of two processes that save
    at the same moment, as the ranks of a first run, one may find the other's code under its key.
    And it imports its whole compiler before it loads a kernel, although the runtime is enough:
    that was most of the start-up time with a filled cache.
    """
    try:
        dispatcher = njit(cache=True, **JIT_OPTIONS)(function)
    except RuntimeError:  # no writable folder, as on a read-only system: each process compiles
        return njit(**JIT_OPTIONS)(function)
    cache = dispatcher._cache
    cache._cache_file._source_stamp = _kernel_digest()
    lock = Path(cache.cache_path) / "hotrow.lock"

    def with_lock(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):  # made here, as a forked child cannot use its parent's
                return function(*args)

        return run

    def load(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)
        return cache._load_overload(signature, context)

    cache.load_overload = with_lock(load)
    cache.save_overload = with_lock(cache.save_overload)
    return dispatcher
