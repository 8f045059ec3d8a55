"""The rule of RAdam; it matches `_single_tensor_radam` in `torch/optim/radam.py`.

    w = w * (1 - lr * weight_decay)               decoupled
    g = g + weight_decay * w                      coupled
    m = lerp(m, g, 1 - b1)
    v = b2 * v + (1 - b2) * g * g
    rho_t = rho - 2 t b2^t / (1 - b2^t),  rho = 2 / (1 - b2) - 1
    r_t = sqrt((rho_t - 4)(rho_t - 2) rho / ((rho - 4)(rho - 2) rho_t))
    w = w - lr * m / (1 - b1^t) * sqrt(1 - b2^t) / (sqrt(v) + eps) * r_t     if rho_t > 5
    w = w - lr * m / (1 - b1^t)                                              otherwise

Source: Liu et al., https://arxiv.org/abs/1908.03265.
"""

from __future__ import annotations

import math
from typing import Any

from hotrow.kernels.rule_math import scaled_reciprocal, sqrt
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.series import PowerSeries
from hotrow.optim.rule import ParamGroup, Rule, ScalarState
from hotrow.optim.rules.moments import moment_entry, moment_slots, update_moments


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (*`moment_entry`, 1 - b1^t, lr, sqrt(1 - b2^t), eps, r_t).

    r_t is 0 while rho_t <= 5, because the variance can't be rectified yet.
    """
    b1, b2 = group["betas"]
    correction = 1 - b2**step
    rho_inf = 2 / (1 - b2) - 1
    rho = rho_inf - 2 * step * (b2**step) / correction
    rectification = 0.0
    if rho > 5.0:
        ratio = (rho - 4) * (rho - 2) * rho_inf / ((rho_inf - 4) * (rho_inf - 2) * rho)
        rectification = ratio**0.5
    sizes = 1 - b1**step, group["lr"], correction**0.5
    return *moment_entry(group), *sizes, group["eps"], rectification


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    correction, lr, root, eps, rectification = entry[5:]
    w, g, m, v = update_moments(w, g, slots, entry[:5], flags[0])
    move = m / correction * lr
    if rectification != 0:
        move = move * scaled_reciprocal(root, sqrt(v) + eps) * rectification
    return w - move, (m, v)


def idle_step(entry: tuple[float, ...]) -> tuple[float, float, float]:
    """Return (h, root, eps); an idle step subtracts h * m / (sqrt(v) / root + eps) from w."""
    correction, lr, root, eps, rectification = entry[5:]
    if rectification == 0:
        return lr / correction, math.inf, 1.0
    return lr / correction * root * rectification, 1.0, eps


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return the power series, which applies any number of idle steps without coupled decay."""
    return PowerSeries(idle_step)


rule = Rule("RAdam", update, moment_slots, ledger_entry, closed_form=closed_form)
