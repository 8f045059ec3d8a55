"""How often and when a vocabulary has seen each of its rows."""

from __future__ import annotations

import copy
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from hotrow.vocabulary.keys import Rows

Order = Literal["idle", "count"]


class RowCounts:
    """For each row, the number of times it was seen, and the number of the last batch with it.

    Arguments:
        seen: (2, V) int64, both numbers of each row.
        batch_count: the number of batches so far.
    """

    def __init__(self, seen: NDArray[np.int64], batch_count: int = 0) -> None:
        self._memory, self.batch_count = seen, batch_count
        self._row_count: int = seen.shape[1]

    def __len__(self) -> int:
        return self._row_count

    @property
    def seen(self) -> NDArray[np.int64]:
        """The argument with the same name; it shares the memory."""
        return self._memory[:, : self._row_count]

    def add(self, rows: Rows) -> None:
        """Count a batch."""
        self.batch_count += 1
        np.add.at(self._memory[0], rows, 1)
        self._memory[1, rows] = self.batch_count

    def idle_batches(self) -> NDArray[np.int64]:
        """Return the number of batches since each row was last seen, (V,)."""
        result: NDArray[np.int64] = self.batch_count - self.seen[1]
        return result

    def grown(self, row_count: int) -> RowCounts:
        """Return the counts of more rows; they replace this object, whose memory they may share."""
        result = copy.copy(self)
        if row_count > self._memory.shape[1]:  # double it, so that growing in small steps is fast
            spare = np.zeros((2, row_count), np.int64)
            result._memory = np.concatenate([self._memory, spare], axis=1)
        result._row_count = row_count
        return result

    def selected(self, rows: Rows) -> RowCounts:
        """Return the counts of these rows, in this order."""
        return RowCounts(self.seen[:, rows], self.batch_count)

    def sort(self, rows: Rows, by: Order) -> Rows:
        """Return these rows in the order in which they would be dropped.

        With "idle", the rows that were not seen for the longest time come first. With "count", the
        rows that were seen least often come first.
        """
        return rows[np.argsort(self._memory[int(by == "idle"), rows], kind="stable")]
