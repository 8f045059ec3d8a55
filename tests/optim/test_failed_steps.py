"""An error in a step changes nothing, or later reads and steps raise an error."""

import collections
import copy
import itertools

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.kernels.default import operators as default
from hotrow.optim import ledger, updater
from hotrow.optim.lag import RowLag
from hotrow.table.parameter import Table
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits

ROWS, COLUMNS = 12, 3
OPTIONS = {
    "AdamW": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "ASGD": {"lr": 0.1, "t0": 3},
    "SGD": {"lr": 0.1, "momentum": 0.9},
    "RAdam": {"lr": 0.1},
    "Adamax": {"lr": 0.1},
    "Adagrad": {"lr": 0.1},  # changes no idle row
    "Rprop": {"lr": 0.1},
}
FIRST_STEP = {"SGD": {"dampening": 0.5}}  # options that make the first step special
DTYPES = pytest.mark.parametrize(
    "dtype", [torch.float32, torch.float16], ids=["compiled", "plain torch"]
)


def make_run(name, dtype=torch.float32):
    """Create tables in two parameter groups, so that a step calls the kernels twice."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Embedding(ROWS, COLUMNS, dtype=dtype) for _ in range(3))
    layers = hotrow.convert(layers, min_entries=0)
    assert all(type(layer.weight) is Table for layer in layers)
    groups = [{"params": [each.weight for each in some]} for some in (layers[:2], layers[2:])]
    return layers, getattr(hotrow.optim, name)(groups, **OPTIONS[name])


def backward(layers, optimizer, t):
    random = torch.Generator().manual_seed(t)
    optimizer.zero_grad()
    for layer in layers:
        layer(torch.randint(ROWS, (4,), generator=random)).square().sum().backward()


def train(layers, optimizer, steps):
    for t in steps:
        backward(layers, optimizer, t)
        optimizer.step()


def assert_same_runs(run, other):
    for layer, expected in zip(run[0], other[0], strict=True):
        assert_same_bits(layer.weight.detach(), expected.weight.detach())
    states, others = (optimizer.state_dict()["state"] for _, optimizer in (run, other))
    for number, state in others.items():
        for name, value in state.items():
            assert_same_bits(states[number][name], value)


def fail(*arguments):
    raise MemoryError


@pytest.mark.parametrize("steps", grid([0, 5], (5).__eq__))
@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
def test_a_step_can_be_repeated_if_no_row_has_changed(name, dtype, steps, monkeypatch):
    run, other = make_run(name, dtype), make_run(name, dtype)
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(steps))
        backward(layers, optimizer, steps)
    with monkeypatch.context() as patch:
        patch.setattr(updater, "step_rows_together", fail)
        with pytest.raises(MemoryError):
            run[1].step()
    for layer in run[0]:
        lag = layer.weight.lag
        assert steps == (0 if lag is None else lag.ledger.length)
    for layers, optimizer in (run, other):
        optimizer.step()
        train(layers, optimizer, range(steps + 1, steps + 20))
    assert_same_runs(run, other)


class FullDeque(collections.deque):
    """A deque that cannot grow."""

    append = fail


def test_a_step_can_be_repeated_if_its_record_failed():
    run, other = make_run("SGD"), make_run("SGD")
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(3))
        backward(layers, optimizer, 3)
    ledgers = {layer.weight.lag.ledger for layer in run[0]}
    kept = {each: each._undo for each in ledgers}
    for each in ledgers:
        each._undo = FullDeque(each._undo, maxlen=1)
    with pytest.raises(MemoryError):
        run[1].step()
    for each, undo in kept.items():
        each._undo = undo
    for layers, optimizer in (run, other):
        optimizer.step()
        train(layers, optimizer, range(4, 9))
    assert_same_runs(run, other)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize("method", ["drop_updater", "_table"])
def test_training_continues_after_an_error_while_a_lag_closes(name, method, monkeypatch):
    run, other = make_run(name), make_run(name)
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(3))
    lag = run[0][0].weight.lag
    with monkeypatch.context() as patch:
        patch.setattr(lag, method, fail)
        with pytest.raises(MemoryError):
            run[1].state_dict()
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(3, 8))
    for layer, expected in zip(run[0], other[0], strict=True):
        torch.testing.assert_close(layer.weight.detach(), expected.weight.detach())


@DTYPES
@pytest.mark.parametrize("name", OPTIONS)
def test_reads_and_steps_raise_after_only_some_tables_took_a_step(name, dtype, monkeypatch):
    layers, optimizer = make_run(name, dtype)
    train(layers, optimizer, range(3))
    backward(layers, optimizer, 3)
    original, calls = updater.step_rows_together, []

    def fail_the_second_time(tables):
        calls.append(tables)
        original(tables) if len(calls) == 1 else fail()

    with monkeypatch.context() as patch:
        patch.setattr(updater, "step_rows_together", fail_the_second_time)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert len(calls) == 2
    assert_all_uses_raise(layers, optimizer)


def test_a_warning_that_raises_an_error_comes_after_the_whole_step():
    run, other = make_run("AdamW"), make_run("AdamW")
    aliases = [layers[0].weight.data for layers, _ in (run, other)]
    for layers, optimizer in (run, other):
        train(layers[:2], optimizer, range(9))
        backward(layers, optimizer, 9)
    with pytest.raises(UserWarning, match="shares the storage of a"):
        run[1].step()
    with pytest.warns(UserWarning, match="shares the storage of a"):
        other[1].step()
    assert run[1].state[run[0][2].weight]["step"] == 1  # the first step of this table
    del aliases
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(10, 14))
    for layer, expected in zip(run[0], other[0], strict=True):
        torch.testing.assert_close(layer.weight.detach(), expected.weight.detach())


@pytest.mark.parametrize("earlier_steps", [0, 3])
def test_reads_and_steps_raise_after_the_scalars_of_a_step_were_not_written(
    earlier_steps, monkeypatch
):
    layers, optimizer = make_run("NAdam")
    train(layers, optimizer, range(earlier_steps))
    backward(layers, optimizer, earlier_steps)
    with monkeypatch.context() as patch:
        patch.setattr(RowLag, "write_scalars", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    assert_all_uses_raise(layers, optimizer)


@pytest.mark.parametrize("read", ["settle", "look_up"])
def test_reads_and_steps_raise_after_a_read_in_plain_torch_has_failed(read, monkeypatch):
    layers, optimizer = make_run("SGD", torch.float16)
    train(layers, optimizer, range(5))
    with monkeypatch.context() as patch:
        patch.setattr(default, "advance_rows", fail)
        for layer in layers:
            assert layer.weight.has_stale_rows
            with pytest.raises(MemoryError):
                layer.weight.sum() if read == "settle" else layer(torch.arange(ROWS))
    assert_all_uses_raise(layers, optimizer)


def assert_all_uses_raise(layers, optimizer):
    assert all(layer.weight.grad is not None for layer in layers)
    for use in (
        optimizer.state_dict,  # must not remove the mark of the interrupted step
        optimizer.step,
        *(layer.weight.sum for layer in layers),
        *(lambda layer=layer: layer(torch.arange(ROWS)) for layer in layers),
        *(layer.state_dict for layer in layers),
    ):
        with pytest.raises(HotrowError, match="an error has interrupted a step or a read"):
            use()


@pytest.mark.parametrize("trained", [0, 1])
def test_the_first_step_of_a_loaded_run_can_be_repeated(trained, monkeypatch):
    layers, optimizer = make_run("SGD")
    for _ in range(3):
        optimizer.zero_grad()
        layers[trained](torch.arange(ROWS)).sum().backward()
        optimizer.step()
    weights, state = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
    runs = [make_run("SGD") for _ in range(2)]
    for other, its in runs:
        other.load_state_dict(weights)
        its.load_state_dict(copy.deepcopy(state))
        backward(other, its, 3)
    with monkeypatch.context() as patch:
        patch.setattr(updater, "step_rows_together", fail)
        with pytest.raises(MemoryError):
            runs[0][1].step()
    for other, its in runs:
        its.step()
        train(other, its, range(4, 8))
    assert_same_runs(*runs)


@pytest.mark.parametrize(("name", "place", "function", "steps"), [
    ("ASGD", ledger.Ledger, "append", 4),
    ("NAdam", ledger.Ledger, "append", 4),
    ("SGD", ledger.Ledger, "append", 4),
    ("ASGD", ledger.np, "concatenate", 64),  # the ledger starts with room for 64 steps
    ("NAdam", ledger.np, "concatenate", 64),
])  # fmt: skip
def test_a_step_whose_entry_cannot_be_stored_is_repeated(name, place, function, steps, monkeypatch):
    run, other = make_run(name), make_run(name)
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(steps))
        backward(layers, optimizer, steps)
    with monkeypatch.context() as patch:
        patch.setattr(place, function, fail)
        with pytest.raises(MemoryError):
            run[1].step()
    for layers, optimizer in (run, other):
        optimizer.step()
        train(layers, optimizer, range(steps + 1, steps + 6))
    assert_same_runs(run, other)


@pytest.mark.parametrize("cause", ["kernel", "option"])
@pytest.mark.parametrize(
    ("name", "then"),
    grid(  # `maximize` compiles a kernel for each optimizer
        itertools.product(["ASGD", "Rprop", "SGD"], ["step", "state_dict", "maximize"]),
        lambda name, then: then != "maximize",
    ),
)
def test_a_failed_first_step_leaves_no_state(name, cause, then, monkeypatch):
    run, other = make_run(name), make_run(name)
    for layers, optimizer in (run, other):
        optimizer.param_groups[0].update(FIRST_STEP.get(name, {}))
        backward(layers, optimizer, 0)
    options = run[1].param_groups
    rate, options[0]["lr"] = options[0]["lr"], 0.5
    with monkeypatch.context() as patch:
        if cause == "kernel":
            patch.setattr(updater, "step_rows_together", fail)
        else:
            options[1]["lr"] = 10**400
        with pytest.raises((MemoryError, OverflowError, HotrowError)):
            run[1].step()
    options[0]["lr"] = options[1]["lr"] = rate
    if then == "state_dict":
        assert run[1].state_dict()["state"] == {}
    elif then == "maximize":
        for _, optimizer in (run, other):
            optimizer.param_groups[0]["maximize"] = True
    for layers, optimizer in (run, other):
        optimizer.step()
        train(layers, optimizer, range(1, 5))
    assert_same_runs(run, other)


@pytest.mark.parametrize("name", ["AdamW", "NAdam", "RAdam", "Adamax"])
def test_a_closed_form_is_computed_again_after_an_error(name, monkeypatch):
    run, other = make_run(name), make_run(name)
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(20))
        backward(layers, optimizer, 20)
    with monkeypatch.context() as patch:
        patch.setattr(updater, "step_rows_together", fail)
        with pytest.raises(MemoryError):
            run[1].step()
    closed_form = type(run[0][0].weight.lag.ledger.closed_form)
    original, calls = closed_form.add_entry, []

    def fail_in_the_last_call(self, *arguments):
        calls.append(arguments)
        original(self, *arguments) if len(calls) < 20 else fail()

    for layer in run[0]:
        calls.clear()
        with monkeypatch.context() as patch:
            patch.setattr(closed_form, "add_entry", fail_in_the_last_call)
            with pytest.raises(MemoryError):
                layer.weight.lag.ledger.steps(20, 20, torch.float32)
    for layers, optimizer in (run, other):
        optimizer.step()
        train(layers, optimizer, range(21, 25))
    assert_same_runs(run, other)


def test_invalid_options_of_a_table_change_no_dense_parameter():
    table = hotrow.convert(nn.Embedding(ROWS, COLUMNS), min_entries=0)
    assert type(table.weight) is Table
    dense = nn.Linear(COLUMNS, 1)
    optimizer = hotrow.optim.Adam([{"params": table.parameters()}, {"params": dense.parameters()}])
    before = dense.weight.detach().clone()
    dense(table(torch.tensor([1, 2]))).sum().backward()
    optimizer.param_groups[0]["betas"] = 1.0, 0.999
    with pytest.raises(HotrowError, match="step 1 of Adam cannot be computed"):
        optimizer.step()
    assert torch.equal(dense.weight.detach(), before)


def test_a_step_that_cannot_be_recorded_changes_no_group():
    run, other = make_run("AdamW"), make_run("AdamW")
    for layers, optimizer in (run, other):
        train(layers, optimizer, range(3))
        backward(layers, optimizer, 3)
    layers, optimizer = run
    options = optimizer.param_groups[1]["betas"]
    optimizer.param_groups[1]["betas"] = 1.0, 0.999
    with pytest.raises(HotrowError, match="step 4 of AdamW cannot be computed"):
        optimizer.step()
    optimizer.param_groups[1]["betas"] = options
    for layers, optimizer in (run, other):
        optimizer.step()
        train(layers, optimizer, range(4, 9))
    assert_same_runs(run, other)


def test_a_step_that_fails_after_its_rows_have_changed_cannot_be_repeated(monkeypatch):
    layers, optimizer = make_run("Adagrad")
    train(layers, optimizer, range(2))
    assert optimizer.state[layers[0].weight]["sum"].any()  # the next step checks the state
    backward(layers, optimizer, 2)
    with monkeypatch.context() as patch:
        patch.setattr(RowLag, "finish_write", fail)
        with pytest.raises(MemoryError):
            optimizer.step()
    for repeat in (optimizer.step, layers[0].weight.sum):
        with pytest.raises(HotrowError, match="an error has interrupted a step or a read"):
            repeat()
