"""The driver of `driver.py` in plain torch: any dtype, any device, gathered rows only.

The rows are sorted by how long ago they were settled, so that those that miss step t are the
first n of them; the rule then runs over those n rows, with torch.optim's own operations.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


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
    w, state = table[rows], tuple(slot[rows] for slot in slots)
    zeros = torch.zeros_like(w)
    upto = now if grads is None else now - 1
    for t in range(ages[0] if ages else upto, upto):
        n = bisect.bisect_right(ages, t)
        moved, left = update(w[:n], zeros[:n], tuple(s[:n] for s in state), ledger[t - start], flags)
        w[:n] = moved
        for slot, value in zip(state, left, strict=True):
            slot[:n] = value
    if grads is not None and len(rows):
        w, state = update(w, grads[order], state, ledger[upto - start], flags)
    table[rows] = w
    for slot, value in zip(slots, state, strict=True):
        slot[rows] = value
    last[rows] = last[rows].clamp(min=now)
