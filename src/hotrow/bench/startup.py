"""The time of a whole short program: import, a small table, three steps, exit."""

from __future__ import annotations

import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hotrow.bench.workload import Part, Record, Told, quiet, spread

TORCH = """
import torch
table = torch.nn.Embedding(1000, 64)
optimizer = torch.optim.AdamW(table.parameters())
"""
HOTROW = """
import torch, hotrow
table = hotrow.convert(torch.nn.Embedding(1000, 64), least=0)
optimizer = hotrow.optim.AdamW(table.parameters())
"""
STEPS = """
for _ in range(3):
    optimizer.zero_grad()
    table(torch.arange(500)).sum().backward()
    optimizer.step()
"""
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

    def parts(self) -> list[Part]:
        """One, which starts the others."""
        return [Part("times", "startup", self.seconds)]

    def run(self, part: str, told: Told = quiet) -> Record:
        """Measure."""
        first, torch_alone, later = [], [], []
        with tempfile.TemporaryDirectory() as folder:
            seconds(TORCH, folder)  # finds the files that the others read
            for number in range(min(self.rounds, 3)):
                told(0.5 * number / 3, "first starts")
                cache = os.path.join(folder, str(number))
                first.append(seconds(HOTROW, cache))
            for number in range(self.rounds):
                told(0.5 + 0.5 * number / self.rounds, "later starts")
                torch_alone.append(seconds(TORCH, cache))
                later.append(seconds(HOTROW, cache))
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
            "goals": [
                {
                    "against": "torch alone",
                    "at_most_added_s": ADDED_SECONDS_AT_MOST,
                    "added_s": round(median, 3),
                    "met": median <= ADDED_SECONDS_AT_MOST,
                }
            ],
        }

    def record(self, results: Mapping[str, Record]) -> Record:
        """What was measured."""
        return results["times"]


def seconds(program: str, cache: str) -> float:
    """From the start of the interpreter to its end."""
    begin = time.perf_counter()
    environment = os.environ | {"NUMBA_CACHE_DIR": cache}
    subprocess.run([sys.executable, "-c", program + STEPS], env=environment, check=True)
    return time.perf_counter() - begin
