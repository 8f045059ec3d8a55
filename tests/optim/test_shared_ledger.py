"""Tables that take their steps together share a ledger, and train as if each had its own."""

import copy
import time
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from hotrow.table.parameter import Table
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits

OPTIONS = {
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "AdamW": {"lr": 0.01},
    "NAdam": {"lr": 0.01},
    "ASGD": {"lr": 0.1},
    "Rprop": {"lr": 0.01},
    "Adagrad": {"lr": 0.1, "lr_decay": 0.1},
}
# No other test needs the kernel of Rprop in float64, which takes seconds to compile.
optimizers = pytest.mark.parametrize("name", grid(OPTIONS, lambda name: name != "Rprop"))
SIZES = (40, 3), (300, 16), (70, 5), (5000, 3)


@pytest.fixture(autouse=True)
def _small_weights_become_tables(monkeypatch):
    monkeypatch.setattr("hotrow.table.lookup.MIN_TABLE_ENTRIES", 1)


class Model(nn.Module):
    """Tables of different sizes and dtypes, one of them looked up by columns, and a dense layer."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(1)
        self.tables = nn.ModuleList(nn.Embedding(*size) for size in SIZES)
        self.tables[2].double()
        self.head = nn.Linear(600, 4)
        self.dense = nn.Linear(3, 2)

    def forward(self, ids, used):
        """Return the loss over the tables whose numbers are in `used`."""
        total = self.dense(self.tables[0](ids[0])).square().mean() if 0 in used else 0
        for k in used - {0, 4}:
            total = total + self.tables[k](ids[k]).square().mean()
        if 4 in used:
            total = total + self.head(F.one_hot(ids[4], 600).float()).square().mean()
        return total


def batches(steps, tables=None):
    """Yield the ids of each table, and the numbers of the tables in the batch."""
    random = torch.Generator().manual_seed(2)
    for _ in range(steps):
        ids = [torch.randint(rows, (90,), generator=random) for rows, _ in (*SIZES, (600, 0))]
        used = {k for k in range(5) if torch.rand((), generator=random) < 0.7}
        yield ids, tables or used


def make(name, model=None, package=hotrow.optim):
    model = model or Model()
    if package is hotrow.optim:
        model = hotrow.convert(model, min_entries=0)
    return model, getattr(package, name)(model.parameters(), **OPTIONS[name])


def train(model, optimizer, data):
    for ids, used in data:
        optimizer.zero_grad()
        if used:
            model(ids, used).backward()
        optimizer.step()


def ledgers(model):
    lags = [table.lag for table in model.parameters() if isinstance(table, Table)]
    return [lag.ledger for lag in lags if lag is not None]


def alone(name, data):
    """Train the tables one after another, each with its own optimizer."""
    model = hotrow.convert(Model(), min_entries=0)
    optimizers = [getattr(hotrow.optim, name)([p], **OPTIONS[name]) for p in model.parameters()]
    for ids, used in data:
        for optimizer in optimizers:
            optimizer.zero_grad()
        if used:
            model(ids, used).backward()
        for optimizer in optimizers:
            optimizer.step()
    state = {}
    for optimizer in optimizers:
        state.update(optimizer.state)
    return model, state


def assert_same_training(model, state, other, other_state):
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        assert one.requires_grad == two.requires_grad
        assert_same_bits(one.detach(), two.detach())
        assert sorted(state[one]) == sorted(other_state[two])
        for key in state[one]:
            assert torch.equal(torch.as_tensor(state[one][key]), other_state[two][key]), key


@optimizers
def test_tables_train_together_as_they_do_alone(name):
    every = {0, 1, 2, 3, 4}
    model, optimizer = make(name)
    train(model, optimizer, batches(30, every))
    assert all(isinstance(table.weight, Table) for table in (*model.tables, model.head))
    *shared, head = ledgers(model)
    assert len(shared) == 4
    assert all(ledger is shared[0] for ledger in shared)
    assert (shared[0].table_count, shared[0].length) == (4, 30)
    assert (head.table_count, head.length) == (1, 29)  # it became a table in the first step
    assert_same_training(model, optimizer.state, *alone(name, batches(30, every)))


@optimizers
def test_a_table_without_a_gradient_takes_no_step(name):
    model, optimizer = make(name)
    train(model, optimizer, batches(30))
    assert len(set(map(id, ledgers(model)))) == 5
    assert all(ledger.table_count == 1 for ledger in ledgers(model))
    assert_same_training(model, optimizer.state, *alone(name, batches(30)))
    # Compare with dense torch too, because `alone` runs hotrow's code.
    plain, dense = make(name, Model(), torch.optim)
    train(plain, dense, batches(30))
    for one, two in zip(model.parameters(), plain.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-4, atol=1e-5)
        assert float(optimizer.state[one].get("step", 0)) == dense.state[two].get("step", 0)


def test_a_split_ledger_keeps_its_earlier_steps():
    model, optimizer = make("AdamW")
    train(model, optimizer, batches(10, {0, 1, 3}))
    (shared, *_) = ledgers(model)
    train(model, optimizer, batches(1, {1, 3}))
    first, second, third = (model.tables[k].weight.lag.ledger for k in (0, 1, 3))
    assert first is shared
    assert second is third
    assert (first.table_count, second.table_count) == (1, 2)
    assert (first.length, second.length) == (10, 11)


def test_tables_of_different_groups_and_counts_do_not_share():
    model, _ = make("NAdam")
    first, second, double, fourth = (table.weight for table in model.tables)
    groups = [{"params": [first, second, fourth]}, {"params": [double], "lr": 0.5}]
    optimizer = hotrow.optim.NAdam(groups)
    train(model, optimizer, batches(3, {0, 1, 2, 3}))
    one, two, three, four = ledgers(model)
    assert one is two
    assert one is four
    assert one is not three
    # Load a state in which the first table has a different step count.
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][0]["step"] += 7
    optimizer.load_state_dict(saved)
    train(model, optimizer, batches(3, {0, 1, 2, 3}))
    one, two, three, four = ledgers(model)
    assert one is not two
    assert two is four
    # Load a state in which only the `mu_product` of a table differs.
    saved = copy.deepcopy(optimizer.state_dict())
    saved["state"][2]["mu_product"] /= 2
    optimizer.load_state_dict(saved)
    train(model, optimizer, batches(1, {0, 1, 2, 3}))
    assert ledgers(model)[1] is not ledgers(model)[3]


def test_tables_of_different_dtypes_do_not_share_after_a_load():
    model, optimizer = make("NAdam")
    train(model, optimizer, batches(3, {0, 1, 2, 3}))
    assert len(set(map(id, ledgers(model)[:4]))) == 1
    optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    train(model, optimizer, batches(1, {0, 1, 2, 3}))
    one, two, three, four = ledgers(model)[:4]
    assert one is two is four
    assert one is not three  # torch casts `mu_product` to the table's dtype, here float64


def test_tables_share_a_ledger_again_after_their_state_was_read():
    model, optimizer = make("AdamW")
    train(model, optimizer, batches(5))
    for table in model.tables:
        optimizer.state[table.weight]["step"] = torch.tensor(5.0)
    train(model, optimizer, batches(2, {0, 1, 2, 3}))
    assert len(set(map(id, ledgers(model)[:4]))) == 1


def test_a_table_moved_to_another_group_takes_that_groups_options():
    found = []
    for package in (hotrow.optim, torch.optim):
        model, _ = make("SGD", package=package)
        weights = [table.weight for table in model.tables]
        optimizer = package.SGD([{"params": weights[:3]}, {"params": weights[3:]}], lr=0.1)
        train(model, optimizer, batches(3, {0, 1, 3}))
        optimizer.param_groups[1]["params"].append(optimizer.param_groups[0]["params"].pop(1))
        optimizer.param_groups[1]["lr"] = 0.7
        train(model, optimizer, batches(3, {0, 1, 3}))
        found.append([weight.detach().clone() for weight in weights])
    for one, two in zip(*found, strict=True):
        torch.testing.assert_close(one, two, rtol=1e-5, atol=1e-6)


def test_threads_read_tables_while_others_step():
    data = list(batches(25, {0, 1, 2, 3, 4}))
    model, optimizer = make("AdamW")
    expected, _ = alone("AdamW", data)
    is_done = False

    # With autograd, torch 2.13 deadlocks when one thread applies a Python autograd function to a
    # parameter while another thread uses that parameter, even without hotrow.
    @torch.no_grad()
    def read():
        while not is_done:
            for table in model.tables:
                assert table.weight.isfinite().all()
                time.sleep(0.001)  # without it, the training thread rarely gets the GIL

    with ThreadPoolExecutor(1) as pool:
        reader = pool.submit(read)
        try:
            train(model, optimizer, data)
        finally:
            is_done = True
        reader.result()
    for one, two in zip(model.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(one.detach(), two.detach(), rtol=1e-5, atol=1e-6)
    assert float(optimizer.state[model.tables[0].weight]["step"]) == 25
