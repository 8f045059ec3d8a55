"""Let only one operation at a time use the files of a table.

Without this, a thread that saves could read the ledger before another thread's step and the rows
after it. A signal handler that saves could delete the journal of the save that it interrupted.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotrow.errors import HotrowError
from hotrow.optim.lag import ExclusiveAccess, RowLag
from hotrow.table.parameter import Table


class FileAccess:
    """The access to the files of one table.

    An operation holds the lock that steps and settling also hold, so other threads wait for it. It
    also postpones signals.

    Arguments:
        folder: the folder of the files, for error messages.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._is_busy = False
        self._change: weakref.ref[object] | None = None
        self._changing_thread = 0

    @contextmanager
    def exclusive(self, table: Table | None = None) -> Iterator[None]:
        """Run an operation on the files; if `table` is given, its rows may not be read meanwhile.

        Raises:
            HotrowError: this thread already runs an operation on the files or on the table.
        """
        with ExclusiveAccess():
            if self._is_busy:
                raise HotrowError(
                    f"{self._folder} was saved, closed or changed during its own save, for example "
                    "by a signal handler",
                    fix="set a flag in the handler, and call the method after the save",
                )
            self._is_busy = True
            try:
                lag = None if table is None else table.lag
                with ExclusiveAccess(*([lag] if isinstance(lag, RowLag) else [])):
                    yield
            finally:
                self._is_busy = False

    # The first step creates the files of the optimizer state one by one, and uses them later.

    def begin_change(self, change: object) -> None:
        """Refuse saves by other threads until `end_change`, or until `change` is deleted."""
        self._change, self._changing_thread = weakref.ref(change), threading.get_ident()

    def end_change(self) -> None:
        """Allow saves by all threads again."""
        self._change = None

    def check_change(self) -> None:
        """Raise an error if another thread has begun a change that is not complete yet."""
        is_changing = self._change is not None and self._change() is not None
        if is_changing and self._changing_thread != threading.get_ident():
            raise HotrowError(
                f"{self._folder} cannot be saved now, because another thread is creating the "
                "optimizer state of the table",
                fix="save again later, or save in the thread that trains the table",
            )
