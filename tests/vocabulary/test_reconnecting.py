"""Test that optimizers continue after other code has resized the embeddings in their model."""

import copy
import sys

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_same_bits


class Model(nn.Module):
    """A model with an embedding, an output head with its own weight, and another layer."""

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
@pytest.mark.parametrize("mode", [torch.enable_grad, torch.inference_mode])
def test_the_state_continues(mode, replace, rows, library):
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
            with mode():
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
    assert_same_bits(model.tokens.weight.data, before)  # the optimizer still trains the old weight
    replaced = Model()
    optimizer = torch.optim.AdamW(replaced.parameters(), lr=0.1)
    step(replaced, optimizer, 6)
    replace_data(replaced, 9, torch.randn(9, 3))
    with pytest.raises(RuntimeError, match="must match the size"):
        step(replaced, optimizer, 9)


def test_only_the_optimizer_that_took_the_last_step_reconnects():
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 3)), min_entries=0)
    weight = model[0].weight
    assert isinstance(weight, Table)
    first, last = (hotrow.optim.Adam(model.parameters(), lr=0.1) for _ in "ab")
    for optimizer in (first, last):
        model(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
    model[0].weight = nn.Parameter(torch.cat([weight.detach(), torch.zeros(2, 3)]))
    with pytest.raises(HotrowError, match="did not take the last step"):
        vocabulary.reconnect(model, first)
    assert vocabulary.reconnect(model, last) == ["0.weight"]
    assert last.state[model[0].weight]["exp_avg"].shape == (8, 3)
    assert model[0].weight is weight


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


@pytest.mark.parametrize("cause", ["equal weights", "another equal layer", "a frozen copy"])
def test_an_unclear_choice_is_an_error(cause):
    model = nn.ModuleList([nn.Embedding(4, 2, _weight=torch.zeros(4, 2)) for _ in range(2)])
    if cause == "a frozen copy":
        model[1].requires_grad_(False)
    hotrow.convert(model, min_entries=0)
    assert all(isinstance(layer.weight, Table) for layer in model)
    trained = [each for each in model.parameters() if each.requires_grad]
    optimizer = hotrow.optim.Adam(trained, lr=0.1)
    model[0] = nn.Embedding(6, 2, _weight=torch.full((6, 2), float(cause == "a frozen copy")))
    if cause == "equal weights":
        model[1] = nn.Embedding(6, 2, _weight=torch.zeros(6, 2))
    if cause == "another equal layer":
        model.append(nn.Embedding(9, 2, _weight=torch.zeros(9, 2)))
    new = [layer.weight for layer in model]
    text = "no new parameter" if cause == "a frozen copy" else "2 new parameters"
    with pytest.raises(HotrowError, match=f"{text} with the same requires_grad can continue"):
        vocabulary.reconnect(model, optimizer)
    assert all(layer.weight is weight for layer, weight in zip(model, new, strict=True))


def test_a_gradient_of_a_new_parameter_is_an_error():
    model = nn.Sequential(nn.Embedding(4, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    larger = torch.cat([model[0].weight.detach(), torch.zeros(2, 2)])
    model[0] = nn.Embedding.from_pretrained(larger, freeze=False)
    model(torch.tensor([1, 5])).sum().backward()
    with pytest.raises(HotrowError, match=r"the new \(6, 2\) parameter has a gradient"):
        vocabulary.reconnect(model, optimizer)
    assert len(optimizer.param_groups[0]["params"][0]) == 4


@pytest.mark.parametrize("when", ["before the change", "after the change"])
@pytest.mark.parametrize("library", [hotrow.optim, torch.optim])
def test_the_gradient_of_a_parameter_that_has_new_data_is_kept(library, when):
    layer = nn.Embedding(4, 2)
    if library is hotrow.optim:
        hotrow.convert(layer, min_entries=0)
        assert isinstance(layer.weight, Table)
    optimizer = library.SGD(layer.parameters(), 0.1, 0.9)
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if when == "before the change":
        layer(torch.tensor([3, 0])).sum().backward()
    layer.weight.data = torch.zeros(6, 2)
    layer.num_embeddings = 6
    if when == "after the change":
        layer(torch.tensor([3, 5])).sum().backward()
    assert vocabulary.reconnect(layer, optimizer) == ["weight"]
    optimizer.step()
    moved = [-0.1, -0.09, 0, -0.1, 0, 0]
    if when == "after the change":
        moved = [0, -0.09, 0, -0.1, 0, -0.1]
    torch.testing.assert_close(layer.weight.detach(), torch.tensor(moved)[:, None].expand(6, 2))


class PerColumn(torch.optim.Optimizer):
    """Has one state value for each column of a weight."""

    def __init__(self, parameters):
        super().__init__(parameters, {})

    def step(self, closure=None):
        for parameter in self.param_groups[0]["params"]:
            self.state[parameter]["sum"] = parameter.grad.square().sum(0, keepdim=True)


def lbfgs(parameters):
    return torch.optim.LBFGS(parameters, max_iter=2)


@pytest.mark.parametrize("make", [torch.optim.Adafactor, PerColumn, lbfgs])
def test_a_state_without_rows_is_an_error(make):
    layer = nn.Linear(3, 2)
    optimizer = make([layer.bias, layer.weight])

    def closure():
        optimizer.zero_grad()
        loss = layer(torch.ones(1, 3)).square().sum()
        loss.backward()
        return loss

    closure()
    optimizer.step(closure)
    before = copy.deepcopy(optimizer.state_dict()["state"])
    with pytest.raises(HotrowError, match="can't tell whether the state has a row"):
        vocabulary.reconnect(layer, optimizer)
    torch.testing.assert_close(optimizer.state_dict()["state"], before, rtol=0, atol=0)


def test_frozen_rows_stay_frozen_if_they_remain():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    vocabulary.freeze(layer, [0, 5])
    layer(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    layer.weight.data = layer.weight.data[:4].clone()
    layer.num_embeddings = 4
    assert vocabulary.reconnect(layer, optimizer) == ["weight"]
    assert layer.weight.frozen_rows.tolist() == [0]
    before = layer.weight.detach().clone()
    optimizer.zero_grad()
    layer(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    assert (layer.weight.detach() != before).any(1).tolist() == [False, True, True, True]


def test_a_backward_pass_from_before_new_data_is_an_error():
    layer = nn.Embedding(4, 2)
    optimizer = torch.optim.AdamW(layer.parameters())
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    loss = layer(torch.tensor([3])).sum()
    layer.weight.data = torch.cat([layer.weight.data, torch.zeros(2, 2)])
    vocabulary.reconnect(layer, optimizer)
    with pytest.raises(HotrowError, match="the rows of the vocabulary changed after"):
        loss.backward()


@pytest.mark.skipif(sys.platform != "linux", reason="tables on disk need Linux")
def test_a_table_on_disk_is_an_error(tmp_path):
    with disk.create(tmp_path / "table", 4, 2) as store:
        optimizer = hotrow.optim.AdamW(store.layer.parameters())
        with pytest.raises(HotrowError, match="reconnect is not supported for a table on disk"):
            vocabulary.reconnect(store.layer, optimizer)


def test_two_optimizers_reconnect_one_after_the_other():
    layer = nn.Sequential(hotrow.convert(nn.Embedding(6, 3), min_entries=0))
    assert isinstance(layer[0].weight, Table)
    optimizers = (
        hotrow.optim.AdamW(layer.parameters()),
        hotrow.optim.SGD(layer.parameters(), 0.1, 0.9),
    )

    def train(optimizer):
        optimizer.zero_grad()
        layer(torch.tensor([0, 1])).square().sum().backward()
        optimizer.step()

    for optimizer in (*optimizers, optimizers[0]):
        train(optimizer)
    new = nn.Embedding(8, 3)
    new.weight.data[:6] = layer[0].weight.detach()
    layer[0] = new
    for optimizer in optimizers:
        vocabulary.reconnect(layer, optimizer)
    for optimizer in optimizers:
        train(optimizer)
        assert optimizer.state_dict()["state"][0]


@pytest.mark.parametrize("outputs", [3, 8])
def test_a_weight_for_one_hots_gets_more_or_fewer_outputs(outputs, monkeypatch):
    monkeypatch.setattr("hotrow.table.lookup.MIN_TABLE_ENTRIES", 0)
    found = []
    for library in (torch.optim, hotrow.optim):
        torch.manual_seed(0)
        layer = hotrow.OneHotLinear(6, 5, bias=False)
        model = nn.Sequential(layer)
        optimizer = library.Adam(model.parameters(), lr=0.1)
        for t in range(4):
            optimizer.zero_grad()
            model(torch.tensor([0, t])).square().sum().backward()
            optimizer.step()
        old = layer.weight
        assert isinstance(old, Table) == (library is hotrow.optim)
        assert not isinstance(old, Table) or old.has_stale_rows
        model(torch.tensor([1, 5])).sum().backward()
        if library is hotrow.optim:
            vocabulary.freeze(layer, [4])
        values = torch.full((outputs, 6), 0.5)
        values[:5] = old.detach()[:outputs]
        layer.weight = nn.Parameter(values)
        vocabulary.reconnect(model, optimizer)
        assert layer.weight is old
        if library is hotrow.optim:
            assert old.frozen_rows.tolist() == [4]
            vocabulary.unfreeze(layer, [4])
        for _ in range(2):
            gradient = old.grad + 0
            optimizer.step()
        state = optimizer.state[old]
        slots = [state[name] for name in ("exp_avg", "exp_avg_sq")]
        found.append([gradient, old.detach(), *slots])
    for expected, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, expected)
