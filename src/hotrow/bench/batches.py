"""The ids of each training step, which are the same for every peer."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

ZIPF_EXPONENT = 1.1  # the k-th most frequent id has a probability proportional to 1 / k^1.1
STRIDE, OFFSET = 7919, 13  # a prime stride and an offset scatter frequent rows over the table


class Batches:
    """Reproducible batches of `count` ids for a table of `rows` rows.

    The ids follow Zipf's law with `zipf_exponent`, or are uniform if the exponent is None.
    """

    def __init__(
        self, rows: int, count: int, zipf_exponent: float | None = ZIPF_EXPONENT, seed: int = 0
    ) -> None:
        self.rows, self.count, self.zipf_exponent, self.seed = rows, count, zipf_exponent, seed
        stride = STRIDE
        while math.gcd(stride, rows) > 1:  # a common factor would give two ranks the same id
            stride += 1
        self.stride = stride

    def __getitem__(self, t: int) -> Tensor:
        """Return batch t, an int64 tensor of shape (count,)."""
        random = np.random.default_rng([self.seed, t])
        if self.zipf_exponent is None:
            return torch.from_numpy(random.integers(0, self.rows, self.count))
        sums = _cumulative_weights(self.rows, self.zipf_exponent)
        return self.ids_of_ranks(np.searchsorted(sums, random.random(self.count) * sums[-1]))

    def ids_of_ranks(self, ranks: NDArray[Any]) -> Tensor:
        """Return the ids with these frequency ranks; rank 0 is the most frequent."""
        return torch.from_numpy((ranks * self.stride + OFFSET) % self.rows)


@functools.lru_cache(maxsize=4)
def _cumulative_weights(rows: int, exponent: float) -> NDArray[np.float64]:
    sums: NDArray[np.float64] = np.cumsum(1 / np.arange(1, rows + 1) ** exponent)
    return sums


def clear_cache() -> None:
    """Free the cached Zipf weights: 8 bytes per row, for up to four tables."""
    _cumulative_weights.cache_clear()
