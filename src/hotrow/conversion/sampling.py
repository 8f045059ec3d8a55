"""Choose which calls of a converted model to search for one-hots.

A search takes time, and makes a call faster only if the call creates a large one-hot. So hotrow
searches the calls whose inputs are as large as those of earlier calls that a search sped up, and a
sample of the other calls. All other calls run as in the original model.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Collection
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling

MIN_ENTRIES = 100_000  # below this size, torch's dense product is about as fast as a lookup
_FIRST_CALLS, _INTERVAL, _MAX_INTERVAL = 8, 64, 1024  # see `CallSampler`
_GROWTHS, _MARGINS = 4, 8
_MAX_ARGUMENTS, _MAX_DEPTH = 64, 4  # beyond these limits, the size counts as unknown
_INFINITY = math.inf


class Search:
    """The findings from searching one call.

    Attributes:
        is_faster: whether an operation on ids saved more time than the search takes.
        used: the origins of one-hots whose ids were used.
        materialized: the origins of one-hots that were materialized.
    """

    def __init__(self) -> None:
        self.is_faster = False
        self.used: set[Any] = set()
        self.materialized: set[Any] = set()

    @property
    def is_worthwhile(self) -> bool:
        """Whether the call was faster because of the search."""
        return self.is_faster or not self.used <= self.materialized


class _History:
    """The history of calls to one method.

    Args:
        max_interval: the maximum number of calls from one search to the next.

    Attributes:
        calls: the number of calls.
        next_search: the number of the call to search next, whatever the size of its input.
        skipped_size: calls with inputs up to this size are searched only when `next_search` is due.
    """

    def __init__(self, max_interval: int) -> None:
        self._max_interval = max_interval
        self.calls, self.next_search = 0, 1
        self.skipped_size: float = 0
        self._largest_slower: float = 0  # the largest input for which a search didn't pay off
        self._growths = 0  # how often `_largest_slower` has changed
        self._smallest_faster: float = _INFINITY  # the smallest input for which a search paid off

    def start_search(self) -> None:
        """Choose the next call to search, whatever the size of its input."""
        interval = min(max(self.calls, _INTERVAL - self.calls), self._max_interval)
        self.next_search = self.calls + (1 if self.calls < _FIRST_CALLS else interval)

    def end_search(self, size: float, is_worthwhile: bool) -> None:
        """Record whether the search sped up a call with an input of this size."""
        if is_worthwhile:
            self._smallest_faster = min(self._smallest_faster, size)
        elif size > self._largest_slower:
            self._largest_slower, self._growths = size, self._growths + 1
        # If the input grows with each call, as when text is generated, don't search each call.
        margin = min(max(self._growths - _GROWTHS, 0), _MARGINS)
        skipped = self._largest_slower + self._largest_slower * margin // _MARGINS
        self.skipped_size = min(skipped, self._smallest_faster - 1)


class CallSampler:
    """Chooses which calls of one method to search for one-hots.

    hotrow searches the first 8 calls, and then calls 64, 128, 256, 512, 1024, 2048, 3072, ... It
    also searches each call whose input may be large enough: larger than the inputs of all calls
    that a search didn't speed up, or at least as large as the input of a call that it did speed up.
    After more than four ever larger inputs that a search didn't speed up, an input must also be
    larger by a margin, which increases with each such input, up to a factor of 2.

    Calls with inputs of unknown size have their own history, in which all inputs count as equally
    large. Because these inputs may grow, hotrow searches every 64th of these calls.

    Attributes:
        search: the findings of the current search.
    """

    def __init__(self) -> None:
        self.search = Search()
        self._known, self._unknown = _History(_MAX_INTERVAL), _History(_INTERVAL)
        self._current: tuple[_History, float] | None = None  # the history and size of a search

    def skips(self, args: Any, kwargs: Any, must_search: bool) -> bool:
        """Return whether to skip the search of a call with these arguments.

        If `must_search` is true, the call isn't counted, and the result is always false.
        """
        if must_search:
            self._current, self.search = None, Search()
            return False
        size: float = 0
        for value in args:
            size += value.numel() if type(value) is Tensor else _size_of(value)
        if kwargs:
            size += _input_size(kwargs.values())
        history = self._known
        if not 0 < size < _INFINITY:  # without arguments, a method gets its input from elsewhere
            if is_compiling():
                return self.skips(args, kwargs, must_search=True)
            history, size = self._unknown, 1
        history.calls = calls = history.calls + 1
        if size <= history.skipped_size and calls < history.next_search:
            return True
        history.start_search()
        self._current, self.search = (history, size), Search()
        return False

    def end_search(self) -> None:
        """Record whether the current search made its call faster."""
        if self._current is not None:
            history, size = self._current
            history.end_search(size, self.search.is_worthwhile)


def _input_size(values: Collection[Any], depth: int = 0) -> float:
    """Return the number of array entries plus the sum of all integers, which may be sizes.

    Returns inf if the size of a value is unknown.
    """
    if len(values) > _MAX_ARGUMENTS or depth > _MAX_DEPTH:
        return _INFINITY
    total: float = 0
    for value in values:
        total += _size_of(value, depth)
    return total


def _size_of(value: Any, depth: int = 0) -> float:
    if isinstance(value, Tensor):
        return _INFINITY if is_compiling() else value.numel()
    if isinstance(value, int):
        return abs(value)
    if isinstance(value, list | tuple):
        return _input_size(value, depth + 1)
    if isinstance(value, dict):
        return _input_size(value.values(), depth + 1)
    if isinstance(value, np.ndarray | np.generic):
        return value.size + (abs(int(value)) if isinstance(value, np.integer) else 0)
    return 0 if value is None or isinstance(value, float) else _INFINITY


top_hooks = torch._C._autograd._top_saved_tensors_default_hooks
is_traced = torch.compiler.is_dynamo_compiling


def saved_tensor_hook() -> Any:
    """Return the hook that packs the tensors that autograd saves, or None.

    Activation checkpointing sets such a hook.
    """
    hooks = None if is_traced() else top_hooks(True)
    return hooks and hooks[0]


class CallState:
    """The state of a thread's current call to a converted method.

    Attributes:
        is_searching: whether a mode is active, such as a search for one-hots.
        sampler: the sampler of the method that is being searched, or None.
        saved_tensor_hook: the hook that was set when the innermost converted method began, or
            "no method" outside of any call.
    """

    def __init__(self) -> None:
        self.is_searching = False
        self.sampler: CallSampler | None = None
        self.saved_tensor_hook: Any = "no method"


class _CallStates(threading.local):
    def __init__(self) -> None:  # threading.local calls this once in each thread
        self.current = CallState()  # reading this once is faster than reading each attribute


call_states = _CallStates()


def call_outside(function: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    """Call a function as if no converted method were running.

    A mode's `__torch_function__` must call a backward pass like this. The mode isn't active then,
    so a converted method that a checkpoint recomputes must activate a mode again.
    """
    before, call_states.current = call_states.current, CallState()
    try:
        return function(*args, **kwargs)
    finally:
        call_states.current = before
