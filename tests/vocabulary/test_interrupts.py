"""After an interrupt, each key of a vocabulary still names the row with its values."""

import sys

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, disk, vocabulary
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
