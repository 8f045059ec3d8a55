"""Measure how much time and memory a function uses, and how much memory is free."""

from __future__ import annotations

import functools
import gc
import os
import statistics
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import psutil
import torch

T = TypeVar("T")
Progress = Callable[[str, int, int], None]  # args: current activity, steps done, total steps
_MAX_RUNS_PER_TURN = 9
_SHORT_MS = 250.0


@dataclass(frozen=True)
class Measurement:
    """The times of a function's runs, and the peak memory that torch allocates during a run."""

    milliseconds: tuple[float, ...]
    bytes_peak: int

    @property
    def median_ms(self) -> float:
        """The median time of a run in milliseconds."""
        return statistics.median(self.milliseconds)

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON. Key names include the units."""
        return {
            "measured_bytes_peak": self.bytes_peak,
            "median_ms": self.median_ms,
            "runs_ms": list(self.milliseconds),
        }


CPU = torch.device("cpu")


def measure_peak_memory(work: Callable[[], T], device: torch.device = CPU) -> tuple[T, int]:
    """Return the result of `work` and the peak memory that torch allocated, including the result.

    On the CPU, torch's profiler counts every allocation and release by torch's allocators. It does
    not count memory that a linear algebra library allocates.
    """
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        result = work()
        return result, torch.cuda.max_memory_allocated(device) - before
    # At lower log levels, the profiler prints to standard error.
    os.environ.setdefault("KINETO_LOG_LEVEL", "6")
    # The profiler also prints if garbage collection frees a tensor that was created before it ran.
    collects = gc.isenabled()
    gc.disable()
    try:
        with torch.autograd.profiler.profile(profile_memory=True) as profiler:
            result = work()
    finally:
        if collects:
            gc.enable()
    assert profiler.kineto_results is not None
    events = [e for e in profiler.kineto_results.events() if e.name() == "[memory]"]
    allocated = peak = 0
    for event in sorted(events, key=lambda event: event.start_ns()):
        allocated += event.nbytes()
        peak = max(peak, allocated)
    return result, peak


def time_interleaved(
    works: Sequence[Callable[[], object]],
    seconds: float,
    max_rounds: int,
    device: torch.device = CPU,
) -> Iterator[list[float]]:
    """Time functions in turn (A B A B), and yield each round's times in milliseconds.

    At least one round runs. No round starts after `seconds` seconds or `max_rounds` rounds. The
    first run of a turn is slow because the threads of the previous function are still winding down.
    So a short function runs up to `_MAX_RUNS_PER_TURN` times in its turn, and the turn's time is
    the median of these runs. On a GPU, a run ends when all its kernels have finished.
    """
    start = time.perf_counter()
    for _ in range(max_rounds):
        yield [statistics.median(_time_turn(work, device)) for work in works]
        if time.perf_counter() - start > seconds:
            return


def _time_turn(work: Callable[[], object], device: torch.device) -> list[float]:
    wait = functools.partial(torch.cuda.synchronize, device) if device.type == "cuda" else None
    times: list[float] = []
    while not times or (len(times) < _MAX_RUNS_PER_TURN and sum(times) < _SHORT_MS):
        if wait is not None:
            wait()
        begin = time.perf_counter()
        work()
        if wait is not None:
            wait()
        times.append((time.perf_counter() - begin) * 1e3)
    return times


def free_memory(device: str | torch.device = CPU) -> int:
    """Return how many bytes this process can still allocate on this system and in its cgroup.

    For a GPU, return how many bytes are free on the GPU.
    """
    if torch.device(device).type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([psutil.virtual_memory().available, *_cgroup_free_memory()])


def _cgroup_free_memory() -> Iterator[int]:
    """Yield how many bytes are left under the memory limits of Linux cgroups v2 and v1."""
    for limit, used in (
        ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current"),
        (
            "/sys/fs/cgroup/memory/memory.limit_in_bytes",
            "/sys/fs/cgroup/memory/memory.usage_in_bytes",
        ),
    ):
        try:
            yield max(int(Path(limit).read_text()) - int(Path(used).read_text()), 0)
        except (OSError, ValueError):  # the files don't exist, or the limit is "max"
            continue
