"""A signal handler that raises an error, such as Ctrl-C's, never leaves a step half finished."""

import gc
import signal
import sys
import threading

import pytest
import torch
from torch import nn

import hotrow
from hotrow.optim.interrupts import PostponedSignals
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive

BATCHES = [torch.tensor(ids) for ids in ([1, 2, 2], [3], [0, 3], [5, 1])]


@pytest.fixture(autouse=True)
def _default_handler():
    """Install Python's handler, because programs started in the background ignore SIGINT."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


class InterruptAt:
    """A trace function that sends SIGINT before the n-th line of the traced call.

    With `first_visits`, it doesn't count a line that the call has already run. When Python
    leaves a `with` block, it visits the `with` line again; only a trace function can raise there.
    """

    def __init__(self, line, first_visits=False):
        self.line, self.count, self.first_visits = line, 0, first_visits

    def __call__(self, frame, event, argument):
        if frame.f_code.co_filename.endswith("torch/autograd/profiler.py"):
            return None
        visited = set()

        def trace_line(frame, event, argument):
            if event == "line" and not (self.first_visits and frame.f_lineno in visited):
                visited.add(frame.f_lineno)
                if self.count == self.line:
                    signal.raise_signal(signal.SIGINT)
                self.count += 1
            return trace_line

        return trace_line


def make():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(9, 3), nn.EmbeddingBag(9, 3), nn.Linear(3, 1))
    hotrow.convert(model, min_entries=0)
    assert type(model[0].weight) is type(model[1].weight) is Table
    return model, hotrow.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.1)


def backward(model, ids):
    model.zero_grad()
    model[2](model[0](ids).sum(0) + model[1](ids[None])[0]).pow(2).sum().backward()


def run(interrupted_line=None):
    """Train; return all values, and whether an interrupt stopped the third step."""
    model, optimizer = make()
    stopped = False
    for n, ids in enumerate(BATCHES):
        backward(model, ids)
        if n != 2 or interrupted_line is None:
            optimizer.step()
            continue
        before = snapshot(model, optimizer)
        gc.disable()  # during garbage collection, Python ignores an interrupt and only warns
        try:
            sys.settrace(InterruptAt(interrupted_line))
            optimizer.step()
        except KeyboardInterrupt:
            stopped = True
        finally:
            sys.settrace(None)
            gc.enable()
        assert torch.is_grad_enabled()
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
        if stopped and same(snapshot(model, optimizer), before):
            optimizer.step()  # the interrupt came before the step began
    return snapshot(model, optimizer), stopped


def snapshot(model, optimizer):
    """Return copies, so that this call doesn't change which rows later steps settle."""
    lags = [weight.lag for weight in model.parameters() if isinstance(weight, Table)]
    tensors = [
        weight.raw_data if isinstance(weight, Table) else weight for weight in model.parameters()
    ]
    for lag in lags:
        tensors += [lag.row_steps, *lag.slots.values(), *lag.scalar_tensors.values()]
        tensors.append(torch.tensor(lag.ledger.length))
    for state in optimizer.state.values():
        tensors += [value for value in dict.values(state) if isinstance(value, torch.Tensor)]
    return [tensor.detach().clone() for tensor in tensors]


def same(one, two):
    return all(map(torch.equal, one, two))


def count_lines():
    model, optimizer = make()
    for ids in BATCHES[:3]:
        backward(model, ids)
        trace = InterruptAt(-1)
        try:
            sys.settrace(trace)
            optimizer.step()
        finally:
            sys.settrace(None)
    return trace.count


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=exhaustive)])
def test_an_interrupt_at_any_line_leaves_all_or_nothing_of_a_step(stride):
    expected, _ = run()
    stops = 0
    lines = count_lines()
    assert lines > 300
    for line in range(0, lines, stride):
        found, stopped = run(line)
        stops += stopped
        assert same(found, expected), f"line {line} of the step"
    assert stops > 0.9 * (lines / stride)


def test_a_lookup_is_complete_when_an_interrupt_arrives():
    model, optimizer = make()
    for ids in BATCHES:
        backward(model, ids)
        optimizer.step()
    assert model[0].weight.has_stale_rows
    found = []

    def look_up():
        with PostponedSignals():
            signal.raise_signal(signal.SIGINT)
            found.append(model[0](torch.arange(9)))

    with pytest.raises(KeyboardInterrupt):
        look_up()
    assert torch.equal(found[0], model[0].weight)


@pytest.mark.parametrize("compiled", [True, False])
def test_an_interrupt_at_any_line_of_a_lookup_changes_no_result(compiled, monkeypatch):
    if not compiled:
        monkeypatch.setattr("hotrow.kernels.operators.is_compiled", lambda table: False)

    def train(interrupted_line):
        torch.manual_seed(0)
        layer = hotrow.convert(nn.Embedding(9, 3), min_entries=0)
        # Missed steps are replayed, so the bits don't depend on when rows are read.
        optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1, weight_decay=0.1)
        trace = InterruptAt(interrupted_line, first_visits=True)
        for n, ids in enumerate([*BATCHES, *BATCHES]):
            optimizer.zero_grad()
            if n == 6:
                assert layer.weight.has_stale_rows
                gc.disable()  # as in run()
                try:
                    sys.settrace(trace)
                    layer(ids)
                except (KeyboardInterrupt, SystemError):
                    pass  # numba turns an error in a trace function into a SystemError
                finally:
                    sys.settrace(None)
                    gc.enable()
            layer(ids).pow(2).sum().backward()
            optimizer.step()
        return layer.weight.data.clone(), trace.count

    train(-1)  # compiles kernels
    expected, lines = train(-1)
    assert lines > 150
    for line in range(0, lines, 3):
        assert torch.equal(train(line)[0], expected), f"line {line} of the lookup"


def test_all_postponed_signals_arrive():
    seen = []
    old = signal.signal(signal.SIGTERM, lambda number, frame: seen.append(number))
    try:
        with PostponedSignals(), PostponedSignals():
            signal.raise_signal(signal.SIGTERM)
            signal.raise_signal(signal.SIGTERM)
            assert seen == []
        assert seen == [signal.SIGTERM] * 2
    finally:
        signal.signal(signal.SIGTERM, old)


def test_other_threads_may_step():
    errors = []

    def work():
        try:
            run()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert errors == []
