"""What is measured: one table, one batch size, one optimizer, and the peers that train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotrow.bench.batches import ZIPF_EXPONENT

Record = dict[str, Any]
ReportProgress = Callable[[float, str], None]  # the share that is done, 0 to 1, and what is next


def ignore_progress(share: float, activity: str) -> None:
    """Report nothing."""


@dataclass(frozen=True)
class PeerConfig:
    """A peer by the name of its type, with sizes of its own where they differ."""

    type_name: str
    rows: int | None = None
    ids: int | None = None
    threads: int | None = None

    @property
    def name(self) -> str:
        """Its key in records and goals."""
        sizes = {"rows": self.rows, "ids": self.ids, "threads": self.threads}
        texts = [f"{value:,} {size}" for size, value in sizes.items() if value]
        return ", ".join([self.type_name, *texts])


HOTROW = PeerConfig("hotrow")


@dataclass(frozen=True)
class TableWorkload:
    """One table and one task, and how many steps are run.

    `task` is one of `peers.TASK_PARTS`; without an optimizer it is "forward" or "gradient". Each
    peer runs `warmup_steps` before the timing, `dense_warmup_steps` if it is dense: then its time
    does not depend on earlier steps. `rounds` rounds follow, each with `steps_per_turn` timed
    steps of every peer, `dense_steps_per_turn` of a dense one. A turn begins with an untimed step.
    """

    name: str
    about: str
    optimizer: str | None
    rows: int
    columns: int
    ids: int
    peers: tuple[PeerConfig, ...]
    task: str = "step"
    dtype: str = "float32"
    zipf_exponent: float | None = ZIPF_EXPONENT  # None: uniform ids
    warmup_steps: int = 500
    dense_warmup_steps: int = 2
    rounds: int = 5
    steps_per_turn: int = 20
    dense_steps_per_turn: int = 2
