"""The time of a whole short program: import, a small table, three steps, exit."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection
from dataclasses import dataclass, replace

from benchmarks import memory
from benchmarks.workload import Record, Told, quiet, spread

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
STATUS = f"\nprint(open({str(memory.STATUS)!r}).read())"  # on Linux, with the program's own peak
ADDED_SECONDS_AT_MOST = 0.5


@dataclass(frozen=True)
class Startup:
    """First starts, with an empty cache of compiled kernels; later ones, in turn with torch."""

    name: str = "startup"
    about: str = "a whole program: import, a table of 1,000 x 64, three steps of AdamW, exit"
    rounds: int = 5
    seconds: float = 55.0

    def small(self) -> Startup:
        """Two rounds."""
        return replace(self, rounds=2, seconds=30.0)

    def among(self, peers: Collection[str]) -> Startup:
        """The same: the peer is torch without hotrow."""
        return self

    def run(self, told: Told = quiet) -> Record:
        """Measure."""
        first: list[float] = []
        torch_alone: list[float] = []
        later: list[float] = []
        peaks: dict[str, list[int]] = {"torch_alone": [], "later_use": []}
        with tempfile.TemporaryDirectory() as folder:
            run(TORCH, folder)  # finds the files that the others read
            for number in range(min(self.rounds, 3)):
                told(0.5 * number / 3, "first starts")
                cache = os.path.join(folder, str(number))
                first.append(run(HOTROW, cache)[0])
            for number in range(self.rounds):
                told(0.5 + 0.5 * number / self.rounds, "later starts")
                alone, ours = run(TORCH, cache), run(HOTROW, cache)
                torch_alone.append(alone[0])
                later.append(ours[0])
                for use, peak in zip(peaks, (alone[1], ours[1]), strict=True):
                    peaks[use] += [] if peak is None else [peak]
        added = [1e3 * (b - a) for a, b in zip(torch_alone, later, strict=True)]
        median = statistics.median(added) / 1e3
        return {
            "workload": self.name,
            "about": self.about,
            "rounds": self.rounds,
            "first_use_median_s": round(statistics.median(first), 3),
            "first_use_samples_s": [round(value, 3) for value in first],
            "torch_alone": spread([1e3 * value for value in torch_alone]),
            "later_use": spread([1e3 * value for value in later]),
            "added": spread(added),
            "peak_bytes": {use: statistics.median(each) for use, each in peaks.items() if each},
            "goals": [
                {
                    "against": "torch alone",
                    "at_most_added_s": ADDED_SECONDS_AT_MOST,
                    "added_s": round(median, 3),
                    "met": median <= ADDED_SECONDS_AT_MOST,
                }
            ],
        }


def run(program: str, cache: str) -> tuple[float, int | None]:
    """Seconds from the start of the interpreter to its end; its most resident bytes, on Linux."""
    begin = time.perf_counter()
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    told = STATUS * sys.platform.startswith("linux")
    command = [sys.executable, "-c", program + STEPS + told]
    done = subprocess.run(command, env=environment, check=True, stdout=subprocess.PIPE, text=True)
    taken = time.perf_counter() - begin
    return taken, memory.resident("VmHWM", done.stdout) if told else None
