"""The bandwidth floor: the bytes that a step must move, divided by the copy speed.

A training step reads and writes each touched row's weight and state once, reads each row of the
output's gradient once, and writes each row of the output once. A forward pass alone reads the
touched rows and writes the output. A backward pass also reads the output's gradient and writes the
gradient of each touched row. The bytes of the ids are not counted.
"""

from __future__ import annotations

import functools
import statistics

import torch
from torch import nn

import hotrow.optim
from hotrow.bench.clock import Clock

COPY_BYTES = 128 << 20  # several times the size of the caches


def bytes_moved(
    task: str, optimizer_name: str | None, columns: int, ids: int, distinct: int, itemsize: int
) -> int:
    """Return the number of bytes that a step on `distinct` rows must move."""
    row = columns * itemsize
    if task == "forward":
        return row * (distinct + ids)
    if task == "gradient":
        return row * (2 * distinct + 2 * ids)
    assert optimizer_name is not None
    return row * (2 * distinct * (1 + state_count(optimizer_name)) + 2 * ids)


@functools.cache
def state_count(optimizer_name: str) -> int:
    """Return the number of state values that an optimizer stores per weight."""
    weight = nn.Parameter(torch.zeros(2, 3))
    optimizer = getattr(hotrow.optim, optimizer_name).torch_class([weight])
    weight.grad = torch.ones(2, 3)
    optimizer.step()
    return sum(getattr(v, "shape", None) == weight.shape for v in optimizer.state[weight].values())


class CopySpeed:
    """The machine's copy speed, measured between the peers' turns."""

    def __init__(self, device: str = "cpu") -> None:
        self.device = device
        self.source, self.target = (
            torch.ones(COPY_BYTES, dtype=torch.uint8, device=device) for _ in range(2)
        )
        self.seconds: list[float] = []

    def measure(self, times: int = 5) -> None:
        """Make an untimed copy, then time `times` copies."""
        for number in range(times + 1):
            clock = Clock(self.device)
            self.target.copy_(self.source)
            clock.mark()
            if number:
                self.seconds += clock.seconds()

    def bytes_per_second(self) -> float:
        """Return the median number of bytes read and written per second."""
        return 2 * self.source.nbytes / statistics.median_high(self.seconds)
