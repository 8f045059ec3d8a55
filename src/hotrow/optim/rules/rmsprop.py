"""RMSprop: the update of `torch/optim/rmsprop.py`, `_single_tensor_rmsprop`.

    g = g + weight_decay * w
    v = alpha * v + (1 - alpha) * g * g
    mean = lerp(mean, g, 1 - alpha)                        centered
    d = sqrt(v) + eps, or sqrt(v - mean * mean) + eps      centered
    buf = momentum * buf + g / d;  w = w - lr * buf        with momentum
    w = w - lr * g / d                                     without

Hinton, https://www.cs.toronto.edu/~tijmen/csc321/slides/lecture_slides_lec6.pdf.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.rule_math import addcdiv, addcmul, axpy, lerp, sqrt
from hotrow.optim.closed_form.linear import Linear
from hotrow.optim.closed_form.shortcut import Shortcut
from hotrow.optim.rule import Carried, Group, Rule


def slots(group: Group) -> dict[str, float]:
    """The mean square; the mean if centered; the buffer if there is momentum."""
    names = ["square_avg"] + ["grad_avg"] * bool(group["centered"])
    return dict.fromkeys(names + ["momentum_buffer"] * (group["momentum"] > 0), 0.0)


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(weight decay, alpha, 1 - alpha, eps, momentum, -lr, 1, -1)."""
    alpha, lr = group["alpha"], group["lr"]
    averages = alpha, 1 - alpha, group["eps"], group["momentum"]
    return group["weight_decay"], *averages, -lr, 1.0, -1.0


def flags(group: Group) -> tuple[bool, ...]:
    """Whether the gradient changes sign; whether the mean is taken off."""
    return bool(group["maximize"]), bool(group["centered"])


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    decay, alpha, rest, eps, momentum, size, one, minus = entry
    if flags[0]:
        g = -g
    if decay != 0:
        g = axpy(g, w, decay)
    v = addcmul(slots[0] * alpha, g, g, rest)
    if len(slots) == 1:
        return addcdiv(w, g, sqrt(v) + eps, size), (v,)
    if len(slots) == 3:
        mean = lerp(slots[1], g, rest)
        d = sqrt(addcmul(v, mean, mean, minus)) + eps
        buf = addcdiv(slots[2] * momentum, g, d, one)
        return axpy(w, buf, size), (v, mean, buf)
    if flags[1]:
        mean = lerp(slots[1], g, rest)
        return addcdiv(w, g, sqrt(addcmul(v, mean, mean, minus)) + eps, size), (v, mean)
    buf = addcdiv(slots[1] * momentum, g, sqrt(v) + eps, one)
    return axpy(w, buf, size), (v, buf)


def shortcut(group: Group) -> Shortcut:
    """Without decay the averages shrink, and w moves by the buffer alone."""
    return Linear(update, flags(group), len(slots(group)))


def dense(group: Group) -> bool:
    """With decay: rows have nothing to gain by waiting, since there is no closed form.

    And it is the only gradient of an idle row, and divided by its own root it moves w by as much
    however small w is: weights circle around 0, and one rounding grows to all of their size.
    """
    return bool(group["weight_decay"] != 0)


rule = Rule("RMSprop", update, slots, entry, flags, shortcut=shortcut, dense=dense)
