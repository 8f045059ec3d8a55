"""The rule of SGD; it matches `_single_tensor_sgd` in `torch/optim/sgd.py`.

    g = g + weight_decay * w
    buf = g                                        in the first step with momentum
    buf = momentum * buf + (1 - dampening) * g     in later steps
    w = w - lr * buf
    w = w - lr * (g + momentum * buf)              with nesterov

Without momentum there is no buffer, and w = w - lr * g.

Source: Sutskever et al., https://proceedings.mlr.press/v28/sutskever13.html (momentum).
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import axpy
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.linear import LinearRecurrence
from hotrow.optim.rule import BEGUN_KEY, ParamGroup, ParamState, Rule, ScalarState


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return the slot for the momentum buffer, or no slots if there is no momentum."""
    return {"momentum_buffer": 0.0} if group["momentum"] != 0 else {}


def initial_scalars(group: ParamGroup, state: ParamState) -> ScalarState:
    """Return a flag: 1.0 if the momentum buffer already exists, otherwise 0.0."""
    return {BEGUN_KEY: float(state.get("momentum_buffer") is not None)}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return (weight decay, momentum, 1 - dampening, -lr, 1.0 if this step sets buf = g)."""
    momentum, lr = group["momentum"], group["lr"]
    begins = momentum != 0 and not scalars[BEGUN_KEY]
    scalars[BEGUN_KEY] = float(momentum != 0)
    return group["weight_decay"], momentum, 1 - group["dampening"], -lr, float(begins)


def flags(group: ParamGroup) -> tuple[bool, ...]:
    """Return the flags (maximize, nesterov)."""
    return bool(group["maximize"]), bool(group["nesterov"])


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    weight_decay, momentum, one_minus_dampening, step_size, begins = entry
    if flags[0]:
        g = -g
    if weight_decay != 0:
        g = axpy(g, w, weight_decay)
    if len(slots) == 0:
        return axpy(w, g, step_size), slots
    buf = g if begins != 0 else axpy(slots[0] * momentum, g, one_minus_dampening)
    if flags[1]:
        return axpy(w, axpy(g, buf, momentum), step_size), (buf,)
    return axpy(w, buf, step_size), (buf,)


def idle_rows_unchanged(group: ParamGroup) -> bool:
    """Return True if there is no momentum and no decay, so that idle rows don't change."""
    return bool(group["momentum"] == 0 and group["weight_decay"] == 0)


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return a linear recurrence, because decay and momentum are linear in (w, buf)."""
    return LinearRecurrence(update, flags(group), len(initial_slots(group)))


rule = Rule(
    "SGD",
    update,
    initial_slots,
    ledger_entry,
    flags,
    initial_scalars,
    idle_rows_unchanged,
    closed_form,
    has_step_count=False,
)
