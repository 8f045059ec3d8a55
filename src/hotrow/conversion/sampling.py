"""Choose which calls of a converted model to search for one-hots.

Until a method creates a one-hot that is large enough for a lookup, hotrow searches only a sample of
the method's calls. All other calls run as in the original model.
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

MIN_ENTRIES = 100_000  # below this size, torch's dense product is about as fast as a lookup
_FIRST_CALLS, _INTERVAL = 8, 64  # search the first 8 calls, then every 64th
_MAX_ARGUMENTS, _MAX_DEPTH = 64, 4  # beyond these limits, the input size is unknown


class CallSampler:
    """Chooses which calls of one method to search for one-hots.

    hotrow searches the first 8 calls, and then every 64th call. It also searches each call
    whose input is larger than in all earlier searches, or whose input size is unknown.

    Attributes:
        always_searches: whether to search every call; set once a call has created a large one-hot.
    """

    def __init__(self) -> None:
        self.always_searches = False
        self._calls = 0
        self._largest: float = 0

    def skips(self, args: Any, kwargs: Any) -> bool:
        """Count a call with these arguments, and return whether to skip the search."""
        if self.always_searches:
            return False
        self._calls += 1
        size = _input_size(args) + _input_size(kwargs.values()) if kwargs else _input_size(args)
        size = size or math.inf  # a method without arguments gets its input from elsewhere
        searches = (
            self._calls <= _FIRST_CALLS or self._calls % _INTERVAL == 0 or size > self._largest
        )
        if searches and size < math.inf:
            self._largest = max(self._largest, size)
        return not searches


def _input_size(values: Collection[Any], depth: int = 0) -> float:
    """Return the number of array entries plus the sum of all integers, which may be sizes.

    Returns inf if the size of a value is unknown.
    """
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


_top_hooks = torch._C._autograd._top_saved_tensors_default_hooks


def saved_tensor_hook() -> Any:
    """Return the hook that packs the tensors that autograd saves, or None.

    Activation checkpointing sets such a hook.
    """
    if is_compiling():
        return None
    hooks = _top_hooks(True)
    return None if hooks is None else hooks[0]


class CallState:
    """The state of a thread's current call to a converted method.

    Attributes:
        mode: "searching" for one-hots, "skipping" the search, or "" outside any call.
        sampler: the sampler of the method that is searching, or None.
        saved_tensor_hook: the hook that was set when the innermost converted method began.
    """

    def __init__(self) -> None:
        self.mode = ""
        self.sampler: CallSampler | None = None
        self.saved_tensor_hook: Any = None


class _CallStates(threading.local):
    def __init__(self) -> None:  # threading.local calls this once in each thread
        self.current = CallState()  # reading this once is faster than reading each attribute


call_states = _CallStates()
