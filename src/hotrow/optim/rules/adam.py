"""The rule of Adam and AdamW; it matches `_single_tensor_adam` in `torch/optim/adam.py`.

    w = w * (1 - lr * weight_decay)               decoupled (AdamW)
    g = g + weight_decay * w                      coupled (Adam)
    m = lerp(m, g, 1 - b1)
    v = b2 * v + (1 - b2) * g * g
    w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

With amsgrad, the largest v so far replaces v in the last line.

Source: Kingma and Ba, https://arxiv.org/abs/1412.6980; Loshchilov and Hutter,
https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcdiv, maximum, sqrt
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.series import PowerSeries
from hotrow.optim.rule import ParamGroup, Rule, ScalarState
from hotrow.optim.rules.moments import moment_entry, moment_slots, update_moments


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (*`moment_entry`, sqrt(1 - b2^t), eps, -lr / (1 - b1^t))."""
    lr, (b1, b2) = group["lr"], group["betas"]
    root = (1 - b2**step) ** 0.5
    return *moment_entry(group), root, group["eps"], -(lr / (1 - b1**step))


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    root, eps, step_size = entry[5:]
    w, g, m, v = update_moments(w, g, slots, entry[:5], flags[0])
    if len(slots) == 3:
        top = maximum(slots[2], v)
        return addcdiv(w, m, sqrt(top) / root + eps, step_size), (m, v, top)
    return addcdiv(w, m, sqrt(v) / root + eps, step_size), (m, v)


def idle_step(entry: tuple[float, ...]) -> tuple[float, float, float]:
    """Return (h, root, eps); an idle step subtracts h * m / (sqrt(v) / root + eps) from w."""
    root, eps, step_size = entry[5:]
    return -step_size, root, eps


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return the power series for applying any number of idle steps without coupled decay."""
    return PowerSeries(idle_step, bool(group["amsgrad"]))


# A table on disk stores the name of the rule, so AdamW doesn't continue a run of Adam.
rule, adamw_rule = (
    Rule(name, update, moment_slots, ledger_entry, closed_form=closed_form)
    for name in ("Adam", "AdamW")
)
