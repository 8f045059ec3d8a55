"""hotrow's optimizers train like torch's in an ordinary training loop."""

import copy
import io

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import hotrow.optim
from hotrow import HotrowError
from hotrow.kernels import operators
from hotrow.kernels.cpu.rows import row_kernel
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive, grid
from tests.support.tolerance import assert_no_worse, assert_same_bits

ROWS, COLUMNS = 200, 5

CONFIGURATIONS = [
    ("SGD", {"lr": 0.1}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "dampening": 0.2, "weight_decay": 0.01}),
    ("SGD", {"lr": 0.1, "momentum": 0.9, "nesterov": True}),
    ("SGD", {"lr": 0.1, "maximize": True}),
    ("Adam", {"lr": 0.01}),
    ("Adam", {"lr": 0.01, "amsgrad": True}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.1}),
    ("Adam", {"lr": torch.tensor(0.01)}),
    ("AdamW", {"lr": 0.01, "weight_decay": 0.1}),
    ("AdamW", {"lr": 0.01, "amsgrad": True, "maximize": True}),
    ("Adamax", {}),
    ("NAdam", {}),
    ("NAdam", {"weight_decay": 0.01, "decoupled_weight_decay": True}),
    ("RAdam", {"weight_decay": 0.01}),
    ("Adagrad", {}),
    ("Adagrad", {"lr_decay": 0.1, "weight_decay": 0.01, "initial_accumulator_value": 0.1}),
    ("Adadelta", {}),
    ("RMSprop", {}),
    ("RMSprop", {"centered": True, "momentum": 0.9}),
    ("ASGD", {"t0": 10.0}),
    ("Rprop", {}),
]
# One configuration for each kind of closed form, and one without a closed form.
DECISIVE = [CONFIGURATIONS[i] for i in (1, 5, 7, 9, 11, 15, 19, 21)]
all_configurations = pytest.mark.parametrize(
    ("name", "options"), grid(CONFIGURATIONS, lambda *case: case in DECISIVE), ids=str
)
some_configurations = pytest.mark.parametrize(
    ("name", "options"),
    grid(
        [
            ("AdamW", {"lr": 0.01}),
            ("SGD", {"lr": 0.1, "momentum": 0.9}),
            ("Adagrad", {}),
            ("NAdam", {}),
            ("ASGD", {}),
        ],
        lambda name, _: name in ("AdamW", "SGD"),
    ),
    ids=str,
)


def dense_model(dtype=torch.float32):
    torch.manual_seed(3)
    layers = nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, 2)).to(dtype)
    return layers


def table_model(dtype=torch.float32):
    layers = dense_model(dtype)
    Table.adopt(layers[0].weight)
    return layers


def hotrow_optimizer(name, layers, options):
    return getattr(hotrow.optim, name)(layers.parameters(), **copy_options(options))


def torch_optimizer(name, layers, options):
    return getattr(torch.optim, name)(layers.parameters(), **copy_options(options))


def copy_options(options):  # because a scheduler changes an lr in place if it is a tensor
    return copy.deepcopy(options)


def batches(count, seed=0):
    """Yield ids distributed like words: a few are frequent, many repeat, some are never used."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(count):
        ids = (torch.rand(12, generator=generator) ** 4 * ROWS).long()
        yield ids, torch.randn(12, COLUMNS, generator=generator)


def loss_of(layers, batch):
    """Compute a loss with constant gradients for the table, so rounding errors don't feed back."""
    ids, gradient = batch
    gradient = gradient.to(layers[0].weight.dtype)
    return (layers[0](ids) * gradient).sum() + layers[1](gradient).pow(2).mean()


def train(layers, optimizer, steps, *, after=None, prepare=None, scheduler=None):
    for batch in steps:
        optimizer.zero_grad()
        loss_of(layers, batch).backward()
        if prepare:
            prepare(layers)
        optimizer.step()
        if scheduler:
            scheduler.step()
        if after:
            after(layers, optimizer)


def train_model(make_model, make_optimizer, name, options, dtype=torch.float32, steps=60, **how):
    layers = make_model(dtype)
    optimizer = make_optimizer(name, layers, options)
    scheduler = None
    if how.pop("schedule", False):
        scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)
    train(layers, optimizer, batches(steps), scheduler=scheduler, **how)
    return layers, optimizer


def assert_three_way(name, options, **how):
    rows, _ = train_model(table_model, hotrow_optimizer, name, options, **how)
    dense, _ = train_model(dense_model, torch_optimizer, name, options, **how)
    truth, _ = train_model(dense_model, torch_optimizer, name, options, dtype=torch.float64, **how)
    assert_no_worse(*map(parameter_vector, (rows, dense, truth)))


def parameter_vector(layers):
    """Return all parameters as one vector.

    In a single small layer, torch can be exact by chance, so errors are compared over all layers.
    """
    return nn.utils.parameters_to_vector(layers.parameters()).detach()


@all_configurations
def test_every_row_matches_dense_training(name, options):
    assert_three_way(name, options)


@some_configurations
def test_every_row_matches_dense_training_under_a_schedule(name, options):
    assert_three_way(name, options, schedule=True)


@some_configurations
def test_every_row_matches_dense_training_with_clipping(name, options):
    assert_three_way(name, options, prepare=lambda m: nn.utils.clip_grad_norm_(m.parameters(), 0.5))


@some_configurations
def test_every_row_matches_dense_training_in_float64(name, options):
    rows, _ = train_model(table_model, hotrow_optimizer, name, options, dtype=torch.float64)
    dense, _ = train_model(dense_model, torch_optimizer, name, options, dtype=torch.float64)
    torch.testing.assert_close(rows[0].weight.data, dense[0].weight.data, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize(
    ("name", "options"),
    grid(
        [
            ("SGD", {"momentum": 0.9, "weight_decay": 0.1}),
            ("Adam", {"weight_decay": 0.1}),
            ("AdamW", {"weight_decay": 0.1}),
            ("AdamW", {"weight_decay": torch.tensor(0.1)}),
            ("AdamW", {"lr": torch.tensor([0.01]), "weight_decay": 0.1}),
            ("AdamW", {"betas": (torch.tensor(0.9), torch.tensor(0.99))}),
            ("Adamax", {}),
            ("NAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
            ("RAdam", {"weight_decay": 0.1, "decoupled_weight_decay": True}),
            ("Adagrad", {"lr_decay": 0.1}),
            ("Adadelta", {}),
            ("RMSprop", {}),
            ("ASGD", {"t0": 10.0, "lambd": 0.01}),
            ("Rprop", {}),
        ],
        lambda name, options: name in ("SGD", "AdamW", "NAdam"),
    ),
    ids=str,
)
def test_a_learning_rate_in_a_tensor_has_torchs_rounding(name, options, monkeypatch):
    """torch computes with a float32 learning rate in float32, even if the table is float64."""
    monkeypatch.setattr(operators, "is_compiled", lambda table: False)  # compiling takes seconds
    weights = []
    for make_model, make in ((table_model, hotrow_optimizer), (dense_model, torch_optimizer)):
        layers = make_model(torch.float64)
        optimizer = make(name, layers, {"lr": torch.tensor(0.01), **options})
        train(layers, optimizer, batches(20))
        optimizer.param_groups[0]["lr"].fill_(0.003)  # as some schedulers do
        train(layers, optimizer, batches(20, seed=1))
        weights.append(layers[0].weight.detach().clone())
    torch.testing.assert_close(*weights, rtol=1e-12, atol=1e-13)


@some_configurations
def test_reading_early_and_often_changes_nothing(name, options):
    def read(layers, optimizer):
        layers.state_dict()
        optimizer.state_dict()
        layers[0].weight.norm()

    assert_three_way(name, options, after=read)


def test_rows_not_in_the_batch_move_as_in_dense_training():
    rows, _ = train_model(table_model, hotrow_optimizer, "AdamW", {"lr": 0.01})
    start = dense_model()[0].weight
    moved = (rows[0].weight.data != start).any(1)
    assert moved.all()  # decay moves every row, whether or not it was selected
    sgd, _ = train_model(table_model, hotrow_optimizer, "SGD", {"lr": 0.01})
    idle = set(range(ROWS)) - {int(id) for ids, _ in batches(60) for id in ids}
    assert idle
    assert_same_bits(sgd[0].weight.data[list(idle)], start[list(idle)])


# --- The training loop -------------------------------------------------------------------


@some_configurations
def test_one_optimizer_steps_dense_parameters_as_torch_does(name, options):
    rows, _ = train_model(table_model, hotrow_optimizer, name, options)
    dense, _ = train_model(dense_model, torch_optimizer, name, options)
    assert_same_bits(rows[1].weight, dense[1].weight)
    assert_same_bits(rows[1].bias, dense[1].bias)


@pytest.mark.parametrize("name", sorted({name for name, _ in CONFIGURATIONS}))
def test_steps_do_not_depend_on_the_default_device(name):
    def trained(device):
        torch.manual_seed(0)
        layer = hotrow.convert(nn.Embedding(9, 3), min_entries=0)
        assert isinstance(layer.weight, Table)
        optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1)
        loss = layer(torch.tensor([1, 2])).sum()
        with torch.device(device):
            for _ in range(3):
                optimizer.zero_grad()
                loss.backward(retain_graph=True)
                optimizer.step()
        return layer.weight.detach().clone()

    assert_same_bits(trained("meta"), trained("cpu"))


def test_accumulation_and_forwards_without_steps_match_dense_training():
    results = []
    for layers, optimizer in (
        (table_model(), hotrow.optim.AdamW),
        (dense_model(), torch.optim.AdamW),
    ):
        optimizer = optimizer(layers.parameters(), lr=0.01)
        for step, batch in enumerate(batches(20)):
            loss_of(layers, batch).backward()
            if step % 3 == 0:
                optimizer.step()
                optimizer.zero_grad()
            if step % 5 == 0:
                layers.eval()(batch[0])
                if step % 3 == 0:
                    optimizer.step()  # does nothing, because there is no gradient
        results.append(layers[0].weight.data)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


def test_closures_and_hooks_run_once_for_each_step():
    layers = table_model()
    optimizer = hotrow.optim.SGD(layers.parameters(), lr=0.1)
    before, after = [], []
    optimizer.register_step_pre_hook(lambda *_: before.append(1))
    optimizer.register_step_post_hook(lambda *_: after.append(1))
    torch.optim.SGD(dense_model().parameters(), lr=0.1)  # makes torch hook `torch.optim.SGD` too

    def closure():
        optimizer.zero_grad()
        loss = layers(torch.tensor([1, 2])).pow(2).sum()
        loss.backward()
        return loss

    first, second = optimizer.step(closure), optimizer.step(closure)
    assert second < first
    assert (len(before), len(after)) == (2, 2)


def test_a_gradient_scaler_skips_a_step():
    layers = table_model()
    optimizer = hotrow.optim.AdamW(layers.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    start = layers[0].weight.data.clone()
    for factor, moves in ((float("inf"), False), (1.0, True)):
        optimizer.zero_grad()
        scaler.scale(layers(torch.tensor([1, 2])).sum() * factor).backward()
        scaler.step(optimizer)
        scaler.update()
        assert torch.equal(layers[0].weight.data, start) != moves


@pytest.mark.parametrize("name", ["SGD", "Adam", "AdamW", "Adagrad"])
def test_a_gradient_scaler_with_a_fused_optimizer_matches_dense_training(name):
    results = []
    for layers, package in ((table_model(), hotrow.optim), (dense_model(), torch.optim)):
        optimizer = getattr(package, name)(layers.parameters(), lr=0.1, fused=True)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for factor in (1.0, float("inf"), 1.0):
            optimizer.zero_grad()
            scaler.scale(layers(torch.tensor([1, 2])).sum() * factor).backward()
            scaler.step(optimizer)
            scaler.update()
        results.append(parameter_vector(layers))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:Using backward")
def test_a_gradient_with_create_graph_is_applied():
    results = []
    for layers, package in ((table_model(), hotrow.optim), (dense_model(), torch.optim)):
        optimizer = package.Adam(layers.parameters(), lr=0.1)
        layers(torch.tensor([1, 2])).pow(2).sum().backward(create_graph=True)
        optimizer.step()
        optimizer.zero_grad()
        results.append(parameter_vector(layers))
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_a_non_finite_gradient_stays_in_its_rows(value):
    layers = nn.Embedding(6, 2)
    Table.adopt(layers.weight)
    optimizer = hotrow.optim.AdamW(layers.parameters())
    (layers(torch.tensor([2])) * value).sum().backward()
    optimizer.step()
    finite = layers.weight.data.isfinite().all(1)
    assert finite.tolist() == [True, True, False, True, True, True]


def test_a_dense_gradient_gets_torchs_step():
    results = []
    for layers, kind in ((table_model(), hotrow.optim.AdamW), (dense_model(), torch.optim.AdamW)):
        optimizer = kind(layers.parameters(), lr=0.01)
        train(layers, optimizer, batches(5))
        for _ in range(2):  # use the weight as a dense matrix, as a tied head does
            optimizer.zero_grad()
            (layers[0].weight * 2).sum().backward()
            optimizer.step()
        train(layers, optimizer, batches(5))
        results.append(layers[0].weight.data)
    torch.testing.assert_close(*results, rtol=1e-5, atol=1e-6)


# --- Checkpoints -------------------------------------------------------------------------


@all_configurations
def test_a_run_moves_from_torch_to_hotrow_and_back(name, options):
    """Compare 30 steps taken by torch, hotrow and torch in turn with 30 steps of torch alone."""
    steps = list(batches(30))
    truth = dense_model(torch.float64)
    train(truth, torch_optimizer(name, truth, options), steps)
    rival = dense_model()
    train(rival, torch_optimizer(name, rival, options), steps)
    layers = dense_model()
    optimizer = torch_optimizer(name, layers, options)
    for part, (make, others) in enumerate(
        (
            (dense_model, torch_optimizer),
            (table_model, hotrow_optimizer),
            (dense_model, torch_optimizer),
        )
    ):
        if part:
            following = make()
            following.load_state_dict(layers.state_dict())
            successor = others(name, following, options)
            successor.load_state_dict(optimizer.state_dict())
            layers, optimizer = following, successor
        train(layers, optimizer, steps[10 * part : 10 * part + 10])
    assert_no_worse(*map(parameter_vector, (layers, rival, truth)))


@some_configurations
def test_state_is_in_torchs_format(name, options):
    _, optimizer = train_model(table_model, hotrow_optimizer, name, options, steps=7)
    _, other = train_model(dense_model, torch_optimizer, name, options, steps=7)
    state, expected = optimizer.state_dict(), other.state_dict()
    assert state["param_groups"] == expected["param_groups"]
    assert state["state"].keys() == expected["state"].keys()
    for index, values in expected["state"].items():
        for key, value in values.items():
            found = state["state"][index][key]
            if value is None:
                assert found is None
                continue
            assert found.shape == value.shape
            assert found.dtype == value.dtype
            torch.testing.assert_close(found, value, rtol=1e-4, atol=1e-6)
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    torch.load(file, weights_only=True)


@all_configurations
def test_a_second_optimizer_uses_the_compiled_kernels_of_the_first(name, options):
    misses = []
    for _ in range(2):
        layers = table_model()
        train(layers, hotrow_optimizer(name, layers, options), batches(4))
        assert type(layers[0].weight) is Table
        layers[0].weight.sum()
        misses.append(row_kernel.cache_info().misses)
    assert misses[0] == misses[1]


@pytest.mark.parametrize(
    ("name", "option", "value"),
    [
        ("Adagrad", "lr_decay", float("nan")),
        ("Adagrad", "lr", float("inf")),
        ("SGD", "lr", float("inf")),
    ],
)
def test_a_step_size_that_is_not_finite_changes_idle_rows_as_in_torch(name, option, value):
    weights = []
    for make_model, make in ((table_model, hotrow_optimizer), (dense_model, torch_optimizer)):
        layers = make_model()
        optimizer = make(name, layers, {"lr": 0.1})
        train(layers, optimizer, batches(3))
        optimizer.param_groups[0][option] = value
        train(layers, optimizer, batches(3))
        weights.append(layers[0].weight.detach().clone())
    assert weights[1].isnan().any()
    assert torch.equal(weights[0].isnan(), weights[1].isnan())


@pytest.mark.parametrize("name", ["Adam", "NAdam"])
def test_an_eps_that_is_infinite_in_float32_stops_all_rows_as_in_torch(name):
    runs = [
        train_model(make_model, make, name, {"lr": 0.1, "eps": 1e39}, steps=12)[0]
        for make_model, make in ((table_model, hotrow_optimizer), (dense_model, torch_optimizer))
    ]
    assert type(runs[0][0].weight) is Table
    assert torch.equal(runs[0][0].weight.detach(), runs[1][0].weight.detach())


@some_configurations
def test_a_resumed_run_has_the_same_bits(name, options):
    steps = list(batches(24))
    layers = table_model()
    optimizer = hotrow_optimizer(name, layers, options)
    train(layers, optimizer, steps[:12])
    saved = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
    train(layers, optimizer, steps[12:])
    resumed = table_model()
    resumed.load_state_dict(saved[0])
    other = hotrow_optimizer(name, resumed, options)
    other.load_state_dict(saved[1])
    train(resumed, other, steps[12:])
    assert_same_bits(resumed[0].weight.data, layers[0].weight.data)


@exhaustive
@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", ["NAdam", "ASGD"])
def test_the_scalars_of_a_loaded_state_have_the_same_bits_as_torchs(name, dtype):
    """torch's `load_state_dict` casts the scalars to the parameter's dtype.

    torch then rounds them to this dtype in every step.
    """
    options = {"lr": 0.01, "momentum_decay": 0.1} if name == "NAdam" else {"lr": 0.1, "t0": 2}
    saved = {}
    for make_model, make in ((table_model, hotrow_optimizer), (dense_model, torch_optimizer)):
        for _ in range(2):  # the second optimizer resumes the run of the first
            layers = make_model(dtype)
            optimizer = make(name, layers, options)
            if make_model in saved:
                layers.load_state_dict(saved[make_model][0])
                optimizer.load_state_dict(saved[make_model][1])
            train(layers, optimizer, batches(6))
            saved[make_model] = copy.deepcopy((layers.state_dict(), optimizer.state_dict()))
        assert isinstance(layers[0].weight, Table) == (make_model is table_model)
    (weights, state), (torch_weights, torch_state) = saved[table_model], saved[dense_model]
    for key, value in torch_state["state"][0].items():
        if value.ndim == 0:
            assert_same_bits(state["state"][0][key], value)
    if dtype == torch.float64:
        for key, value in torch_weights.items():
            torch.testing.assert_close(weights[key], value, rtol=1e-13, atol=1e-13)


@pytest.mark.parametrize("centered", [True, False])
def test_rmsprop_with_decay_matches_torch_bit_for_bit(centered):
    options = {"weight_decay": 0.1, "centered": centered, "momentum": 0.5}
    rows, optimizer = train_model(table_model, hotrow_optimizer, "RMSprop", options)
    dense, other = train_model(dense_model, torch_optimizer, "RMSprop", options)
    assert isinstance(rows[0].weight.grad, RowGradient)
    assert_same_bits(rows[0].weight.data, dense[0].weight.data)
    for name, value in other.state[dense[0].weight].items():
        assert torch.equal(optimizer.state[rows[0].weight][name], value)


def test_weight_decay_can_be_turned_on_and_off():
    results = []
    for layers, make in (
        (table_model(), hotrow_optimizer),
        (dense_model(), torch_optimizer),
        (dense_model(torch.float64), torch_optimizer),
    ):
        optimizer = make("RMSprop", layers, {"momentum": 0.5})
        for decay in (0.0, 0.1, 0.0):
            optimizer.param_groups[0]["weight_decay"] = decay
            train(layers, optimizer, batches(10))
        results.append(parameter_vector(layers))
    assert_no_worse(*results)


REPLAYED = [  # the bits don't depend on when rows are read: missed steps are replayed or do nothing
    ("Adam", {"lr": 0.01, "weight_decay": 0.01}),
    ("Adam", {"lr": 0.01, "weight_decay": 0.01, "amsgrad": True}),
    ("NAdam", {"weight_decay": 0.01}),
    ("Adagrad", {"weight_decay": 0.01, "lr_decay": 0.1}),
    ("Adagrad", {}),
    ("SGD", {"lr": 0.1}),
    ("Rprop", {}),
]
ACTIONS = ["step", "step", "read", "state", "eval", "copy", "settle", "resume", "threads", "alias"]


@settings(max_examples=40, deadline=None)
@given(st.sampled_from(REPLAYED), st.lists(st.sampled_from(ACTIONS), max_size=25))
def test_any_order_of_steps_and_reads_ends_with_the_same_bits(configuration, actions):
    name, options = configuration
    layers, quiet = table_model(), table_model()
    optimizer, other = (
        hotrow_optimizer(name, layers, options),
        hotrow_optimizer(name, quiet, options),
    )
    threads, aliases = torch.get_num_threads(), []
    for action, batch in zip(actions, batches(len(actions)), strict=True):
        if action == "step":
            train(layers, optimizer, [batch])
            train(quiet, other, [batch])
        elif action == "read":
            layers[0].weight[3].tolist()
        elif action == "state":
            optimizer.state_dict()
        elif action == "eval":
            layers.eval()(batch[0])
        elif action == "settle":
            optimizer.settle()
        elif action == "threads":
            torch.set_num_threads(3 - torch.get_num_threads() % 2)
        elif action == "alias":
            aliases = [] if aliases else [layers[0].weight.data]
        elif action == "copy":
            copy.deepcopy(layers)
        else:
            layers, saved = copy.deepcopy(layers), copy.deepcopy(optimizer.state_dict())
            optimizer, aliases = hotrow_optimizer(name, layers, options), []
            optimizer.load_state_dict(saved)
    torch.set_num_threads(threads)
    assert all(torch.equal(alias, layers[0].weight) for alias in aliases)
    assert_same_bits(layers[0].weight.data, quiet[0].weight.data)
    for key, value in other.state[quiet[0].weight].items():
        assert torch.equal(value, optimizer.state[layers[0].weight][key])


# --- Options, documentation, dense models ------------------------------------------------


@pytest.mark.parametrize("option", ["capturable", "differentiable"])
def test_unsupported_options_raise(option):
    with pytest.raises(HotrowError, match=f"Adam does not support {option}=True for tables"):
        hotrow.optim.Adam(table_model().parameters(), **{option: True})
    hotrow.optim.Adam(dense_model().parameters(), differentiable=True)


def test_all_eleven_torch_optimizers_exist_and_are_documented():
    assert len(hotrow.optim.__all__) == 11
    for name in hotrow.optim.__all__:
        kind = getattr(hotrow.optim, name)
        assert issubclass(kind, getattr(torch.optim, name))
        assert kind.__doc__.startswith(f"A `torch.optim.{name}`")
        assert "    w = w " in kind.__doc__
        assert f">>> optimizer = hotrow.optim.{name}(model.parameters())" in kind.__doc__


def test_a_model_without_tables_takes_torchs_steps():
    layers, _ = train_model(dense_model, hotrow_optimizer, "AdamW", {"lr": 0.01})
    dense, _ = train_model(dense_model, torch_optimizer, "AdamW", {"lr": 0.01})
    assert not isinstance(layers[0].weight.grad, RowGradient)
    assert_same_bits(layers[0].weight, dense[0].weight)


def test_libraries_that_list_torch_s_optimizers_do_not_find_ours():
    """class-resolver walks all subclasses, and skips a class whose base is from another package."""

    def walk(base):
        for cls in base.__subclasses__():
            yield from walk(cls)
            if cls.__module__.partition(".")[0] == base.__module__.partition(".")[0]:
                yield cls

    assert not [cls for cls in walk(torch.optim.Optimizer) if cls.__module__.startswith("hotrow")]
    assert issubclass(hotrow.optim.AdamW, torch.optim.AdamW)


def _train_adagrad_with_two_initial_values(kind, change):
    layer = nn.Embedding(6, 3, _weight=torch.arange(18.0).reshape(6, 3))
    if kind is hotrow.optim:
        layer = hotrow.convert(layer, min_entries=0)
        assert isinstance(layer.weight, Table)
    optimizer = kind.Adagrad(nn.Linear(2, 2).parameters(), lr=0.1, initial_accumulator_value=2.0)
    group = {"params": list(layer.parameters()), "initial_accumulator_value": 5.0}
    if change == "add_param_group":
        optimizer.add_param_group(group)
    else:
        optimizer = kind.Adagrad(layer.parameters(), lr=0.1, initial_accumulator_value=2.0)
        groups = optimizer.state_dict()["param_groups"]
        groups[0]["initial_accumulator_value"] = 5.0
        optimizer.load_state_dict({"state": {}, "param_groups": groups})
    for t in range(3):
        optimizer.zero_grad()
        layer(torch.tensor([t, 5, t])).square().sum().backward()
        optimizer.step()
    return layer.weight.detach()


@pytest.mark.parametrize("change", ["add_param_group", "load_state_dict"])
def test_adagrads_initial_value_comes_from_the_defaults_as_in_torch(change):
    ours, theirs = (
        _train_adagrad_with_two_initial_values(kind, change) for kind in (hotrow.optim, torch.optim)
    )
    assert_same_bits(ours, theirs)


def test_adamax_with_a_second_beta_of_zero_equals_torch_in_float16():
    found = []
    for convert, library in ((False, torch.optim), (True, hotrow.optim)):
        layer = nn.Embedding(12, 3, _weight=torch.arange(36.0).view(12, 3).half() / 16)
        if convert:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        optimizer = library.Adamax(layer.parameters(), betas=(0.9, 0.0), eps=1e-2)
        for t in range(8):
            optimizer.zero_grad()
            layer(torch.tensor([t % 4, 1])).pow(2).sum().backward()
            optimizer.step()
        found.append(layer.weight.detach())
    assert_same_bits(*found)


@pytest.mark.parametrize("options", [{}, {"centered": True}], ids=str)
def test_options_may_be_numpy_numbers(options):
    options = {"lr": np.float64(0.01), "momentum": np.float64(0.5), **options}
    layers, dense = table_model(), dense_model()
    for model, make in ((layers, hotrow_optimizer), (dense, torch_optimizer)):
        train(model, make("RMSprop", model, options), batches(4))
    assert isinstance(layers[0].weight, Table)
    torch.testing.assert_close(parameter_vector(layers), parameter_vector(dense))
