"""Workloads that train one table, with peers, goals and estimated durations."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from benchmarks.goals import BEST, FLOOR, Goal, judge
from benchmarks.registry import PEER_TYPES
from hotrow.bench.measurement import Measurement
from hotrow.bench.workload import (
    HOTROW,
    Record,
    ReportProgress,
    TableWorkload,
    ignore_progress,
)


@dataclass(frozen=True)
class TableBenchmark(TableWorkload):
    """A workload with goals.

    Attributes:
        seconds: the estimated duration on two cores, used to estimate progress and suite durations.
    """

    goals: tuple[Goal, ...] = ()
    max_extra_bytes: float | None = None
    seconds: float = 20.0

    def shrink(self) -> TableBenchmark:
        """Return a version with a thousandth of the rows and only a few steps."""
        peers = tuple(
            replace(
                peer,
                rows=peer.rows and peer.rows // 1000 + 1,
                ids=peer.ids and peer.ids // 64 + 1,
            )
            for peer in self.peers
        )
        names = {a.name: b.name for a, b in zip(self.peers, peers, strict=True)}
        goals = tuple(replace(g, against=names.get(g.against, g.against)) for g in self.goals)
        return replace(
            self,
            rows=self.rows // 1000 + 1,
            ids=self.ids // 64 + 1,
            peers=peers,
            goals=goals,
            warmup_steps=30,
            rounds=2,
            steps_per_turn=3,
            seconds=8.0,
        )

    def with_peers(self, type_names: Collection[str]) -> TableBenchmark:
        """Return a version with only hotrow, these peer types, and the goals that still apply."""
        peers = tuple(
            p for p in self.peers if p.type_name == HOTROW.type_name or p.type_name in type_names
        )
        against = {FLOOR, *(peer.name for peer in peers)}
        if any(peer.type_name != HOTROW.type_name for peer in peers):
            against.add(BEST)
        goals = tuple(goal for goal in self.goals if goal.against in against)
        return replace(self, peers=peers, goals=goals)

    def run(self, report_progress: ReportProgress = ignore_progress) -> Record:
        """Measure equality, times and memory of all peers, and check the goals."""
        record = Measurement(self, PEER_TYPES, report_progress).run()
        return record | {"goals": list(judge(record, self.goals, self.max_extra_bytes))}
