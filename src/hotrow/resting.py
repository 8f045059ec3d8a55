"""When a converted model runs as it is: where no one-hot in it is worth looking up."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotrow.nested import within

LEAST = 100_000  # entries of a one-hot; of a smaller one torch's own product is about as quick
_TRIES, _EVERY = 8, 64


class Rest:
    """Of one method of a model, called while it finds nothing that is worth it.

    The first calls look for one-hots, and then one in 64, and each with more input than any that
    looked: all others run as if the model were not converted.
    """

    def __init__(self) -> None:
        self._calls = self._largest = 0

    def is_on(self, args: Any, kwargs: Any) -> bool:
        """Whether this call is one of those."""
        self._calls += 1
        entries = 0
        for each in (*args, *kwargs.values()):
            if isinstance(each, Tensor):
                entries += each.numel()
            else:
                entries += sum(tensor.numel() for tensor in within(each, Tensor))
        looks = self._calls <= _TRIES or self._calls % _EVERY == 0 or entries > self._largest
        if looks:
            self._largest = max(self._largest, entries)
        return not looks
