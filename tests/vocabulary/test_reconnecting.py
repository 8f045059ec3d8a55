"""Optimizers continue after other code has resized the embeddings of their model."""

import copy

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, vocabulary
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_same_bits


class Model(nn.Module):
    """A model with an embedding, an untied output head, and another layer."""

    def __init__(self):
        super().__init__()
        self.tokens = nn.Embedding(6, 3)
        self.middle = nn.Linear(3, 3)
        self.head = nn.Linear(3, 6)

    def forward(self, ids):
        return self.head(self.middle(self.tokens(ids))).logsumexp(-1).sum()


def resized(values, rows, new):
    return torch.cat([values.detach()[:rows], new[len(values) : rows]])


def replace_layers(model, rows, new):
    """Put new layers into the model, as some libraries do."""
    tokens, head = nn.Embedding(rows, 3), nn.Linear(3, rows)
    for layer, old in ((tokens, model.tokens), (head, model.head)):
        layer.weight.data = resized(old.weight, rows, new)
    head.bias.data = resized(model.head.bias, rows, torch.zeros(rows))
    model.tokens, model.head = tokens, head


def replace_data(model, rows, new):
    """Give the parameters new data, as other libraries do."""
    for layer in (model.tokens, model.head):
        layer.weight.data = resized(layer.weight, rows, new)
    model.head.bias.data = resized(model.head.bias, rows, torch.zeros(rows))


def step(model, optimizer, rows):
    optimizer.zero_grad()
    model(torch.randint(rows, (5,))).backward()
    optimizer.step()


@pytest.mark.parametrize("library", [hotrow.optim, torch.optim])
@pytest.mark.parametrize("rows", [9, 4])
@pytest.mark.parametrize("replace", [replace_layers, replace_data])
def test_the_state_continues(replace, rows, library):
    torch.manual_seed(0)
    first, new = Model(), torch.randn(9, 3)
    results = []
    for change in (replace, None):
        model = copy.deepcopy(first)
        if library is hotrow.optim:
            hotrow.convert(model, min_entries=0)
        optimizer = library.AdamW(model.parameters(), lr=0.1)
        torch.manual_seed(1)
        for _ in range(3):
            step(model, optimizer, 4)
        if change:
            change(model, rows, new)
            names = vocabulary.reconnect(model, optimizer)
            assert sorted(names) == ["head.bias", "head.weight", "tokens.weight"]
            assert vocabulary.reconnect(model, optimizer) == []
        else:
            vocabulary.resize(model.tokens, rows, optimizer, init=new[6:rows])
            vocabulary.resize(model.head, rows, optimizer, init=new[6:rows])
        assert len(optimizer.state) == 5
        torch.manual_seed(2)
        for _ in range(3):
            step(model, optimizer, rows)
        assert isinstance(model.tokens.weight, Table) == (library is hotrow.optim)
        results.append([*model.parameters(), *optimizer.state_dict()["state"].values()])
    # In hotrow, assigning new data settles all rows, which can change the rounding.
    tolerance = 2e-7 if library is hotrow.optim else 0
    for found, expected in zip(*results, strict=True):
        pairs = [(found, expected)]
        if isinstance(found, dict):
            pairs = [(found[name], value) for name, value in expected.items()]
        for value, other in pairs:
            torch.testing.assert_close(value.data, other.data, rtol=tolerance, atol=tolerance)


def test_without_reconnect_the_state_is_lost():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, optimizer, 6)
    replace_layers(model, 9, torch.randn(9, 3))
    before = model.tokens.weight.data.clone()
    step(model, optimizer, 9)
    assert_same_bits(model.tokens.weight.data, before)  # the optimizer trains the old weight
    replaced = Model()
    optimizer = torch.optim.AdamW(replaced.parameters(), lr=0.1)
    step(replaced, optimizer, 6)
    replace_data(replaced, 9, torch.randn(9, 3))
    with pytest.raises(RuntimeError, match="must match the size"):
        step(replaced, optimizer, 9)


def test_a_missing_parameter_is_an_error_before_any_change():
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters())
    step(model, optimizer, 6)
    old = model.tokens.weight
    replace_layers(model, 9, torch.randn(9, 3))
    model.head = nn.Linear(3, 9)  # other values
    with pytest.raises(HotrowError, match=r"trains a \(6, 3\) parameter that is no longer"):
        vocabulary.reconnect(model, optimizer)
    assert old.shape == (6, 3)
    assert optimizer.state[old]["exp_avg"].shape == (6, 3)
    assert model.tokens.weight is not old
    with pytest.raises(HotrowError, match="optimizer is None"):
        vocabulary.reconnect(model, None)
