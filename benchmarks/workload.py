"""The interface of a workload."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from hotrow.bench.workload import Record, ReportProgress


class Workload(Protocol):
    """A workload of the benchmark suite."""

    @property
    def name(self) -> str:
        """The name of the workload, used in suites and for its record file."""

    @property
    def about(self) -> str:
        """A one-line description."""

    @property
    def seconds(self) -> float:
        """The estimated duration in seconds on two idle cores."""

    def shrink(self) -> Workload:
        """Return a tiny version for testing the suite."""

    def with_peers(self, type_names: Collection[str]) -> Workload:
        """Return a version with hotrow and only these peer types."""

    def run(self, report_progress: ReportProgress) -> Record:
        """Measure the workload in this process."""
