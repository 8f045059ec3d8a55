"""Postpone signals, such as Ctrl-C, until a step is complete.

A signal handler may raise an exception, such as `KeyboardInterrupt`, between any two instructions.
If that happened in the middle of a step, the rows, the optimizer state and the ledger would no
longer agree.
"""

from __future__ import annotations

# The functions in `signal`, unlike those in `_signal`, create an enum member on each call, which
# would add 20 us to a step.
import _signal  # type: ignore[import-not-found]
import signal
import threading
from typing import Any

# Signals for which programs often install their own handlers.
_SIGNALS = [
    int(getattr(signal, name))
    for name in ("SIGINT", "SIGTERM", "SIGALRM", "SIGHUP", "SIGUSR1", "SIGUSR2")
    if hasattr(signal, name)
]
_get: Any = _signal.getsignal
_set: Any = _signal.signal
_is_postponing = False  # only the main thread reads or writes this flag


class PostponedSignals:
    """A context manager that postpones Python's signal handlers until the context ends.

    Python runs signal handlers only in the main thread, so other threads need no protection.
    """

    _handlers: list[tuple[int, Any]] = []  # noqa: RUF012 - an empty list that is never changed

    def __enter__(self) -> None:
        global _is_postponing
        if _is_postponing or threading.current_thread() is not threading.main_thread():
            return
        self._arrived: list[int] = []
        self._handlers = [
            (number, handler) for number in _SIGNALS if callable(handler := _get(number))
        ]
        try:
            _is_postponing = True
            for number, _ in self._handlers:
                _set(number, self._postpone)
        except BaseException:  # raised by a handler that had not been replaced yet
            self._restore()
            raise

    def __exit__(self, *error: object) -> None:
        if self._handlers:
            self._restore()
            for number in self._arrived:
                signal.raise_signal(number)

    def _postpone(self, number: int, frame: Any) -> None:
        self._arrived.append(number)

    def _restore(self) -> None:
        global _is_postponing
        _is_postponing = False
        try:
            for number, handler in self._handlers:
                _set(number, handler)
        except BaseException:  # raised by a handler that had already been restored
            for number, handler in self._handlers:
                _set(number, handler)
            raise
