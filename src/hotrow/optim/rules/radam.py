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

import math
from typing import Any

from hotrow.kernels.rule_math import sqrt, under
from hotrow.optim.closed_form.series import Series
from hotrow.optim.closed_form.shortcut import Shortcut
from hotrow.optim.rule import Carried, Group, Rule
from hotrow.optim.rules import moments as two
from hotrow.optim.rules.moments import moments


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(decay, coupled decay, 1 - b1, b2, 1 - b2, 1 - b1^t, lr, sqrt(1 - b2^t), eps, r_t).

    r_t is 0 as long as the variance cannot be rectified.
    """
    b1, b2 = group["betas"]
    correction = 1 - b2**step
    most = 2 / (1 - b2) - 1
    rho = most - 2 * step * (b2**step) / correction
    rectified = 0.0
    if rho > 5.0:
        rectified = ((rho - 4) * (rho - 2) * most / ((most - 4) * (most - 2) * rho)) ** 0.5
    sizes = 1 - b1**step, group["lr"], correction**0.5
    return *two.entry(group), *sizes, group["eps"], rectified


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    correction, lr, root, eps, rectified = entry[5:]
    w, g, m, v = moments(w, g, slots, entry[:5], flags[0])
    move = m / correction * lr
    if rectified != 0:
        move = move * under(root, sqrt(v) + eps) * rectified
    return w - move, (m, v)


def idle(entry: tuple[float, ...]) -> tuple[float, float, float]:
    """(h, root, eps) of a step: without a gradient it takes h * m / (sqrt(v) / root + eps)."""
    correction, lr, root, eps, rectified = entry[5:]
    if rectified == 0:
        return lr / correction, math.inf, 1.0
    return lr / correction * root * rectified, 1.0, eps


def shortcut(group: Group) -> Shortcut:
    """Any number of idle steps at once, unless decay is coupled."""
    return Series(idle)


rule = Rule("RAdam", update, two.slots, entry, shortcut=shortcut)
