"""What every workload of the suite has, for those who run and show it."""

from __future__ import annotations

from collections.abc import Collection
from typing import Protocol

from hotrow.bench.workload import Record, ReportProgress


class Workload(Protocol):
    """One thing to measure."""

    @property
    def name(self) -> str:
        """Its name in suites, and its record's file name."""

    @property
    def about(self) -> str:
        """What it is, in a line."""

    @property
    def seconds(self) -> float:
        """About how long it takes, on two quiet cores."""

    def shrink(self) -> Workload:
        """The same in a size that only tries the harness: its numbers mean nothing."""

    def with_peers(self, type_names: Collection[str]) -> Workload:
        """The same with only these types of peers beside hotrow."""

    def run(self, report_progress: ReportProgress) -> Record:
        """Measure it, in a process of its own."""
