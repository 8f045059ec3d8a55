"""What any workload is, for those who run and show it."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Collection, Sequence
from typing import Any, Protocol

Record = dict[str, Any]
Told = Callable[[float, str], None]  # how much is done, 0 to 1, and what is being done


class Workload(Protocol):
    """One thing to measure."""

    @property
    def name(self) -> str:
        """By which it is asked for, and its record's file is called."""

    @property
    def about(self) -> str:
        """What it is, in a line."""

    @property
    def seconds(self) -> float:
        """About how long it takes, on two quiet cores."""

    def small(self) -> Workload:
        """The same in a size that only tries the harness: its figures say nothing."""

    def among(self, peers: Collection[str]) -> Workload:
        """The same, in which of the peers only these take part beside hotrow."""

    def run(self, told: Told) -> Record:
        """What was found, in a process of its own."""


def quiet(done: float, doing: str) -> None:
    """Tell nobody."""


def spread(milliseconds: Sequence[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile."""
    low, *_, high = statistics.quantiles(milliseconds, n=5, method="inclusive")
    named = {"median_ms": statistics.median(milliseconds), "p20_ms": low, "p80_ms": high}
    return {key: float(f"{value:.5g}") for key, value in named.items()}


def ratios(ours: Sequence[Sequence[float]], theirs: Sequence[Sequence[float]]) -> dict[str, float]:
    """Our time over theirs, turn by turn, each turn by its median."""
    found = [statistics.median(a) / statistics.median(b) for a, b in zip(ours, theirs, strict=True)]
    return {key.removesuffix("_ms"): value for key, value in spread(found).items()}
