"""Ids for a training step, the same for every peer."""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ODDS = 1.1  # id of rank k is drawn with odds 1 / k^ODDS
STRIDE, OFFSET = 7919, 13  # a prime and a shift: popular rows are spread over the table


class Batches:
    """Batch t of `count` ids for a table of `rows` rows: always the same for the same t.

    Zipf(1.1), or uniform.
    """

    def __init__(self, rows: int, count: int, zipf: bool = True, seed: int = 0) -> None:
        assert rows % STRIDE, "ranks would share rows"
        self.rows, self.count, self.zipf, self.seed = rows, count, zipf, seed

    def __getitem__(self, t: int) -> Tensor:
        """(count,) int64."""
        random = np.random.default_rng([self.seed, t])
        if not self.zipf:
            return torch.from_numpy(random.integers(0, self.rows, self.count))
        sums = _sums(self.rows)
        return self.at(np.searchsorted(sums, random.random(self.count) * sums[-1]))

    def at(self, ranks: NDArray[Any]) -> Tensor:
        """The ids of these ranks; 0 is the most frequent."""
        return torch.from_numpy((ranks * STRIDE + OFFSET) % self.rows)


@functools.lru_cache(maxsize=4)
def _sums(rows: int) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.cumsum(1 / np.arange(1, rows + 1) ** ODDS)
    return sums


def forget() -> None:
    """Let go of what drawing has kept: 8 bytes a row of the last tables."""
    _sums.cache_clear()
