"""Test that a table's state can be moved to another parameter."""

import gc
import io
import weakref
from collections import defaultdict
from copy import deepcopy

import pytest
import torch
from torch import nn

import hotrow
from hotrow import vocabulary
from hotrow.optim.state import RowState
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_same_bits

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
        assert type(layer.weight) is Table
    return layer, library.optim.Adam(layer.parameters(), lr=0.1)


def make_stale(library):
    """Take two steps, so that some rows of the table and of its state are stale."""
    layer, optimizer = make(library)
    step(layer, optimizer, 0, 1, 2)
    step(layer, optimizer, 0)
    return layer, optimizer


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
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_moved", [False, True])
def test_a_saved_state_is_read_without_the_classes_of_hotrow(is_moved):
    layer, optimizer = make(hotrow)
    step(layer, optimizer, 1, 2)
    assert isinstance(layer.weight, Table)
    state = optimizer.state[layer.weight]
    assert type(state) is RowState
    expected = {name: torch.as_tensor(value).clone() for name, value in state.items()}
    if is_moved:
        weight = nn.Parameter(layer.weight.detach().clone())
        optimizer.state[weight] = optimizer.state.pop(layer.weight)
        optimizer.param_groups[0]["params"][0] = weight
        (state,) = optimizer.state_dict()["state"].values()
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert loaded.keys() == expected.keys()
    for name, value in loaded.items():
        assert_same_bits(torch.as_tensor(value), expected[name])
    assert type(deepcopy(state)) is dict


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
    torch.testing.assert_close(*found)


def test_a_state_can_be_moved_in_a_dict_that_replaces_all_states():
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make_stale(library)
        other, other_optimizer = make(library)
        other_optimizer.state = defaultdict(dict, {other.weight: optimizer.state[layer.weight]})
        step(other, other_optimizer, 1)
        found.append([other.weight.detach(), layer.weight.detach()])
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("is_kept", [False, True])
def test_a_state_can_be_moved_before_the_rows_change(is_kept):
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make_stale(library)
        other, other_optimizer = make(library)
        step(other, other_optimizer, 3)
        other_optimizer.state[other.weight] = optimizer.state[layer.weight]
        if not is_kept:
            del layer, optimizer
        vocabulary.take(other, [2, 1, 0], other_optimizer)
        step(other, other_optimizer, 1)
        state = other_optimizer.state[other.weight]
        found.append([other.weight.detach(), state["exp_avg"]])
    torch.testing.assert_close(*found)


def test_states_can_be_kept_without_their_tables():
    """As in federated learning, where a client keeps its state, but not its model."""
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make_stale(library)
        (kept,) = optimizer.state.values()
        del layer, optimizer
        layer, optimizer = make(library)
        optimizer.state[layer.weight] = kept
        step(layer, optimizer, 1)
        found.append([layer.weight.detach(), kept["exp_avg"], kept["exp_avg_sq"]])
    torch.testing.assert_close(*found)


def test_rows_change_together_with_a_state_that_is_kept():
    layer, optimizer = make_stale(hotrow)
    kept = optimizer.state[layer.weight]
    del optimizer
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight] = kept
    before = kept["exp_avg"].clone()
    vocabulary.take(layer, [2, 1, 0], optimizer)
    assert torch.equal(optimizer.state[layer.weight]["exp_avg"], before[[2, 1, 0]])


def test_a_table_and_its_state_are_freed_without_garbage_collection():
    layer, optimizer = make(hotrow)
    step(layer, optimizer, 0)
    assert layer.weight.lag is not None
    freed = [weakref.ref(each) for each in (layer.weight, optimizer.state[layer.weight])]
    gc.disable()
    try:
        del layer, optimizer
        assert [each() for each in freed] == [None, None]
    finally:
        gc.enable()


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
