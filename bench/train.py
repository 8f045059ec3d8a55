"""Measure whole training steps through the public API, record them, and make the page.

    python -m bench.train                  # everything, about 12 minutes and 13 GB
    python -m bench.train --only sgd-1m-256 startup
    python -m bench.train --small          # tries the harness; records go to build/bench
    python -m bench.train --page-only      # docs/performance.md from the records there are

A step is what a user writes: zero_grad, the look-up, backward from a given gradient of the
output, which only backward holds, as in a model, and the optimizer's step. Each workload has a
process of its own, in which the peers take turns; the ids are Zipf(1.1), new at each step and
drawn before it is timed.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from bench import page, records
from bench.job import chosen
from bench.workloads import WORKLOADS, Workload

PAGE = records.ROOT / "docs" / "performance.md"
STARTUP, STARTUP_SECONDS, MEMORY_SECONDS = "startup", 60.0, 8.0


class Failed(Exception):
    """A measurement's process ended without a result."""


class Progress:
    """One line on the terminal: what is being done, and about how long everything still takes."""

    def __init__(self, jobs: list[dict[str, Any]]) -> None:
        self.jobs, self.begun, self.done = jobs, time.monotonic(), 0.0
        self.all = sum(job["seconds"] for job in jobs)

    def tell(self, job: dict[str, Any], share: float, doing: str) -> None:
        """`share` of this job is done."""
        spent, done = time.monotonic() - self.begun, self.done + share * job["seconds"]
        # The estimates' sum, scaled by how they have proved so far.
        left = (self.all - done) * (spent / done if done > 0.1 * self.all else 1.0)
        ends = "" if sys.stderr.isatty() else "\n"
        text = f"{job['name']}: {doing}, {spent:.0f} s spent, about {left:.0f} s left"
        print(f"\r\033[K{text}" if not ends else text, end=ends, file=sys.stderr, flush=True)


def main(arguments: list[str] | None = None) -> int:
    """Run; 1 if a workload failed."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", nargs="+", choices=[*WORKLOADS, STARTUP], help="some workloads")
    parser.add_argument("--small", action="store_true", help="small tables, a few steps")
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--records", type=Path, help="their folder")
    parser.add_argument("--page", type=Path, help="the page to make")
    parser.add_argument("--page-only", action="store_true", help="measure nothing")
    asked = parser.parse_args(arguments)
    trial = records.ROOT / "build" / "bench"
    folder = asked.records or (trial if asked.small else records.RECORDS)
    target = asked.page or (trial / "performance.md" if asked.small else PAGE)

    failed = [] if asked.page_only else measure(asked, folder)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(page.page(records.read(folder)))
    print(f"{target}, from the records in {folder}", file=sys.stderr)
    for name, why in failed:
        print(f"{name} failed: {why}", file=sys.stderr)
    return bool(failed)


def measure(asked: argparse.Namespace, folder: Path) -> list[tuple[str, str]]:
    """Measure and record; what failed, and why."""
    jobs = [job for name in asked.only or [*WORKLOADS, STARTUP] for job in plan(name, asked)]
    progress = Progress(jobs)
    results: dict[str, dict[str, Any]] = {}
    failed: list[tuple[str, str]] = []
    for number, job in enumerate(jobs):
        name = job["workload"]
        try:
            if job["kind"] != "memory":
                environment = records.environment(asked.threads)
                results[name] = run(job, progress) | {"environment": environment}
            elif name in results and "failed" not in results[name]["peers"][job["entry"]]:
                results[name]["peers"][job["entry"]]["memory"] = run(job, progress)
        except Failed as error:
            failed.append((job["name"], str(error)))
        progress.done += job["seconds"]
        last = number + 1 == len(jobs) or jobs[number + 1]["workload"] != name
        if last and name in results:
            if name != STARTUP:
                add_memory_goal(chosen(job), results[name])
            records.write(results[name], name, folder)
    print(file=sys.stderr)
    return failed


def plan(name: str, asked: argparse.Namespace) -> list[dict[str, Any]]:
    """The processes of one workload: one for the times, one for each peer's memory."""
    common = {"workload": name} | {k: getattr(asked, k) for k in ("small", "threads")}
    if name == STARTUP:
        return [common | {"kind": "startup", "name": name, "seconds": STARTUP_SECONDS}]
    workload = chosen(common)
    times = common | {"kind": "time", "name": name, "seconds": workload.seconds}
    memory = {"kind": "memory", "seconds": MEMORY_SECONDS}
    return [times] + [
        common | memory | {"name": f"{name}, {entry.name}", "entry": entry.name}
        for entry in workload.entries
    ]


def run(job: dict[str, Any], progress: Progress) -> dict[str, Any]:
    """The result of one measurement, from a process of its own.

    Raises:
        Failed: with the last line that the process wrote.
    """
    environment = (
        os.environ
        | records.settings(job["kind"])
        | {
            "OMP_NUM_THREADS": str(job["threads"]),
            "PYTHONPATH": os.pathsep.join([str(records.ROOT), os.environ.get("PYTHONPATH", "")]),
        }
    )
    progress.tell(job, 0.0, "starting")
    with tempfile.TemporaryDirectory() as folder, open(f"{folder}/errors", "w+") as errors:
        job = job | {"result": f"{folder}/result"}
        with subprocess.Popen(
            [sys.executable, "-m", "bench.job", json.dumps(job)],
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
            env=environment,
        ) as process:
            assert process.stdout is not None
            for line in process.stdout:
                if line.startswith('{"done"'):
                    told = json.loads(line)
                    progress.tell(job, told["done"], told["doing"])
        if process.returncode:
            errors.seek(0)
            lines = errors.read().strip().splitlines()
            raise Failed(lines[-1] if lines else f"its process ended with {process.returncode}")
        result: dict[str, Any] = json.loads(Path(job["result"]).read_text())
        return result


def add_memory_goal(workload: Workload, record: dict[str, Any]) -> None:
    """Whether a step of hotrow's needs as little memory as was asked."""
    most = workload.extra_bytes_at_most
    memory = record["peers"]["hotrow"].get("memory")
    if most is not None:
        extra = memory and memory["peak_extra_bytes"]
        goal = {"at_most_extra_bytes": most, "extra_bytes": extra}
        record["goals"].append(goal | {"met": None if extra is None else extra <= most})


if __name__ == "__main__":
    sys.exit(main())
