"""The times of a workload's peers, A B A B in one process, equality first."""

from __future__ import annotations

import functools
import statistics
from collections.abc import Callable
from typing import Any

import torch

from bench import equality
from bench.batches import Batches
from bench.peers import KINDS, PARTS, REMEDY, Peer
from bench.workloads import OURS, Workload

Told = Callable[[float, str], None]  # how much is done, 0 to 1, and what is being done


def quiet(done: float, doing: str) -> None:
    """Tell nobody."""


def spread(milliseconds: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    low, *_, high = statistics.quantiles(milliseconds, n=5, method="inclusive")
    named = {"median_ms": statistics.median(milliseconds), "p20_ms": low, "p80_ms": high}
    return {key: float(f"{value:.5g}") for key, value in named.items()}


class Run:
    """One workload: who still takes part, and what is known of each."""

    def __init__(self, workload: Workload, told: Told = quiet) -> None:
        self.workload, self.told = workload, told
        self.peers: dict[str, Peer] = {}
        self.found: dict[str, dict[str, Any]] = {}
        self.next: dict[str, int] = {}  # each peer's next batch
        self.batches: dict[str, Batches] = {}
        self.gradient = torch.randn(
            workload.ids, workload.columns, generator=torch.Generator().manual_seed(1)
        )

    def measure(self) -> dict[str, Any]:
        """The record, but for where it was made.

        Raises:
            AssertionError: hotrow's rows are not those of dense training.
        """
        self.build()
        self.prepare()
        rounds = self.rounds()
        for name, times in rounds.items():
            steps = [step for turn in times for step in turn]
            whole = [sum(step) for step in steps]
            self.found[name] |= {"step": spread(whole)}
            for k, part in enumerate(PARTS):
                self.found[name][part] = spread([step[k] for step in steps])
            self.found[name]["step_samples_ms"] = [
                [round(sum(step), 4) for step in turn] for turn in times
            ]
        for name in rounds:
            if name != OURS.name:
                self.found[name]["hotrow_ratio"] = self.ratio(name)
        workload = self.workload
        return {
            "workload": workload.name,
            "rule": workload.rule,
            "rows": workload.rows,
            "columns": workload.columns,
            "ids": workload.ids,
            "distinct_ids_per_step": len(torch.unique(self.batches[OURS.name][0])),
            "steps_before": workload.steps_before,
            "steps_before_dense": workload.few_before,
            "rounds": workload.rounds,
            "peers": self.found,
            "goals": [self.goal(goal.against, goal.at_most) for goal in workload.goals],
        }

    def build(self) -> None:
        """Make the peers; one that cannot be made is left out, and the record says why."""
        for number, entry in enumerate(self.workload.entries):
            self.told(0.15 * number / len(self.workload.entries), f"{entry.name}: table")
            rows = entry.rows or self.workload.rows
            self.found[entry.name] = {"rows": rows}
            self.batches[entry.name] = Batches(rows, self.workload.ids)
            self.next[entry.name] = 0
            make = functools.partial(
                KINDS[entry.kind], self.workload.rule, rows, self.workload.columns, self.peers
            )
            peer = self.attempt(entry.name, make)
            if peer is not None:
                self.peers[entry.name] = peer
                self.found[entry.name]["label"] = peer.label

    def attempt(self, name: str, work: Callable[[], Any]) -> Any:
        """The result, or None where a peer fails, which then takes part no longer."""
        try:
            return work()
        except Exception as error:
            kind = name.partition(",")[0]
            if kind == OURS.kind:
                raise
            self.peers.pop(name, None)
            self.found[name]["failed"] = f"{type(error).__name__}: {error}".splitlines()[0]
            if isinstance(error, ImportError) and kind in REMEDY:
                self.found[name]["remedy"] = REMEDY[kind]
            return None

    def prepare(self) -> None:
        """Train up to the steady state, and compare rows with dense torch's on the way's end."""
        references: dict[Any, torch.Tensor] = {}
        for number, (name, peer) in enumerate(list(self.peers.items())):
            done = 0.15 + 0.5 * number / len(self.peers)
            self.told(done, f"{name}: steps before the timing")
            self.attempt(name, functools.partial(self.prepare_one, name, peer, references))

    def prepare_one(self, name: str, peer: Peer, references: dict[Any, torch.Tensor]) -> None:
        """The steps before the timing, and the comparison."""
        batches = self.batches[name]
        if peer.dense:  # torch's own: nothing to compare
            self.turn(name, peer, self.workload.few_before)
            return
        rows = equality.sample(batches)
        initial = peer.read(rows)
        self.turn(name, peer, self.workload.steps_before)

        def dense(dtype: torch.dtype) -> torch.Tensor:
            key = peer.counterpart, batches.rows, dtype
            if key not in references:
                steps = [batches[t] for t in range(self.workload.steps_before)]
                references[key] = equality.trained(
                    peer.counterpart, initial, rows, steps, self.gradient, dtype
                )
            return references[key]

        compared = equality.compare(peer.read(rows), initial, dense)
        self.found[name]["equality"] = compared | {"with": f"torch.optim.{peer.counterpart}"}
        if not compared["equal"] and name.partition(",")[0] == OURS.kind:
            raise AssertionError(f"{name} is not what dense training gives: {compared}")

    def turn(self, name: str, peer: Peer, count: int) -> list[list[float]]:
        """So many steps of one peer; milliseconds of each part of each."""
        # Drawn before any is timed, a few at a time.
        found = []
        for begin in range(0, count, 32):
            first = self.next[name] + begin
            for ids in [self.batches[name][first + k] for k in range(min(32, count - begin))]:
                found.append([1e3 * seconds for seconds in peer.step(ids, self.gradient)])
        self.next[name] += count
        return found

    def rounds(self) -> dict[str, list[list[list[float]]]]:
        """A B A B: the timed steps of each peer, by turn."""
        workload = self.workload
        found: dict[str, list[list[list[float]]]] = {name: [] for name in self.peers}
        for number in range(workload.rounds):
            self.told(0.65 + 0.35 * number / workload.rounds, f"round {number + 1}")
            for name, peer in list(self.peers.items()):
                count = 1 + (workload.dense_turn if peer.dense else workload.turn)
                times = self.attempt(name, functools.partial(self.turn, name, peer, count))
                if times is not None:
                    found[name].append(times[1:])  # the first finds the caches of another
        return {name: times for name, times in found.items() if name in self.peers}

    def ratio(self, against: str) -> dict[str, float]:
        """Our time over theirs, turn by turn."""

        def turns(name: str) -> list[float]:
            return [statistics.median(turn) for turn in self.found[name]["step_samples_ms"]]

        ratios = [a / b for a, b in zip(turns(OURS.name), turns(against), strict=True)]
        return {key.removesuffix("_ms"): value for key, value in spread(ratios).items()}

    def goal(self, against: str, at_most: float) -> dict[str, Any]:
        """Whether the median ratio is as low as was asked; None if there is no such peer."""
        found: dict[str, Any] = {"against": against, "at_most_ratio": at_most}
        if against not in self.peers:
            return found | {"ratio": None, "met": None}
        ratio = self.found[against]["hotrow_ratio"]["median"]
        return found | {"ratio": ratio, "met": ratio <= at_most}
