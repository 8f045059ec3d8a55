"""Train with torch.optim on a dense parameter, and with hotrow's rules on the touched rows."""

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch.testing._internal.common_optimizers import optim_db

import hotrow
from hotrow import optim
from hotrow.cli.optimizer_options import EXECUTION_OPTIONS
from hotrow.kernels.grouping import group, sum_by_row
from hotrow.optim.ledger import Ledger
from hotrow.optim.updater import RowUpdater, step_together
from hotrow.table.parameter import Table
from hotrow.verify.sameness import Batches

RULES = {name: getattr(optim, name).rule for name in optim.__all__}

EXTRA_OPTIONS = {
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
    """Return (class name, arguments) pairs from torch's own tests and from EXTRA_OPTIONS."""
    result = []
    for info in optim_db:
        name = info.optim_cls.__name__
        if name not in RULES:
            continue
        inputs = [i.kwargs for i in info.optim_inputs_func(device="cpu")]
        for kwargs in [*inputs, *EXTRA_OPTIONS[name]]:
            options = {k: v for k, v in kwargs.items() if k not in EXECUTION_OPTIONS}
            if (name, options) not in result:
                result.append((name, options))
    return result


def label(value):
    """Return a readable test id."""
    if isinstance(value, dict):
        return ",".join(f"{k}={v}" for k, v in value.items()) or "default"
    return str(value)


def make_torch_optimizer(name, kwargs, weights):
    """Return torch's single-tensor optimizer and its parameter."""
    parameter = torch.nn.Parameter(weights.clone())
    return getattr(torch.optim, name)([parameter], **kwargs, foreach=False), parameter


def train_dense(name, kwargs, batches, dtype):
    """Train a dense parameter with torch.optim; return (weights, state slots)."""
    torch_optimizer, parameter = make_torch_optimizer(name, kwargs, batches.weights.to(dtype))
    base_lr = torch_optimizer.param_groups[0]["lr"]
    for t, ids in enumerate(batches.all_ids):
        torch_optimizer.param_groups[0]["lr"] = base_lr * batches.learning_rate_factor(t)
        grouped = group(ids, batches.gradients(t).to(dtype), batches.rows)
        parameter.grad = torch.zeros_like(parameter).index_copy_(
            0, grouped.ids.rows, sum_by_row(grouped)
        )
        torch_optimizer.step()
    rule, state = RULES[name], torch_optimizer.state[parameter]
    return parameter.detach(), [
        state[key] for key in rule.initial_slots(torch_optimizer.param_groups[0])
    ]


@dataclass
class RowRun:
    """Train a table with an optimizer's rule, on touched rows only."""

    name: str
    kwargs: dict
    batches: Batches
    dtype: torch.dtype
    exact: bool = True

    def __post_init__(self):
        torch_optimizer, parameter = make_torch_optimizer(
            self.name, self.kwargs, self.batches.weights.to(self.dtype)
        )
        self.group = dict(torch_optimizer.param_groups[0])
        self.base_lr = self.group["lr"]
        # Rprop's initial state contains the learning rate.
        self.group["lr"] = self.base_lr * self.batches.learning_rate_factor(0)
        self.rule = RULES[self.name]
        self.table = parameter.detach()
        self.slots = [
            torch.full_like(self.table, value)
            for value in self.rule.initial_slots(self.group).values()
        ]
        self.row_steps = torch.zeros(len(self.table), dtype=torch.int32)
        self.ledger = Ledger(self.rule, self.group, exact=self.exact)
        self.updater = RowUpdater(self.ledger, self.table, self.slots, self.row_steps)

    def step(self, t):
        """Run the optimizer step for batch t."""
        self.group["lr"] = self.base_lr * self.batches.learning_rate_factor(t)
        self.ledger.record_step(self.group)
        grads = self.batches.gradients(t).to(self.dtype)
        grouped = group(self.batches.all_ids[t], grads, self.batches.rows)
        step_together([(self.updater, grouped)])

    def settle(self, rows=None):
        """Apply the missed steps to the given rows, by default to all rows."""
        rows = torch.arange(len(self.table)) if rows is None else rows
        self.updater.settle(rows)

    def run(self):
        """Train on all batches, then apply the missed steps to all rows."""
        for t in range(self.batches.steps):
            self.step(t)
        self.settle()
        return self.table, self.slots


class LongDouble:
    """An array of numpy's long doubles, with the tensor operations that rules use."""

    def __init__(self, values):
        self.values = np.asarray(values, np.longdouble)

    @classmethod
    def __torch_function__(cls, function, types, arguments=(), options=None):
        assert function is torch.maximum
        return cls(np.maximum(*(each.values for each in arguments)))

    def __neg__(self):
        return LongDouble(-self.values)

    def __abs__(self):
        return LongDouble(abs(self.values))

    def __add__(self, other):
        return LongDouble(self.values + to_numpy(other))

    def __sub__(self, other):
        return LongDouble(self.values - to_numpy(other))

    def __mul__(self, other):
        return LongDouble(self.values * to_numpy(other))

    def __truediv__(self, other):
        return LongDouble(self.values / to_numpy(other))

    def __rtruediv__(self, other):
        return LongDouble(to_numpy(other) / self.values)

    def add(self, b, alpha):
        return self + b * alpha

    def lerp(self, b, weight):
        return self + (b - self) * weight

    def addcmul(self, b, c, value):
        return self + b * c * value

    def addcdiv(self, b, c, value):
        return self + b / c * value

    def sqrt(self):
        return LongDouble(np.sqrt(self.values))


def to_numpy(value):
    """Convert the values to numpy's long double."""
    return value.values if isinstance(value, LongDouble) else np.longdouble(value)


def train_long_double(name, kwargs, batches):
    """Train a dense parameter in long double with hotrow's rule, as a reference for float64."""
    rule, torch_optimizer = (
        RULES[name],
        make_torch_optimizer(name, kwargs, batches.weights.double())[0],
    )
    options = dict(torch_optimizer.param_groups[0])
    base_lr, scalars, w = options["lr"], None, LongDouble(batches.weights.numpy())
    for t, ids in enumerate(batches.all_ids):
        options["lr"] = base_lr * batches.learning_rate_factor(t)
        if scalars is None:
            scalars = rule.initial_scalars(options, {})
            slots = tuple(
                LongDouble(np.full(w.values.shape, value))
                for value in rule.initial_slots(options).values()
            )
        grouped = group(ids, batches.gradients(t).double(), batches.rows)
        g = torch.zeros(w.values.shape, dtype=torch.float64)
        g.index_copy_(0, grouped.ids.rows, sum_by_row(grouped))
        entry = tuple(map(float, rule.ledger_entry(options, t + 1, scalars)))
        w, slots = rule.update(w, LongDouble(g.numpy()), slots, entry, rule.flags(options))
    return w.values


def train_with_low_maximum(library, change):
    """Train with amsgrad until row 1 is idle, while its maximum is less than its second moment.

    Returns:
        the weights, and the maximum of the second moment.
    """
    layer = torch.nn.Embedding(3, 2, _weight=torch.ones(3, 2))
    if library is optim:
        layer = hotrow.convert(layer, min_entries=0)
        assert isinstance(layer.weight, Table)
    optimizer = library.AdamW(layer.parameters(), lr=0.1, amsgrad=True)

    def step(row, gradient):
        (layer(torch.tensor([row])) * gradient).sum().backward()
        optimizer.step()
        optimizer.zero_grad()

    for _ in range(300):  # in the first few hundred steps, missed steps are replayed
        step(0, 1.0)
    step(1, 0.1)
    if change == "toggle":
        optimizer.param_groups[0]["amsgrad"] = False
        step(1, 10.0)
        optimizer.param_groups[0]["amsgrad"] = True
    else:
        step(1, 10.0)
        optimizer.state[layer.weight]["max_exp_avg_sq"].zero_()
    for _ in range(20):
        step(0, 1.0)
    weights = layer.weight.detach().clone()
    return weights, optimizer.state[layer.weight]["max_exp_avg_sq"].clone()


# Options with which a closed form underflows or overflows within 150 steps, and the weight of a row
# that misses these steps. "overflow" means that the row first gets a gradient whose square is inf.
EXTREME_ROWS = [
    ("AdamW", {"lr": 0.9, "weight_decay": 1.0, "betas": (0.0, 0.999)}, float("-inf")),
    ("SGD", {"lr": 0.1, "weight_decay": 0.5}, float("inf")),
    ("SGD", {"lr": 0.1, "weight_decay": 0.5, "momentum": 0.9}, float("inf")),
    ("SGD", {"lr": 0.1, "weight_decay": 9.99}, float("nan")),
    ("SGD", {"lr": 1.0, "weight_decay": 1.0}, float("nan")),  # the factor is 0
    ("SGD", {"lr": 1.0, "weight_decay": 1.0}, float("inf")),
    ("SGD", {"lr": 1.0, "weight_decay": 1.0, "momentum": 0.9}, float("nan")),
    ("ASGD", {"lr": 0.5, "lambd": 0.0, "weight_decay": 2.0}, float("nan")),
    ("ASGD", {"lr": 0.5, "lambd": 2.0}, float("inf")),
    # the product of two steps has a 0 on its diagonal
    ("SGD", {"lr": 0.5, "weight_decay": 1.0, "momentum": 0.5}, float("nan")),
    ("SGD", {"lr": 1e-6, "momentum": 1e3}, 1.0),
    ("ASGD", {"lr": 0.5, "lambd": 0.5, "t0": 10}, float("inf")),
    ("RMSprop", {"alpha": 1e-3}, "overflow"),
    ("RMSprop", {"alpha": 0.0}, "overflow"),
    ("Adadelta", {"rho": 1e-3}, "overflow"),
    ("Adadelta", {"rho": 0.0}, "overflow"),
    ("Adamax", {"betas": (1e-4, 1e-3)}, "overflow"),
    ("RAdam", {"lr": 0.01, "betas": (0.5, 0.5)}, "overflow"),
    ("Adam", {"betas": (0.0, 0.0), "amsgrad": True}, "overflow"),
    ("AdamW", {"betas": (0.5, 0.0), "amsgrad": True}, "overflow"),
    ("NAdam", {"betas": (0.5, 0.0)}, "overflow"),
    ("RAdam", {"betas": (0.0, 0.0)}, "overflow"),
    ("Adamax", {"betas": (0.0, 0.0)}, "overflow"),
]


def train_extreme_row(library, name, options, weight, dtype):
    """Train a row of ones and a row that misses the steps, and return the second row's values."""
    weights = torch.ones(3, 2, dtype=dtype)
    overflows = weight == "overflow"
    weights[1] = 1.0 if overflows else weight
    layer = torch.nn.Embedding(3, 2, _weight=weights)
    if library is optim:
        layer = hotrow.convert(layer, min_entries=0)
        assert isinstance(layer.weight, Table)
    optimizer = getattr(library, name)(layer.parameters(), **options)
    gradient = torch.tensor([1e-3, torch.finfo(dtype).max ** 0.6], dtype=dtype)
    if name == "Adamax":
        gradient[1] = torch.inf
    for step in range(150):
        optimizer.zero_grad()
        rows = [0, 1] if step == 0 and overflows else [0]
        (layer(torch.tensor(rows)).sum(1) * gradient[: len(rows)]).sum().backward()
        optimizer.step()
    state = optimizer.state[layer.weight]
    slots = [state[key][1].clone() for key in sorted(state) if state[key].ndim]
    return [layer.weight.detach()[1].clone(), *slots]


# States that torch turns into NaN in an idle row, or that stay as they are; see `train_broken_row`.
BROKEN_STATES = [
    ("SGD", {"momentum": 0.9}, "momentum_buffer", math.nan),
    ("SGD", {"momentum": 0.9, "weight_decay": 0.1}, "momentum_buffer", math.inf),
    ("SGD", {"momentum": 0.9, "lr": 0.0}, "momentum_buffer", math.nan),
    ("ASGD", {"t0": 2.0}, "ax", math.nan),
    ("RMSprop", {}, "square_avg", math.nan),
    ("RMSprop", {}, "square_avg", -1.0),
    ("RMSprop", {}, "square_avg", math.inf),
    ("RMSprop", {"momentum": 0.5}, "square_avg", math.nan),
    ("RMSprop", {"momentum": 0.5}, "momentum_buffer", math.inf),
    ("RMSprop", {"centered": True}, "square_avg", math.nan),
    ("RMSprop", {"centered": True}, "grad_avg", math.nan),
    ("RMSprop", {"centered": True}, "grad_avg", math.inf),
    ("RMSprop", {"centered": True, "momentum": 0.5}, "grad_avg", 10.0),
    ("Adadelta", {}, "square_avg", math.nan),
    ("Adadelta", {}, "acc_delta", math.nan),
    ("Adadelta", {}, "acc_delta", math.inf),
    ("Adadelta", {}, "acc_delta", -1.0),
    ("Adadelta", {"eps": 1e-3}, "acc_delta", -1e-4),
    ("Adam", {"amsgrad": True}, "exp_avg_sq", math.nan),
    ("Adam", {"amsgrad": True}, "max_exp_avg_sq", math.nan),
    ("Rprop", {}, "step_size", math.nan),
    ("Rprop", {"step_sizes": (1e-6, math.inf)}, "step_size", math.inf),
    ("Adagrad", {}, "sum", math.nan),
    ("Adagrad", {}, "sum", -1.0),
]


def train_broken_row(
    library, name, options, slot, value, missed_steps, dtype=torch.float32, weight=None
):
    """Write `value` to the state of a row that then misses steps; return the row's values.

    Write `weight` to the same place of the table, unless it is None.
    """
    layer = torch.nn.Embedding(3, 2, _weight=torch.arange(1.0, 7).reshape(3, 2).to(dtype))
    if library is optim:
        layer = hotrow.convert(layer, min_entries=0)
        assert isinstance(layer.weight, Table)
    optimizer = getattr(library, name)(layer.parameters(), **{"lr": 0.01, **options})
    for step in range(2 + missed_steps):
        optimizer.zero_grad()
        layer(torch.tensor([0, 1] if step < 2 else [0, 2])).sum().backward()
        optimizer.step()
        if step == 1:
            optimizer.state[layer.weight][slot][1, 0] = value
            if weight is not None:
                with torch.no_grad():
                    layer.weight[1, 0] = weight
    if library is optim:
        assert layer.weight.has_stale_rows == (name != "Adagrad")
    state = optimizer.state[layer.weight]
    slots = [state[key][1].clone() for key in sorted(state) if state[key].ndim]
    return [layer.weight.detach()[1].clone(), *slots]
