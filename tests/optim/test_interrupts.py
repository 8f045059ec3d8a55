"""A signal handler that raises an error, such as Ctrl-C's, never leaves a step half finished."""

import gc
import os
import signal
import socket
import sys
import threading
import warnings

import pytest
import torch
from torch import nn

import hotrow
from hotrow.optim import interrupts, optimizer
from hotrow.optim.interrupts import PostponedSignals
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive, grid
from tests.support.interrupts import InterruptAt

BATCHES = [torch.tensor(ids) for ids in ([1, 2, 2], [3], [0, 3], [5, 1])]


@pytest.fixture(autouse=True)
def _default_handler():
    """Install Python's handler, because programs started in the background ignore SIGINT."""
    old = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, old)


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


@pytest.mark.parametrize("compiled", grid([True, False], bool))
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


@pytest.fixture
def handle():
    """Return a function that installs a signal handler until the end of the test."""
    old = {}

    def install(number, handler):
        old.setdefault(number, signal.getsignal(number))
        signal.signal(number, handler)

    yield install
    for number, handler in old.items():
        signal.signal(number, handler)


def recorder(seen):
    return lambda number, frame: seen.append(number)


def fail(number, frame):
    """Raise an error, like the handler of SIGCHLD that torch's DataLoader installs."""
    raise RuntimeError(f"signal {number}")


def test_all_postponed_signals_arrive(handle):
    seen = []
    handle(signal.SIGTERM, recorder(seen))
    with PostponedSignals(), PostponedSignals():
        signal.raise_signal(signal.SIGTERM)
        with PostponedSignals():
            signal.raise_signal(signal.SIGTERM)
        assert seen == []
    assert seen == [signal.SIGTERM] * 2


OTHERS = ["QUIT", "ABRT", "CHLD", "CONT", "TSTP", "XCPU", "VTALRM", "PROF", "WINCH", "RTMIN"]


@pytest.mark.parametrize("name", OTHERS)
def test_every_signal_with_a_python_handler_is_postponed(name, handle):
    number, seen = getattr(signal, f"SIG{name}"), []
    handle(number, recorder(seen))
    with PostponedSignals():
        signal.raise_signal(number)
        assert seen == []
    assert seen == [number]


def test_an_error_in_the_handler_of_a_dead_worker_leaves_no_half_step(handle, monkeypatch):
    expected, _ = run()
    handle(signal.SIGCHLD, fail)
    model, adam = make()

    def send_signal(steps):
        signal.raise_signal(signal.SIGCHLD)
        return step_together(steps)

    step_together = optimizer.step_together
    for n, ids in enumerate(BATCHES):
        backward(model, ids)
        if n == 2:
            monkeypatch.setattr(optimizer, "step_together", send_signal)
            with pytest.raises(RuntimeError, match=f"signal {int(signal.SIGCHLD)}"):
                adam.step()
            monkeypatch.undo()
        else:
            adam.step()
    assert same(snapshot(model, adam), expected)


def test_an_error_in_one_handler_does_not_lose_the_other_signals(handle):
    seen = []
    handle(signal.SIGTERM, recorder(seen))
    handle(signal.SIGUSR1, fail)
    handle(signal.SIGUSR2, recorder(seen))

    def interrupted():
        with PostponedSignals():
            for name in ("INT", "TERM", "USR1", "USR2"):
                signal.raise_signal(getattr(signal, f"SIG{name}"))

    with pytest.raises(RuntimeError) as info:
        interrupted()
    assert isinstance(info.value.__context__, KeyboardInterrupt)
    assert sorted(seen) == [signal.SIGUSR2, signal.SIGTERM]


def test_a_process_that_ignores_all_signals_may_install_a_handler_later(handle):
    handle(signal.SIGINT, signal.SIG_IGN)
    with PostponedSignals():
        pass
    seen = []
    handle(signal.SIGINT, recorder(seen))
    with PostponedSignals():
        signal.raise_signal(signal.SIGINT)
        assert seen == []
    assert seen == [signal.SIGINT]


def test_the_wakeup_descriptor_gets_each_signal_once(handle):
    """So that asyncio calls its own handlers once."""
    seen = []
    handle(signal.SIGUSR1, recorder(seen))
    reader, writer = socket.socketpair()
    with reader, writer:
        reader.setblocking(False)
        writer.setblocking(False)
        old = signal.set_wakeup_fd(writer.fileno())
        try:
            with PostponedSignals():
                signal.raise_signal(signal.SIGUSR1)
        finally:
            signal.set_wakeup_fd(old)
        assert reader.recv(100) == bytes([signal.SIGUSR1])
    assert seen == [signal.SIGUSR1]


def test_signals_while_handlers_are_replaced(handle, monkeypatch):
    seen = []
    handle(signal.SIGTERM, lambda number, frame: fail(seen.append(number), frame))
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH):
        handle(number, recorder(seen))
    numbers = [number for number in signal.valid_signals() if callable(signal.getsignal(number))]
    handlers = list(map(signal.getsignal, numbers))
    set_handler, calls = interrupts._set, 0

    def send_signals(number, handler):
        nonlocal calls
        calls += 1
        if calls == moment:
            for each in (signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH, signal.SIGTERM):
                signal.raise_signal(each)
        return set_handler(number, handler)

    monkeypatch.setattr(interrupts, "_set", send_signals)
    for moment in range(1, 2 * len(numbers) + 1):
        calls = 0
        seen.clear()
        with pytest.raises(RuntimeError), PostponedSignals():
            pass
        expected = {signal.SIGHUP, signal.SIGUSR1, signal.SIGWINCH, signal.SIGTERM}
        assert len(seen) == 4, f"signals before handler {moment}"
        assert set(seen) == expected
        assert list(map(signal.getsignal, numbers)) == handlers


@pytest.mark.parametrize("is_late", [False, True])
def test_a_handler_may_change_handlers_at_any_moment(handle, monkeypatch, is_late):
    changed = (signal.SIGHUP, signal.SIGUSR1, signal.SIGTERM, signal.SIGWINCH)
    set_handler, calls = interrupts._set, 0

    def change(*_):
        for each in changed:
            set_handler(each, done)

    def send_signal(number, handler):
        nonlocal calls
        calls += 1
        if calls == moment and not is_late:
            signal.raise_signal(signal.SIGUSR1)
        result = set_handler(number, handler)
        if calls == moment and is_late:
            signal.raise_signal(signal.SIGUSR1)
        return result

    monkeypatch.setattr(interrupts, "_set", send_signal)
    for moment in range(1, 200):
        for each in changed:
            handle(each, recorder([]))
        handle(signal.SIGUSR1, change)
        calls, done = 0, recorder([])
        with PostponedSignals():
            pass
        if calls < moment:
            break
        found = [signal.getsignal(each) is done for each in changed]
        assert found == [True] * 4, f"signal at handler {moment}"
    assert moment > 10


def test_a_handler_that_is_set_while_signals_are_postponed_stays(handle):
    handle(signal.SIGUSR1, recorder([]))
    with PostponedSignals():
        new = recorder([])
        signal.signal(signal.SIGUSR1, new)
    assert signal.getsignal(signal.SIGUSR1) is new


@pytest.mark.parametrize("is_early", [False, True])
def test_a_handler_that_calls_the_previous_one_reaches_it(handle, is_early):
    """Libraries chain handlers at their first use, which may be inside of `init`."""
    seen = []
    handle(signal.SIGUSR1, recorder(seen))
    with PostponedSignals():
        previous = signal.signal(signal.SIGUSR1, lambda *args: previous(*args))
        if is_early:
            signal.raise_signal(signal.SIGUSR1)
            assert seen == []
    for _ in range(2):
        signal.raise_signal(signal.SIGUSR1)
        with PostponedSignals():
            signal.raise_signal(signal.SIGUSR1)
    assert seen == [signal.SIGUSR1] * (5 if is_early else 4)


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize("by_thread", [True, False])
def test_a_child_that_is_forked_during_a_step_gets_signals(by_thread):
    codes = []

    def fork():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            child = os.fork()
        if child:
            codes.append(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
            return
        try:
            signal.raise_signal(signal.SIGINT)
        except KeyboardInterrupt:
            os._exit(7)
        os._exit(1)

    with PostponedSignals():
        if by_thread:
            thread = threading.Thread(target=fork)
            thread.start()
            thread.join()
        else:
            fork()
    assert codes == [7]
