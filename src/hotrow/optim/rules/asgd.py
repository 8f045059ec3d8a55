"""The rule of ASGD; it matches `_single_tensor_asgd` in `torch/optim/asgd.py`.

    g = g + weight_decay * w
    w = w * (1 - lambd * eta_t) - eta_t * g
    ax = ax + (w - ax) * mu_t                      ax = w while mu_t = 1
    eta_(t+1) = lr / (1 + lambd * lr * t)^alpha,  mu_(t+1) = 1 / max(1, t - t0)

Source: Polyak and Juditsky, https://doi.org/10.1137/0330046.
"""

from __future__ import annotations

from typing import Any

import torch

from hotrow.kernels.rule_math import axpy
from hotrow.optim.closed_form.base import ClosedForm
from hotrow.optim.closed_form.linear import LinearRecurrence
from hotrow.optim.rule import (
    ParamGroup,
    ParamState,
    Rule,
    ScalarState,
    describe_dtype,
    maximize_flag,
    stored_dtype,
)


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return the slot for the average of w."""
    return {"ax": 0.0}


def initial_scalars(group: ParamGroup, state: ParamState) -> ScalarState:
    """Return eta and mu for the next step; torch rounds them to the dtype of its state."""
    eta = state.get("eta")
    dtype = describe_dtype(eta)
    if eta is None:
        eta = torch.tensor(float(group["lr"]), dtype=stored_dtype(dtype), device="cpu")
    return {"eta": float(eta), "mu": float(state.get("mu", 1.0)), **dtype}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (weight decay, 1 - lambd * eta, -eta, mu)."""
    lr, lambd, eta = group["lr"], group["lambd"], scalars["eta"]
    entry = group["weight_decay"], 1 - lambd * eta, -eta, scalars["mu"]
    # torch rounds the values to its default dtype, and then to the dtype of its state.
    new_eta = torch.as_tensor(lr / ((1 + lambd * lr * step) ** group["alpha"]), device="cpu")
    new_mu = torch.as_tensor(1 / max(1, step - group["t0"]), device="cpu")
    dtype = stored_dtype(scalars)
    scalars["eta"], scalars["mu"] = new_eta.to(dtype).item(), new_mu.to(dtype).item()
    return entry


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    weight_decay, decay_factor, step_size, mu = entry
    if flags[0]:
        g = -g
    if weight_decay != 0:
        g = axpy(g, w, weight_decay)
    w = axpy(w * decay_factor, g, step_size)
    ax = slots[0] + (w - slots[0]) * mu if mu != 1 else w
    return w, (ax,)


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return a linear recurrence, because decay and averaging are linear in (w, ax)."""
    return LinearRecurrence(update, maximize_flag(group), len(initial_slots(group)))


rule = Rule(
    "ASGD",
    update,
    initial_slots,
    ledger_entry,
    initial_scalars=initial_scalars,
    closed_form=closed_form,
)
