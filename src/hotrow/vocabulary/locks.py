"""The locks of vocabularies, which also work in forked processes."""

from __future__ import annotations

import os
import threading
import weakref
from typing import Any

# Held while the keys or the counts of a vocabulary are read or written, but not while its layers
# change. So no thread that holds it waits for other threads or ranks.
contents_lock = threading.RLock()


class LongLock:
    """A reentrant lock that may be held for long.

    In a forked process it is free, because the thread that held it does not exist there.
    """

    def __init__(self) -> None:
        self.renew()
        _long_locks.add(self)

    def renew(self) -> None:
        """Release the lock, whichever thread holds it."""
        self._lock: Any = threading.RLock()

    def __enter__(self) -> None:
        self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


_long_locks: weakref.WeakSet[LongLock] = weakref.WeakSet()


def _renew_long_locks() -> None:
    for lock in _long_locks:
        lock.renew()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(
        # A fork waits, so that the contents are complete in the new process.
        before=contents_lock.acquire,
        after_in_parent=contents_lock.release,
        after_in_child=contents_lock.release,
    )
    os.register_at_fork(after_in_child=_renew_long_locks)
