"""A lock that forked processes can use."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


class ForkSafeLock:
    """A reentrant lock that no other thread holds in a new forked process.

    Only the thread that forks exists there. An ordinary lock of another thread would stay locked.
    """

    def __init__(self) -> None:
        self._lock: Any = threading.RLock()
        _locks.add(self)

    @property
    def is_held_here(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self._lock._is_owned())

    def release_others(self) -> None:
        """Release the lock if another thread holds it."""
        if not self.is_held_here:
            self._lock = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _release_others() -> None:
    for lock in _locks:
        lock.release_others()


if hasattr(os, "register_at_fork"):  # does not exist on Windows
    os.register_at_fork(after_in_child=_release_others)
