"""Measuring a piece of work: its time, the memory it adds, and what memory is free."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

import psutil
import torch

T = TypeVar("T")
_IN_ONE_TURN = 9
_SHORT_MS = 250.0


@dataclass(frozen=True)
class Measured:
    """Times of one way, in milliseconds, and the memory its torch operations added, in bytes."""

    milliseconds: tuple[float, ...]
    bytes_peak: int

    @property
    def median_ms(self) -> float:
        """The median time of a run."""
        return statistics.median(self.milliseconds)


def peak_memory(work: Callable[[], T]) -> tuple[T, int]:
    """The result of `work`, and the most bytes torch held for it at one time, result included.

    Every allocation and release of torch's allocators is counted, by torch's profiler; what
    a linear algebra library takes for itself is not.
    """
    # The profiler announces itself on standard error at any level below this one.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    with torch.autograd.profiler.profile(profile_memory=True) as profiler:
        result = work()
    assert profiler.kineto_results is not None
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    held = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        held += event.nbytes()
        peak = max(peak, held)
    return result, peak


def in_turn(
    works: Sequence[Callable[[], object]], seconds: float, most: int
) -> Iterator[list[float]]:
    """Milliseconds of each of `works`, run in turn A B A B, a list a round.

    At least one round is run; then rounds until `seconds` are over or there are `most`. A
    short work runs up to `_IN_ONE_TURN` times in its turn, and the median of these counts: the
    first is slow while the threads of the work before it wind down.
    """
    start = time.perf_counter()
    for _ in range(most):
        yield [statistics.median(_turn(work)) for work in works]
        if time.perf_counter() - start > seconds:
            return


def _turn(work: Callable[[], object]) -> list[float]:
    times: list[float] = []
    while not times or (len(times) < _IN_ONE_TURN and sum(times) < _SHORT_MS):
        begin = time.perf_counter()
        work()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def free_memory() -> int:
    """Bytes this process can still take: what the system has, or its control group allows."""
    return min([psutil.virtual_memory().available, *_group_limits()])


def _group_limits() -> Iterator[int]:
    """What is left under the memory limits of Linux control groups, version 2 and 1."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            yield max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0)
        except (OSError, ValueError):  # no such group, or "max"
            continue
