"""Time the parts of a step on the CPU or on a GPU."""

from __future__ import annotations

import itertools
import time
from typing import Any

import torch


class Clock:
    """Time the parts of a step: with CUDA events on a GPU, otherwise with Python's clock."""

    def __init__(self, device: str) -> None:
        self._is_cpu = device == "cpu"
        self._marks: list[Any] = []
        if not self._is_cpu:
            torch.cuda.synchronize()
        self.mark()

    def mark(self) -> None:
        """Mark the end of the current part."""
        if self._is_cpu:
            self._marks.append(time.perf_counter())
            return
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        self._marks.append(event)

    def seconds(self) -> list[float]:
        """Return the time of each part in seconds."""
        pairs = itertools.pairwise(self._marks)
        if self._is_cpu:
            return [end - begin for begin, end in pairs]
        torch.cuda.synchronize()
        return [begin.elapsed_time(end) / 1e3 for begin, end in pairs]
