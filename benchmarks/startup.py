"""Measure the startup time of a program that takes three steps on a small table."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from hotrow.bench import memory
from hotrow.bench.percentiles import percentiles
from hotrow.bench.workload import Record, ReportProgress, ignore_progress

TORCH = """
import torch
table = torch.nn.Embedding(1000, 64)
optimizer = torch.optim.AdamW(table.parameters())
"""
HOTROW = """
import torch, hotrow
table = hotrow.convert(torch.nn.Embedding(1000, 64), min_entries=0)
optimizer = hotrow.optim.AdamW(table.parameters())
"""
STEPS = """
for _ in range(3):
    optimizer.zero_grad()
    table(torch.arange(500)).sum().backward()
    optimizer.step()
"""
PRINT_STATUS = f"\nprint(open({str(memory.STATUS)!r}).read())"  # Linux only; shows the peak memory
MAX_ADDED_SECONDS = 0.5


@dataclass(frozen=True)
class Startup:
    """The startup time of a program.

    The first starts use an empty cache and compile the kernels. Later starts load the compiled
    kernels, and alternate with starts of the same program without hotrow.
    """

    name: str = "startup"
    about: str = "the startup time of a program that takes three AdamW steps"
    rounds: int = 5
    seconds: float = 55.0

    def shrink(self) -> Startup:
        """Return a version of this workload with only two rounds."""
        return replace(self, rounds=2, seconds=30.0)

    def with_peers(self, type_names: Collection[str]) -> Startup:
        """Return this workload unchanged: its only peer is torch without hotrow."""
        return self

    def run(self, report_progress: ReportProgress = ignore_progress) -> Record:
        """Time all starts."""
        first: list[float] = []
        torch_alone: list[float] = []
        later: list[float] = []
        peaks: dict[str, list[int]] = {"torch_alone": [], "later_use": []}
        with tempfile.TemporaryDirectory() as folder:
            run_program(TORCH, folder)  # fill the file cache for the timed runs
            for number in range(min(self.rounds, 3)):
                report_progress(0.5 * number / 3, "first starts")
                cache = os.path.join(folder, str(number))
                first.append(run_program(HOTROW, cache)[0])
            for number in range(self.rounds):
                report_progress(0.5 + 0.5 * number / self.rounds, "later starts")
                torch, hotrow = run_program(TORCH, cache), run_program(HOTROW, cache)
                torch_alone.append(torch[0])
                later.append(hotrow[0])
                for use, peak in zip(peaks, (torch[1], hotrow[1]), strict=True):
                    peaks[use] += [] if peak is None else [peak]
        added = [1e3 * (b - a) for a, b in zip(torch_alone, later, strict=True)]
        median = statistics.median(added) / 1e3
        return {
            "workload": self.name,
            "about": self.about,
            "rounds": self.rounds,
            "first_use_median_s": round(statistics.median(first), 3),
            "torch_alone": percentiles([1e3 * value for value in torch_alone]),
            "later_use": percentiles([1e3 * value for value in later]),
            "added": percentiles(added),
            "peak_bytes": {use: statistics.median(each) for use, each in peaks.items() if each},
            "goals": [
                {
                    "against": "torch alone",
                    "max_added_s": MAX_ADDED_SECONDS,
                    "added_s": round(median, 3),
                    "met": median <= MAX_ADDED_SECONDS,
                }
            ],
        }


def run_program(program: str, cache: str) -> tuple[float, int | None]:
    """Run a program; return its time in seconds and, on Linux, its peak resident bytes."""
    begin = time.perf_counter()
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    status = PRINT_STATUS * sys.platform.startswith("linux")
    command = [sys.executable, "-c", program + STEPS + status]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    seconds = time.perf_counter() - begin
    return seconds, memory.resident_bytes("VmHWM", done.stdout) if status else None
