"""Locks that forked processes can use."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any


class ForkSafeLock:
    """A reentrant lock that no other thread holds in a new forked process.

    Only the thread that forks exists there. An ordinary lock of another thread would stay locked.

    Attributes:
        lock: the lock itself. Signal handlers can't interrupt a `with` statement on it after the
            lock was acquired, as they could if the statement called a method of this class.
    """

    def __init__(self) -> None:
        self.lock: Any = threading.RLock()
        _locks.add(self)

    @property
    def is_held_here(self) -> bool:
        """Whether this thread holds the lock."""
        return bool(self.lock._is_owned())


_locks: weakref.WeakSet[ForkSafeLock] = weakref.WeakSet()


def _replace_locks_of_other_threads() -> None:
    for each in _locks:
        if not each.is_held_here:
            each.lock = threading.RLock()


if hasattr(os, "register_at_fork"):  # does not exist on Windows
    os.register_at_fork(after_in_child=_replace_locks_of_other_threads)
