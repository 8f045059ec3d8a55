"""Zipf ids, the same for every peer."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

ODDS = 1.1  # id of rank k is drawn with odds 1 / k^ODDS
STRIDE, OFFSET = 7919, 13  # a prime and a shift: popular rows are spread over the table


class Batches:
    """Batch t of `count` ids for a table of `rows` rows: always the same for the same t."""

    def __init__(self, rows: int, count: int, seed: int = 0) -> None:
        assert rows % STRIDE, "ranks would share rows"
        self.rows, self.count, self.seed = rows, count, seed
        self._sums = np.cumsum(1 / np.arange(1, rows + 1) ** ODDS)

    def __getitem__(self, t: int) -> Tensor:
        """(count,) int64."""
        random = np.random.default_rng([self.seed, t])
        ranks = np.searchsorted(self._sums, random.random(self.count) * self._sums[-1])
        return self.at(ranks)

    def at(self, ranks: np.ndarray) -> Tensor:
        """The ids of these ranks; 0 is the most frequent."""
        return torch.from_numpy((ranks * STRIDE + OFFSET) % self.rows)
