"""Using `convert` without a hotrow optimizer, or the reverse, causes a warning or an error."""

import warnings
import weakref

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, vocabulary
from hotrow.table.parameter import Table


def backward(layer):
    layer(torch.tensor([1, 2, 2])).pow(2).sum().backward()


def converted():
    layer = hotrow.convert(nn.Embedding(9, 3), min_entries=0)
    assert type(layer.weight) is Table
    backward(layer)
    return layer


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Adagrad"])
def test_a_torch_optimizer_with_a_table_warns_once(name):
    layer = converted()
    optimizer = getattr(torch.optim, name)(layer.parameters(), lr=0.1)
    message = rf"{name} updates every row of the \(9, 3\) table .* Use hotrow.optim.{name}, which"
    with pytest.warns(UserWarning, match=message) as record:
        optimizer.step()
    assert record[0].filename == __file__
    tables = [converted(), converted()]  # changes the number of tables
    optimizer.step()
    assert tables


def test_an_optimizer_that_hotrow_does_not_have():
    class Mine(torch.optim.SGD):
        pass

    optimizer = Mine(converted().parameters(), lr=0.1)
    with pytest.warns(UserWarning, match="Use an optimizer from hotrow.optim"):
        optimizer.step()


def test_no_warning_without_tables_or_with_our_optimizer():
    layer = nn.Embedding(9, 3)
    backward(layer)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch.optim.AdamW(layer.parameters()).step()
        hotrow.optim.AdamW(converted().parameters()).step()


class Lookahead(torch.optim.Optimizer):
    """Move the weights back every second step, halfway to their earlier values."""

    def __init__(self, base):
        super().__init__(base.param_groups, {})
        self.base, self.count = base, 0

    def step(self, closure=None):
        self.base.step()
        self.count += 1
        for parameter in self.param_groups[0]["params"] if self.count % 2 == 0 else ():
            state = self.state[parameter]
            slow = state.setdefault("slow", torch.zeros_like(parameter))
            slow.add_(parameter.detach() - slow, alpha=0.5)
            parameter.data.copy_(slow)


class Several(torch.optim.Optimizer):
    """Step several optimizers."""

    def __init__(self, *parts):
        super().__init__([group for part in parts for group in part.param_groups], {})
        self.parts = dict(enumerate(parts))
        self.this, self.gone = weakref.proxy(self), weakref.proxy({*parts})

    def step(self, closure=None):
        for part in self.parts.values():
            part.step()


@pytest.mark.parametrize("outer", [lambda base: base, Lookahead, Several])
def test_an_optimizer_that_wraps_ours_takes_row_steps(outer):
    weights = []
    for library in (hotrow, torch):
        torch.manual_seed(0)
        layer = nn.Embedding(9, 2)
        if library is hotrow:
            hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = outer(Lookahead(library.optim.AdamW(layer.parameters(), lr=0.1)))
        with warnings.catch_warnings(action="error"):
            for t in range(6):
                optimizer.zero_grad()
                layer(torch.tensor([t])).sum().backward()
                optimizer.step()
        weights.append(layer.weight.detach())
    torch.testing.assert_close(*weights)
    layer = hotrow.convert(nn.Embedding(9, 2), min_entries=0)
    optimizer = Lookahead(hotrow.optim.AdamW(nn.Linear(2, 2).parameters()))
    optimizer.add_param_group({"params": layer.weight})
    layer(torch.tensor([0])).sum().backward()
    with pytest.warns(UserWarning, match="Lookahead updates every row"):  # nothing trains the table
        optimizer.step()


def test_an_optimizer_that_wraps_ours_accepts_frozen_rows():
    layer = hotrow.convert(nn.Embedding(9, 2), min_entries=0)
    vocabulary.freeze(layer, [1])
    before = layer.weight.detach().clone()
    optimizer = Lookahead(hotrow.optim.AdamW(layer.parameters(), lr=0.1))
    layer(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    changed = (layer.weight.detach() != before).any(1)
    assert changed.tolist() == [True, False, *[True] * 7]


def test_a_model_that_is_converted_after_the_first_step_is_noticed():
    layer = nn.Embedding(9, 3)
    optimizer = torch.optim.AdamW(layer.parameters())
    backward(layer)
    optimizer.step()
    hotrow.convert(layer, min_entries=0)
    with pytest.warns(UserWarning, match=r"hotrow\.optim\.AdamW"):
        optimizer.step()


def test_sparse_adam_with_a_table_is_refused():
    layer = converted()
    before = layer.weight.detach().clone()
    with pytest.raises(HotrowError, match=r"use hotrow\.optim\.Adam, which"):
        torch.optim.SparseAdam(layer.parameters()).step()
    assert torch.equal(layer.weight, before)


@pytest.mark.parametrize("name", ["AdamW", "Adam", "NAdam", "RMSprop", "Rprop"])
def test_a_sparse_gradient_without_convert_is_refused(name):
    model = nn.Sequential(nn.Embedding(9, 3, sparse=True), nn.Linear(3, 2))
    optimizer = getattr(hotrow.optim, name)([{"params": m.parameters()} for m in model[::-1]])
    before = [parameter.detach().clone() for parameter in model.parameters()]
    backward(model)
    with pytest.raises(HotrowError, match=rf"{name} does not support: call hotrow\.convert"):
        optimizer.step()
    assert all(map(torch.equal, before, model.parameters()))


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
@pytest.mark.filterwarnings("ignore:Sparse invariant")
def test_a_sparse_gradient_that_torch_supports_warns(name):
    layer = nn.Embedding(9, 3, sparse=True)
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1)
    backward(layer)
    with pytest.warns(UserWarning, match=r"call hotrow\.convert\(model\)"):
        optimizer.step()
    optimizer.step()


def step_of(layer, ids, name="AdamW"):
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1)
    layer(ids).sum().backward()
    optimizer.step()
    optimizer.step()


@pytest.mark.parametrize("name", ["AdamW", "SGD"])
def test_a_large_embedding_without_convert_warns_once(name, monkeypatch):
    monkeypatch.setattr("hotrow.optim.misuse.MIN_TABLE_ENTRIES", 90)
    message = (
        rf"the gradient of a \(30, 3\) parameter is zero except in 2 rows, but hotrow.optim.{name} "
    )
    with pytest.warns(UserWarning, match=message) as record:
        step_of(nn.Embedding(30, 3), torch.tensor([1, 2, 2]), name)
    assert len(record) == 1
    assert record[0].filename == __file__


@pytest.mark.parametrize(
    "build",
    [
        lambda: hotrow.convert(nn.Embedding(30, 3), min_entries=0),
        lambda: nn.Embedding(29, 3),  # too small
        lambda: nn.Embedding.from_pretrained(torch.ones(3, 30), freeze=False),  # 2 of 3 rows
        lambda: nn.Sequential(nn.Embedding(3, 3), nn.Linear(3, 30)),
    ],
    ids=["converted", "small", "few rows", "linear"],
)
def test_no_warning_for_other_parameters(build, monkeypatch):
    monkeypatch.setattr("hotrow.optim.misuse.MIN_TABLE_ENTRIES", 90)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        step_of(build(), torch.tensor([1, 2, 2]))


def test_no_warning_for_a_weight_that_becomes_a_table(monkeypatch):
    monkeypatch.setattr("hotrow.optim.misuse.MIN_TABLE_ENTRIES", 90)
    monkeypatch.setattr("hotrow.table.lookup.MIN_TABLE_ENTRIES", 90)
    weight = nn.Parameter(torch.ones(30, 3))
    optimizer = hotrow.optim.AdamW([weight])
    (hotrow.one_hot(torch.tensor([1, 2]), 30, torch.float32) @ weight).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        optimizer.step()
    assert isinstance(weight, Table)


def test_a_step_that_overflows_changes_nothing_and_can_be_repeated():
    layer = converted()
    optimizer = hotrow.optim.ASGD(layer.parameters(), alpha=1e12)
    before = layer.weight.detach().clone()
    backward(layer)
    with pytest.raises(HotrowError, match=r"step 1 of ASGD cannot be computed .*out of range"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
    optimizer.param_groups[0]["alpha"] = 0.75
    optimizer.step()
    assert not torch.equal(layer.weight, before)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("Adadelta", {"eps": -1.0}),
        ("Rprop", {"lr": torch.nan}),
        ("Rprop", {"step_sizes": (torch.nan, 50.0)}),
        ("Rprop", {"step_sizes": (1e-6, torch.nan)}),
    ],
)
def test_options_for_which_torch_sets_idle_rows_to_nan_are_refused(name, options):
    layer = converted()
    optimizer = getattr(hotrow.optim, name)(layer.parameters())
    backward(layer)
    optimizer.param_groups[0].update(options)
    before = layer.weight.detach().clone()
    with pytest.raises(HotrowError, match=rf"step 1 of {name} cannot be computed .*must not be"):
        optimizer.step()
    assert torch.equal(layer.weight, before)
