"""Run workloads in sequence, each in its own process."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks import record_files
from benchmarks.workload import Workload
from benchmarks.workloads import select
from hotrow.bench.process import JobError, run_job
from hotrow.bench.workload import Record, ReportProgress

# Completed share, current activity, elapsed seconds, and remaining seconds.
ReportSuiteProgress = Callable[[float, str, float, float], None]


@dataclass(frozen=True)
class Options:
    """Options for every workload. `peers` lists the peers to measure; None means all."""

    threads: int
    peers: Collection[str] | None = None
    small: bool = False


class SuiteProgress:
    """Progress of the suite, with an estimate of the remaining time."""

    def __init__(self, report: ReportSuiteProgress, estimated_seconds: float) -> None:
        self.report, self.estimated_seconds = report, estimated_seconds
        self.done_seconds = 0.0
        self.begin = time.monotonic()

    def update(self, workload: Workload, share: float, activity: str) -> None:
        """Report the completed share of a workload."""
        spent = time.monotonic() - self.begin
        done = self.done_seconds + share * workload.seconds
        # Scale the remaining estimates by the ratio of elapsed to estimated time so far.
        is_known = done > 0.1 * self.estimated_seconds
        left = (self.estimated_seconds - done) * (spent / done if is_known else 1.0)
        self.report(done / self.estimated_seconds, activity, spent, left)


def run_suite(
    names: Sequence[str],
    options: Options,
    report_progress: ReportSuiteProgress,
    handle_record: Callable[[Record], None],
) -> list[tuple[str, str]]:
    """Pass the record of each workload to `handle_record`; return failures with their reasons."""
    workloads = [select(name, options.small, options.peers) for name in names]
    progress = SuiteProgress(report_progress, sum(workload.seconds for workload in workloads))
    failures: list[tuple[str, str]] = []
    for workload in workloads:
        environment = record_files.describe_environment(options.threads)
        progress.update(workload, 0.0, workload.name)
        try:
            record = run_in_process(workload, options, partial(progress.update, workload))
            handle_record(record | {"environment": environment})
        except JobError as error:
            failures.append((workload.name, str(error)))
        progress.done_seconds += workload.seconds
    return failures


def run_in_process(workload: Workload, options: Options, report_progress: ReportProgress) -> Record:
    """Measure a workload in a child process; return its record without the environment.

    Raises:
        JobError: the process ended without a record.
    """
    arguments = {
        "name": workload.name,
        "small": options.small,
        "peers": None if options.peers is None else list(options.peers),
    }

    def report(share: float, activity: str) -> None:
        report_progress(share, f"{workload.name}: {activity}")

    return run_job("benchmarks.suite:run_workload", arguments, options.threads, report)


def run_workload(
    name: str, small: bool, peers: list[str] | None, report_progress: ReportProgress
) -> Record:
    """Measure a workload in this process."""
    return select(name, small, peers).run(report_progress)
