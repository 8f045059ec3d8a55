"""When a converted model runs as it is: where no one-hot in it is worth looking up."""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.compilation import is_compiling

LEAST = 100_000  # entries of a one-hot; of a smaller one torch's own product is about as quick
_TRIES, _EVERY = 8, 64  # calls
_MANY, _DEEP = 64, 4  # arguments, and lists in lists, to look through


class Rest:
    """Of one method of a model, called while it finds nothing that is worth it.

    The first calls look for one-hots, and then one in 64, each with more input than any that
    looked, and each whose input cannot be measured: all others run as if the model were not
    converted.

    Attributes:
        worthwhile: whether one of at least as many entries was met, so that all calls look.
    """

    def __init__(self) -> None:
        self.worthwhile = False
        self._calls = 0
        self._largest: float = 0

    def is_on(self, args: Any, kwargs: Any) -> bool:
        """Whether this call is one of those."""
        if self.worthwhile:
            return False
        self._calls += 1
        amount = _amount(args) + _amount(kwargs.values()) if kwargs else _amount(args)
        amount = amount or math.inf  # of none, it has its own
        looks = self._calls <= _TRIES or self._calls % _EVERY == 0 or amount > self._largest
        if looks and amount < math.inf:
            self._largest = max(self._largest, amount)
        return not looks


def _amount(values: Collection[Any], depth: int = 0) -> float:
    """How much there is in arguments: entries, and integers, which may be sizes; inf if unknown."""
    if len(values) > _MANY or depth > _DEEP:
        return math.inf
    total: float = 0
    for each in values:
        if isinstance(each, Tensor):
            total += each.numel()
        elif isinstance(each, int):
            total += abs(each)
        elif isinstance(each, list | tuple):
            total += _amount(each, depth + 1)
        elif isinstance(each, dict):
            total += _amount(each.values(), depth + 1)
        elif isinstance(each, np.ndarray | np.generic):
            total += each.size + (abs(int(each)) if isinstance(each, np.integer) else 0)
        elif each is not None and not isinstance(each, float):
            return math.inf
    return total


def saver() -> Any:
    """Who keeps what autograd saves now, as a checkpoint does, to compute it again; or None."""
    if is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


class _Running(threading.local):
    """The method of a converted model that a thread is in.

    Attributes:
        state: "looks" for one-hots, or "rests"; "" in none.
        rest: of the method, while it looks.
        saver: as it was when the innermost method began.
    """

    def __init__(self) -> None:  # for each thread
        self.state = ""
        self.rest: Rest | None = None
        self.saver: Any = None


running = _Running()
