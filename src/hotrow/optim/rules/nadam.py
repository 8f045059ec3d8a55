"""The rule of NAdam; it matches `_single_tensor_nadam` in `torch/optim/nadam.py`.

    w = w * (1 - lr * weight_decay)               decoupled
    g = g + weight_decay * w                      coupled
    mu_t = b1 * (1 - 0.96^(t * momentum_decay) / 2)
    m = lerp(m, g, 1 - b1)
    v = b2 * v + (1 - b2) * g * g
    d = sqrt(v / (1 - b2^t)) + eps
    w = w - lr * (1 - mu_t) / (1 - mu_1 ... mu_t) * g / d
    w = w - lr * mu_(t+1) / (1 - mu_1 ... mu_(t+1)) * m / d

Source: Dozat, https://openreview.net/forum?id=OM0jvwB8jIp57ZJjtNEZ.
"""

from __future__ import annotations

from typing import Any

import torch

from hotrow.kernels.rule_math import addcdiv, sqrt
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.series import PowerSeries
from hotrow.optim.rule import (
    ParamGroup,
    ParamState,
    Rule,
    ScalarState,
    describe_dtype,
    stored_dtype,
)
from hotrow.optim.rules.moments import moment_entry, moment_slots, update_moments


def initial_scalars(group: ParamGroup, state: ParamState) -> ScalarState:
    """Return mu_1 ... mu_t, the product of all momentum coefficients so far."""
    product = state.get("mu_product")
    return {"mu_product": 1.0 if product is None else float(product), **describe_dtype(product)}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (*`moment_entry`, 1 - b2^t, eps, step size of g, step size of m)."""
    lr, (b1, b2) = group["lr"], group["betas"]
    mu = b1 * (1.0 - 0.5 * (0.96 ** (step * group["momentum_decay"])))
    mu_next = b1 * (1.0 - 0.5 * (0.96 ** ((step + 1) * group["momentum_decay"])))
    # torch stores the product in a tensor, which rounds it.
    dtype = stored_dtype(scalars)
    product = (torch.tensor(scalars["mu_product"], dtype=dtype, device="cpu") * mu).item()
    scalars["mu_product"] = product
    gradient_step_size = -lr * (1.0 - mu) / (1.0 - product)
    momentum_step_size = (-lr * mu_next) / (1.0 - product * mu_next)
    return *moment_entry(group), 1 - b2**step, group["eps"], gradient_step_size, momentum_step_size


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    correction, eps, gradient_step_size, momentum_step_size = entry[5:]
    w, g, m, v = update_moments(w, g, slots, entry[:5], flags[0])
    d = sqrt(v / correction) + eps
    return addcdiv(addcdiv(w, g, d, gradient_step_size), m, d, momentum_step_size), (m, v)


def idle_step(entry: tuple[float, ...]) -> tuple[float, float, float]:
    """Return (h, root, eps); an idle step subtracts h * m / (sqrt(v) / root + eps) from w."""
    correction, eps, _, momentum_step_size = entry[5:]
    return -momentum_step_size, correction**0.5, eps


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return the power series, which applies any number of idle steps without coupled decay."""
    return PowerSeries(idle_step)


rule = Rule(
    "NAdam",
    update,
    moment_slots,
    ledger_entry,
    initial_scalars=initial_scalars,
    closed_form=closed_form,
)
