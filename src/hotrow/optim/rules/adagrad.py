"""The rule of Adagrad; it matches `_single_tensor_adagrad` in `torch/optim/adagrad.py`.

    g = g + weight_decay * w
    sum = sum + g * g
    w = w - lr / (1 + (t - 1) * lr_decay) * g / (sqrt(sum) + eps)

Source: Duchi, Hazan and Singer, https://jmlr.org/papers/v12/duchi11a.html.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcdiv, addcmul, axpy, sqrt
from hotrow.optim.rule import ParamGroup, Rule, ScalarState


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return the slot for the sum of squared gradients, initially `initial_accumulator_value`."""
    return {"sum": float(group["initial_accumulator_value"])}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (weight decay, eps, 1, -lr / (1 + (t - 1) * lr_decay))."""
    step_size = group["lr"] / (1 + (step - 1) * group["lr_decay"])
    return group["weight_decay"], group["eps"], 1.0, -step_size


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    weight_decay, eps, one, step_size = entry
    if flags[0]:
        g = -g
    if weight_decay != 0:
        g = axpy(g, w, weight_decay)
    total = addcmul(slots[0], g, g, one)
    return addcdiv(w, g, sqrt(total) + eps, step_size), (total,)


def idle_rows_unchanged(group: ParamGroup) -> bool:
    """Return True if there is no decay and eps > 0, so that 0 / (sqrt(sum) + eps) is 0."""
    return bool(group["weight_decay"] == 0 and group["eps"] > 0)


rule = Rule("Adagrad", update, initial_slots, ledger_entry, idle_rows_unchanged=idle_rows_unchanged)
