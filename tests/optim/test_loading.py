"""`load_state_dict` accepts what torch accepts, and rejects damaged state before any change."""

import copy
import math
import re
from fractions import Fraction

import numpy as np
import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.table.parameter import Table


def train(library, options=None, change=None, name="AdamW"):
    """Train, change the saved state, resume from it, and return the weight and the state."""
    torch.manual_seed(0)
    layer = nn.Embedding(20, 4)
    if library is hotrow:
        layer = hotrow.convert(layer, min_entries=0)
        assert type(layer.weight) is Table
    optimizer = getattr(library.optim, name)(layer.parameters(), **(options or {}))
    for resumed in False, True:
        for row in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([row, 1])).sum().backward()
            optimizer.step()
        if not resumed:
            state = optimizer.state_dict()
            if change is not None:
                change(state)
            optimizer = getattr(library.optim, name)(layer.parameters())
            optimizer.load_state_dict(state)
    return layer.weight.detach().clone(), optimizer.state_dict()


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"momentum": 0.9}),
        ("ASGD", {}),
        ("RMSprop", {"momentum": 0.9}),
        ("RMSprop", {"centered": True}),
        ("Adadelta", {}),
        ("Adagrad", {}),
        ("Adam", {"amsgrad": True}),
        ("NAdam", {}),
        ("RAdam", {}),
        ("Adamax", {}),
        ("Rprop", {}),
    ],
    ids=str,
)
def test_the_state_has_torchs_order(name, options):
    (_, ours), (_, theirs) = (train(library, options, name=name) for library in (hotrow, torch))
    assert list(ours["state"][0]) == list(theirs["state"][0])


@pytest.mark.parametrize("name", ["AdamW", "RMSprop"])
def test_the_states_have_the_order_of_the_parameters(name):
    orders = []
    for library in (hotrow, torch):
        layers = [nn.Linear(4, 4), nn.Embedding(9, 4), nn.Linear(4, 1), nn.Embedding(9, 4)]
        model = nn.ModuleList(layers)
        if library is hotrow:
            hotrow.convert(model, min_entries=0)
            assert type(layers[1].weight) is type(layers[3].weight) is Table
        optimizer = getattr(library.optim, name)(model.parameters())
        for layer in (layers[3], layers[2]):  # the first step uses only these two layers
            layer(torch.tensor([1]) if layer is layers[3] else torch.ones(4)).sum().backward()
        optimizer.step()
        layers[0](layers[1](torch.tensor([2]))).sum().backward()
        optimizer.step()
        names = {parameter: key for key, parameter in model.named_parameters()}
        order = [names[parameter] for parameter in optimizer.state]
        orders.append((order, list(optimizer.state_dict()["state"])))
    assert orders[0] == orders[1]


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("RAdam", {"betas": [0.9, 0.99]}),
        ("Adamax", {"betas": [0.9, 0.99]}),
        ("NAdam", {"betas": np.array([0.9, 0.99])}),
        ("Rprop", {"etas": [0.5, 1.2], "step_sizes": [1e-6, 50]}),
        ("AdamW", {"lr": np.float32(0.1), "amsgrad": 0, "fused": 1}),
    ],
)
def test_an_optimizer_loads_its_own_state_whatever_the_type_of_its_options(name, options):
    layer = hotrow.convert(nn.Embedding(20, 4), min_entries=0)
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), **options)
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    saved = copy.deepcopy(optimizer.state_dict())
    optimizer.load_state_dict(saved)
    for key, value in saved["state"][0].items():
        assert torch.equal(optimizer.state_dict()["state"][0][key], value)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": np.float32(0.1), "eps": np.float32(1e-8)},
        {"lr": np.array(0.1)},
        {"lr": Fraction(1, 10)},
        {"betas": torch.tensor([0.9, 0.99])},
        {"betas": np.array([0.9, 0.99])},
        {"betas": [0.9, 0.99]},
        {"amsgrad": 0},
        {"amsgrad": np.bool_(True)},
        {"weight_decay": False},
        {"fused": 1},
    ],
    ids=str,
)
def test_a_run_resumes_with_any_options_that_torch_accepts(options):
    expected, _ = train(torch, options)
    found, _ = train(hotrow, options)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def set_in(part, name, value):
    def change(state):
        each = state["state"][0] if part == "state" else state["param_groups"][0]
        each[name] = value(each[name]) if callable(value) else value

    return change


@pytest.mark.parametrize(
    "change",
    [
        set_in("state", "step", lambda step: np.int64(step.item())),
        set_in("state", "step", lambda step: int(step)),
        set_in("state", "noise", torch.zeros(3)),
        set_in("state", "note", "mine"),
        set_in("group", "params", range(1)),
        set_in("group", "name", "table"),
        set_in("group", "lr_scale", "high"),
        set_in("group", "scales", torch.zeros(3)),
    ],
)
def test_a_state_dict_loads_in_every_form_that_torch_accepts(change):
    expected, torch_state = train(torch, change=change)
    found, state = train(hotrow, change=change)
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)
    assert state["param_groups"][0].keys() == torch_state["param_groups"][0].keys()
    assert state["state"][0].keys() == torch_state["state"][0].keys()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (set_in("group", "lr", "fast"), r"param_groups\[0\]\['lr'\] is 'fast'"),
        (set_in("group", "betas", (0.9,)), "betas"),
        (set_in("group", "betas", 0.9), "betas"),
        (set_in("group", "betas", "ab"), "betas"),
        (set_in("group", "lr", None), "lr"),
        (set_in("group", "lr", torch.zeros(2)), "lr"),
        (set_in("group", "eps", 1j), "eps"),
        (set_in("group", "amsgrad", []), "amsgrad"),
        (set_in("state", "step", 1.5), "step"),
        (set_in("state", "step", "7"), "step"),
        (set_in("state", "step", torch.tensor(9.0, dtype=torch.bfloat16)), "beyond 256"),
        (set_in("state", "exp_avg", torch.zeros(3)), "exp_avg"),
        (set_in("state", "exp_avg_sq", 1.0), "exp_avg_sq"),
        (set_in("group", "params", 3), "param_groups"),
        (lambda state: state["param_groups"][0].pop("lr"), r"param_groups\[0\] has no 'lr'"),
        (set_in("group", "betas", torch.tensor(0.9)), "betas"),
    ],
)
def test_a_damaged_state_is_refused_before_anything_changes(change, match):
    layer = hotrow.convert(nn.Embedding(20, 4), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    change(state)
    before = copy.deepcopy((layer.weight, optimizer.state_dict()))
    with pytest.raises(HotrowError, match=match):
        optimizer.load_state_dict(state)
    torch.testing.assert_close((layer.weight, optimizer.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "key", "value", "problem"),
    [
        ("AdamW", "step", torch.tensor(2.5), "is 2.5, but must be a whole number"),
        ("RAdam", "step", torch.tensor(math.nan), "is nan, but must be a whole number"),
        ("AdamW", "step", torch.tensor(300, dtype=torch.bfloat16), "can't count beyond 256"),
        ("AdamW", "step", torch.tensor(5, dtype=torch.float16), "can't count beyond 2048"),
        ("AdamW", "step", torch.tensor([1.0, 2.0]), r"of shape \(2,\), but must be a number"),
        ("ASGD", "step", 5, "is of type int, but must be a tensor"),
        ("ASGD", "eta", torch.tensor(1), "is torch.int64, but must be floating point"),
        ("NAdam", "mu_product", None, "is of type NoneType, but must be a tensor"),
    ],
)
def test_a_scalar_that_is_not_usable_is_refused_before_anything_changes(name, key, value, problem):
    layer = hotrow.convert(nn.Embedding(20, 4), min_entries=0)
    optimizer = getattr(hotrow.optim, name)(layer.parameters())
    for _ in range(2):
        layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
    assert isinstance(layer.weight, Table)
    before = layer.weight.detach().clone()
    earlier, optimizer.state[layer.weight][key] = optimizer.state[layer.weight][key], value
    layer(torch.tensor([3])).sum().backward()
    with pytest.raises(HotrowError, match=problem):
        optimizer.step()
    assert torch.equal(layer.weight.detach(), before)
    optimizer.state[layer.weight][key] = earlier
    optimizer.step()
    assert not torch.equal(layer.weight.detach(), before)


def test_a_state_tensor_that_no_rule_uses_may_have_any_layout():
    def change(state):
        state["state"][0]["extra"] = torch.zeros(20, 4).to_sparse()

    (found, _), (expected, _) = train(hotrow, change=change), train(torch, change=change)
    torch.testing.assert_close(found, expected)


def test_a_rule_without_state_saves_no_state_like_torch():
    _, expected = train(torch, {"lr": 0.1}, name="SGD")
    _, found = train(hotrow, {"lr": 0.1}, name="SGD")
    assert found["state"] == expected["state"] == {}


@pytest.mark.parametrize("value", [torch.arange(20.0), None, "third epoch"], ids=type)
def test_sgd_leaves_a_step_of_the_user_alone(value):
    results = []
    for library in (torch, hotrow):
        torch.manual_seed(0)
        layer = nn.Embedding(20, 4)
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        optimizer = library.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for row in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([row, 1])).sum().backward()
            optimizer.state[layer.weight]["step"] = value
            optimizer.step()
        assert optimizer.state[layer.weight]["step"] is value
        results.append(layer.weight.detach().clone())
    torch.testing.assert_close(*results)


def test_a_hook_can_repair_a_state_before_it_is_checked():
    layer = hotrow.convert(nn.Embedding(20, 4), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    wrapped = {"inner": copy.deepcopy(optimizer.state_dict())}
    optimizer.register_load_state_dict_pre_hook(lambda _, state: state["inner"])
    optimizer.load_state_dict(wrapped)
    assert optimizer.state_dict()["state"][0]["step"] == 1
    with pytest.raises(HotrowError):
        optimizer.load_state_dict({"inner": {}})
    assert len(optimizer._optimizer_load_state_dict_pre_hooks) == 1


REFUSED = [
    ("SGD", "lr", -0.1),
    ("AdamW", "lr", float("nan")),
    ("AdamW", "lr", torch.tensor(-1.0)),
    ("SGD", "momentum", -0.5),
    ("SGD", "nesterov", True),
    ("Adam", "betas", (0.9, 1.0)),
    ("AdamW", "eps", -1e-8),
    ("AdamW", "weight_decay", -0.1),
    ("AdamW", "maximize", 0.5),
    ("Adamax", "betas", [-0.1, 0.9]),
    ("NAdam", "momentum_decay", -1),
    ("RAdam", "betas", (1.5, 0.9)),
    ("Adagrad", "lr_decay", -1.0),
    ("Adadelta", "rho", 1.5),
    ("RMSprop", "alpha", -0.1),
    ("ASGD", "weight_decay", np.float32(-1)),
    ("Rprop", "etas", (1.2, 0.5)),
]


@pytest.mark.parametrize(("name", "option", "value"), REFUSED, ids=str)
def test_an_option_that_torch_s_constructor_refuses_is_refused_before_anything_changes(
    name, option, value
):
    layer = hotrow.convert(nn.Embedding(20, 4), min_entries=0)
    assert type(layer.weight) is Table
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.01)
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    state = copy.deepcopy(optimizer.state_dict())
    set_in("group", option, value)(state)
    before = copy.deepcopy((layer.weight, optimizer.state_dict()))
    match = rf"param_groups\[0\]\['{option}'\] is {re.escape(repr(value)[:40])}, but must be "
    with pytest.raises(HotrowError, match=match):
        optimizer.load_state_dict(state)
    torch.testing.assert_close((layer.weight, optimizer.state_dict()), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("AdamW", {"lr": 0.0}),
        ("AdamW", {"lr": torch.tensor(0.1), "foreach": True}),  # torch's constructor rejects these
        ("AdamW", {"lr": -1.8503717077085946e-18}),  # the last lr of LinearLR(end_factor=0.0)
        ("AdamW", {"betas": (0, 0.99)}),
        ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
        ("Rprop", {"step_sizes": [1e-6, 50]}),
        ("Adam", {"fused": True, "foreach": True}),
    ],
    ids=str,
)
def test_options_that_training_can_reach_load(name, options):
    layer = hotrow.convert(nn.Embedding(20, 4), min_entries=0)
    assert type(layer.weight) is Table
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.01)
    state = copy.deepcopy(optimizer.state_dict())
    state["param_groups"][0].update(options)
    optimizer.load_state_dict(state)
    found = optimizer.param_groups[0]
    assert {option: found[option] for option in options} == options
