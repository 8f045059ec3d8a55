"""The weight and its state may be assigned tensors whose memory doesn't contain their values."""

import copy

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.table import lookup
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table

ROWS, COLUMNS = 30, 4
FORMS = {
    "gradient": lambda dense, weight: weight.grad.clone(),
    "negative": lambda dense, weight: torch._neg_view(-dense),
    "imaginary": lambda dense, weight: torch.complex(dense, -dense).conj().imag,
    "one-hot": lambda dense, weight: hotrow.one_hot(dense.argmax(1), COLUMNS, torch.float32),
}


def make(library, name="SGD", **options):
    torch.manual_seed(0)
    layer = nn.Embedding(ROWS, COLUMNS)
    if library is hotrow:
        layer = hotrow.convert(layer, min_entries=0)
        assert type(layer.weight) is Table
    options |= {"momentum": 0.9} if name == "SGD" else {}
    return layer, getattr(library.optim, name)(layer.parameters(), lr=0.1, **options)


def step(layer, optimizer, t):
    optimizer.zero_grad()
    layer(torch.tensor([t, t, 2 * t])).sum().backward()
    optimizer.step()


def run(library, change):
    layer, optimizer = make(library)
    for t in range(6):
        if t == 3:
            change(layer, optimizer)
        step(layer, optimizer, t)
    return layer.weight.detach().clone(), optimizer.state_dict()["state"][0]["momentum_buffer"]


@pytest.mark.parametrize("target", ["data", "state", "load"])
@pytest.mark.parametrize("form", FORMS)
def test_values_that_are_not_in_memory_are_used_as_in_torch(form, target):
    def change(layer, optimizer):
        weight = layer.weight
        dense = weight.detach().clone()
        values = FORMS[form](dense, weight)
        if type(weight) is not Table and form == "one-hot":
            values = values.to_dense()
        if type(weight) is Table and form == "gradient":
            assert isinstance(values, RowGradient)
        if target == "data":
            weight.data = values
        elif target == "state":
            optimizer.state[weight]["momentum_buffer"] = values
        else:
            state = copy.copy(optimizer.state_dict())
            state["state"] = {0: {"momentum_buffer": values}}
            optimizer.load_state_dict(state)

    for found, expected in zip(run(hotrow, change), run(torch, change), strict=True):
        torch.testing.assert_close(found, expected)


def test_the_state_of_torch_s_optimizer_is_loaded_if_it_contains_a_gradient():
    layer, optimizer = make(hotrow)
    dense, expected = make(torch)
    before = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    with pytest.warns(UserWarning, match="Use hotrow.optim.SGD"):
        step(layer, before, 1)
    step(dense, expected, 1)
    assert isinstance(before.state[layer.weight]["momentum_buffer"], RowGradient)
    optimizer.load_state_dict(before.state_dict())
    for t in range(2, 5):
        step(layer, optimizer, t)
        step(dense, expected, t)
    torch.testing.assert_close(layer.weight.detach(), dense.weight.detach())


def replace_state(state, name, change):
    if change == "assign":
        state[name] = state[name] * 0.5
    elif change == "assign twice":
        state[name] = state[name] * 2
        state[name] = state[name] * 0.25
    elif change == "data":
        values = state[name]
        values.data = values.data * 0.5
    else:
        state[name] = nn.Parameter((state[name] * 0.5).detach(), requires_grad=False)


@pytest.mark.parametrize("change", ["assign", "assign twice", "data", "parameter"])
@pytest.mark.filterwarnings("ignore:SGD updates every row")
def test_a_loaded_state_that_is_a_gradient_can_be_changed_before_the_first_step(change):
    results = []
    for library in (torch, hotrow):
        layer, _ = make(library)
        first = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        step(layer, first, 1)
        if library is hotrow:
            assert type(first.state[layer.weight]["momentum_buffer"]) is RowGradient
        optimizer = library.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        optimizer.load_state_dict(first.state_dict())
        replace_state(optimizer.state[layer.weight], "momentum_buffer", change)
        step(layer, optimizer, 2)
        results.append(layer.weight.detach().clone())
    torch.testing.assert_close(*results)


def make_trained(is_on_disk, tmp_path):
    """Return a layer with a table, and its optimizer, which has taken a step."""
    layer = make(hotrow)[0]
    if is_on_disk:
        layer = hotrow.disk.create(tmp_path / "t", ROWS, COLUMNS).layer
    assert type(layer.weight) is Table
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    step(layer, optimizer, 1)
    return layer, optimizer


@pytest.mark.parametrize("is_on_disk", [False, True])
@pytest.mark.parametrize("source", ["weight", "exp_avg"])
def test_a_state_tensor_that_shares_the_memory_of_another_is_refused(source, is_on_disk, tmp_path):
    layer, optimizer = make_trained(is_on_disk, tmp_path)
    state = optimizer.state[layer.weight]
    kept = layer.weight.data if source == "weight" else state["exp_avg"]
    state["exp_avg_sq"] = kept
    weight = layer.weight.detach().clone()
    with pytest.raises(HotrowError, match=r"two state tensors of a \(.*\) table, or one of them"):
        step(layer, optimizer, 2)
    assert torch.equal(layer.weight, weight)
    state["exp_avg_sq"] = kept.clone()
    step(layer, optimizer, 2)


@pytest.mark.parametrize("make_values", [
    lambda: torch.zeros(1, COLUMNS).expand(ROWS, COLUMNS),
    lambda: torch.zeros(ROWS, 1).expand(ROWS, COLUMNS),
    lambda: torch.zeros(ROWS + COLUMNS).as_strided((ROWS, COLUMNS), (1, 1)),
])  # fmt: skip
@pytest.mark.parametrize("is_on_disk", [False, True])
def test_a_state_tensor_whose_entries_share_memory_is_refused(make_values, is_on_disk, tmp_path):
    layer, optimizer = make_trained(is_on_disk, tmp_path)
    kept = make_values()
    optimizer.state[layer.weight]["exp_avg"] = kept
    weight = layer.weight.detach().clone()
    with pytest.raises(HotrowError, match="entries of the optimizer state 'exp_avg' of"):
        step(layer, optimizer, 2)
    torch.testing.assert_close(layer.weight.detach(), weight, rtol=0, atol=0)
    assert not kept.any()
    optimizer.state[layer.weight]["exp_avg"] = kept.clone(memory_format=torch.contiguous_format)
    step(layer, optimizer, 2)
    assert optimizer.state[layer.weight]["step"] == 2


def halve_each(state):
    for value in state.values():
        if value.ndim:
            value.data = value.data * 0.5


def halve_all(state):
    for value in [value for value in state.values() if value.ndim]:
        value.data = value.data * 0.5


def replace_after_other_reads(state):
    name = next(name for name in state if state[name].ndim)
    value = state[name]
    copy.deepcopy(dict(state)), state[name].sum()
    value.data = value.data + 1


def move_each(state):
    for value in state.values():
        value.data = value.data.to("cpu")


def copy_each(state):
    for value in state.values():
        value.data = value.data.clone()


@pytest.mark.parametrize(
    "change", [halve_each, halve_all, replace_after_other_reads, move_each, copy_each]
)
@pytest.mark.parametrize(
    ("name", "options"), [("SGD", {}), ("Adam", {}), ("AdamW", {"amsgrad": True}), ("Adagrad", {})]
)
def test_data_that_is_assigned_to_the_state_is_used_as_in_torch(name, options, change):
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library, name, **options)
        for t in range(9):
            step(layer, optimizer, t)
            if t in (2, 5, 6):
                change(optimizer.state[layer.weight])
        state = optimizer.state[layer.weight]
        found.append([layer.weight.detach(), *(state[key] for key in sorted(state))])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def assign_after_a_save(state, optimizer):
    value = state["momentum_buffer"]
    optimizer.state_dict(), copy.deepcopy(optimizer)
    value.data = value.data * 0.5


def assign_twice(state, optimizer):
    value = state["momentum_buffer"]
    value.data = value.data * 0.5
    state["momentum_buffer"].sum()
    value.data = value.data * 0.5


def assign_to_a_replaced_tensor(state, optimizer):
    value = state["momentum_buffer"]
    state["momentum_buffer"] = torch.zeros_like(value)
    value.data = value.data * 5


def assign_to_two_reads(state, optimizer):
    one, other = state["momentum_buffer"], state["momentum_buffer"]
    other.data = other.data * 5
    one.data = one.data * 0.5
    other.mul_(0.5)


def move_away_and_back(state, optimizer):
    value = state["momentum_buffer"]
    value.data, saved = torch.empty(0), value.data
    state["momentum_buffer"].shape  # noqa: B018
    value.data = saved * 0.5


def assign_a_view(state, optimizer):
    value = state["momentum_buffer"]
    value.data = value.data.flip(0)
    value.data = value.data[[0]].expand(*value.shape)
    value.data = value.data.clone()


def assign_to_what_was_assigned(state, optimizer):
    value = state["momentum_buffer"]
    state["momentum_buffer"] = value.to("cpu")
    value.data = value.data * 0.5
    own = value.clone()
    state["momentum_buffer"] = own
    own.data = own.data * 0.5


CHANGES = [
    assign_to_what_was_assigned,
    assign_after_a_save,
    assign_twice,
    assign_to_a_replaced_tensor,
    assign_to_two_reads,
    move_away_and_back,
    assign_a_view,
]


@pytest.mark.parametrize("has_spare_memory", [False, True])
@pytest.mark.parametrize("change", CHANGES)
def test_data_may_be_assigned_to_the_state_in_any_order(change, has_spare_memory):
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library)
        for t in range(9):
            step(layer, optimizer, t)
            if t == 1 and has_spare_memory:
                hotrow.vocabulary.resize(layer, ROWS + 1, optimizer, init=torch.nn.init.zeros_)
            if t in (2, 5, 6):
                change(optimizer.state[layer.weight], optimizer)
        state = optimizer.state[layer.weight]
        found.append([layer.weight.detach(), state["momentum_buffer"]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_reads_of_the_state_keep_no_tensor():
    layer, optimizer = make(hotrow)
    for t in range(3):
        step(layer, optimizer, t)
    state = optimizer.state[layer.weight]
    for _ in range(10):
        dict(state), list(state.values())
    step(layer, optimizer, 3)
    assert not state.aliases
    kept = state["momentum_buffer"]
    assert state["momentum_buffer"] is kept
    step(layer, optimizer, 4)
    step(layer, optimizer, 5)
    assert state["momentum_buffer"] is kept
    del kept
    step(layer, optimizer, 6)
    assert not state.aliases


def after_a_dense_step(layer, optimizer):
    optimizer.zero_grad()
    layer.weight.square().sum().backward()
    optimizer.step()
    return layer, optimizer


def after_a_load(layer, optimizer):
    step(layer, optimizer, 0)
    optimizer.load_state_dict(optimizer.state_dict())
    return layer, optimizer


def after_a_copy(layer, optimizer):
    step(layer, optimizer, 0)
    return copy.deepcopy((layer, optimizer))


def after_an_assignment(layer, optimizer):
    step(layer, optimizer, 0)
    optimizer.state[layer.weight] = copy.deepcopy(dict(optimizer.state[layer.weight]))
    return layer, optimizer


@pytest.mark.parametrize(
    "begin", [after_a_dense_step, after_a_load, after_a_copy, after_an_assignment]
)
@pytest.mark.parametrize(
    ("name", "slot"),
    [("SGD", "momentum_buffer"), ("AdamW", "exp_avg"), ("Adamax", "exp_inf"), ("Adagrad", "sum")],
)
def test_a_tensor_that_was_read_before_the_first_row_step_is_part_of_the_state(name, slot, begin):
    found = []
    for library in (hotrow, torch):
        layer, optimizer = begin(*make(library, name))
        kept = optimizer.state[layer.weight][slot]
        for t in range(9):
            step(layer, optimizer, t)
            if t in (3, 5):
                optimizer.state[layer.weight][slot].sum()
                kept.data = kept.data * 0.5
            elif t == 6:
                kept.mul_(0.5)
        found.append([layer.weight.detach(), optimizer.state[layer.weight][slot], kept])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


class LookUp(nn.Module):
    def __init__(self, weight):
        super().__init__()
        self.weight = nn.Parameter(weight)

    def forward(self, ids):
        return lookup.look_up(self.weight, ids)


@pytest.mark.parametrize("becomes_table", ["before", "in the first step"])
@pytest.mark.parametrize(
    "begin", [lambda *pair: pair, after_a_dense_step, after_a_load, after_a_copy]
)
@pytest.mark.parametrize(("name", "slot"), [("SGD", "momentum_buffer"), ("Adagrad", "sum")])
def test_a_dict_that_was_read_before_the_first_row_step_is_the_state(
    name, slot, begin, becomes_table, monkeypatch
):
    monkeypatch.setattr(lookup, "MIN_TABLE_ENTRIES", 0)
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library, name)
        if library is hotrow and becomes_table != "before":
            layer = LookUp(layer.weight.detach().clone())
            optimizer = type(optimizer)(layer.parameters(), **optimizer.defaults)
        layer, optimizer = begin(layer, optimizer)
        if becomes_table != "before":
            step(layer, optimizer, 0)
        kept = optimizer.state[layer.weight]
        for t in range(6):
            step(layer, optimizer, t)
            assert kept is optimizer.state[layer.weight]
            if t in (2, 4):
                kept[slot] = kept[slot] * 0.5
        if library is hotrow:
            assert type(layer.weight) is Table
        found.append([layer.weight.detach(), kept[slot]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_parameter_may_be_part_of_the_state():
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library)
        step(layer, optimizer, 0)
        kept = nn.Parameter(torch.ones(ROWS, COLUMNS), requires_grad=False)
        optimizer.state[layer.weight]["momentum_buffer"] = kept
        for t in range(1, 6):
            step(layer, optimizer, t)
            assert optimizer.state[layer.weight]["momentum_buffer"] is kept
            kept.data = kept.data * 0.5
        found.append([layer.weight.detach(), kept.detach()])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_the_state_of_an_optimizer_can_be_copied_with_its_type():
    """As libraries do that move each state to a device."""
    layer, optimizer = make(hotrow)
    step(layer, optimizer, 0)
    state = optimizer.state[layer.weight]
    for copied in (type(state)(dict(state)), type(state)(list(state.items())), copy.copy(state)):
        assert torch.equal(copied["momentum_buffer"], state["momentum_buffer"])
    for copied in (optimizer.state.copy(), copy.copy(optimizer.state), optimizer.state | {}):
        assert type(copied) is type(optimizer.state)
        assert copied[layer.weight] is state
        assert copied["new"] == {}


def with_own_attribute(base):
    """Return a subclass that saves an attribute with `__getstate__`."""

    class Chosen(base):
        name = None

        def __getstate__(self):
            return {**super().__getstate__(), "name": self.name}

        def __setstate__(self, state):
            self.name = state.pop("name")
            super().__setstate__(state)

    return Chosen


def test_a_copy_of_an_optimizer_shares_its_state():
    found = []
    for kind in (torch.optim, hotrow.optim):
        layer = nn.Embedding(4, 2, dtype=torch.float64, _weight=torch.ones(4, 2).double())
        if kind is hotrow.optim:
            hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = with_own_attribute(kind.Adam)(layer.parameters(), lr=0.1)
        optimizer.name = "own"
        for each in (optimizer, copied := copy.copy(optimizer), optimizer, copied):
            assert each.name == "own"
            each.zero_grad()
            layer(torch.tensor([0, 1])).pow(2).sum().backward()
            each.step()
        assert float(copied.state[layer.weight]["step"]) == 4
        found.append(layer.weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("value", [0, None, [], torch.ones(2)])
def test_a_state_dict_contains_the_entries_that_other_code_has_added(value):
    layer, optimizer = make(hotrow)
    optimizer.state["count"] = value
    step(layer, optimizer, 0)
    assert optimizer.state_dict()["state"]["count"] is value
    assert optimizer.state["count"] is value


def assign_a_dict(optimizer, weight):
    optimizer.state[weight] = {"sum": torch.ones(ROWS, COLUMNS), "step": torch.tensor(1.0)}


@pytest.mark.parametrize("change", [lambda optimizer, weight: None, assign_a_dict])
@pytest.mark.parametrize(
    "read",
    [
        lambda state, weight: state[weight],
        lambda state, weight: state.get(weight),
        lambda state, weight: next(iter(state.values())),
        lambda state, weight: dict(state.items())[weight],
        lambda state, weight: state.setdefault(weight, {}),
    ],
)
def test_a_dict_that_was_read_after_the_conversion_is_the_state(read, change):
    found = []
    for library in (hotrow, torch):
        torch.manual_seed(0)
        layer = nn.Embedding(ROWS, COLUMNS)
        optimizer = library.optim.Adagrad(layer.parameters(), lr=0.1)
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        change(optimizer, layer.weight)
        state = read(optimizer.state, layer.weight)
        step(layer, optimizer, 0)
        state["sum"] = torch.full((ROWS, COLUMNS), 100.0)
        step(layer, optimizer, 1)
        found.append([layer.weight.detach(), optimizer.state[layer.weight]["sum"]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


def test_a_dict_that_setdefault_has_added_is_the_state():
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library)
        state = optimizer.state.setdefault(layer.weight, {"mine": 1})
        assert optimizer.state[layer.weight] is state
        step(layer, optimizer, 0)
        state["mine"] += 1
        step(layer, optimizer, 1)
        found.append(optimizer.state[layer.weight]["mine"])
    assert found == [2, 2]


def test_the_initial_state_of_adagrad_can_be_kept():
    found = []
    for library in (hotrow, torch):
        layer, optimizer = make(library, "Adagrad")
        kept = optimizer.state[layer.weight]["sum"]
        step(layer, optimizer, 0)
        kept.data = kept.data + 1
        step(layer, optimizer, 1)
        found.append([layer.weight.detach(), optimizer.state[layer.weight]["sum"], kept])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "begin", [after_a_dense_step, after_a_load, after_a_copy, after_an_assignment]
)
def test_the_first_row_step_keeps_no_tensor(begin):
    layer, optimizer = begin(*make(hotrow))
    step(layer, optimizer, 1)
    assert not optimizer.state[layer.weight].aliases
