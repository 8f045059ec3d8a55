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

from hotrow.kernels.ops import addcmul, by_sign, clamp, sign, unless_negative
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


rule = Rule("Rprop", update, slots, entry)
