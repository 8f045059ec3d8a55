"""Goals of a workload on a table, and whether a record meets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotrow.bench.workload import HOTROW, Record

FLOOR, BEST = "floor", "best peer"  # what a goal can be against, besides the names of peers


@dataclass(frozen=True)
class Goal:
    """A step of hotrow takes at most `max_ratio` times as long as `against`'s."""

    against: str
    max_ratio: float


def judge(
    record: Record, goals: tuple[Goal, ...], max_extra_bytes: float | None
) -> Iterator[dict[str, Any]]:
    """Each goal with what was measured, and whether it was met; None where it was not measured."""
    for goal in goals:
        yield _judge_ratio(record["peers"], goal)
    if max_extra_bytes is not None:
        memory = record["peers"][HOTROW.name].get("memory")
        extra = None if memory is None else memory["peak_extra_bytes"]
        met = None if extra is None else extra <= max_extra_bytes
        yield {"max_extra_bytes": max_extra_bytes, "extra_bytes": extra, "met": met}


def _judge_ratio(peers: Record, goal: Goal) -> dict[str, Any]:
    result: dict[str, Any] = {"against": goal.against, "max_ratio": goal.max_ratio}
    ratios = {n: p["hotrow_ratio"]["median"] for n, p in peers.items() if "hotrow_ratio" in p}
    if goal.against == FLOOR:
        ratio = peers[HOTROW.name]["floor_ratio"]["median"]
    elif goal.against == BEST:
        # hotrow in other sizes is no peer.
        others = [n for n in ratios if n.partition(",")[0] != HOTROW.type_name]
        best = max(others, key=lambda name: ratios[name], default="")
        if best:
            result["best_peer"] = best
        ratio = ratios.get(best)
    else:
        ratio = ratios.get(goal.against)
    return result | {"ratio": ratio, "met": None if ratio is None else ratio <= goal.max_ratio}
