"""Aliases of a table's storage or optimizer state have the same values as in dense training.

The lag settles rows before each kind of read, and raises errors for changes it can't handle.
"""

import copy
import gc
import io
import pickle
import weakref
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils._pytree import tree_map

import hotrow
from hotrow import HotrowError
from hotrow.optim.lag import RowLag
from hotrow.optim.state import RowState
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.optim.test_optimizer import COLUMNS, ROWS, batches, dense_model, table_model, train
from tests.support.exhaustive import exhaustive
from tests.support.tolerance import assert_same_bits

# Decay moves every row at every step. Missed steps are replayed, so the bits don't depend on when
# rows are read.
OPTIONS = {"lr": 0.01, "weight_decay": 0.1}


def make_runs(steps=6):
    """Run the first half of the training, once with tables and once with dense parameters."""
    found = []
    for make, package in ((table_model, hotrow.optim), (dense_model, torch.optim)):
        layers = make()
        optimizer = package.Adam(layers.parameters(), **OPTIONS)
        train(layers, optimizer, list(batches(2 * steps))[:steps])
        found.append((layers, optimizer))
    return found


def continue_training(layers, optimizer, steps=6):
    train(layers, optimizer, list(batches(2 * steps))[steps:])


def as_tensor(value):
    return torch.from_numpy(value) if isinstance(value, np.ndarray) else torch.as_tensor(value)


def assert_close(found, expected):
    torch.testing.assert_close(as_tensor(found), as_tensor(expected), rtol=1e-5, atol=1e-6)


# --- Aliases: taken before the steps, read after them ---------------------------------------

ALIASES = {
    "data": lambda m, w: w.data,
    "detach": lambda m, w: w.detach(),
    "a view of data": lambda m, w: w.data[5:],
    "a view of a view": lambda m, w: w.detach().t()[1:][0],
    "a row": lambda m, w: w.detach()[ROWS - 1],
    "numpy": lambda m, w: w.detach().numpy(),
    "a view in numpy": lambda m, w: w.detach().numpy()[3:, 1],
    "state_dict": lambda m, w: m.state_dict()["0.weight"],
    "view": lambda m, w: w.detach().view(-1),
    "dlpack": lambda m, w: torch.from_dlpack(w.detach()),
    "storage": lambda m, w: torch.empty(0).set_(w.untyped_storage())[: ROWS * COLUMNS],
    "chunk": lambda m, w: w.detach().chunk(3)[2],
    "with its graph": lambda m, w: w.view(-1),
}


@pytest.mark.parametrize("name", ALIASES)
def test_an_alias_shows_the_values_of_dense_training(name):
    found = []
    for layers, optimizer in make_runs():
        alias = ALIASES[name](layers, layers[0].weight)
        continue_training(layers, optimizer)
        found.append(as_tensor(alias.detach() if isinstance(alias, torch.Tensor) else alias))
    assert_close(*found)


@pytest.mark.parametrize("change", ["to", "data", "state"])
@pytest.mark.parametrize("is_kept", [True, False])
def test_an_alias_of_a_table_in_a_larger_storage_survives_an_assignment_to_itself(change, is_kept):
    found = []
    for layers, optimizer in make_runs():
        weight, state = layers[0].weight, optimizer.state[layers[0].weight]
        values = torch.rand(ROWS + 5, COLUMNS, generator=torch.Generator().manual_seed(1))[5:]
        if change == "state":
            state["exp_avg"] = values
            alias = values if is_kept else state["exp_avg"]
            state["exp_avg"] = state["exp_avg"]
        else:
            weight.data = values
            alias = values if is_kept else weight.data
            if change == "to":
                layers.to("cpu")
            else:
                weight.data = weight.data
        del values
        continue_training(layers, optimizer)
        found.append(alias)
    assert_close(*found)


def test_a_live_alias_warns_once_and_a_deleted_alias_costs_nothing():
    (layers, optimizer), _ = make_runs()
    alias = layers[0].weight.data
    continue_training(layers, optimizer)
    with pytest.warns(UserWarning, match=r"shares the storage of a \(200, 5\) table") as caught:
        [continue_training(layers, optimizer) for _ in range(2)]
    assert len(caught) == 1
    assert caught[0].filename == __file__.replace("test_lag", "test_optimizer")  # the step's caller
    assert not layers[0].weight.lag.has_stale_rows
    del alias
    continue_training(layers, optimizer)
    assert layers[0].weight.lag.has_stale_rows


def test_a_copy_is_not_an_alias():
    (layers, optimizer), _ = make_runs()
    kept = [layers[0].weight.detach().clone(), copy.deepcopy(layers), layers[0].weight.tolist()]
    kept += [copy.deepcopy(layers.state_dict()), copy.deepcopy(optimizer.state_dict())]
    kept += [nn.utils.parameters_to_vector(layers.parameters()).detach()]
    continue_training(layers, optimizer)
    assert layers[0].weight.lag.has_stale_rows
    assert len(kept) == 6


def test_a_write_through_an_alias_trains_like_dense():
    found = []
    for layers, optimizer in make_runs():
        alias = layers[0].weight.data
        continue_training(layers, optimizer)
        alias[3] = 7.0
        alias.mul_(0.5)
        del alias
        layers[0].weight.data[4] += 1
        with torch.no_grad():
            layers[0].weight[5].zero_()
        continue_training(layers, optimizer)
        found.append(layers[0].weight.detach())
    assert_close(*found)


@pytest.mark.parametrize("how", ["data", "vector", "load", "swap"])
def test_training_continues_from_values_assigned_to_the_table(how):
    found = []
    for layers, optimizer in make_runs():
        new = torch.linspace(-1, 1, ROWS * COLUMNS).view(ROWS, COLUMNS)
        if how == "data":
            layers[0].weight.data = new
        elif how == "vector":
            vector = nn.utils.parameters_to_vector(layers.parameters()).detach()
            nn.utils.vector_to_parameters(vector * 0.5, layers.parameters())
        elif how == "load":
            layers.load_state_dict(layers.state_dict() | {"0.weight": new})
        else:
            layers[0].weight.data, new = new, layers[0].weight.data
        continue_training(layers, optimizer)
        found.append(layers[0].weight.detach())
    assert_close(*found)


def test_memory_shared_with_another_process_settles_at_each_step():
    (layers, optimizer), _ = make_runs()
    layers[0].weight.share_memory_()
    continue_training(layers, optimizer)
    assert not layers[0].weight.lag.has_stale_rows


# --- The state ------------------------------------------------------------------------------

STATES = {
    "item": lambda state: state["exp_avg"],
    "get": lambda state: state.get("exp_avg_sq"),
    "values": lambda state: next(v for v in state.values() if v.ndim),
    "items": lambda state: dict(state.items())["exp_avg"],
    "dict": lambda state: dict(state)["exp_avg"],
    "unpacked": lambda state: {**state}["exp_avg"],
    "copy": lambda state: copy.copy(state)["exp_avg"],
    "deep copy": lambda state: copy.deepcopy(state)["exp_avg"],
    "pickle": lambda state: pickle.loads(pickle.dumps(state))["exp_avg"],
    "step": lambda state: state["step"],
}


@pytest.mark.parametrize("name", STATES)
def test_the_state_settles_before_it_is_read(name):
    found = [STATES[name](optimizer.state[layers[0].weight]) for layers, optimizer in make_runs()]
    assert_close(*found)


@pytest.mark.parametrize("route", ["state", "state_dict"])
def test_an_alias_of_the_state_shows_the_values_of_dense_training(route):
    found = []
    for layers, optimizer in make_runs():
        if route == "state":
            alias = optimizer.state[layers[0].weight]["exp_avg"]
        else:
            alias = optimizer.state_dict()["state"][0]["exp_avg"]
        continue_training(layers, optimizer)
        found.append(alias)
    assert_close(*found)


def test_tree_map_copies_the_tensors_of_a_state():
    (layers, optimizer), _ = make_runs()
    state = optimizer.state[layers[0].weight]
    assert type(state) is RowState
    saved = tree_map(torch.clone, state)
    expected = {name: value.clone() for name, value in state.items()}
    continue_training(layers, optimizer)
    assert not torch.equal(state["exp_avg"], expected["exp_avg"])
    assert type(saved) is dict
    assert saved.keys() == expected.keys()
    for name, value in saved.items():
        assert_same_bits(value, expected[name])


@pytest.mark.parametrize(
    "remove",
    [
        lambda state: state.popitem(),
        lambda state: state.pop("exp_avg"),
        lambda state: state.pop("exp_avg", None),
        lambda state: state.pop("other", 3),
        lambda state: state.pop("other"),
        lambda state: state.pop(),
        lambda state: state.pop("a", "b", "c"),
        lambda state: [state.popitem() for _ in range(4)],
        lambda state: state.clear(),
    ],
)
def test_entries_are_removed_from_a_state_as_from_a_dict(remove):
    (layers, optimizer), (rival, other) = make_runs()
    state, expected = optimizer.state[layers[0].weight], other.state[rival[0].weight]
    assert type(state) is RowState
    outcomes = []
    for each in (state, expected):
        try:
            outcomes.append(str(remove(each)).partition("tensor")[0])
        except KeyError as error:
            outcomes.append(repr(error))
        except TypeError:
            outcomes.append("TypeError")
    assert outcomes[0] == outcomes[1]
    assert list(state) == list(expected)


def test_a_checkpoint_in_memory_is_not_an_alias():
    (layers, optimizer), (rival, other) = make_runs()
    saved, expected = copy.deepcopy(optimizer.state_dict()), copy.deepcopy(other.state_dict())
    optimizer.load_state_dict(saved)
    other.load_state_dict(expected)
    continue_training(layers, optimizer)
    continue_training(rival, other)
    assert layers[0].weight.lag.has_stale_rows  # the tables' state was copied, so it has no alias
    assert_close(layers[0].weight.data, rival[0].weight.data)


RESETS = {
    "zeroed": lambda optimizer, state: state["exp_avg"].zero_(),
    "replaced": lambda optimizer, state: state.update(exp_avg=torch.zeros_like(state["exp_avg"])),
    "assigned": lambda optimizer, state: state.__setitem__("step", torch.tensor(3.0)),
    "cleared": lambda optimizer, state: state.clear(),
    "forgotten": lambda optimizer, state: optimizer.state.clear(),
}


@pytest.mark.parametrize("name", RESETS)
def test_training_continues_from_a_changed_state(name):
    found = []
    for layers, optimizer in make_runs():
        RESETS[name](optimizer, optimizer.state[layers[0].weight])
        continue_training(layers, optimizer)
        found.append(layers[0].weight.detach())
    assert_close(*found)


# --- A long run, a second optimizer, a compiled model ---------------------------------------


def test_a_full_ledger_is_replaced_by_a_new_one(monkeypatch):
    plain, (expected, _) = make_runs(12)[0], make_runs(12)[0]
    monkeypatch.setattr("hotrow.optim.lag.MAX_LEDGER_ENTRIES", 5)
    (layers, optimizer), _ = make_runs(12)
    assert layers[0].weight.lag.ledger.length == 2
    assert_same_bits(layers[0].weight.data, plain[0][0].weight.data)
    assert_same_bits(layers[0].weight.data, expected[0].weight.data)
    assert int(optimizer.state[layers[0].weight]["step"]) == 12


@exhaustive
def test_two_optimizers_can_alternate():
    found = []
    for make, package in ((table_model, hotrow.optim), (dense_model, torch.optim)):
        layers = make()
        first = package.Adam(layers.parameters(), **OPTIONS)
        second = package.SGD(layers.parameters(), lr=0.1, momentum=0.9)
        for optimizer in (first, second, first, second):
            continue_training(layers, optimizer)
        found.append(layers[0].weight.detach())
    assert_close(*found)


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_a_compiled_model_reads_settled_rows(kind):
    results = []
    for convert, package in ((hotrow.convert, hotrow.optim), (lambda m: m, torch.optim)):
        torch.manual_seed(0)
        layers = convert(nn.Sequential(kind(50, 4), nn.Linear(4, 2)))
        optimizer = package.AdamW(layers.parameters(), lr=0.1)
        compiled = torch.compile(layers, backend="aot_eager")

        @torch.compile(backend="aot_eager")
        def read(weight):
            return weight.sum(), weight[5].sum(), (weight * 2).norm(), F.embedding(IDLE, weight)

        seen = []
        for i in range(6):
            optimizer.zero_grad()
            compiled(torch.tensor([[1, 2, 2, i]])).pow(2).sum().backward()
            optimizer.step()
            with torch.no_grad():
                seen += [value.flatten() for value in read(layers[0].weight)]
            seen.append(compiled(IDLE[None]).detach().flatten())
        results.append(torch.cat([*seen, layers[0].weight.detach().flatten()]))
    torch.testing.assert_close(*results, rtol=1e-4, atol=1e-5)


IDLE = torch.tensor([7, 8])


def test_function_transforms_read_a_settled_table():
    found = []
    for layers, _ in make_runs():
        parameters = {name: each.detach() for name, each in layers.named_parameters()}

        def loss(given, layers=layers):
            # Use the table both as a variable of the closure and as an argument.
            closed = layers(IDLE).pow(2).sum()
            return closed + torch.func.functional_call(layers, given, (IDLE,)).pow(2).sum()

        found.append(torch.func.grad(loss)(parameters)["0.weight"])
    assert_close(*found)


def test_readers_in_many_threads_settle_once():
    for _ in range(5):
        (layers, optimizer), (dense, rival) = make_runs()
        for _ in range(10):
            for each, stepping in ((layers, optimizer), (dense, rival)):
                stepping.zero_grad()
                each(IDLE[:1]).sum().backward()
                stepping.step()
        every = torch.arange(ROWS)
        with ThreadPoolExecutor(8) as pool:
            list(pool.map(layers[0], [every] * 4))
            list(pool.map(torch.norm, [layers[0].weight] * 4))
        assert_close(layers[0].weight.detach(), dense[0].weight.detach())


def test_a_step_counts_as_an_in_place_write():
    for layers, optimizer in make_runs():
        scale = torch.ones(ROWS, COLUMNS, requires_grad=True)
        loss = (layers[0].weight * scale).sum()
        layers[0](IDLE).sum().backward()
        optimizer.step()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            loss.backward()


@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD"])
def test_scalars_of_the_state_match_torch_and_can_be_changed(name):
    found = []
    for make, package in ((table_model, hotrow.optim), (dense_model, torch.optim)):
        layers = make()
        optimizer = getattr(package, name)(layers.parameters(), lr=0.01)
        continue_training(layers, optimizer)
        state = optimizer.state[layers[0].weight]
        names = sorted(state)
        assert names == sorted(name for name, _ in state.items())
        assert all(state[name].dtype == torch.float32 for name in names)
        scalars = [state[name] for name in names if not state[name].ndim]
        continue_training(layers, optimizer)
        followed = [float(each) for each in scalars]  # torch's ASGD assigns new scalar tensors
        for scalar in (optimizer.state[layers[0].weight][name] for name in names):
            if not scalar.ndim:
                scalar.fill_(3.0)
        continue_training(layers, optimizer)
        found.append((names, followed if name != "ASGD" else [], layers[0].weight.detach()))
    assert found[0][0] == found[1][0]
    assert found[0][1] == found[1][1]
    assert_close(found[0][2], found[1][2])


@pytest.fixture
def bfloat16_by_default():
    torch.set_default_dtype(torch.bfloat16)
    yield
    torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("name", ["Adam", "NAdam", "ASGD"])
def test_scalars_are_float32_when_the_default_dtype_is_bfloat16(name, bfloat16_by_default):
    table = hotrow.convert(nn.Embedding(5, 2, dtype=torch.float32))
    optimizer = getattr(hotrow.optim, name)(table.parameters())
    for _ in range(300):
        optimizer.zero_grad()
        table(torch.tensor([1])).sum().backward()
        optimizer.step()
    state = optimizer.state_dict()["state"][0]
    assert float(state["step"]) == 300
    assert {value.dtype for value in state.values()} == {torch.float32}


@pytest.mark.parametrize("order", ["C", "F"])
def test_a_table_from_a_numpy_array_gets_new_contiguous_storage(order):
    array = np.ones((ROWS, COLUMNS), np.float32, order=order)
    table = nn.Embedding.from_pretrained(torch.from_numpy(array), freeze=False)
    hotrow.convert(table, min_entries=0)
    with torch.no_grad():
        table.weight.zero_()
    assert array.all()
    table(torch.tensor([1])).sum().backward()
    assert isinstance(table.weight.grad, RowGradient)  # only if the weight is contiguous


@pytest.mark.parametrize("keep", [False, True])
def test_a_table_from_a_transposed_tensor_takes_row_steps(keep):
    pretrained = torch.rand(COLUMNS, ROWS).t()
    table = nn.Embedding.from_pretrained(pretrained, freeze=False)
    if not keep:
        del pretrained
    hotrow.convert(table, min_entries=0)
    table(torch.tensor([1])).sum().backward()
    assert isinstance(table.weight.grad, RowGradient)


def test_a_storage_object_is_an_alias():
    (layers, optimizer), (dense, _) = make_runs()
    storage = layers[0].weight.untyped_storage()
    continue_training(layers, optimizer)
    assert not layers[0].weight.lag.has_stale_rows
    assert len(storage) == dense[0].weight.nbytes


def test_deleting_the_model_frees_the_lag():
    (layers, optimizer), _ = make_runs()
    lag = weakref.ref(layers[0].weight.lag)
    gc.disable()
    try:
        del layers, optimizer
        assert lag() is None
    finally:
        gc.enable()


# --- Errors ---------------------------------------------------------------------------------


def test_a_table_cast_after_its_first_step_raises():
    (layers, optimizer), _ = make_runs()
    layers.double()
    before = layers[0].weight.detach().clone()
    layers(IDLE).sum().backward()
    with pytest.raises(
        HotrowError, match=r"the optimizer state 'exp_avg' has dtype torch\.float32"
    ):
        optimizer.step()
    assert_same_bits(layers[0].weight.detach(), before)


def test_a_table_resized_after_its_first_step_raises():
    (layers, optimizer), _ = make_runs()
    layers[0].weight.data = torch.zeros(ROWS + 1, COLUMNS)
    layers[0].weight.grad = None
    layers(IDLE).sum().backward()
    text = r"has shape \(200, 5\), but the table has shape \(201, 5\): create a new optimizer"
    with pytest.raises(HotrowError, match=text):
        optimizer.step()
    assert not layers[0].weight.detach().any()


def test_replaced_storage_raises():
    (layers, optimizer), _ = make_runs()
    layers(IDLE).sum().backward()
    with torch._C.DisableTorchFunctionSubclass():
        layers[0].weight.data = torch.zeros(ROWS, COLUMNS)
    before = layers[1].weight.detach().clone()
    with pytest.raises(HotrowError, match="storage was replaced"):
        optimizer.step()
    assert_same_bits(layers[1].weight.detach(), before)


def test_an_incomplete_state_raises():
    (layers, optimizer), _ = make_runs()
    state = copy.deepcopy(optimizer.state_dict())
    del state["state"][0]["exp_avg_sq"]
    optimizer.load_state_dict(state)
    before = layers[0].weight.detach().clone()
    layers(IDLE).sum().backward()
    with pytest.raises(HotrowError, match="state has no 'exp_avg_sq', but its step count is 6"):
        optimizer.step()
    assert_same_bits(layers[0].weight.detach(), before)


@pytest.mark.parametrize("padding", [ROWS, -ROWS - 1])
@pytest.mark.parametrize("look_up", [F.embedding, F.embedding_bag])
def test_padding_idx_outside_the_table_raises(look_up, padding):
    (layers, _), _ = make_runs()
    with pytest.raises(HotrowError, match=rf"padding_idx = {padding}, but the table has 200 rows"):
        look_up(IDLE[None], layers[0].weight, padding_idx=padding)


def test_an_unsupported_option_set_later_raises():
    (layers, optimizer), _ = make_runs()
    optimizer.param_groups[0]["differentiable"] = True
    layers(IDLE).sum().backward()
    with pytest.raises(HotrowError, match="Adam does not support differentiable=True for tables"):
        optimizer.step()


def test_a_gradient_of_another_shape_raises():
    (layers, _), _ = make_runs()
    other = hotrow.convert(nn.Embedding(ROWS + 1, COLUMNS))
    other(IDLE).sum().backward()
    with pytest.raises(RuntimeError, match="size"):
        layers[0].weight.grad = other.weight.grad


def test_the_state_of_another_table_raises():
    (_, optimizer), _ = make_runs()
    other = hotrow.convert(nn.Sequential(nn.Embedding(ROWS + 1, COLUMNS), nn.Linear(COLUMNS, 2)))
    foreign = hotrow.optim.Adam(other.parameters(), **OPTIONS)
    other(IDLE).sum().backward()
    foreign.step()
    before = copy.deepcopy(optimizer.state_dict())
    wrong = r"state\[0\]\['exp_avg'\] has shape \(201, 5\), but its table has shape \(200, 5\)"
    with pytest.raises(HotrowError, match=wrong):
        optimizer.load_state_dict(foreign.state_dict())
    for name, value in optimizer.state_dict()["state"][0].items():
        assert torch.equal(value, before["state"][0][name])


@pytest.mark.parametrize(("name", "slot"), [("Adagrad", "sum"), ("Rprop", "step_size")])
@pytest.mark.parametrize("value", [torch.nan, -1.0])
def test_a_loaded_state_with_nan_or_negative_values_acts_as_in_torch(name, slot, value):
    weights = []
    for package in (hotrow.optim, torch.optim):
        layer = nn.Embedding(ROWS, COLUMNS, _weight=torch.ones(ROWS, COLUMNS))
        if package is hotrow.optim:
            layer = hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = getattr(package, name)(layer.parameters())
        for step in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([0, 1 + step])).sum().backward()
            optimizer.step()
            if step == 0:
                state = copy.deepcopy(optimizer.state_dict())
                state["state"][0][slot][7] = value
                optimizer.load_state_dict(state)
        weights.append(layer.weight.detach().clone())
    assert weights[1][7].isnan().all() == (name == "Adagrad" or value != -1.0)
    torch.testing.assert_close(*weights, equal_nan=True)


def test_steps_before_a_written_state_are_not_replayed_once_weight_decay_starts():
    weights = []
    for package in (hotrow.optim, torch.optim):
        layer = nn.Embedding(ROWS, COLUMNS, _weight=torch.ones(ROWS, COLUMNS))
        if package is hotrow.optim:
            layer = hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = package.Adagrad(layer.parameters(), lr=0.1)
        for step in range(6):
            if step == 3:
                with torch.no_grad():
                    layer.weight[5] = 50.0
                optimizer.state[layer.weight]["sum"][5] = -0.5
                optimizer.param_groups[0]["weight_decay"] = 0.1
            optimizer.zero_grad()
            layer(torch.tensor([1])).sum().backward()
            optimizer.step()
        weights.append(layer.weight.detach().clone())
    assert weights[1].isfinite().all()
    torch.testing.assert_close(*weights)


def test_saved_files_contain_only_torch_objects():
    (layers, optimizer), _ = make_runs()
    file = io.BytesIO()
    torch.save({"model": layers.state_dict(), "optimizer": optimizer.state_dict()}, file)
    file.seek(0)
    loaded = torch.load(file, weights_only=True)
    assert type(loaded["optimizer"]["state"][0]) is dict
    assert not isinstance(layers[0].weight.lag, RowLag)  # saving closed the `RowLag`
    assert pickle.loads(pickle.dumps(optimizer)).state_dict().keys() == {"state", "param_groups"}
