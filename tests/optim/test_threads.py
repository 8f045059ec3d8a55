"""A thread that reads the optimizer's state doesn't change what another thread trains."""

import copy
import pickle
import threading

import pytest
import torch
from torch import nn

import hotrow
from hotrow import disk
from hotrow.optim import exclusive_access
from hotrow.optim import optimizer as optimizer_module
from hotrow.optim.lag import RowLag
from hotrow.optim.state import sort_new_states
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.exhaustive import grid

ROWS, COLUMNS, STEPS = 200, 4, 8
OPTIONS = {"SGD": {"lr": 1.0, "momentum": 0.5}, "Adam": {"lr": 0.1}}
READS = {
    "state_dict": lambda optimizer: optimizer.state_dict(),
    "deepcopy": copy.deepcopy,
    "pickle": pickle.dumps,
}
# Moments in a step: the rows of the gradient are grouped, the step is recorded, torch's step runs,
# and a lag settles its rows before it is closed.
MOMENTS = {
    "group": (RowGradient, "group"),
    "step": (optimizer_module, "step_together"),
    "torch's step": (torch.optim.SGD, "step"),
    "close": (RowLag, "settle_all"),
}


def call_in_thread(monkeypatch, moment, function):
    """Start a thread that calls the function at this moment; return a function that joins it."""
    owner, name = MOMENTS[moment]
    original, threads = getattr(owner, name), []

    def replacement(*arguments, **options):
        if not threads:
            threads.append(threading.Thread(target=function))
            threads[0].start()
            threads[0].join(0.2)  # the thread may have to wait for the step
        return original(*arguments, **options)

    monkeypatch.setattr(owner, name, replacement)

    def join():
        monkeypatch.undo()
        (thread,) = threads
        thread.join()

    return join


def train(layer, optimizer, steps):
    for t in steps:
        ids = torch.randint(ROWS, (10,), generator=torch.Generator().manual_seed(t))
        optimizer.zero_grad()
        layer(ids).sum().backward()
        optimizer.step()


@pytest.mark.parametrize(
    ("moment", "at"),
    grid(
        [("group", 0), ("group", 3), ("step", 0), ("step", 3), ("close", 3)],
        lambda moment, at: (moment == "group") == (at == 0),
    ),
)
@pytest.mark.parametrize("read", READS)
@pytest.mark.parametrize("name", OPTIONS)
@pytest.mark.parametrize("place", grid(["memory", "disk"], "memory".__eq__))
def test_a_thread_that_reads_the_state_changes_nothing(
    place, name, read, moment, at, tmp_path, monkeypatch
):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS) if place == "disk" else None
    layer = hotrow.convert(nn.Embedding(ROWS, COLUMNS), min_entries=0)
    layer = layer if store is None else store.layer
    assert type(layer.weight) is Table
    dense = nn.Embedding(ROWS, COLUMNS, _weight=layer.weight.detach().clone())
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), **OPTIONS[name])
    expected = getattr(torch.optim, name)(dense.parameters(), **OPTIONS[name])
    failures = []

    def run():
        try:
            READS[read](optimizer)
        except Exception as error:
            failures.append(error)

    for t in range(STEPS):
        if t == at:
            join = call_in_thread(monkeypatch, moment, run)
            if moment == "close":
                optimizer.state_dict()
        train(layer, optimizer, [t])
        train(dense, expected, [t])
        if t == at:
            join()
            assert not failures
            if store is not None:
                store.save()
    torch.testing.assert_close(layer.weight, dense.weight, rtol=1e-5, atol=1e-6)
    if store is not None:
        store.close()
        disk.verify(store.folder)


def test_a_thread_that_changes_the_frozen_rows_waits_for_a_dense_step(monkeypatch):
    layer = hotrow.convert(nn.Embedding(ROWS, COLUMNS), min_entries=0)
    assert type(layer.weight) is Table
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.5)
    hotrow.vocabulary.freeze(layer, [3])
    before = layer.weight.detach().clone()

    def change_frozen_rows():
        hotrow.vocabulary.unfreeze(layer)
        hotrow.vocabulary.freeze(layer, [5])

    layer.weight.sum().backward()
    join = call_in_thread(monkeypatch, "torch's step", change_frozen_rows)
    optimizer.step()
    join()
    expected = before - 0.5
    expected[3] = before[3]
    assert torch.equal(layer.weight.detach(), expected)


def test_states_are_not_sorted_while_another_thread_saves():
    states = {"a": 1, "b": 2}
    arguments = states, 0, [{"params": ["b", "a"]}]
    thread = threading.Thread(target=sort_new_states, args=arguments)
    with exclusive_access.lock:
        thread.start()
        thread.join(0.2)
        assert list(states) == ["a", "b"]
    thread.join()
    assert list(states) == ["b", "a"]
