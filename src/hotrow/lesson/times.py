"""Times measured on this machine, which the page's cost section shows as points."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

from hotrow.errors import HotrowError
from hotrow.figures.cost import MAX_MS, MIN_MS, is_time
from hotrow.inputs.files import MAX_JSON_BYTES, read_text
from hotrow.lesson.location import cache_folder, write_cached

_NAME = "times.json"


@dataclass(frozen=True)
class Timing:
    """Each method's time for the forward pass and the gradient, with V rows, D columns and N ids.

    Raises:
        HotrowError: V, D or N is not an int in 1..2**53, or a time is out of range.
    """

    V: int
    D: int
    N: int
    matmul_ms: float
    lookup_ms: float

    def __post_init__(self) -> None:
        for name in ("V", "D", "N"):
            count = getattr(self, name)
            if type(count) is not int or not 1 <= count <= 2**53:
                raise HotrowError(f"{name} is {count!r:.30}, but it must be an int in 1..2**53")
        for name in ("matmul_ms", "lookup_ms"):
            time = getattr(self, name)
            if not is_time(time):
                raise HotrowError(
                    f"{name} is {time!r:.30}, but it must be in {MIN_MS:g}..{MAX_MS:g} ms"
                )


def from_comparisons(content: Any) -> list[Timing]:
    """Return the times in the output of `hotrow compare --json`.

    Raises KeyError, TypeError or HotrowError for other content.
    """
    comparisons = content.get("comparisons") if isinstance(content, dict) else None
    if not isinstance(comparisons, list) or not comparisons:
        raise HotrowError("it has no comparisons")
    if any("matmul" not in each and "operation" in each for each in comparisons):
        raise HotrowError("it compares other operations than embeddings")
    return [
        Timing(
            V=each["rows"],
            D=each["columns"],
            N=each["ids_compared"],
            matmul_ms=each["matmul"]["median_ms"],
            lookup_ms=each["lookup"]["median_ms"],
        )
        for each in comparisons
    ]


def from_record(record: dict[str, Any]) -> Timing | None:
    """Return the times in a record of `hotrow bench`, or None if a method is missing."""
    peers = record.get("peers", {})
    try:
        matmul, lookup = (
            sum(peers[name][part]["median_ms"] for part in ("forward", "backward"))
            for name in ("one-hot matmul", "hotrow")
        )
        return Timing(record["rows"], record["columns"], record["ids"], matmul, lookup)
    except KeyError:
        return None


def save_times(timings: Iterable[Timing]) -> None:
    """Save the times for the next `hotrow learn`, and keep the saved times for other sizes."""
    by_size = {(each.V, each.D, each.N): each for each in (*load_times(), *timings)}
    content = [asdict(each) for each in by_size.values()]
    write_cached(json.dumps(content) + "\n", _NAME)


def load_times() -> list[Timing]:
    """Load the times that `save_times` wrote; return an empty list if they can't be read."""
    try:
        content = json.loads(read_text(cache_folder() / _NAME, MAX_JSON_BYTES))
        return [Timing(**each) for each in content]
    except (OSError, RuntimeError, ValueError, TypeError, HotrowError, RecursionError):
        return []
