"""Sums over a row's missed steps, stored for every step at which the row may have been settled."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.optim.closed_form.base import Coefficients

NEGLIGIBLE_FACTOR = 2.0**-60  # missed steps with a smaller relative effect are outside the window
MIN_SHRINK = 1e-38  # a smaller factor underflows to 0, which would turn infinite values into NaN


class MissedStepSums(ABC):
    """The sums for every step in a ledger; a new entry changes only the last `window` sums.

    Arguments:
        width: the number of sums per step.
    """

    def __init__(self, width: int) -> None:
        self.entry_count = 0  # the number of entries added so far
        self.first_step = 0  # steps before `first_step` are replayed one by one
        self.hyperparameters: tuple[float, ...] = (0.0,) * 3  # b1, b2, eps, ...
        self.window = 0  # how many missed steps can change a row; 0 if changes shrink too slowly
        self.sums = np.zeros((64, width))
        self.max_window = 0  # the largest window so far

    def changed_since(self, step: int) -> tuple[slice, ...]:
        """See `FastForward.changed_since`."""
        return (slice(max(0, step + 1 - self.max_window), self.entry_count + 1),)

    def compute_coefficients(
        self, entries: NDArray[np.float64], end_step: int, dtype: torch.dtype
    ) -> Coefficients | None:
        """Return the coefficients up to `end_step`, or None if later coefficients already exist."""
        if end_step < self.entry_count:
            return None
        while len(self.sums) <= end_step:
            self.sums = np.concatenate([self.sums, np.zeros_like(self.sums)])
        for i in range(self.entry_count, end_step):
            self.add_entry(i, tuple(entries[i].tolist()))
        self.entry_count = end_step
        b1, b2, eps = self.hyperparameters[:3]
        return self.sums, self.first_step, b1, b2, eps, self.last_coefficient(dtype)

    def set_hyperparameters(self, i: int, b1: float, b2: float, *others: float) -> None:
        """Start new sums at entry i if its hyperparameters differ from those of entry i - 1.

        The first of the other hyperparameters is eps.
        """
        if self.hyperparameters != (b1, b2, *others):
            self.hyperparameters, self.first_step = (b1, b2, *others), i
            self.compute_powers(b1, b2)

    def set_window(self, ratio: float) -> NDArray[np.int64]:
        """Set `window` for changes that shrink by `ratio` per step; return [window, ..., 2, 1]."""
        self.window = 0
        if 0 <= ratio < 0.999:
            self.window = max(
                2, math.ceil(math.log(NEGLIGIBLE_FACTOR) / math.log(max(ratio, 1e-10)))
            )
        self.max_window = max(self.max_window, self.window)
        return np.arange(max(self.window, 1), 0, -1)

    @abstractmethod
    def add_entry(self, i: int, entry: tuple[float, ...]) -> None:
        """Add entry i to the sums for the steps in its window."""

    @abstractmethod
    def compute_powers(self, b1: float, b2: float) -> None:
        """Compute the powers of b1 and b2 that `add_entry` needs."""

    @abstractmethod
    def last_coefficient(self, dtype: torch.dtype) -> Any:
        """Return the last coefficient. Its meaning depends on the subclass."""
