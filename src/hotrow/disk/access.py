"""Let only one operation at a time use the files of a table.

Without this, a thread that saves could read the ledger before another thread's step and the rows
after it. A signal handler that saves could delete the journal of the save that it interrupted.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotrow.errors import HotrowError
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.lag import RowLag
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
