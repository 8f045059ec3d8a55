"""ASGD: the update of `torch/optim/asgd.py`, `_single_tensor_asgd`.

    g = g + weight_decay * w
    w = w * (1 - lambd * eta_t) - eta_t * g
    ax = ax + (w - ax) * mu_t                      ax = w while mu_t = 1
    eta_(t+1) = lr / (1 + lambd * lr * t)^alpha,  mu_(t+1) = 1 / max(1, t - t0)

Polyak and Juditsky, https://doi.org/10.1137/0330046.
"""

from __future__ import annotations

from typing import Any

import torch

from hotrow.kernels.rule_math import axpy
from hotrow.optim.closed_form.linear import Linear
from hotrow.optim.closed_form.shortcut import Shortcut
from hotrow.optim.rule import Carried, Group, Rule, State, only_maximize, scalar_dtype


def slots(group: Group) -> dict[str, float]:
    """The average of w."""
    return {"ax": 0.0}


def carry(group: Group, state: State) -> Carried:
    """The rates of the next step; torch rounds them to its default dtype."""
    eta = state.get("eta", torch.tensor(float(group["lr"]), dtype=scalar_dtype()))
    return {"eta": float(eta), "mu": float(state.get("mu", 1.0))}


def entry(group: Group, step: int, carried: Carried) -> tuple[Any, ...]:
    """(weight decay, 1 - lambd * eta, -eta, mu)."""
    lr, lambd, eta = group["lr"], group["lambd"], carried["eta"]
    now = group["weight_decay"], 1 - lambd * eta, -eta, carried["mu"]
    carried["eta"] = torch.as_tensor(lr / ((1 + lambd * lr * step) ** group["alpha"])).item()
    carried["mu"] = torch.as_tensor(1 / max(1, step - group["t0"])).item()
    return now


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """One step of one element, or of a tensor of rows."""
    decay, shrink, size, mu = entry
    if flags[0]:
        g = -g
    if decay != 0:
        g = axpy(g, w, decay)
    w = axpy(w * shrink, g, size)
    ax = slots[0] + (w - slots[0]) * mu if mu != 1 else w
    return w, (ax,)


def shortcut(group: Group) -> Shortcut:
    """Decay and averaging are linear in (w, ax)."""
    return Linear(update, only_maximize(group), len(slots(group)))


rule = Rule("ASGD", update, slots, entry, carry=carry, shortcut=shortcut)
