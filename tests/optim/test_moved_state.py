"""Test that a table's state can be moved to another parameter."""

from collections import defaultdict

import pytest
import torch
from torch import nn

import hotrow
from hotrow.table.parameter import Table

ROWS, COLUMNS = 6, 2


def pop(states, old, new):
    states[new] = states.pop(old)


def pop_the_last_item(states, old, new):
    states[new] = states.popitem()[1]


def get_and_delete(states, old, new):
    kept = states.get(old)
    del states[old]
    states[new] = kept


def get_and_clear(states, old, new):
    kept = states.get(old)
    states.clear()
    states[new] = kept


def copy(states, old, new):
    states[new] = states[old]


def update(states, old, new):
    states.update({new: states[old]})


def update_in_place(states, old, new):
    states |= {new: states[old]}


def overwrite(states, old, new):
    kept = states[old]
    states[old] = {}
    states[new] = kept


MOVES = [
    pop,
    pop_the_last_item,
    get_and_delete,
    get_and_clear,
    copy,
    update,
    update_in_place,
    overwrite,
]


def step(layer, optimizer, *ids):
    optimizer.zero_grad()
    layer(torch.tensor(ids)).square().sum().backward()
    optimizer.step()


def make(library):
    torch.manual_seed(0)
    layer = nn.Embedding(ROWS, COLUMNS)
    if library is hotrow:
        layer = hotrow.convert(layer, min_entries=0)
    return layer, library.optim.Adam(layer.parameters(), lr=0.1)


@pytest.mark.parametrize("is_kept", [False, True])
@pytest.mark.parametrize("move", MOVES)
def test_a_state_can_be_moved_to_a_new_parameter(move, is_kept):
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library)
        step(layer, optimizer, 0, 1, 2)
        for _ in range(3):
            step(layer, optimizer, 0)  # the other rows are stale
        old, new = layer.weight, nn.Parameter(torch.ones(ROWS, COLUMNS))
        layer.weight = new
        optimizer.param_groups[0]["params"] = [new]
        move(optimizer.state, old, new)
        if not is_kept:
            del old
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        step(layer, optimizer, 1)
        step(layer, optimizer, 1)
        state = optimizer.state[layer.weight]
        found.append([layer.weight.detach(), state["exp_avg"], state["exp_avg_sq"]])
        if is_kept:
            found[-1].append(old.detach())
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_states_of_two_tables_can_be_exchanged():
    found = []
    for library in (hotrow, torch):
        layers, optimizers = zip(*[make(library) for _ in range(2)], strict=True)
        for t, (layer, optimizer) in enumerate(zip(layers, optimizers, strict=True)):
            step(layer, optimizer, 0, 1, t + 2)
            step(layer, optimizer, 0)
        one, two = (optimizer.state for optimizer in optimizers)
        weights = [layer.weight for layer in layers]
        one[weights[0]], two[weights[1]] = two[weights[1]], one[weights[0]]
        for t, (layer, optimizer) in enumerate(zip(layers, optimizers, strict=True)):
            step(layer, optimizer, t + 1)
        found.append([weight.detach() for weight in weights])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_state_can_be_moved_in_a_dict_that_replaces_all_states():
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library)
        other, other_optimizer = make(library)
        step(layer, optimizer, 0, 1, 2)
        step(layer, optimizer, 0)
        other_optimizer.state = defaultdict(dict, {other.weight: optimizer.state[layer.weight]})
        step(other, other_optimizer, 1)
        found.append([other.weight.detach(), layer.weight.detach()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_missing_state_is_not_popped():
    layer, optimizer = make(hotrow)
    assert optimizer.state.pop(layer.weight, None) is None
    for remove in (lambda: optimizer.state.pop(layer.weight), optimizer.state.popitem):
        with pytest.raises(KeyError):
            remove()


def test_a_table_without_state_can_be_replaced():
    found = []
    for library in (hotrow, torch):
        layer, _ = make(library)
        optimizer = library.optim.SGD(layer.parameters(), lr=0.1)
        step(layer, optimizer, 0)
        assert not optimizer.state.get(layer.weight)
        layer.weight = nn.Parameter(torch.ones(ROWS, COLUMNS))
        optimizer.param_groups[0]["params"] = [layer.weight]
        step(layer, optimizer, 1)
        found.append(optimizer.state_dict()["state"])
    assert found == [{}, {}]
