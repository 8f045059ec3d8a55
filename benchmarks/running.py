"""All workloads that were asked for, each in a process of its own."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import records
from benchmarks.workload import Record, Workload
from benchmarks.workloads import chosen

# How everything stands: the share done, what is being done, seconds spent, and seconds left.
Tell = Callable[[float, str, float, float], None]


class Failed(Exception):
    """A workload's process ended without a result."""


@dataclass(frozen=True)
class Asked:
    """What is wanted of all workloads: `peers` beside hotrow, or None for all."""

    threads: int
    peers: Collection[str] | None = None
    small: bool = False


class Progress:
    """What is done, and about how long everything still takes."""

    def __init__(self, tell: Tell, estimate: float) -> None:
        self.tell, self.all, self.done = tell, estimate, 0.0
        self.begun = time.monotonic()

    def __call__(self, workload: Workload, share: float, doing: str) -> None:
        """`share` of this workload is done."""
        spent, done = time.monotonic() - self.begun, self.done + share * workload.seconds
        # The estimates' sum, scaled by how they have proved so far.
        left = (self.all - done) * (spent / done if done > 0.1 * self.all else 1.0)
        self.tell(done / self.all, doing, spent, left)


def measure(
    names: Sequence[str], asked: Asked, tell: Tell, found: Callable[[Record], None]
) -> list[tuple[str, str]]:
    """Measure each workload and hand its record over; returns what failed, and why."""
    workloads = [chosen(name, asked.small, asked.peers) for name in names]
    progress = Progress(tell, sum(workload.seconds for workload in workloads))
    failed: list[tuple[str, str]] = []
    for workload in workloads:
        environment = records.environment(asked.threads)
        try:
            found(run(workload, asked, progress) | {"environment": environment})
        except Failed as error:
            failed.append((workload.name, str(error)))
        progress.done += workload.seconds
    return failed


def run(workload: Workload, asked: Asked, progress: Progress) -> Record:
    """The record of a workload, but for where it was made; from a process of its own.

    Raises:
        Failed: with the last line that the process wrote.
    """
    threads = str(asked.threads)
    environment = (
        os.environ
        | records.SETTINGS
        | {"OMP_NUM_THREADS": threads, "NPROC": threads}  # torch's, and JAX's
    )
    job: dict[str, Any] = {
        "workload": workload.name,
        "threads": asked.threads,
        "small": asked.small,
        "peers": None if asked.peers is None else list(asked.peers),
    }
    progress(workload, 0.0, workload.name)
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        job["result"] = f"{folder}/result"
        with subprocess.Popen(
            [sys.executable, "-m", "benchmarks.job", json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"done"'):
                    told = json.loads(line)
                    progress(workload, told["done"], f"{workload.name}: {told['doing']}")
        if process.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise Failed(lines[-1] if lines else f"its process ended with {process.returncode}")
        result: Record = json.loads(Path(job["result"]).read_text())
        return result
