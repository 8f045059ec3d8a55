"""The driver of `driver.py` in plain torch: any dtype, any device, gathered rows only.

The rows are sorted by how long ago they were settled, so that those that miss step t are the
first n of them; the rule then runs over those n rows, with torch.optim's own operations.

On the CPU torch rounds bfloat16 and float16 otherwise in the last elements of an array, and of
each thread's share of a large one, than in the rest (`a + alpha * b` twice instead of once). So
rows are padded to whole vectors and taken in parts too small to be shared: every element is
rounded as in the bulk of a dense step, whatever the batch and the number of threads.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

LANES = 128  # at least two vectors of any dtype torch's loops take at once
SHARED = 32768  # at::internal::GRAIN_SIZE: from here on torch splits an array among threads


def drive(
    update: Callable[..., Any],
    flags: tuple[bool, ...],
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    rows: Tensor,
    grads: Tensor | None,
    ledger: Sequence[Sequence[float]],
    start: int,
    now: int,
) -> None:
    """Replay entries `last[row]` .. of each row, the last of them with its gradient if given.

    `ledger` holds entries `start` .. `now - 1`, and no row may be older than `start`.
    """
    seen, order = last[rows].sort(stable=True)
    rows, ages = rows[order], seen.tolist()
    size, width = len(rows), table.shape[1]
    if table.device.type == "cpu":
        width = -(-width // LANES) * LANES
        size = max(1, SHARED // max(width, 1))

    def gather(source: Tensor, which: Tensor) -> Tensor:
        if width == table.shape[1]:
            return source[which]
        padded = source.new_zeros((len(which), width))
        padded[:, : table.shape[1]] = source[which]
        return padded

    upto = now if grads is None else now - 1
    for begin in range(0, len(rows), size):
        part, old = rows[begin : begin + size], ages[begin : begin + size]
        w, state = gather(table, part), tuple(gather(slot, part) for slot in slots)
        zeros = torch.zeros_like(w)
        for t in range(old[0], upto):
            n = bisect.bisect_right(old, t)
            moved, left = update(
                w[:n], zeros[:n], tuple(s[:n] for s in state), ledger[t - start], flags
            )
            w[:n] = moved
            for slot, value in zip(state, left, strict=True):
                slot[:n] = value
        if grads is not None:
            g = gather(grads, order[begin : begin + size])
            w, state = update(w, g, state, ledger[upto - start], flags)
        table[part] = w[:, : table.shape[1]]
        for slot, value in zip(slots, state, strict=True):
            slot[part] = value[:, : table.shape[1]]
    last[rows] = last[rows].clamp(min=now)
