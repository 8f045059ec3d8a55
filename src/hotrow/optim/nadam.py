"""NAdam: the update of `torch/optim/nadam.py`, `_single_tensor_nadam`.

    w = w * (1 - lr * weight_decay)               decoupled
    g = g + weight_decay * w                      coupled
    mu_t = b1 * (1 - 0.96^(t * momentum_decay) / 2)
    m = lerp(m, g, 1 - b1)
    v = b2 * v + (1 - b2) * g * g
    d = sqrt(v / (1 - b2^t)) + eps
    w = w - lr * (1 - mu_t) / (1 - mu_1 ... mu_t) * g / d
    w = w - lr * mu_(t+1) / (1 - mu_1 ... mu_(t+1)) * m / d

Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
"""

from __future__ import annotations

from typing import Any

import torch

from hotrow.kernels.ops import addcdiv, addcmul, axpy, lerp, sqrt
from hotrow.optim.rule import Carried, Group, Rule


def slots(group: Group) -> dict[str, float]:
    """Two moments."""
    return {"exp_avg": 0.0, "exp_avg_sq": 0.0}


def carry(group: Group) -> Carried:
    """The product of the momenta so far."""
    return {"mu_product": 1.0}


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(decay, coupled decay, 1 - b1, b2, 1 - b2, 1 - b2^t, eps, size of g, size of m)."""
    lr, (b1, b2), weight_decay = group["lr"], group["betas"], group["weight_decay"]
    decoupled = group["decoupled_weight_decay"]
    decay = 1 - lr * weight_decay if decoupled and weight_decay != 0 else 1.0
    coupled = 0.0 if decoupled else weight_decay
    mu = b1 * (1.0 - 0.5 * (0.96 ** (step * group["momentum_decay"])))
    mu_next = b1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * group["momentum_decay"])))
    # torch keeps the product in a tensor of the default dtype, and rounds it there.
    product = (torch.tensor(carried["mu_product"]) * mu).item()
    carried["mu_product"] = product
    size = -lr * (1.0 - mu) / (1.0 - product)
    size_next = (-lr * mu_next) / (1.0 - product * mu_next)
    moments = 1 - b1, b2, 1 - b2, 1 - b2**step
    return decay, coupled, *moments, group["eps"], size, size_next


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    decay, coupled, a1, b2, a2, correction, eps, size, size_next = entry
    if flags[0]:
        g = -g
    w = w * decay
    if coupled != 0:
        g = axpy(g, w, coupled)
    m = lerp(slots[0], g, a1)
    v = addcmul(slots[1] * b2, g, g, a2)
    d = sqrt(v / correction) + eps
    return addcdiv(addcdiv(w, g, d, size), m, d, size_next), (m, v)


rule = Rule("NAdam", update, slots, entry, carry=carry)
