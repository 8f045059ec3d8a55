"""Rprop: the update of `torch/optim/rprop.py`, `_single_tensor_rprop`.

    s = etaplus, 1 or etaminus as g * prev is positive, zero or negative
    step_size = clamp(step_size * s, smallest, largest)
    g = 0 where g * prev is negative
    w = w - sign(g) * step_size
    prev = g

Riedmiller and Braun, https://doi.org/10.1109/ICNN.1993.298623.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.rule_math import addcmul, by_sign, clamp, sign, unless_negative
from hotrow.optim.closed_form.shortcut import Memo, Shortcut
from hotrow.optim.rule import Carried, Group, Rule


def slots(group: Group) -> dict[str, float]:
    """The gradient before, and the step of each element, which starts at lr."""
    return {"prev": 0.0, "step_size": float(group["lr"])}


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(etaminus, 1, etaplus, smallest step, largest step, -1)."""
    return group["etas"][0], 1.0, group["etas"][1], *group["step_sizes"], -1.0


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    less, one, more, smallest, largest, minus = entry
    if flags[0]:
        g = -g
    turn = g * slots[0]
    step = clamp(slots[1] * by_sign(turn, less, one, more), smallest, largest)
    g = unless_negative(turn, g)
    return addcmul(w, sign(g), step, minus), (g, step)


def jump(w: Any, slots: Any, t: Any, upto: Any, memo: Any) -> Any:
    """The first idle step forgets the gradient and holds the step; the rest change nothing."""
    since, smallest, largest = memo
    if t < since:
        return t
    before, steps = slots
    zero = w.dtype.type(0)
    for j in range(len(w)):
        before[j], steps[j] = zero, clamp(steps[j], smallest, largest)
    return upto


class Rest:
    """Since when the limits of the step have been what they are."""

    def __init__(self) -> None:
        self.jump = jump
        self.done, self.since = 0, 0

    def advance(self, entries: NDArray[np.float64], upto: int, dtype: torch.dtype) -> Memo | None:
        """The memo for jumps to step `upto`; None if it is beyond that step already."""
        if upto < self.done or not upto:
            return None
        for i in range(max(self.done, 1), upto):
            if (entries[i] != entries[i - 1]).any():
                self.since = i
        self.done = upto
        kind = np.float64 if dtype == torch.float64 else np.float32
        smallest, largest = entries[upto - 1][3:5].astype(kind)
        return self.since, smallest, largest

    def leap(
        self, w: Tensor, slots: tuple[Tensor, ...], at: NDArray[np.int64], upto: int, memo: Memo
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """The jumps of many rows, in plain torch."""
        since, smallest, largest = memo
        step = clamp(slots[1], float(smallest), float(largest))
        return w, (torch.zeros_like(w), step), torch.from_numpy(at >= since).to(w.device)


def shortcut(group: Group) -> Shortcut:
    """A row at rest stays at rest."""
    return Rest()


rule = Rule("Rprop", update, slots, entry, shortcut=shortcut)
