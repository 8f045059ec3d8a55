"""RAdam: the update of `torch/optim/radam.py`, `_single_tensor_radam`.

    w = w * (1 - lr * weight_decay)               decoupled
    g = g + weight_decay * w                      coupled
    m = lerp(m, g, 1 - b1)
    v = b2 * v + (1 - b2) * g * g
    rho_t = rho - 2 t b2^t / (1 - b2^t),  rho = 2 / (1 - b2) - 1
    r_t = sqrt((rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t))
    w = w - lr * m / (1 - b1^t) * sqrt(1 - b2^t) / (sqrt(v) + eps) * r_t     while rho_t > 5
    w = w - lr * m / (1 - b1^t)                                              before

Liu et al., https://arxiv.org/abs/1908.03265.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.ops import addcmul, axpy, lerp, sqrt, under
from hotrow.optim.rule import Carried, Group, Rule


def slots(group: Group) -> dict[str, float]:
    """Two moments."""
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(decay, coupled decay, 1 - b1, b2, 1 - b2, 1 - b1^t, lr, sqrt(1 - b2^t), eps, r_t).

    r_t is 0 as long as the variance cannot be rectified.
    """
    lr, (b1, b2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    decay = 1 - lr * weight_decay if decoupled and weight_decay != 0 else 1.0
    coupled = 0.0 if decoupled else weight_decay
    correction = 1 - b2**step
    most = 2 / (1 - b2) - 1
    rho = most - 2 * step * (b2**step) / correction
    rectified = 0.0
    if rho > 5.0:
        rectified = ((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)) ** 0.5
    moments = 1 - b1, b2, 1 - b2, 1 - b1**step
    return decay, coupled, *moments, lr, correction**0.5, group["eps"], rectified


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    decay, coupled, a1, b2, a2, correction, lr, root, eps, rectified = entry
    if flags[0]:
        g = -g
    w = w * decay
    if coupled != 0:
        g = axpy(g, w, coupled)
    m = lerp(slots[0], g, a1)
    v = addcmul(slots[1] * b2, g, g, a2)
    move = m / correction * lr
    if rectified != 0:
        move = move * under(root, sqrt(v) + eps) * rectified
    return w - move, (m, v)


rule = Rule("RAdam", update, slots, entry)
