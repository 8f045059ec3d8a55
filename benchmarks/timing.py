"""The memory and times of a workload's peers, A B A B in one process, equality first."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch

from benchmarks import equality, floor, memory
from benchmarks.batches import Batches
from benchmarks.kinds import KINDS, Room, bytes_needed
from benchmarks.peers import PARTS, Case, Peer, new_weight
from benchmarks.tables import BEST, FLOOR, OURS, Entry, Tables
from benchmarks.workload import Told, quiet, ratios, spread
from hotrow.inputs.text import one_line
from hotrow.verify.measure import free_memory

Turns = list[list[dict[str, float]]]  # of a peer: its turns, their steps, their parts


def case_of(workload: Tables, entry: Entry) -> Case:
    """What the peer of an entry is made for."""
    return Case(
        workload.task,
        workload.rule,
        entry.rows or workload.rows,
        workload.columns,
        entry.ids or workload.ids,
        getattr(torch, workload.dtype),
    )


class Run:
    """One workload: who still takes part, and what is known of each."""

    def __init__(self, workload: Tables, told: Told = quiet) -> None:
        self.workload, self.told = workload, told
        self.entries = {entry.name: entry for entry in workload.entries}
        self.cases = {name: case_of(workload, entry) for name, entry in self.entries.items()}
        self.peers: dict[str, Peer] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.next: dict[str, int] = {}  # each peer's next batch
        self.batches = {
            name: Batches(case.rows, case.ids, workload.zipf) for name, case in self.cases.items()
        }
        most = max(case.ids for case in self.cases.values())
        random = torch.Generator().manual_seed(1)
        self.gradient = torch.randn(most, workload.columns, generator=random).to(
            self.cases[OURS.name].dtype
        )
        self.threads = torch.get_num_threads()
        self.copying = floor.Copying()

    def measure(self) -> dict[str, Any]:
        """The record, but for where it was made.

        Raises:
            AssertionError: hotrow's rows are not those of dense training.
        """
        self.admit()
        turns = self.rounds()
        for name, times in turns.items():
            self.found[name] |= self.summary(times)
        for name in turns:
            if name != OURS.name:
                ours, theirs = (self.found[n]["step_samples_ms"] for n in (OURS.name, name))
                self.found[name]["hotrow_ratio"] = ratios(ours, theirs)
        speed = self.copying.bytes_per_second()
        for name in turns:
            self.found[name] |= self.above_floor(name, speed)
        workload = self.workload
        return {
            "workload": workload.name,
            "about": workload.about,
            "task": workload.task,
            "rule": workload.rule,
            "rows": workload.rows,
            "columns": workload.columns,
            "ids": workload.ids,
            "dtype": workload.dtype,
            "zipf": workload.zipf,
            "distinct_ids_per_step": self.distinct(OURS.name),
            "steps_before": workload.steps_before,
            "steps_before_dense": workload.few_before,
            "rounds": workload.rounds,
            "copy_bytes_per_s": speed,
            "peers": self.found,
            "goals": list(self.goals()),
        }

    def admit(self) -> None:
        """Make each peer ready; one that cannot take part is left out, and the record says why.

        What they need is reckoned: much of it is only taken when they step.
        """
        room = Room(free_memory())
        references: dict[Any, torch.Tensor] = {}
        for number, (name, entry) in enumerate(self.entries.items()):
            self.told(0.65 * number / len(self.entries), f"{name}: steps before the timing")
            case = self.cases[name]
            own = {"ids": entry.ids, "threads": entry.threads}
            self.found[name] = {"rows": case.rows} | {k: v for k, v in own.items() if v}
            self.next[name] = 0
            self.attempt(name, functools.partial(self.admit_one, name, room, references))

    def admit_one(self, name: str, room: Room, references: dict[Any, torch.Tensor]) -> None:
        """Make a peer, train it up to the steady state, and see to its numbers and its memory."""
        kind, case = self.entries[name].kind, self.cases[name]
        needs = bytes_needed(kind, case, self.peers)
        room.check(*needs)
        peer = KINDS[kind].build(case, self.peers)
        self.peers[name], self.found[name]["label"] = peer, peer.label
        self.prepare(name, peer, references)
        if memory.is_seen():
            memory.touch(peer)
            peer.clear()
            peak = memory.peak_of(functools.partial(self.turn, name, peer, 1))
            self.found[name]["memory"] = {
                "peak_extra_bytes": peak + peer.bytes_kept(),
                "table_and_state_bytes": peer.bytes_held(),
            }
        peer.clear()  # the others need the memory
        room.take(*needs)

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """The result, or None where a peer fails, which then takes part no longer."""
        kind = self.entries[name].kind
        try:
            return work()
        except Exception as error:
            if kind == OURS.kind:
                raise
            self.peers.pop(name, None)
            self.found[name]["failed"] = one_line(error)
            if isinstance(error, ImportError) and KINDS[kind].remedy:
                self.found[name]["remedy"] = KINDS[kind].remedy
            return None

    def prepare(self, name: str, peer: Peer, references: dict[Any, torch.Tensor]) -> None:
        """The steps before the timing, and the comparison."""
        steps = self.workload.few_before if peer.dense else self.workload.steps_before
        if peer.reference:  # torch's own: nothing to compare
            self.turn(name, peer, steps)
            return
        case, rows = self.cases[name], equality.sample(self.batches[name])
        initial = peer.read(rows)
        if case.task == "forward":
            # What was read is to be what stands in the table.
            table = new_weight(case)[rows]
            compared = equality.compare(initial, table, lambda dtype: table.to(dtype))
            compared["equal"] = torch.equal(initial, table)
            self.turn(name, peer, steps)
        else:
            if case.task == "gradient":
                steps = 1
            self.turn(name, peer, steps)
            values = peer.read(rows) if case.task == "step" else peer.gradient(rows)

            def dense(dtype: torch.dtype) -> torch.Tensor:
                key = peer.counterpart, case, steps, dtype
                if key not in references:
                    batches = [self.batches[name][t] for t in range(steps)]
                    given = self.gradient[: case.ids]
                    references[key] = equality.trained(
                        peer.counterpart, initial, rows, batches, given, dtype
                    )
                return references[key]

            compared = equality.compare(values, initial, dense)
        with_ = peer.counterpart and f"torch.optim.{peer.counterpart}"
        self.found[name]["equality"] = compared | {"with": with_}
        if not compared["equal"] and self.entries[name].kind == OURS.kind:
            raise AssertionError(f"{name} is not what dense training gives: {compared}")

    def turn(self, name: str, peer: Peer, count: int) -> list[dict[str, float]]:
        """So many steps of one peer; milliseconds of each part of each."""
        torch.set_num_threads(self.entries[name].threads or self.threads)
        gradient = self.gradient[: self.cases[name].ids]
        found = []
        try:
            # Drawn before any is timed, a few at a time.
            for begin in range(0, count, 32):
                first = self.next[name] + begin
                for ids in [self.batches[name][first + k] for k in range(min(32, count - begin))]:
                    seconds = peer.step(ids, gradient)
                    found.append({part: 1e3 * value for part, value in seconds.items()})
        finally:
            torch.set_num_threads(self.threads)
        self.next[name] += count
        return found

    def rounds(self) -> dict[str, Turns]:
        """A B A B: the timed steps of each peer, by turn."""
        workload = self.workload
        found: dict[str, Turns] = {name: [] for name in self.peers}
        for number in range(workload.rounds):
            self.told(0.65 + 0.35 * number / workload.rounds, f"round {number + 1}")
            self.copying.watch()
            for name, peer in list(self.peers.items()):
                count = 1 + (workload.dense_turn if peer.dense else workload.turn)
                times = self.attempt(name, functools.partial(self.turn, name, peer, count))
                if times is not None:
                    found[name].append(times[1:])  # the first finds the caches of another
                    peer.clear()
        return {name: times for name, times in found.items() if name in self.peers}

    def summary(self, turns: Turns) -> dict[str, Any]:
        """Each step's time, and that of its parts where they are known."""
        steps = [step for turn in turns for step in turn]
        found: dict[str, Any] = {"step": spread([sum(step.values()) for step in steps])}
        for part in PARTS[self.workload.task]:
            if part in steps[0]:
                found[part] = spread([step[part] for step in steps])
        samples = [[round(sum(step.values()), 4) for step in turn] for turn in turns]
        return found | {"step_samples_ms": samples}

    def distinct(self, name: str) -> int:
        """Ids of a step that differ."""
        return len(torch.unique(self.batches[name][0]))

    def above_floor(self, name: str, speed: float) -> dict[str, Any]:
        """The bytes that a step must move, their time at the speed of copying, and the ratio."""
        case, step = self.cases[name], self.found[name]["step"]
        moved = floor.bytes_moved(
            case.task,
            case.rule,
            case.columns,
            case.ids,
            self.distinct(name),
            case.dtype.itemsize,
        )
        lowest = 1e3 * moved / speed
        ratio = {k.removesuffix("_ms"): float(f"{v / lowest:.5g}") for k, v in step.items()}
        return {"floor_bytes": moved, "floor_ms": lowest, "floor_ratio": ratio}

    def goals(self) -> Iterator[dict[str, Any]]:
        """What was asked for, and whether it was met."""
        for goal in self.workload.goals:
            yield self.goal(goal.against, goal.at_most)
        if self.workload.extra_bytes_at_most is not None:
            yield self.memory_goal(self.workload.extra_bytes_at_most)

    def goal(self, against: str, at_most: float) -> dict[str, Any]:
        """Whether the median ratio is as low as was asked; None if there is no such peer."""
        found: dict[str, Any] = {"against": against, "at_most_ratio": at_most}
        if against == FLOOR:
            ratio = self.found[OURS.name]["floor_ratio"]["median"]
            return found | {"ratio": ratio, "met": ratio <= at_most}
        if against == BEST:
            others = {n: p["hotrow_ratio"] for n, p in self.found.items() if "hotrow_ratio" in p}
            theirs = {n: r for n, r in others.items() if self.entries[n].kind != OURS.kind}
            if not theirs:
                return found | {"ratio": None, "met": None}
            best = max(theirs, key=lambda name: theirs[name]["median"])
            found["best_peer"], against = best, best
        if against not in self.peers:
            return found | {"ratio": None, "met": None}
        ratio = self.found[against]["hotrow_ratio"]["median"]
        return found | {"ratio": ratio, "met": ratio <= at_most}

    def memory_goal(self, at_most: float) -> dict[str, Any]:
        """Whether hotrow's extra memory is as low as was asked; None where it cannot be seen."""
        seen = self.found[OURS.name].get("memory")
        extra = None if seen is None else seen["peak_extra_bytes"]
        met = None if extra is None else extra <= at_most
        return {"at_most_extra_bytes": at_most, "extra_bytes": extra, "met": met}
