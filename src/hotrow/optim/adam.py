"""Adam and AdamW: the update of `torch/optim/adam.py`, `_single_tensor_adam`.

    w = w * (1 - lr * weight_decay)               decoupled (AdamW)
    g = g + weight_decay * w                      coupled (Adam)
    m = lerp(m, g, 1 - b1)
    v = b2 * v + (1 - b2) * g * g
    w = w - lr / (1 - b1^t) * m / (sqrt(v) / sqrt(1 - b2^t) + eps)

With amsgrad the largest v so far stands in the root. Kingma and Ba, https://arxiv.org/abs/1412.6980;
Loshchilov and Hutter, https://arxiv.org/abs/1711.05101.
"""

from __future__ import annotations

from typing import Any

from hotrow.kernels.ops import addcdiv, addcmul, axpy, lerp, maximum, sqrt
from hotrow.optim.rule import Carried, Group, Rule
from hotrow.optim.series import Series
from hotrow.optim.shortcut import Shortcut


def slots(group: Group) -> dict[str, float]:
    """Two moments, and the largest second moment for amsgrad."""
    names = ["exp_avg", "exp_avg_sq"] + ["max_exp_avg_sq"] * bool(group["amsgrad"])
    return dict.fromkeys(names, 0.0)


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(decay, coupled decay, 1 - b1, b2, 1 - b2, sqrt(1 - b2^t), eps, -step size)."""
    lr, (b1, b2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    decoupled = group.get("decoupled_weight_decay", False)
    decay = 1 - lr * weight_decay if decoupled and weight_decay != 0 else 1.0
    coupled = 0.0 if decoupled else weight_decay
    root = (1 - b2**step) ** 0.5
    return decay, coupled, 1 - b1, b2, 1 - b2, root, group["eps"], -(lr / (1 - b1**step))


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    decay, coupled, a1, b2, a2, root, eps, size = entry
    if flags[0]:
        g = -g
    w = w * decay
    if coupled != 0:
        g = axpy(g, w, coupled)
    m = lerp(slots[0], g, a1)
    v = addcmul(slots[1] * b2, g, g, a2)
    if len(slots) == 3:
        top = maximum(slots[2], v)
        return addcdiv(w, m, sqrt(top) / root + eps, size), (m, v, top)
    return addcdiv(w, m, sqrt(v) / root + eps, size), (m, v)


def shortcut(group: Group) -> Shortcut:
    """Any number of idle steps at once, unless decay is coupled."""
    return Series(bool(group["amsgrad"]))


rule = Rule("Adam", update, slots, entry, shortcut=shortcut)
