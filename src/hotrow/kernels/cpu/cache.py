"""Cache compiled kernels on disk; concurrent processes can share the cache safely."""
# mypy: ignore-errors
# numba's dispatchers have no type annotations.

from __future__ import annotations

import functools
import hashlib
import uuid
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

from filelock import FileLock, Timeout
from numba import njit
from numba.core.runtime import rtsys

from hotrow.kernels import IMPORT_TIME
from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS

_LOCK_SECONDS = 60  # other processes need it only while they read or write files
_stuck: set[Path] = set()  # locks for which this process has waited in vain


def source_digest(files: Iterable[str | Path]) -> str:
    """Return a short hash of the contents of `files`.

    If a file has changed since this process imported hotrow, the process may run the old code. The
    hash is then unique, so that no other process loads the compiled code.
    """
    paths = sorted(map(Path, files))
    text = b"".join(path.read_bytes() for path in paths)
    if any(max(path.stat().st_mtime, path.stat().st_ctime) > IMPORT_TIME for path in paths):
        text += uuid.uuid4().bytes
    return hashlib.sha256(text).hexdigest()[:16]


@functools.cache
def _kernel_digest() -> str:
    """Return the digest of all files in `kernels`; `rows.py` also hashes each rule's sources."""
    return source_digest(Path(__file__).parents[1].rglob("*.py"))


def cached_jit(function: Callable[..., Any]) -> Callable[..., Any]:
    """Compile a kernel with `njit(cache=True)` and fix five problems with numba's cache.

    - Stale code: numba checks only the modification time of the function's own file. Here, editing
      any file in `kernels` invalidates the cache.
    - Locking: numba reads and writes the cache index without a lock. If two processes, such as two
      ranks in their first run, save at the same time, one may load the other's code. Here, a file
      lock lets only one process at a time access the index.
    - Order: numba writes the index before the kernel, and reuses file names. After an interrupted
      write, the index may refer to another kernel. Here, a file's name is the hash of its contents,
      and the index is written last.
    - Errors: numba raises an error if the cache is damaged or the disk is full, and runs a kernel
      whose machine code is damaged. Here, the kernel is compiled again, or not cached.
    - Startup: numba imports its whole compiler before it loads a kernel, and this import takes most
      of the startup time. Loading needs only numba's runtime, so only the runtime is initialized
      here.

    Set NUMBA_CACHE_DIR to choose the cache folder. If no folder is writable, each process compiles
    the kernels again.
    """
    try:
        dispatcher = njit(cache=True, **JIT_OPTIONS)(function)
    except RuntimeError:  # no writable cache folder, for example on a read-only file system
        return njit(**JIT_OPTIONS)(function)
    cache = dispatcher._cache
    file = cache._cache_file
    file._source_stamp, stem = _kernel_digest(), file._index_name.removesuffix(".nbi")
    lock = Path(cache.cache_path) / "hotrow.lock"

    def file_name(data: bytes) -> str:
        return f"{stem}.{hashlib.sha256(data).hexdigest()[:32]}.nbc"

    read_file = file._load_data

    def load_data(name: str) -> Any:
        if file_name((lock.parent / name).read_bytes()) != name:
            raise ValueError(f"{name} is damaged")
        return read_file(name)

    def save_file(key: Any, data: Any) -> None:
        data = file._dump(data)
        name = file_name(data)
        with file._open_for_write(lock.parent / name) as output:
            output.write(data)
        index = {**file._load_index(), key: name}
        file._save_index(index)
        names = set(index.values())
        for other in lock.parent.glob("*.nbc"):
            if other.name.startswith(f"{stem}.") and other.name not in names:
                with suppress(OSError):  # on Windows, another process may be reading it
                    other.unlink()

    def with_lock(function: Callable[..., Any]) -> Callable[..., Any]:
        def run(*args: Any) -> Any:
            if lock in _stuck:
                return None
            with suppress(Exception):
                lock.parent.mkdir(parents=True, exist_ok=True)
                try:
                    # Create a new lock: a forked child can't use its parent's lock.
                    with FileLock(lock, timeout=_LOCK_SECONDS):
                        return function(*args)
                except Timeout:  # for example, a stopped process has the lock
                    _stuck.add(lock)
            return None

        return run

    def load(signature: Any, context: Any) -> Any:
        rtsys.initialize(context)
        try:
            return cache._load_overload(signature, context)
        except Exception:  # numba can't add kernels to a damaged index
            Path(file._index_path).unlink()
            raise

    file.save, file._load_data = save_file, load_data
    cache.load_overload = with_lock(load)
    cache.save_overload = with_lock(cache.save_overload)
    return dispatcher
