"""The rule of Adadelta; it matches `_single_tensor_adadelta` in `torch/optim/adadelta.py`.

    g = g + weight_decay * w
    v = rho * v + (1 - rho) * g * g
    delta = sqrt(acc + eps) / sqrt(v + eps) * g
    acc = rho * acc + (1 - rho) * delta * delta
    w = w - lr * delta

Source: Zeiler, https://arxiv.org/abs/1212.5701.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcmul, axpy, sqrt
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.linear import LinearRecurrence
from hotrow.optim.rule import ParamGroup, Rule, ScalarState, maximize_flag


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return slots for the running averages of the squared gradients and the squared updates."""
    return {"square_avg": 0.0, "acc_delta": 0.0}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (weight decay, rho, 1 - rho, eps, -lr).

    Raises:
        ValueError: if eps is negative; torch would set the weights of idle rows to NaN.
    """
    if group["eps"] < 0:
        raise ValueError(f"eps must not be negative, but is {group['eps']}")
    rho = group["rho"]
    return group["weight_decay"], rho, 1 - rho, group["eps"], -group["lr"]


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    weight_decay, rho, one_minus_rho, eps, step_size = entry
    if flags[0]:
        g = -g
    if weight_decay != 0:
        g = axpy(g, w, weight_decay)
    v = addcmul(slots[0] * rho, g, g, one_minus_rho)
    delta = sqrt(slots[1] + eps) / sqrt(v + eps) * g
    return axpy(w, delta, step_size), (v, addcmul(slots[1] * rho, delta, delta, one_minus_rho))


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return a linear recurrence, because idle steps without decay only shrink the averages."""
    slot_count = len(initial_slots(group))
    return LinearRecurrence(update, maximize_flag(group), slot_count, root_count=slot_count)


rule = Rule("Adadelta", update, initial_slots, ledger_entry, closed_form=closed_form)
