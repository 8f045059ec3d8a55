"""After an interrupt or an error, a vocabulary has either changed completely or not at all."""

import signal
import sys
import threading

import numpy as np
import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.optim import exclusive_access
from hotrow.optim.old_rows import _optimizers
from hotrow.table.row_change import RowChange
from hotrow.vocabulary import changing
from hotrow.vocabulary.keys import IntegerKeys, TextKeys
from hotrow.vocabulary.layers import VocabularyLayers
from tests.support.exhaustive import exhaustive
from tests.support.interrupts import InterruptAt

KEYS = [f"k{i}" for i in range(12)]
NEW_KEYS = ["new0", "k3", "new1"]


def make():
    """Return a vocabulary and its layers; the row of key i contains i."""
    layers = [hotrow.convert(nn.Embedding(1, 2), min_entries=0) for _ in range(2)]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = hotrow.optim.Adam(parameters, lr=0.0)
    keys = vocabulary.Vocabulary(layers, optimizer, unknown="row")
    for batch in (KEYS, KEYS[::2]):
        ids = keys.admit(batch)
        sum(layer(ids).sum() for layer in layers).backward()
        optimizer.step()
    for layer in layers:
        with torch.no_grad():
            layer.weight[1:] = torch.arange(12.0)[:, None]
    return keys, layers


def assert_rows_match(keys, layers):
    for layer in layers:
        assert len(layer.weight) == layer.num_embeddings == len(keys)
        known = [key for key in KEYS if keys.look_up([key]).item()]
        rows = layer.weight.detach()[keys.look_up(known)]
        assert rows[:, 0].tolist() == [float(KEYS.index(key)) for key in known]


def interrupt(call, line):
    """Interrupt a call before its n-th line; return whether the call has that many lines."""
    trace = InterruptAt(line, first_visits=True)
    sys.settrace(trace)
    try:
        call()
    except KeyboardInterrupt:
        pass
    finally:
        sys.settrace(None)
    return trace.count >= line


@exhaustive
@pytest.mark.parametrize("name", ["evict", "admit"])
def test_an_interrupt_changes_the_keys_and_their_rows_or_neither(name):
    line, sizes = 0, set()
    while True:
        keys, layers = make()
        call = {"evict": lambda k=keys: k.evict(7), "admit": lambda k=keys: k.admit(NEW_KEYS)}
        if not interrupt(call[name], line):
            break
        assert_rows_match(keys, layers)
        sizes.add(len(keys))
        line += 7
    assert line > 300
    assert sizes == ({13, 7} if name == "evict" else {13, 15})


def test_an_eviction_that_one_layer_refuses_changes_no_layer(tmp_path):
    store = disk.create(tmp_path / "t", 1, 2)
    layers = [hotrow.convert(nn.Embedding(1, 2), min_entries=0), store.layer]
    parameters = [parameter for layer in layers for parameter in layer.parameters()]
    optimizer = hotrow.optim.Adam(parameters)
    keys = vocabulary.Vocabulary(layers, optimizer, unknown="row")
    keys.admit(KEYS)
    before, alias = layers[0].weight.detach().clone(), store.layer.weight.data
    with pytest.raises(HotrowError, match="shares the memory"):
        keys.evict(7)
    assert torch.equal(layers[0].weight, before)
    assert keys.keys() == KEYS
    assert len(alias) == len(keys) == 13


# --- Changes of one layer ------------------------------------------------------------------------


class Trained:
    """A trained layer with a frozen row, and its optimizer."""

    def __init__(self):
        # If a trace function raises in an `except` clause, Python 3.11 leaks the optimizer. Each
        # change visits all optimizers, so a test with a thousand of them would take minutes.
        _optimizers.clear()
        torch.manual_seed(0)
        self.model = hotrow.convert(nn.Sequential(nn.Embedding(9, 2)), min_entries=0)
        self.optimizer = hotrow.optim.AdamW(self.model.parameters(), lr=0.1)
        vocabulary.freeze(self.model, [4])
        for ids in ([1, 2, 4], [3], [0, 7]):
            self.step(ids)

    def step(self, ids):
        self.optimizer.zero_grad()
        self.model(torch.tensor(ids)).pow(2).sum().backward()
        self.optimizer.step()

    def replace_layer(self):
        """Do what Hugging Face's `resize_token_embeddings` does."""
        layer = nn.Embedding(11, 2)
        layer.weight.data[:9] = self.model[0].weight.data
        self.model[0] = layer

    def reconnect(self):
        return vocabulary.reconnect(self.model, self.optimizer)

    def results(self):
        """Train on, and return all values."""
        for row in range(self.model[0].num_embeddings):
            self.step([row, 0])
        state = self.optimizer.state_dict()["state"][0]
        return [self.model[0].weight.detach().clone(), *map(torch.as_tensor, state.values())]


def grow(x):
    vocabulary.resize(x.model, 12, x.optimizer, init=nn.init.ones_)


OPERATIONS = {
    "grow": grow,
    "shrink": lambda x: vocabulary.resize(x.model, 6, x.optimizer),
    "take": lambda x: vocabulary.take(x.model, [8, 4, 0, -1], x.optimizer, init=nn.init.ones_),
    "freeze": lambda x: vocabulary.freeze(x.model, [1, 7]),
    "unfreeze": lambda x: vocabulary.unfreeze(x.model),
}


def same(one, two):
    return len(one) == len(two) and all(map(torch.equal, one, two))


@pytest.mark.parametrize("stride", [13, pytest.param(1, marks=exhaustive)])
@pytest.mark.parametrize("name", OPERATIONS)
def test_an_interrupted_operation_is_complete_or_has_not_begun(name, stride):
    untouched, changed = Trained(), Trained()
    OPERATIONS[name](changed)
    expected = [untouched.results(), changed.results()]
    line, found = 0, []
    while True:
        trained = Trained()
        if not interrupt(lambda each=trained: OPERATIONS[name](each), line):
            break
        results = trained.results()
        found.append([same(results, each) for each in expected])
        assert any(found[-1]), f"line {line} of {name}"
        line += stride
    assert found.count([True, False]) > 0
    assert found.count([False, True]) > 0


@pytest.mark.parametrize("stride", [29, pytest.param(1, marks=exhaustive)])
def test_a_reconnection_is_complete_or_can_be_repeated(stride):
    def start():
        trained = Trained()
        vocabulary.unfreeze(trained.model)
        torch.manual_seed(1)
        trained.replace_layer()
        return trained

    trained = start()
    trained.reconnect()
    expected = trained.results()
    line, repeated = 0, 0
    while True:
        trained = start()
        if not interrupt(trained.reconnect, line):
            break
        repeated += bool(trained.reconnect())
        assert same(trained.results(), expected), f"line {line} of reconnect"
        line += stride
    assert 0 < repeated * stride < line


# --- Errors --------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["evict", "admit"])
def test_too_little_memory_for_one_of_the_tensors_changes_nothing(name, monkeypatch):
    apply, count = RowChange.apply, 0

    def fail(*arguments, **options):
        nonlocal count
        count += 1
        if count == failing:
            raise MemoryError
        return apply(*arguments, **options)

    monkeypatch.setattr(RowChange, "apply", fail)
    failing = 0
    while True:
        keys, layers = make()
        state, count = keys.state_dict(), 0
        failing += 1
        try:
            keys.evict(7) if name == "evict" else keys.admit(NEW_KEYS)
        except MemoryError:
            assert all(map(np.array_equal, keys.state_dict().values(), state.values()))
            assert_rows_match(keys, layers)
        else:
            break
    assert failing > 6  # two layers, each with two state tensors


@pytest.mark.parametrize("admit_after", [1, 2])
def test_too_little_memory_for_the_keys_changes_nothing(admit_after, monkeypatch):
    layer = hotrow.convert(nn.Embedding(1, 2), min_entries=0)
    keys = vocabulary.Vocabulary(layer, unknown="row", admit_after=admit_after)
    keys.admit([*KEYS, *KEYS, "new0"][: 25 if admit_after == 2 else 12])
    state = keys.state_dict()

    def fail(*arguments):
        raise MemoryError

    for method, call in (("append", keys.admit), ("selected", lambda _: keys.evict(7))):
        monkeypatch.setattr(TextKeys, method, fail)
        with pytest.raises(MemoryError):
            call(NEW_KEYS)
        monkeypatch.undo()
        assert all(map(np.array_equal, keys.state_dict().values(), state.values()))
        assert len(layer.weight) == 13
    assert keys.admit(["new0"]).tolist() == [13]


def test_a_failed_addition_of_keys_can_be_repeated():
    text = TextKeys(1, ["a"])
    with pytest.raises(TypeError):
        text.append(["b", []])
    assert text.find(["a", "b"]).tolist() == [1, -1]
    text.append(["c", "b"])
    assert text.find(["a", "b", "c"]).tolist() == [1, 3, 2]

    numbers = IntegerKeys(1, np.array([5]))
    insert = numbers._insert

    def fail(rows, keys, first_row):
        numbers._insert = insert
        insert(rows, keys[:1], first_row)
        raise MemoryError

    numbers._insert = fail
    with pytest.raises(MemoryError):
        numbers.append(np.array([6, 7]))
    assert numbers.find(np.array([5, 6, 7])).tolist() == [1, -1, -1]
    numbers.append(np.array([7, 6]))
    assert numbers.find(np.array([5, 6, 7])).tolist() == [1, 3, 2]
    assert numbers.to_list() == [5, 7, 6]


def test_layers_with_the_same_weight_change_together():
    embedding, head = nn.Embedding(13, 2), nn.Linear(2, 13)
    head.weight = embedding.weight
    keys = vocabulary.Vocabulary([embedding, head], None, KEYS, unknown="row")
    before = embedding.weight.detach().clone(), head.bias.detach().clone()
    keys.evict(7)
    assert head.weight is embedding.weight
    assert embedding.num_embeddings == head.out_features == 7
    kept = [0, *range(7, 13)]
    assert torch.equal(head.weight, before[0][kept])
    assert torch.equal(head.bias, before[1][kept])
    keys.admit(["new"])
    assert head.weight.shape == (8, 2)
    assert head.bias.shape == (8,)


# --- Saves by signal handlers and other threads --------------------------------------------------


@exhaustive
@pytest.mark.parametrize("stride", [151, pytest.param(3, marks=exhaustive)])
def test_a_handler_may_save_while_the_rows_change(stride, tmp_path):
    line, sizes = 0, set()
    old = signal.getsignal(signal.SIGUSR1)
    try:
        while True:
            path = tmp_path / str(line)
            with disk.create(path, 2000, 2) as store:
                optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.1)
                store.layer(torch.tensor([1, 1999])).sum().backward()
                optimizer.step()
                saved = []

                def save(*_, store=store, saved=saved):
                    saved.append(len(store.layer.weight))
                    store.save()

                signal.signal(signal.SIGUSR1, save)
                trace = InterruptAt(line, first_visits=True, number=signal.SIGUSR1)
                sys.settrace(trace)
                try:
                    vocabulary.resize(store.layer, 3000, optimizer, init=nn.init.ones_)
                finally:
                    sys.settrace(None)
                store.save()
            with disk.open(path) as store:
                weight = store.layer.weight.detach()
                assert weight.shape == (3000, 2)
                assert bool((weight[2000:] == 1).all()), f"line {line}"
            if trace.count < line:
                break
            sizes.update(saved)
            line += stride
    finally:
        signal.signal(signal.SIGUSR1, old)
    assert sizes == {2000, 3000}


def test_other_threads_wait_until_all_layers_have_changed(monkeypatch):
    keys, layers = make()
    taken = []

    def try_to_settle():
        taken.append(exclusive_access.lock.acquire(blocking=False))
        if taken[-1]:
            exclusive_access.lock.release()

    def watch(name):
        original = getattr(changing, name)

        def run(*arguments):
            thread = threading.Thread(target=try_to_settle)
            thread.start()
            thread.join()
            return original(*arguments)

        monkeypatch.setattr(changing, name, run)

    watch("prepare_change")
    watch("replace_data")
    keys.evict(7)
    assert taken == [False] * 4
    keys.admit(["new0"])
    assert taken == [False] * 8
    assert_rows_match(keys, layers)


class Stop(BaseException):
    pass


@pytest.mark.skipif(not hasattr(signal, "setitimer"), reason="needs signal.setitimer")
def test_an_interrupt_releases_the_locks(tmp_path):
    keys, _ = make()
    path = tmp_path / "keys.safetensors"

    def stop(*_):
        raise Stop

    old_handler = signal.signal(signal.SIGALRM, stop)
    try:
        for trial in range(1000):
            try:
                signal.setitimer(signal.ITIMER_REAL, 1e-4 + trial * 1e-6)
                while True:
                    keys.save(path) if trial % 4 == 0 else keys.admit(KEYS)
            except Stop:
                pass
            assert not keys._change_lock.is_held_here
            assert not keys._save_lock.is_held_here
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, old_handler)


def test_a_handler_that_init_sets_runs_after_the_change(monkeypatch):
    keys, layers = make()
    keys._init = lambda _: signal.signal(signal.SIGUSR1, stop)
    set_row_count = VocabularyLayers.set_row_count

    def stop(*_):
        raise Stop

    def set_row_count_and_raise(layers, change):
        set_row_count(layers, change)
        signal.raise_signal(signal.SIGUSR1)

    monkeypatch.setattr(VocabularyLayers, "set_row_count", set_row_count_and_raise)
    old_handler = signal.signal(signal.SIGUSR1, signal.SIG_DFL)
    try:
        with pytest.raises(Stop):
            keys.admit(NEW_KEYS)
        assert signal.getsignal(signal.SIGUSR1) is stop
    finally:
        signal.signal(signal.SIGUSR1, old_handler)
    assert len(keys) == len(KEYS) + 3
    assert_rows_match(keys, layers)
