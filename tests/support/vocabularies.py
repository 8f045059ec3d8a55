"""Change the vocabulary of a table with hotrow, and that of a dense parameter by hand."""

import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from hotrow import vocabulary
from hotrow.optim.lag import RowLag
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_no_worse

COLUMNS = 3


def learning_rate(kwargs, t):
    """Return the learning rate of step t, or None to keep the optimizer's default."""
    return None if "lr" not in kwargs else kwargs["lr"] * (1 + t % 3) / 2


class DenseRun:
    """Train with torch.optim; change the parameter and its state by hand."""

    def __init__(self, name, kwargs, weights, dtype):
        self.kwargs, self.dtype, self.frozen, self.t = kwargs, dtype, [], 0
        self.parameter = nn.Parameter(weights.to(dtype))
        self.optimizer = getattr(torch.optim, name)([self.parameter], **kwargs, foreach=False)

    @property
    def group(self):
        return self.optimizer.param_groups[0]

    @property
    def state(self):
        """The state tensors with a row for each id."""
        state = self.optimizer.state[self.parameter]
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim}

    @property
    def weights(self):
        return self.parameter.detach()

    def initial(self, name):
        """Return torch's initial value for a state tensor."""
        return {
            "sum": self.group.get("initial_accumulator_value"),
            "step_size": self.group["lr"],
        }.get(name, 0.0)

    def step(self, ids, factors):
        """Train on a batch; the gradient doesn't depend on the weights."""
        self.group["lr"] = learning_rate(self.kwargs, self.t) or self.group["lr"]
        self.t += 1
        before = self.weights.clone()
        state = {name: value.clone() for name, value in self.state.items()}
        self.optimizer.zero_grad()
        (F.embedding(ids, self.parameter) * factors.to(self.dtype)).sum().backward()
        self.optimizer.step()
        with torch.no_grad():  # put the frozen rows back
            self.parameter[self.frozen] = before[self.frozen]
            for key, value in self.state.items():
                initial = torch.full_like(value, self.initial(key))
                value[self.frozen] = state.get(key, initial)[self.frozen]

    def take(self, sources, added):
        """Select rows; a source of -1 adds a row."""
        new = sources < 0
        for container, key, value in [
            (None, None, self.weights),
            *((self.optimizer.state[self.parameter], *item) for item in self.state.items()),
        ]:
            rows = value[sources.clamp(min=0)]
            rows[new] = added.to(self.dtype) if key is None else self.initial(key)
            if key is None:
                weights = rows
            else:
                container[key] = rows
        state = self.optimizer.state.pop(self.parameter, None)
        self.parameter = nn.Parameter(weights)
        self.group["params"] = [self.parameter]
        if state is not None:
            self.optimizer.state[self.parameter] = state
        order = sources.tolist()
        self.frozen = [order.index(row) for row in self.frozen]


class TableRun:
    """Train a table with hotrow; change it with `hotrow.vocabulary`."""

    def __init__(self, name, kwargs, weights):
        self.kwargs, self.t = kwargs, 0
        layer = nn.Embedding(*weights.shape, _weight=weights.clone())
        self.layer = hotrow.convert(layer, min_entries=0)
        self.weight = self.layer.weight
        self.optimizer = getattr(hotrow.optim, name)([self.weight], **kwargs)

    @property
    def state(self):
        state = self.optimizer.state[self.weight]
        return {k: v for k, v in state.items() if isinstance(v, torch.Tensor) and v.ndim}

    @property
    def weights(self):
        return self.weight.detach()

    @property
    def lag(self):
        """The table's lag, which must still be open."""
        assert isinstance(self.weight.lag, RowLag)
        return self.weight.lag

    def step(self, ids, factors):
        """Train on a batch, like `DenseRun.step`."""
        group = self.optimizer.param_groups[0]
        group["lr"] = learning_rate(self.kwargs, self.t) or group["lr"]
        self.t += 1
        self.optimizer.zero_grad()
        (self.layer(ids) * factors).sum().backward()
        self.optimizer.step()
        assert self.layer.weight is self.weight
        assert isinstance(self.weight, Table)

    def resize(self, rows, added):
        vocabulary.resize(self.layer, rows, self.optimizer, init=added)

    def take(self, sources, added):
        return vocabulary.take(self.layer, sources, self.optimizer, init=added)


class ThreeRuns:
    """The same training and the same changes, with hotrow, and with torch in two dtypes."""

    def __init__(self, name, kwargs, rows, seed=0):
        self.generator = torch.Generator().manual_seed(seed)
        weights = self.random(rows)
        self.table = TableRun(name, kwargs, weights)
        self.rival = DenseRun(name, kwargs, weights, torch.float32)
        self.truth = DenseRun(name, kwargs, weights, torch.float64)

    @property
    def rows(self):
        return len(self.rival.parameter)

    def random(self, rows):
        return torch.randn(rows, COLUMNS, generator=self.generator)

    def steps(self, count, batch=4):
        for _ in range(count):
            ids = torch.randint(self.rows, (batch,), generator=self.generator)
            factors = self.random(batch)
            for run in (self.table, self.rival, self.truth):
                run.step(ids, factors)

    def resize(self, rows):
        """Grow or shrink with `resize`, and by hand with `take`."""
        kept = torch.arange(min(rows, self.rows))
        added = self.random(rows - len(kept))
        sources = torch.cat([kept, torch.full((len(added),), -1)])
        self.table.resize(rows, added)
        for run in (self.rival, self.truth):
            run.take(sources, added)

    def take(self, sources):
        sources = torch.tensor(sources)
        added = self.random(int((sources < 0).sum()))
        for run in (self.table, self.rival, self.truth):
            run.take(sources, added)

    def freeze(self, ids):
        vocabulary.freeze(self.table.layer, ids)
        for run in (self.rival, self.truth):
            run.frozen = sorted({*run.frozen, *ids})

    def unfreeze(self, ids):
        vocabulary.unfreeze(self.table.layer, ids)
        for run in (self.rival, self.truth):
            run.frozen = [row for row in run.frozen if row not in ids]

    def check(self):
        """Check the weights and the state with `assert_no_worse`."""
        assert_no_worse(self.table.weights, self.rival.weights, self.truth.weights)
        state = self.table.state
        assert set(state) == set(self.rival.state)
        for name, value in state.items():
            assert_no_worse(value, self.rival.state[name], self.truth.state[name])
