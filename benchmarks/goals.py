"""Set goals for table workloads, and check whether a record meets them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from hotrow.bench.workload import HOTROW, Record

FLOOR, BEST = "floor", "best peer"  # values of `Goal.against` that don't name a peer


@dataclass(frozen=True)
class Goal:
    """A goal: hotrow's step takes at most `max_ratio` times as long as `against`'s step."""

    against: str
    max_ratio: float


def judge(
    record: Record, goals: tuple[Goal, ...], max_extra_bytes: float | None
) -> Iterator[dict[str, Any]]:
    """Yield each goal, its measured value and whether it was met (None if not measured)."""
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
        # Ignore hotrow's results for other sizes.
        others = [n for n in ratios if n.partition(",")[0] != HOTROW.type_name]
        best = max(others, key=lambda name: ratios[name], default="")
        if best:
            result["best_peer"] = best
        ratio = ratios.get(best)
    else:
        ratio = ratios.get(goal.against)
    return result | {"ratio": ratio, "met": None if ratio is None else ratio <= goal.max_ratio}
