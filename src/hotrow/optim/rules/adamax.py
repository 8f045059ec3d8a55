"""The rule of Adamax; it matches `_single_tensor_adamax` in `torch/optim/adamax.py`.

    g = g + weight_decay * w
    m = lerp(m, g, 1 - b1)
    u = max(b2 * u, |g| + eps)
    w = w - lr / (1 - b1^t) * m / u

Source: Kingma and Ba, https://arxiv.org/abs/1412.6980, section 7.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcdiv, axpy, lerp, maximum
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.infinity_norm import InfinityNormSums
from hotrow.optim.rule import ParamGroup, Rule, ScalarState


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return the slots for the first moment and the infinity norm."""
    return {"exp_avg": 0.0, "exp_inf": 0.0}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (weight decay, 1 - b1, b2, eps, -lr / (1 - b1^t))."""
    b1, b2 = group["betas"]
    step_size = group["lr"] / (1 - b1**step)
    return group["weight_decay"], 1 - b1, b2, group["eps"], -step_size


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    weight_decay, a1, b2, eps, step_size = entry
    if flags[0]:
        g = -g
    if weight_decay != 0:
        g = axpy(g, w, weight_decay)
    m = lerp(slots[0], g, a1)
    norm = maximum(slots[1] * b2, abs(g) + eps)
    return addcdiv(w, m, norm, step_size), (m, norm)


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return the sums for applying any number of idle steps without weight decay."""
    return InfinityNormSums()


rule = Rule("Adamax", update, initial_slots, ledger_entry, closed_form=closed_form)
