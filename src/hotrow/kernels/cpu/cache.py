"""Cache compiled kernels on disk, safely for several processes at once."""
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
    """A short hash of the contents of these files."""
    text = b"".join(Path(file).read_bytes() for file in sorted(files))
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def _kernel_digest() -> str:
    """The digest of all files in `kernels`; each rule has a digest of its own in `rows.py`."""
    return source_digest(Path(__file__).parents[1].rglob("*.py"))


def cached_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """`njit(cache=True)` with the options of every kernel, and with three corrections.

    - Stale code: numba compares only the date of the function's own file. Here an edit of any file
      in `kernels` invalidates the cache.
    - Locking: numba reads and writes the index of a cache without a lock. When two processes save
      at the same moment, like the ranks of a first run, one may load the other's code. Here a file
      lock lets in one process at a time.
    - Start-up: numba imports its whole compiler before it loads a kernel. Here it initializes only
      its runtime, which is enough; the import took most of the start-up time.

    Set NUMBA_CACHE_DIR to choose the folder. Without a writable folder, each process compiles.
    """
    try:
        dispatcher = njit(cache=True, **JIT_OPTIONS)(function)
    except RuntimeError:  # no writable folder, as on a read-only file system
        return njit(**JIT_OPTIONS)(function)
    cache = dispatcher._cache
    cache._cache_file._source_stamp = _kernel_digest()
    lock = Path(cache.cache_path) / "hotrow.lock"

    def with_lock(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            lock.parent.mkdir(parents=True, exist_ok=True)
            with FileLock(lock):  # a new object each time: a forked child cannot use its parent's
                return function(*args)

        return run

    def load(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)
        return cache._load_overload(signature, context)

    cache.load_overload = with_lock(load)
    cache.save_overload = with_lock(cache.save_overload)
    return dispatcher
