"""Which calls of a converted model look for one-hots: a sample, while none is large enough.

A method that makes no one-hot of at least as many entries runs as if the model were not converted,
except for the calls that are sampled.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling

MIN_ENTRIES = 100_000  # of a one-hot; torch's own product is about as fast for a smaller one
_FIRST_CALLS, _INTERVAL = 8, 64  # calls that search
_MAX_ARGUMENTS, _MAX_DEPTH = 64, 4  # that are measured: arguments, and lists in lists


class CallSampler:
    """Chooses the calls of one method that search for one-hots.

    These are the first calls, then one in 64, each with a larger input than any that searched, and
    each whose input cannot be measured.

    Attributes:
        always_searches: whether a large enough one-hot was met, so that all calls search.
    """

    def __init__(self) -> None:
        self.always_searches = False
        self._calls = 0
        self._largest: float = 0

    def skips(self, args: Any, kwargs: Any) -> bool:
        """Count a call with these arguments, and say whether it runs without a search."""
        if self.always_searches:
            return False
        self._calls += 1
        size = _input_size(args) + _input_size(kwargs.values()) if kwargs else _input_size(args)
        size = size or math.inf  # without arguments, the method has input of its own
        searches = (
            self._calls <= _FIRST_CALLS or self._calls % _INTERVAL == 0 or size > self._largest
        )
        if searches and size < math.inf:
            self._largest = max(self._largest, size)
        return not searches


def _input_size(values: Collection[Any], depth: int = 0) -> float:
    """The size of arguments: entries, and integers, which may be sizes; inf if unknown."""
    if len(values) > _MAX_ARGUMENTS or depth > _MAX_DEPTH:
        return math.inf
    total: float = 0
    for value in values:
        if isinstance(value, Tensor):
            total += value.numel()
        elif isinstance(value, int):
            total += abs(value)
        elif isinstance(value, list | tuple):
            total += _input_size(value, depth + 1)
        elif isinstance(value, dict):
            total += _input_size(value.values(), depth + 1)
        elif isinstance(value, np.ndarray | np.generic):
            total += value.size + (abs(int(value)) if isinstance(value, np.integer) else 0)
        elif value is not None and not isinstance(value, float):
            return math.inf
    return total


def saved_tensor_hook() -> Any:
    """The hook that packs the tensors autograd saves now, as a checkpoint sets one; or None."""
    if is_compiling():
        return None
    hooks = torch._C._autograd._top_saved_tensors_default_hooks(True)
    return None if hooks is None else hooks[0]


class _CallState(threading.local):
    """The call of a converted model's method that a thread is in.

    Attributes:
        mode: "searching" for one-hots, or "skipping" the search; "" outside of any call.
        sampler: of the method, while it searches.
        saved_tensor_hook: the hook that was set when the innermost method began.
    """

    def __init__(self) -> None:  # in each thread
        self.mode = ""
        self.sampler: CallSampler | None = None
        self.saved_tensor_hook: Any = None


call_state = _CallState()
