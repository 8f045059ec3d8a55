"""The bytes that must move, and how long this machine takes to copy as many.

A training step reads and writes each touched row's weight and state once, reads each row of the
output's gradient once, and writes each row of the output once. Forward alone reads the touched
rows and writes the output; forward and backward also read the output's gradient and write the
gradient of each touched row. The ids themselves are left out.
"""

from __future__ import annotations

import functools
import time

import torch
from torch import nn

COPIED_BYTES = 128 << 20  # several times the caches


def bytes_moved(
    task: str, rule: str | None, columns: int, ids: int, distinct: int, item: int
) -> int:
    """Of one step over `distinct` rows, in values of `item` bytes."""
    row = columns * item
    if task == "forward":
        return row * (distinct + ids)
    if task == "gradient":
        return row * (2 * distinct + 2 * ids)
    assert rule is not None
    return row * (2 * distinct * (1 + states(rule)) + 2 * ids)


@functools.cache
def states(rule: str) -> int:
    """How many values an optimizer keeps for each weight."""
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = getattr(torch.optim, rule)([weight])
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    return sum(getattr(v, "shape", None) == weight.shape for v in optimizer.state[weight].values())


class Copying:
    """How fast the machine copies, watched among the peers' turns."""

    def __init__(self, size: int = COPIED_BYTES) -> None:
        self.source, self.target = (torch.ones(size, dtype=torch.uint8) for _ in range(2))
        self.seconds: list[float] = []

    def watch(self, times: int = 5) -> None:
        """A few more copies, after one that is not timed."""
        for number in range(times + 1):
            begin = time.perf_counter()
            self.target.copy_(self.source)
            if number:
                self.seconds.append(time.perf_counter() - begin)

    def bytes_per_second(self) -> float:
        """Read and written, at the median."""
        middle = sorted(self.seconds)[len(self.seconds) // 2]
        return 2 * self.source.nbytes / middle
