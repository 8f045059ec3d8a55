"""Sparse training runs, by torch.optim on a dense parameter and by the rules on touched rows."""

from dataclasses import dataclass

import numpy as np
import torch
from torch.testing._internal.common_optimizers import optim_db

from hotrow import optim
from hotrow.cli.optimizer_options import MECHANICS
from hotrow.kernels.grouping import group
from hotrow.optim.ledger import Ledger
from hotrow.optim.settle import settle, step
from hotrow.verify.sameness import Batches

RULES = {name: getattr(optim, name).rule for name in optim.__all__}

OWN = {
    "SGD": [
        {"momentum": 0.9},
        {"momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
        {"momentum": 0.8, "nesterov": True, "weight_decay": 0.01, "maximize": True},
        {"weight_decay": 0.05},
    ],
    "Adam": [{"betas": (0.4, 0.7)}, {"eps": 1e-3}, {"amsgrad": True}],
    "AdamW": [{"weight_decay": 0}, {"betas": (0.8, 0.95), "eps": 1e-4, "maximize": True}],
    "Adamax": [{"betas": (0.4, 0.9), "weight_decay": 0.01}],
    "NAdam": [
        {"momentum_decay": 0.1, "weight_decay": 0.05, "decoupled_weight_decay": True},
        {"maximize": True},
    ],
    "RAdam": [
        {"betas": (0.9, 0.9)},
        {"weight_decay": 0.05, "decoupled_weight_decay": True, "maximize": True},
    ],
    "Adagrad": [{"initial_accumulator_value": 0.1, "lr_decay": 0.02, "weight_decay": 0.01}],
    "Adadelta": [{"lr": 0.3, "rho": 0.7}, {"lr": 0.3, "weight_decay": 0.01}],
    "RMSprop": [
        {"momentum": 0.9},
        {"centered": True},
        {"centered": True, "momentum": 0.5, "maximize": True},
        {"weight_decay": 0.01, "momentum": 0.9},
        {"weight_decay": 0.01, "momentum": 0.9, "alpha": 0.7},
    ],
    "ASGD": [{"t0": 20, "alpha": 0.5, "lambd": 0.01}, {"weight_decay": 0.05, "t0": 0}],
    "Rprop": [{"lr": 1e-3, "step_sizes": (1e-4, 5e-3)}, {"maximize": True}],
}


def configurations():
    """(torch's class name, its arguments): those of torch's own tests, and ours."""
    found = []
    for info in optim_db:
        name = info.optim_cls.__name__
        if name not in RULES:
            continue
        inputs = [i.kwargs for i in info.optim_inputs_func(device="cpu")]
        for kwargs in [*inputs, *OWN[name]]:
            kept = {k: v for k, v in kwargs.items() if k not in MECHANICS}
            if (name, kept) not in found:
                found.append((name, kept))
    return found


def label(value):
    """A readable test id."""
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "default"
    return str(value)


def optimizer(name, kwargs, weights):
    """torch's own, with the plain single-tensor code, and its parameter."""
    parameter = torch.nn.Parameter(weights.clone())
    return getattr(torch.optim, name)([parameter], **kwargs, foreach=False), parameter


def dense(name, kwargs, batches, dtype):
    """torch.optim on a dense parameter: (weights, state slots)."""
    chosen, parameter = optimizer(name, kwargs, batches.weights.to(dtype))
    base = chosen.param_groups[0]["lr"]
    for t, ids in enumerate(batches.all_ids):
        chosen.param_groups[0]["lr"] = base * batches.rate(t)
        grouped = group(ids, batches.grads(t).to(dtype), batches.rows)
        parameter.grad = torch.zeros_like(parameter).index_copy_(0, grouped.at.rows, grouped.sums())
        chosen.step()
    rule, state = RULES[name], chosen.state[parameter]
    return parameter.detach(), [state[key] for key in rule.slots(chosen.param_groups[0])]


@dataclass
class Touched:
    """A table trained by its rule, on touched rows only."""

    name: str
    kwargs: dict
    batches: Batches
    dtype: torch.dtype
    exact: bool = True

    def __post_init__(self):
        chosen, parameter = optimizer(self.name, self.kwargs, self.batches.weights.to(self.dtype))
        self.group = dict(chosen.param_groups[0])
        self.base = self.group["lr"]
        self.group["lr"] = self.base * self.batches.rate(0)  # Rprop's state begins with it
        self.rule = RULES[self.name]
        self.table = parameter.detach()
        self.slots = [
            torch.full_like(self.table, value) for value in self.rule.slots(self.group).values()
        ]
        self.last = torch.zeros(len(self.table), dtype=torch.int32)
        self.ledger = Ledger(self.rule, self.group, exact=self.exact)

    def step(self, t):
        """One step on batch t."""
        self.group["lr"] = self.base * self.batches.rate(t)
        self.ledger.record(self.group)
        grads = self.batches.grads(t).to(self.dtype)
        grouped = group(self.batches.all_ids[t], grads, self.batches.rows)
        step(self.ledger, self.table, self.slots, self.last, grouped)

    def settle(self, rows=None):
        """Settle some rows, or all."""
        rows = torch.arange(len(self.table)) if rows is None else rows
        settle(self.ledger, self.table, self.slots, self.last, rows)

    def run(self):
        """All batches, then all rows settled."""
        for t in range(self.batches.steps):
            self.step(t)
        self.settle()
        return self.table, self.slots


class Wide:
    """Numbers of numpy's long double, with the operations of torch that rules are written in."""

    def __init__(self, values):
        self.values = np.asarray(values, np.longdouble)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        assert function is torch.maximum
        return cls(np.maximum(*(each.values for each in arguments)))

    def __neg__(self):
        return Wide(-self.values)

    def __abs__(self):
        return Wide(abs(self.values))

    def __add__(self, other):
        return Wide(self.values + plain(other))

    def __sub__(self, other):
        return Wide(self.values - plain(other))

    def __mul__(self, other):
        return Wide(self.values * plain(other))

    def __truediv__(self, other):
        return Wide(self.values / plain(other))

    def __rtruediv__(self, other):
        return Wide(plain(other) / self.values)

    def add(self, b, alpha):
        return self + b * alpha

    def lerp(self, b, weight):
        return self + (b - self) * weight

    def addcmul(self, b, c, value):
        return self + b * c * value

    def addcdiv(self, b, c, value):
        return self + b / c * value

    def sqrt(self):
        return Wide(np.sqrt(self.values))


def plain(value):
    """What numpy computes with."""
    return value.values if isinstance(value, Wide) else np.longdouble(value)


def wide(name, kwargs, batches):
    """The rule on a dense parameter in long double: what float64 is held against."""
    rule, chosen = RULES[name], optimizer(name, kwargs, batches.weights.double())[0]
    given = dict(chosen.param_groups[0])
    base, carried, w = given["lr"], None, Wide(batches.weights.numpy())
    for t, ids in enumerate(batches.all_ids):
        given["lr"] = base * batches.rate(t)
        if carried is None:
            carried = rule.carry(given, {})
            slots = tuple(
                Wide(np.full(w.values.shape, value)) for value in rule.slots(given).values()
            )
        grouped = group(ids, batches.grads(t).double(), batches.rows)
        g = torch.zeros(w.values.shape, dtype=torch.float64)
        g.index_copy_(0, grouped.at.rows, grouped.sums())
        entry = tuple(map(float, rule.entry(given, t + 1, carried)))
        w, slots = rule.update(w, Wide(g.numpy()), slots, entry, rule.flags(given))
    return w.values
