"""All parts of all workloads that were asked for, each in a process of its own."""

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

from hotrow.bench import records
from hotrow.bench.workload import Part, Record
from hotrow.bench.workloads import chosen, seconds

# How everything stands: the share done, what is being done, seconds spent, and seconds left.
Tell = Callable[[float, str, float, float], None]


class Failed(Exception):
    """A part's process ended without a result."""


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

    def __call__(self, part: Part, share: float, doing: str) -> None:
        """`share` of this part is done."""
        spent, done = time.monotonic() - self.begun, self.done + share * part.seconds
        # The estimates' sum, scaled by how they have proved so far.
        left = (self.all - done) * (spent / done if done > 0.1 * self.all else 1.0)
        self.tell(done / self.all, doing, spent, left)


def measure(
    names: Sequence[str], asked: Asked, tell: Tell, found: Callable[[Record], None]
) -> list[tuple[str, str]]:
    """Measure each workload and hand its record over; returns what failed, and why."""
    workloads = [chosen(name, asked.small, asked.peers) for name in names]
    progress = Progress(tell, sum(map(seconds, workloads)))
    failed: list[tuple[str, str]] = []
    for workload in workloads:
        environment = records.environment(asked.threads)
        results: dict[str, Record] = {}
        parts = workload.parts()
        for part in parts:
            try:
                # Without the first part there is nothing to add the others to.
                if part is parts[0] or parts[0].name in results:
                    results[part.name] = run(workload.name, part, asked, progress)
            except Failed as error:
                failed.append((f"{workload.name}, {part.name}", str(error)))
            progress.done += part.seconds
        if parts[0].name in results:
            found(workload.record(results) | {"environment": environment})
    return failed


def run(name: str, part: Part, asked: Asked, progress: Progress) -> Record:
    """The result of one part, from a process of its own.

    Raises:
        Failed: with the last line that the process wrote.
    """
    threads = str(asked.threads)
    environment = (
        os.environ
        | records.settings(part.kind)
        | {"OMP_NUM_THREADS": threads, "NPROC": threads}  # torch's, and JAX's
    )
    job: dict[str, Any] = {
        "workload": name,
        "part": part.name,
        "kind": part.kind,
        "threads": asked.threads,
        "small": asked.small,
        "peers": None if asked.peers is None else list(asked.peers),
    }
    progress(part, 0.0, f"{name}: {part.name}")
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        job["result"] = f"{folder}/result"
        with subprocess.Popen(
            [sys.executable, "-m", "hotrow.bench.job", json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"done"'):
                    told = json.loads(line)
                    progress(part, told["done"], f"{name}: {told['doing']}")
        if process.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise Failed(lines[-1] if lines else f"its process ended with {process.returncode}")
        result: Record = json.loads(Path(job["result"]).read_text())
        return result
