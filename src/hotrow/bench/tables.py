"""One table as a workload: who takes part, how long they are watched, and the goals."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

from hotrow.bench.workload import Part, Record, Told, quiet

TIMES, MEMORY = "times", "memory of "
MEMORY_SECONDS = 11.0
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
    memory: tuple[str, ...] = ()  # the entries whose memory is measured
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
        """Hotrow and these kinds of peers."""
        left = tuple(e for e in self.entries if e.kind == OURS.kind or e.kind in peers)
        return replace(self, entries=left)

    def parts(self) -> list[Part]:
        """A process for the times, and one for the memory of each peer in `memory`."""
        linux = sys.platform.startswith("linux")  # whose /proc is read
        watched = [e for e in self.entries if linux and e.name in self.memory]
        return [
            Part(TIMES, "time", self.seconds),
            *(Part(MEMORY + entry.name, "memory", MEMORY_SECONDS) for entry in watched),
        ]

    def run(self, part: str, told: Told = quiet) -> Record:
        """The times of all, or one's memory."""
        from hotrow.bench import memory, timing

        if part == TIMES:
            return timing.Run(self, told).measure()
        entry = next(e for e in self.entries if MEMORY + e.name == part)
        return memory.measure(self, entry, told)

    def record(self, results: Mapping[str, Record]) -> Record:
        """The times, each peer's memory beside them, and whether ours is as low as was asked."""
        record = results[TIMES]
        for name, peer in record["peers"].items():
            found = results.get(MEMORY + name)
            if found and "failed" not in peer:
                peer["memory"] = found
        most = self.extra_bytes_at_most
        if most is not None:
            memory = record["peers"][OURS.name].get("memory")
            extra = memory and memory["peak_extra_bytes"]
            goal = {"at_most_extra_bytes": most, "extra_bytes": extra}
            record["goals"].append(goal | {"met": None if extra is None else extra <= most})
        return record
