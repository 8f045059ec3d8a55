"""The keys of a vocabulary, the row of each key, and how often it was seen."""

from __future__ import annotations

import os
import threading
from collections import Counter
from collections.abc import Mapping
from typing import Any, Self

import numpy as np

from hotrow.optim.interrupts import PostponedSignals
from hotrow.vocabulary.counts import Order, RowCounts
from hotrow.vocabulary.keys import IntegerKeys, KeyMap, Rows, TextKeys

# Held while keys or counts are read or written, but not while layers change, and not while signal
# handlers run. So a thread that holds it never waits for other threads or ranks.
_lock: Any = threading.RLock()
_fork_signals = PostponedSignals()  # only the thread that holds the lock uses it


def _acquire() -> None:
    """Let a fork wait, so that the keys and counts are complete in the new process."""
    global _fork_signals
    signals = PostponedSignals()
    try:
        signals.__enter__()  # a handler that runs in a later function may wait for another thread
    finally:
        _lock.acquire()
        _fork_signals = signals


def _release() -> None:
    if _lock._is_owned():
        signals = _fork_signals
        _lock.release()
        signals.__exit__()


def _release_in_child() -> None:
    global _lock
    if not _lock._is_owned():  # C code has forked the process without the first function
        _lock = threading.RLock()
    _release()


if hasattr(os, "register_at_fork"):  # does not exist on Windows
    os.register_at_fork(before=_acquire, after_in_parent=_release, after_in_child=_release_in_child)


class KeyRows:
    """The keys of a vocabulary, the row of each key, and how often it was seen.

    Any thread may read it at any time. Only the thread that changes the vocabulary may write it, or
    use the attributes.

    Arguments:
        first_row: the row of the first key.
        keys: distinct strings or int64 numbers, in the order of their rows.
        counts: the counts of all rows, or None if no row was seen.
        pending: how often each key without a row was seen.

    Attributes:
        keys: the map from keys to rows.
        counts: the counts of the rows.
    """

    def __init__(
        self,
        first_row: int,
        keys: Any,
        counts: RowCounts | None = None,
        pending: Mapping[Any, int] | None = None,
    ) -> None:
        make_map = TextKeys if isinstance(keys, list) else IntegerKeys
        self.keys: KeyMap = make_map(first_row, keys)
        if counts is None:
            counts = RowCounts(np.zeros((2, first_row + len(self.keys)), np.int64))
        self.counts = counts
        self._pending = Counter(pending)

    @classmethod
    def from_arrays(cls, arrays: Mapping[str, Any], first_row: int, batch_count: int) -> Self:
        """Create the object whose `to_arrays` returned these values."""
        counts = RowCounts(arrays["seen"].copy(), batch_count)
        pending = zip(
            to_list(arrays["pending_keys"]), arrays["pending_counts"].tolist(), strict=True
        )
        return cls(first_row, arrays["keys"], counts, dict(pending))

    def to_arrays(self) -> tuple[dict[str, Any], int]:
        """Return copies of the keys and counts, and the number of batches so far."""
        with PostponedSignals(), _lock:
            keys, pending = self.to_list(), list(self._pending)
            is_text = isinstance(self.keys, TextKeys)
            arrays = {
                "keys": keys if is_text else np.array(keys, np.int64),
                "pending_keys": pending if is_text else np.array(pending, np.int64),
                "pending_counts": np.array(list(self._pending.values()), np.int64),
                "seen": self.counts.seen.copy(),
            }
            return arrays, self.counts.batch_count

    def __len__(self) -> int:
        """The number of rows, including those before the first key."""
        return len(self.counts)

    def to_list(self) -> list[Any]:
        """Return the keys in the order of their rows."""
        with PostponedSignals(), _lock:
            return self.keys.to_list()[: len(self) - self.keys.first_row]

    def find(self, keys: Any) -> Rows:
        """Return the row of each key, or -1 if it has none."""
        with PostponedSignals(), _lock:
            rows = self.keys.find(keys)
            rows[rows >= len(self)] = -1  # another thread is just adding these rows
        return rows

    def seen(self) -> Rows:
        """Return how often each row was seen."""
        with PostponedSignals(), _lock:
            seen: Rows = self.counts.seen[0].copy()
            return seen

    def idle_batches(self) -> Rows:
        """Return the number of batches since each row was last seen."""
        with PostponedSignals(), _lock:
            return self.counts.idle_batches()

    def sort(self, rows: Rows, by: Order) -> Rows:
        """Return these rows in the order in which they would be dropped; see `RowCounts.sort`."""
        with PostponedSignals(), _lock:
            return self.counts.sort(rows, by)

    def count(self, rows: Rows) -> None:
        """Count a batch."""
        with PostponedSignals(), _lock:
            self.counts.add(rows)

    def count_pending(self, keys: Any) -> dict[Any, int]:
        """Return how often each key of a batch without rows was seen, including this batch."""
        occurrences = Counter(to_list(keys))
        return {key: self._pending.get(key, 0) + count for key, count in occurrences.items()}

    def append(self, keys: Any) -> None:
        """Add distinct keys. Other threads see them once `complete` is called."""
        with PostponedSignals(), _lock:
            self.keys.append(keys)

    def undo_append(self) -> None:
        """Remove the keys that other threads don't see yet."""
        count = len(self) - self.keys.first_row
        if len(self.keys) > count:
            with PostponedSignals(), _lock:
                self.keys = self.keys.selected(np.arange(count))

    def complete(
        self, new: list[Any], counts: RowCounts, pending: Mapping[Any, int], rows: Rows
    ) -> None:
        """Let other threads see the new keys, and count a batch.

        Arguments:
            new: the new keys.
            counts: the counts of all rows before the batch.
            pending: new values of the counts of keys without a row.
            rows: the rows of the batch.
        """
        with PostponedSignals(), _lock:
            counts.add(rows)
            self.counts = counts
            dict.update(self._pending, pending)
            if self._pending:
                for key in new:
                    self._pending.pop(key, None)

    def replace(self, keys: KeyMap, counts: RowCounts) -> None:
        """Replace all keys and their counts."""
        with PostponedSignals(), _lock:
            self.keys, self.counts = keys, counts


def to_list(keys: Any) -> list[Any]:
    """Return a batch of keys as a list."""
    return list(keys.tolist()) if isinstance(keys, np.ndarray) else list(keys)
