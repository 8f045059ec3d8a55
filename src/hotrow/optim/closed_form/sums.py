"""Sums over the steps that a row has missed, kept for every step that it may be settled at."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from hotrow.optim.closed_form.shortcut import Memo

GONE = 2.0**-60  # of the move: the steps after it are left out


class Sums(ABC):
    """The sums of a ledger; an entry adds to those of the last `reach` steps.

    Arguments:
        width: numbers for each step.
    """

    def __init__(self, width: int) -> None:
        self.done = 0  # entries that are in the sums
        self.first = 0  # the first step from which the hyperparameters were what they are
        self.constants = (0.0,) * 4  # b1, b2, eps, coupled decay
        self.reach = 0  # steps that a row feels; 0 if there is no end in sight
        self.sums = np.zeros((64, width))

    def advance(self, entries: NDArray[np.float64], upto: int, dtype: torch.dtype) -> Memo | None:
        """The memo for jumps to step `upto`; None if it is beyond that step already."""
        if upto < self.done:
            return None
        while len(self.sums) <= upto:
            self.sums = np.concatenate([self.sums, np.zeros_like(self.sums)])
        for i in range(self.done, upto):
            self.add(i, tuple(entries[i].tolist()))
        self.done = upto
        b1, b2, eps, _ = self.constants
        return self.sums, self.first, b1, b2, eps, self.last(dtype)

    def renew(self, i: int, constants: tuple[float, float, float, float]) -> None:
        """Begin again at entry i if its hyperparameters are others."""
        if self.constants != constants:
            self.constants, self.first = constants, i
            self.tables(*constants[:2])

    def felt(self, speed: float) -> NDArray[np.int64]:
        """Set `reach` for moves that shrink by `speed` a step; k from there to 1."""
        self.reach = 0
        if 0 <= speed < 0.999:
            self.reach = max(2, math.ceil(math.log(GONE) / math.log(max(speed, 1e-10))))
        return np.arange(max(self.reach, 1), 0, -1)

    @abstractmethod
    def add(self, i: int, entry: tuple[float, ...]) -> None:
        """Entry i, into the sums of the steps whose rows still feel it."""

    @abstractmethod
    def tables(self, b1: float, b2: float) -> None:
        """The powers of the moments that `add` needs."""

    @abstractmethod
    def last(self, dtype: torch.dtype) -> Any:
        """What ends the memo of a table of `dtype`."""
