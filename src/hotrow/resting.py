"""When a converted model runs as it is: where no one-hot in it is worth looking up."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import numpy as np
from torch import Tensor

LEAST = 100_000  # entries of a one-hot; of a smaller one torch's own product is about as quick
_TRIES, _EVERY = 8, 64


class Rest:
    """Of one method of a model, called while it finds nothing that is worth it.

    The first calls look for one-hots, and then one in 64, and each with more input than any that
    looked: all others run as if the model were not converted.

    Attributes:
        worthwhile: whether one of at least as many entries was met, so that all calls look.
    """

    def __init__(self) -> None:
        self.worthwhile = False
        self._calls, self._largest = 0, 0.0

    def is_on(self, args: Any, kwargs: Any) -> bool:
        """Whether this call is one of those."""
        if self.worthwhile:
            return False
        self._calls += 1
        amount = _amount(args) + _amount(kwargs.values()) if kwargs else _amount(args)
        looks = self._calls <= _TRIES or self._calls % _EVERY == 0 or amount > self._largest
        if looks and amount < math.inf:
            self._largest = max(self._largest, amount)
        return not looks


def _amount(values: Iterable[Any]) -> float:
    """How much there is in arguments: entries, and numbers, which may be sizes."""
    total = 0.0
    for each in values:
        if isinstance(each, Tensor):
            total += each.numel()
        elif isinstance(each, int):
            total += abs(each)
        elif isinstance(each, list | tuple):
            total += _amount(each)
        elif isinstance(each, dict):
            total += _amount(each.values())
        elif isinstance(each, np.ndarray):
            total += each.size
        elif each is not None and not isinstance(each, float | str):
            return math.inf  # who knows
    return total
