"""Postpone signals, such as Ctrl-C, until a step is complete.

A signal handler may raise an exception, such as `KeyboardInterrupt`, between any two instructions.
If that happened in the middle of a step, the rows, the optimizer state and the ledger would no
longer agree.
"""

from __future__ import annotations

# The functions in `signal`, unlike those in `_signal`, create an enum member on each call, which
# would add 20 us to a step.
import _signal  # type: ignore[import-not-found]
import _thread
import os
import signal
import sys
import threading
from collections import deque
from typing import Any

# After a fault, Python's handlers can't run, and the system does not allow handlers for the others.
_FAULTS = "SIGSEGV", "SIGBUS", "SIGFPE", "SIGILL"
_WITHOUT_HANDLERS = {getattr(signal, name, None) for name in (*_FAULTS, "SIGKILL", "SIGSTOP")}
_SIGNALS = [int(each) for each in signal.valid_signals() if each not in _WITHOUT_HANDLERS]
_get: Any = _signal.getsignal
_set: Any = _signal.signal
_call_soon: Any = _thread.interrupt_main
# Only the main thread reads or writes these variables.
_outermost: PostponedSignals | None = None  # the context that postpones the handlers now
# The latest handlers of all signals, and (signal, handler) of those that are Python functions.
_latest: tuple[list[Any], list[tuple[int, Any]]] = [], []


class PostponedSignals:
    """A context manager that postpones Python's signal handlers until the context ends.

    In nested contexts, the handlers run when the outermost context ends. Then all of them run, in
    the order in which the signals arrived. If one of them raises an exception, the others run
    while that exception propagates.

    Python runs signal handlers only in the main thread, so other threads need no protection.
    """

    _handlers: dict[int, Any] = {}  # noqa: RUF012 - an empty dict that is never changed
    _is_over = False

    def __enter__(self) -> None:
        global _outermost, _latest
        thread = _thread.get_ident()
        if _outermost is not None or thread != threading.main_thread().ident:
            return
        handlers = list(map(_get, _SIGNALS))
        known, functions = _latest
        if handlers != known:
            pairs = zip(_SIGNALS, handlers, strict=True)
            functions = [(number, handler) for number, handler in pairs if callable(handler)]
            _latest = handlers, functions
        if not functions:
            return
        self._arrived: list[int] = []
        self._postpone = postpone = self._arrive
        self._handlers = self._originals = found = dict(functions)
        try:
            for number, _ in functions:
                # A handler that has just run may have changed this one.
                found[number] = _set(number, postpone)
            # Set this last: until then, a handler that has not been replaced yet may run, and its
            # own contexts must work.
            _outermost = self
        except BaseException:  # raised by a handler that had not been replaced yet
            self._end()
            raise

    def __exit__(self, *error: object) -> None:
        if self._handlers:
            self._end()

    def _arrive(self, number: int, frame: Any) -> None:
        if not self._is_over:
            self._arrived.append(number)
        elif callable(handler := self._originals[number]):
            # Code inside of the context has set a handler that calls the previous one: this one.
            handler(number, frame)

    def _end(self) -> None:
        """Restore all handlers, and call the handlers of the signals that have arrived."""
        global _outermost
        _outermost = None
        arrived = self._arrived
        try:
            try:
                self._restore()
            except BaseException:  # raised by a handler that had already been restored
                self._restore()
                raise
            finally:
                self._is_over = True
            while arrived:
                _call_handler(arrived.pop(0))
        finally:
            if arrived:
                # After an exception, let Python call the other handlers as soon as it can. No
                # exception can interrupt this call, because it runs no Python code.
                deque(map(_call_soon, arrived), 0)

    def _restore(self) -> None:
        """Restore all handlers but those that another handler has changed meanwhile."""
        for number, handler in self._handlers.items():
            previous = _set(number, handler)
            if previous is not self._postpone:
                _set(number, previous)


def postpone_new_handlers() -> None:
    """Also postpone the handlers that other code has set since signals are postponed."""
    context = _outermost
    if context is None or _thread.get_ident() != threading.main_thread().ident:
        return
    for number in _SIGNALS:
        handler = _get(number)
        if callable(handler) and handler is not context._postpone:
            context._handlers = context._handlers | {number: handler}
            _set(number, context._postpone)


def _restore_handlers() -> None:
    """Restore the handlers in a forked child, which may never reach the end of the context."""
    if _outermost is not None:
        _outermost._arrived.clear()  # the parent handles these signals
        _outermost._end()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_restore_handlers)


def _call_handler(number: int) -> None:
    """Call a signal's handler.

    Sending the signal again would write to the file descriptor of `signal.set_wakeup_fd` again, so
    asyncio would call its handlers twice.
    """
    handler = _get(number)
    if callable(handler):
        handler(number, sys._getframe(1))
    else:  # another handler has just removed it
        signal.raise_signal(number)
