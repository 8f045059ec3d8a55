"""A workload: one table, one batch size, one optimizer, and the peers that train it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from hotrow.bench.batches import ZIPF_EXPONENT

Record = dict[str, Any]
ReportProgress = Callable[[float, str], None]  # args: completed share (0 to 1), next activity


def ignore_progress(share: float, activity: str) -> None:
    """Ignore the progress."""


@dataclass(frozen=True)
class PeerConfig:
    """A peer: the name of its type, and any sizes that differ from the workload's sizes."""

    type_name: str
    rows: int | None = None
    ids: int | None = None
    threads: int | None = None

    @property
    def name(self) -> str:
        """The key of the peer in records and goals."""
        sizes = {"rows": self.rows, "ids": self.ids, "threads": self.threads}
        texts = [f"{value:,} {size}" for size, value in sizes.items() if value]
        return ", ".join([self.type_name, *texts])


HOTROW = PeerConfig("hotrow")


@dataclass(frozen=True)
class TableWorkload:
    """One table, one task, and the number of steps.

    `task` is a key of `peers.TASK_PARTS`. Without an optimizer, the task is "forward" or
    "gradient". Each peer first runs `warmup_steps` steps. A dense peer runs only
    `dense_warmup_steps`, because its step time doesn't depend on earlier steps. Then the
    peers take turns for `rounds` rounds. In each turn, a peer runs an untimed step, then
    `steps_per_turn` timed steps (`dense_steps_per_turn` if it is dense).
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
    device: str = "cpu"
    zipf_exponent: float | None = ZIPF_EXPONENT  # None: uniform ids
    warmup_steps: int = 500
    dense_warmup_steps: int = 2
    rounds: int = 5
    steps_per_turn: int = 20
    dense_steps_per_turn: int = 2
