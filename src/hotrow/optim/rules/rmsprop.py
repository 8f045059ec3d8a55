"""The rule of RMSprop; it matches `_single_tensor_rmsprop` in `torch/optim/rmsprop.py`.

    g = g + weight_decay * w
    v = alpha * v + (1 - alpha) * g * g
    mean = lerp(mean, g, 1 - alpha)                        centered
    d = sqrt(v) + eps
    d = sqrt(v - mean * mean) + eps                        centered
    buf = momentum * buf + g / d;  w = w - lr * buf        with momentum
    w = w - lr * g / d                                     without momentum

Source: Hinton, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcdiv, addcmul, axpy, lerp, sqrt
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.linear import LinearRecurrence
from hotrow.optim.rule import ParamGroup, Rule, ScalarState


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return the slots: the mean square, the mean if centered, and the momentum buffer if used."""
    names = ["square_avg"] + ["grad_avg"] * bool(group["centered"])
    return dict.fromkeys(names + ["momentum_buffer"] * bool(group["momentum"] > 0), 0.0)


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (weight decay, alpha, 1 - alpha, eps, momentum, -lr, 1, -1)."""
    alpha, lr = group["alpha"], group["lr"]
    averages = alpha, 1 - alpha, group["eps"], group["momentum"]
    return group["weight_decay"], *averages, -lr, 1.0, -1.0


def flags(group: ParamGroup) -> tuple[bool, ...]:
    """Return the flags (maximize, centered)."""
    return bool(group["maximize"]), bool(group["centered"])


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    weight_decay, alpha, one_minus_alpha, eps, momentum, step_size, one, minus_one = entry
    if flags[0]:
        g = -g
    if weight_decay != 0:
        g = axpy(g, w, weight_decay)
    v = addcmul(slots[0] * alpha, g, g, one_minus_alpha)
    if len(slots) == 1:
        return addcdiv(w, g, sqrt(v) + eps, step_size), (v,)
    if len(slots) == 3:
        mean = lerp(slots[1], g, one_minus_alpha)
        d = sqrt(addcmul(v, mean, mean, minus_one)) + eps
        buf = addcdiv(slots[2] * momentum, g, d, one)
        return axpy(w, buf, step_size), (v, mean, buf)
    if flags[1]:
        mean = lerp(slots[1], g, one_minus_alpha)
        return addcdiv(w, g, sqrt(addcmul(v, mean, mean, minus_one)) + eps, step_size), (v, mean)
    buf = addcdiv(slots[1] * momentum, g, sqrt(v) + eps, one)
    return axpy(w, buf, step_size), (v, buf)


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return a linear recurrence: without decay, all slots shrink, and the buffer moves w."""
    slot_count, is_centered = len(initial_slots(group)), bool(group["centered"])
    return LinearRecurrence(update, flags(group), slot_count, 1, is_centered)


def needs_dense_step(group: ParamGroup) -> bool:
    """Return True if there is weight decay, which would make rounding errors grow.

    The gradient of an idle row comes only from the decay. The rule divides this gradient by its own
    root mean square, so the step does not shrink with w. The weights oscillate around 0, and a
    single rounding error can grow as large as the weights.
    """
    return bool(group["weight_decay"] != 0)


rule = Rule(
    "RMSprop",
    update,
    initial_slots,
    ledger_entry,
    flags,
    closed_form=closed_form,
    needs_dense_step=needs_dense_step,
)
