"""One table as a workload: who takes part, how long they are watched, and the goals."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace

from benchmarks.workload import Record, Told, quiet

FLOOR, BEST = "floor", "best peer"  # of a goal's `against`, beside the names of entries


@dataclass(frozen=True)
class Entry:
    """One who takes part: a kind of `KINDS`, with sizes of its own where it has them."""

    kind: str
    rows: int | None = None
    ids: int | None = None
    threads: int | None = None

    @property
    def name(self) -> str:
        """How it is called in records and goals."""
        own = {"rows": self.rows, "ids": self.ids, "threads": self.threads}
        said = [f"{value:,} {what}" for what, value in own.items() if value]
        return ", ".join([self.kind, *said])


OURS = Entry("hotrow")


@dataclass(frozen=True)
class Goal:
    """A step of hotrow takes at most `at_most` times as long as `against`'s."""

    against: str
    at_most: float


@dataclass(frozen=True)
class Tables:
    """One table and one task, and how long they are watched.

    `steps_before` steps come before the timing, `few_before` of those whose time cannot depend
    on the past (dense peers). Then `rounds` turns of `turn` timed steps each, `dense_turn` for
    dense peers; a turn begins with one step that is not timed.
    """

    name: str
    about: str
    rule: str | None
    rows: int
    columns: int
    ids: int
    entries: tuple[Entry, ...]
    goals: tuple[Goal, ...] = ()
    task: str = "step"
    dtype: str = "float32"
    zipf: bool = True
    extra_bytes_at_most: float | None = None
    steps_before: int = 500
    few_before: int = 2
    rounds: int = 5
    turn: int = 20
    dense_turn: int = 2
    seconds: float = 20.0  # about, on two cores; for the time left and for the suites

    def small(self) -> Tables:
        """Tables of a thousandth of the rows, and a few steps."""
        entries = tuple(
            replace(
                entry,
                rows=entry.rows and entry.rows // 1000 + 1,
                ids=entry.ids and entry.ids // 64 + 1,
            )
            for entry in self.entries
        )
        names = {a.name: b.name for a, b in zip(self.entries, entries, strict=True)}
        goals = tuple(replace(g, against=names.get(g.against, g.against)) for g in self.goals)
        return replace(
            self,
            rows=self.rows // 1000 + 1,
            ids=self.ids // 64 + 1,
            entries=entries,
            goals=goals,
            steps_before=30,
            rounds=2,
            turn=3,
            seconds=8.0,
        )

    def among(self, peers: Collection[str]) -> Tables:
        """Hotrow and these kinds of peers, and the goals that are left beside them."""
        left = tuple(e for e in self.entries if e.kind == OURS.kind or e.kind in peers)
        beside = {FLOOR, *(e.name for e in left)}
        beside |= {BEST} if any(e.kind != OURS.kind for e in left) else set()
        goals = tuple(goal for goal in self.goals if goal.against in beside)
        return replace(self, entries=left, goals=goals)

    def run(self, told: Told = quiet) -> Record:
        """Equality, times and memory of all."""
        from benchmarks.timing import Run

        return Run(self, told).measure()
