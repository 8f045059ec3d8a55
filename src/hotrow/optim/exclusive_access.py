"""The lock that allows only one operation on rows at a time."""

from __future__ import annotations

import os
import threading
from typing import Protocol

from hotrow.errors import HotrowError
from hotrow.optim.interrupts import PostponedSignals

# Only one thread settles rows at a time, so that no row is settled twice.
lock = threading.RLock()


def _replace_lock() -> None:
    """Create a new lock in a forked child; a thread of the parent may have held the old lock."""
    global lock
    lock = threading.RLock()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_replace_lock)


class Lag(Protocol):
    """What `ExclusiveAccess` uses of a `RowLag`."""

    is_busy: bool

    def check_idle(self) -> None:
        """Raise an error if an operation on rows is running, or was interrupted."""


class ExclusiveAccess:
    """A context manager that allows only one row operation at a time, even within one thread."""

    __slots__ = ("_lags", "_lock", "_signals")

    def __init__(self, *lags: Lag) -> None:
        self._lags, self._lock, self._signals = lags, lock, PostponedSignals()

    def __enter__(self) -> None:
        self._signals.__enter__()
        self._lock.acquire()
        try:
            for lag in self._lags:
                lag.check_idle()
        except HotrowError:
            self._lock.release()
            self._signals.__exit__()
            raise
        for lag in self._lags:
            lag.is_busy = True

    def __exit__(self, *error: object) -> None:
        for lag in self._lags:
            lag.is_busy = False
        self._lock.release()
        self._signals.__exit__()
