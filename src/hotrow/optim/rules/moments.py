"""The weight decay and moment updates shared by Adam, NAdam and RAdam.

w = w * (1 - lr * weight_decay)               decoupled
g = g + weight_decay * w                      coupled
m = lerp(m, g, 1 - b1)
v = b2 * v + (1 - b2) * g * g
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcmul, axpy, lerp
from hotrow.optim.rule import ParamGroup


def moment_slots(group: ParamGroup) -> dict[str, float]:
    """Return slots for the two moments and, with amsgrad, the largest second moment."""
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group.get("amsgrad"))
    return dict.fromkeys(names, 0.0)


def moment_entry(group: ParamGroup) -> tuple[float, float, float, float, float]:
    """Return the first five scalars of an entry.

    The scalars are the decay factor, the coupled weight decay, 1 - b1, b2 and 1 - b2.

    The decay factor is 1 - lr * weight_decay if decay is decoupled, otherwise 1.
    """
    lr, (b1, b2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    decay_factor = 1 - lr * weight_decay if decoupled and weight_decay != 0 else 1.0
    return decay_factor, 0.0 if decoupled else weight_decay, 1 - b1, b2, 1 - b2


def update_moments(w: Any, g: Any, slots: Any, entry: Any, maximize: bool) -> Any:
    """Return `(w, g, m, v)`: w and g after weight decay, and the updated moments."""
    decay_factor, coupled_decay, a1, b2, a2 = entry
    if maximize:
        g = -g
    w = w * decay_factor
    if coupled_decay != 0:
        g = axpy(g, w, coupled_decay)
    return w, g, lerp(slots[0], g, a1), addcmul(slots[1] * b2, g, g, a2)
