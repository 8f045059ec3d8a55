"""The sizes that are measured, who takes part, and the goals."""

from __future__ import annotations

from dataclasses import dataclass, replace


@dataclass(frozen=True)
class Entry:
    """One who takes part: a kind of `peers.KINDS`, with a table of its own size if `rows`."""

    kind: str
    rows: int | None = None

    @property
    def name(self) -> str:
        """How it is called in records and goals."""
        return f"{self.kind}, {self.rows:,} rows" if self.rows else self.kind


OURS = Entry("hotrow")


@dataclass(frozen=True)
class Goal:
    """A step of hotrow takes at most `at_most` times as long as `against`'s."""

    against: str
    at_most: float


@dataclass(frozen=True)
class Workload:
    """One table, one optimizer, and how long they are watched.

    `steps_before` steps come before the timing, `few_before` of those whose time cannot depend
    on the past (dense peers). Then `rounds` turns of `turn` timed steps each, `dense_turn` for
    dense peers; a turn begins with one step that is not timed.
    """

    name: str
    rule: str
    rows: int
    columns: int
    ids: int
    entries: tuple[Entry, ...]
    goals: tuple[Goal, ...]
    extra_bytes_at_most: float | None = None
    steps_before: int = 1000
    few_before: int = 3
    rounds: int = 8
    turn: int = 25
    dense_turn: int = 2
    seconds: float = 60.0  # about; only for the time left

    def small(self) -> Workload:
        """The same, to try the harness: a few seconds, and figures that say nothing."""
        entries = tuple(replace(e, rows=e.rows and e.rows // 1000 + 1) for e in self.entries)
        goals = tuple(
            replace(goal, against=small.name)
            for goal in self.goals
            for entry, small in zip(self.entries, entries, strict=True)
            if goal.against == entry.name
        )
        return replace(
            self,
            rows=self.rows // 1000 + 1,
            ids=self.ids // 64,
            entries=entries,
            goals=goals,
            steps_before=30,
            rounds=2,
            turn=3,
            seconds=20.0,
        )


FUSED, DEFAULT = Entry("torch fused"), Entry("torch default")
SPARSE, FBGEMM = Entry("torch sparse"), Entry("fbgemm")
SMALLER = Entry("hotrow", rows=1_000_000)

WORKLOADS = {
    workload.name: workload
    for workload in (
        Workload(
            "adamw-1m-256", "AdamW", 1_000_000, 256, 16_384,
            (OURS, SPARSE, FUSED, DEFAULT),
            (Goal("torch fused", 1 / 30), Goal("torch default", 1 / 150),
             Goal("torch sparse", 0.6)),
            extra_bytes_at_most=150e6, seconds=200,
        ),
        Workload(
            "adamw-50k-768", "AdamW", 50_257, 768, 4_096,
            (OURS, SPARSE, FUSED, DEFAULT),
            (Goal("torch fused", 1 / 15), Goal("torch sparse", 0.2)),
            dense_turn=4, seconds=80,
        ),
        Workload(
            "adamw-10m-64", "AdamW", 10_000_000, 64, 16_384,
            (OURS, SMALLER),
            (Goal(SMALLER.name, 1.5),),
            seconds=90,
        ),
        Workload(
            "sgd-1m-256", "SGD", 1_000_000, 256, 16_384,
            (OURS, SPARSE, FBGEMM),
            (Goal("torch sparse", 0.8), Goal("fbgemm", 0.8)),
            seconds=90,
        ),
        Workload(
            "adagrad-1m-256", "Adagrad", 1_000_000, 256, 16_384,
            (OURS, SPARSE, FBGEMM),
            (Goal("torch sparse", 0.8), Goal("fbgemm", 0.8)),
            seconds=120,
        ),
    )
}  # fmt: skip
