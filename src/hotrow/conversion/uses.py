"""Describe the operations on one-hots, and the sizes below which torch is as fast as hotrow."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

# Counting ids is faster than torch's sum over the batch if the one-hot has at least this many times
# `min_entries` entries. The limits of the other operations are in `onehot/tensor.py`.
COUNT_SIZE = 10


def operation_name(func: Any, purpose: str = "") -> str:
    """Return the function's name, after the purpose of the call if the name doesn't tell it."""
    name = getattr(func, "__name__", str(func)).strip("_")
    return f"{purpose} ({name})" if purpose else name


@dataclass(frozen=True)
class SmallSize:
    """The size of a one-hot for which torch is as fast as an operation on the ids.

    An operation on the ids is faster if the one-hot has at least `min_entries` entries, plus
    `min_columns` entries for each id.

    Attributes:
        entries: the number of entries of the one-hot.
        ids: the number of ids.
        min_entries: the limit for one-hots with very many columns.
        min_columns: with this many columns or fewer, a one-hot of any size is too small.
    """

    entries: float
    ids: float
    min_entries: float
    min_columns: float = 0

    @property
    def limit(self) -> int | None:
        """The least number of entries with the same number of columns; None if there is none."""
        if not self.min_columns * self.ids:
            return math.ceil(self.min_entries)
        columns = self.entries / self.ids
        if columns <= self.min_columns:
            return None
        limit = self.min_entries / (1 - self.min_columns / columns)
        return math.ceil(limit * (1 - 1e-12))  # so that 500,000.0000001 becomes 500,000

    def __str__(self) -> str:
        if self.limit is None:
            columns = round(self.entries / self.ids)
            return f"{columns:,} columns (limit: {math.floor(self.min_columns) + 1:,} columns)"
        return f"{self.entries:,} entries (limit: {self.limit:,})"
