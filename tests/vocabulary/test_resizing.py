"""Compare changes to a vocabulary with the same changes made by hand in dense training."""

import collections
import copy
import gc
import io
import itertools
import re

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, vocabulary
from hotrow.optim.lag import RowLag
from hotrow.table.parameter import Table
from hotrow.table.storage_growth import MIN_BYTES
from tests.support.exhaustive import exhaustive, grid
from tests.support.tolerance import assert_same_bits
from tests.support.training import EXTRA_OPTIONS, RULES, label
from tests.support.vocabularies import COLUMNS, ThreeRuns

RICH = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "dampening": 0.3, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1, "lr_decay": 0.02},
    "RMSprop": {"lr": 0.01, "centered": True, "momentum": 0.5},
}
CASES = [(name, RICH.get(name, {"lr": 0.1})) for name in RULES]
CASES += [(name, {"lr": 0.1, **options}) for name in RULES for options in EXTRA_OPTIONS[name]]


def is_decisive(name, options):
    return options == RICH.get(name, {"lr": 0.1})


@pytest.mark.parametrize(("name", "options"), grid(CASES, is_decisive), ids=label)
def test_training_continues_as_after_a_change_by_hand(name, options):
    runs = ThreeRuns(name, options, rows=12)
    runs.steps(7)
    runs.resize(17)
    runs.steps(5)
    runs.check()
    runs.steps(3)
    runs.take([3, -1, 16, 0, 9, -1, 5, 2, 11])
    runs.steps(6)
    runs.resize(5)
    runs.steps(2)
    runs.resize(6)
    runs.resize(30)
    runs.steps(4)
    runs.check()


@pytest.mark.parametrize("is_coalesced", [True, False])
@pytest.mark.parametrize("dimensions", [1, 2])
@pytest.mark.parametrize("ids", [[4, 0, -1, 2], None])
def test_a_sparse_gradient_keeps_its_rows(ids, dimensions, is_coalesced):
    layer = nn.Embedding(5, 3, sparse=True)
    layer(torch.tensor([2, 4, 2, 1])).pow(2).sum().backward()
    if dimensions == 2:
        layer.weight.grad = layer.weight.grad.to_dense().to_sparse()
    if is_coalesced:
        layer.weight.grad = layer.weight.grad.coalesce()
    expected = torch.cat([layer.weight.grad.to_dense(), torch.zeros(2, 3)])
    if ids is None:
        vocabulary.resize(layer, 7)
    else:
        vocabulary.take(layer, ids)
        expected = expected[ids]
    assert layer.weight.grad.is_sparse
    assert_same_bits(layer.weight.grad.to_dense(), expected)
    torch.optim.SGD([layer.weight], lr=0.1).step()


def test_an_output_layer_may_have_a_sparse_gradient():
    head = nn.Linear(3, 5)
    head.weight.grad = torch.eye(5, 3).to_sparse()
    vocabulary.resize(head, 4)
    assert_same_bits(head.weight.grad.to_dense(), torch.eye(4, 3))


def test_old_rows_keep_the_steps_that_they_have_missed():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=50)
    runs.steps(6)
    lag, missed = runs.table.lag, runs.table.lag.row_steps.clone()
    assert missed.min() == 0
    runs.resize(60)
    assert runs.table.lag is lag
    assert lag.row_steps.tolist() == [*missed.tolist(), *[6] * 10]
    sources = torch.randperm(60)
    expected = lag.row_steps[sources]
    runs.take(sources.tolist())
    assert runs.table.lag is lag
    assert torch.equal(lag.row_steps, expected)
    runs.steps(3)
    runs.check()


def memory_of(lag):
    return [tensor.data_ptr() for tensor in (lag.values, *lag.slots.values(), lag.row_steps)]


def test_many_growths_use_the_same_memory():
    runs = ThreeRuns("Adam", {"lr": 0.1}, rows=40)
    runs.steps(3)
    runs.resize(41)
    lag = runs.table.lag
    addresses = memory_of(lag)
    for rows in range(42, 80):
        runs.resize(rows)
        runs.steps(1)
        assert memory_of(lag) == addresses
    runs.resize(81)
    assert lag.values.data_ptr() != addresses[0]
    runs.resize(10)
    assert lag.values.untyped_storage().nbytes() == lag.values.nbytes
    runs.check()


def test_a_row_added_where_another_row_was_removed_begins_from_the_initial_state():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=10)
    runs.resize(20)
    runs.steps(5)
    runs.resize(15)
    runs.resize(20)
    assert not runs.table.state["exp_avg"][15:].any()
    runs.steps(5)
    runs.check()


def test_spare_memory_is_not_saved():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=400)
    runs.steps(2)
    runs.resize(401)
    weight, optimizer = runs.table.weight, runs.table.optimizer
    assert weight.raw_data.untyped_storage().nbytes() > 1.9 * weight.nbytes
    states = [optimizer.state[weight], optimizer.state_dict()["state"][0]]
    saved = [
        *runs.table.layer.state_dict().values(),
        weight.data,
        weight.detach(),
        copy.deepcopy(weight).data,
        *(value for state in states for value in state.values()),
    ]
    for tensor in saved:
        if tensor.ndim:
            assert tensor.untyped_storage().nbytes() == weight.nbytes
    file = io.BytesIO()
    torch.save(runs.table.layer, file)
    assert file.tell() < 1.5 * weight.nbytes


def test_a_tensor_that_shares_the_storage_keeps_the_old_rows():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=10)
    runs.resize(15)
    runs.steps(2)
    alias, exp_avg = runs.table.weight.data, runs.table.state["exp_avg"]
    before = alias.clone(), exp_avg.clone()
    runs.resize(20)
    runs.steps(3)
    assert_same_bits(alias, before[0])
    assert_same_bits(exp_avg, before[1])
    runs.check()


def test_a_state_dict_that_is_kept_is_still_up_to_date():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=10)
    runs.resize(15)
    runs.steps(2)
    kept = runs.table.layer.state_dict()
    runs.steps(3)
    assert kept["weight"].untyped_storage().nbytes() == kept["weight"].nbytes
    assert_same_bits(kept["weight"], runs.table.weights)
    runs.check()


@pytest.mark.parametrize("changes", ["resize", "take"])
def test_the_gradient_follows_its_rows(changes):
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    layer(torch.tensor([5, 1, 5])).sum().backward()
    if changes == "resize":
        vocabulary.resize(layer, 8)
        vocabulary.resize(layer, 4)
        assert layer.weight.grad.as_dense()[:, 0].tolist() == [0, 1, 0, 0]
    else:
        vocabulary.take(layer, [1, -1, 5, 0])
        assert layer.weight.grad.as_dense()[:, 0].tolist() == [1, 0, 2, 0]
    layer(torch.tensor([0])).sum().backward()  # accumulates
    assert layer.weight.grad.shape == layer.weight.shape
    plain = nn.Embedding(6, 2)
    plain(torch.tensor([5, 1, 5])).sum().backward()
    vocabulary.take(plain, [1, -1, 5, 0])
    assert plain.weight.grad[:, 0].tolist() == [1, 0, 2, 0]


@pytest.mark.parametrize("is_switched_off", [False, True])
@pytest.mark.parametrize("is_table", [True, False])
def test_a_backward_pass_from_before_the_change_is_an_error(is_table, is_switched_off):
    layer = nn.Embedding(6, 2)
    if is_table:
        hotrow.convert(layer, min_entries=0)
    assert isinstance(layer.weight, Table) == is_table
    loss = layer(torch.tensor([5, 1])).sum()
    layer.weight.requires_grad_(not is_switched_off)
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0])
    assert layer.weight.requires_grad != is_switched_off
    layer.weight.requires_grad_()
    with pytest.raises(HotrowError, match="the vocabulary changed after the forward pass"):
        loss.backward()
    assert layer.weight.grad is None
    layer(torch.tensor([5, 1])).sum().backward()
    assert layer.weight.grad.shape == (6, 2)


def test_a_backward_pass_from_before_the_change_has_no_gradient_for_inputs():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    loss = layer(torch.tensor([5, 1])).sum()
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0])
    loss.backward(inputs=[layer.weight], retain_graph=True)
    assert layer.weight.grad is None
    assert torch.autograd.grad(loss, layer.weight, allow_unused=True) == (None,)


def test_weights_that_cannot_have_a_gradient_change_their_rows():
    layer = nn.Embedding(6, 2, _weight=torch.zeros(6, 2, dtype=torch.int8), _freeze=True)
    vocabulary.resize(layer, 8, init=nn.init.ones_)
    assert layer.weight.sum(1).tolist() == [0] * 6 + [2] * 2


def change_in_mode(is_table, mode):
    """Train, change the rows in this mode between backward and step, and return the results."""
    torch.manual_seed(0)
    layer = nn.Embedding(4, 2)
    if is_table:
        hotrow.convert(layer, min_entries=0)
    assert isinstance(layer.weight, Table) == is_table
    optimizer = (hotrow if is_table else torch).optim.Adam(layer.parameters(), lr=0.1)
    words = vocabulary.Vocabulary(layer, optimizer, keys=["a", "b", "c", "d"])

    def backward():
        optimizer.zero_grad()
        layer(words.admit(["a", "c", "d"])).square().sum().backward()

    backward()
    optimizer.step()
    backward()
    with mode():
        words.admit(["e", "f"])
        words.evict(5)
        vocabulary.take(layer, [4, 3, 2, 1, 0], optimizer)
        vocabulary.resize(layer, 7, optimizer, init=torch.ones(2, 2))
        vocabulary.resize(layer, 5, optimizer)
    assert not layer.weight.is_inference()
    assert not layer.weight.grad.is_inference()
    optimizer.step()
    backward()
    optimizer.step()
    state = optimizer.state[layer.weight]
    return words.keys(), layer.weight.detach(), state["exp_avg"], state["exp_avg_sq"]


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.no_grad])
@pytest.mark.parametrize("is_table", [True, False])
def test_rows_change_in_every_mode(is_table, mode):
    keys, *tensors = change_in_mode(is_table, mode)
    expected_keys, *expected = change_in_mode(is_table, torch.enable_grad)
    assert keys == expected_keys
    assert len(keys) == 5
    for tensor, other in zip(tensors, expected, strict=True):
        assert_same_bits(tensor, other)


@pytest.mark.parametrize("mode", [torch.inference_mode, torch.enable_grad])
def test_a_weight_created_in_inference_mode_can_be_trained_after_the_change(mode):
    with torch.inference_mode():
        layer = nn.Embedding(4, 2)
    with mode():
        vocabulary.resize(layer, 6)
    layer(torch.tensor([5])).sum().backward()
    assert layer.weight.grad.sum(1).tolist() == [0, 0, 0, 0, 0, 2]


class Tied(nn.Module):
    """A language model whose output head shares the embedding's weight."""

    def __init__(self, rows):
        super().__init__()
        self.embed = nn.Embedding(rows, 3, padding_idx=1)
        self.head = nn.Linear(3, rows)
        self.head.weight = self.embed.weight

    def forward(self, ids):
        return self.head(self.embed(ids)).logsumexp(-1).sum()


@pytest.mark.parametrize("library", [torch.optim, hotrow.optim])
@pytest.mark.parametrize("name", ["AdamW", "Rprop", "Adagrad"])
def test_a_tied_head_and_its_bias_follow(library, name):
    torch.manual_seed(0)
    model, new = Tied(6), torch.randn(3, 3)
    reference = copy.deepcopy(model)
    weight, bias = model.embed.weight, model.head.bias
    optimizer = getattr(library, name)(model.parameters(), lr=0.1)
    rival = getattr(torch.optim, name)(reference.parameters(), lr=0.1)

    def step(size):
        ids = torch.randint(size, (5,))
        for each, other in ((model, optimizer), (reference, rival)):
            other.zero_grad()
            each(ids).backward()
            other.step()

    for _ in range(3):
        step(6)
    assert vocabulary.resize(model, 9, optimizer, init=new) is model
    larger = Tied(9)
    for key, old in reference.state_dict().items():
        added = new if "weight" in key else torch.zeros(3)
        larger.state_dict()[key].copy_(torch.cat([old, added]))
    states = rival.state_dict()
    initial = {"step_size": 0.1}
    for state in states["state"].values():
        for key, value in state.items():
            if value.ndim:
                added = torch.full((3, *value.shape[1:]), initial.get(key, 0.0))
                state[key] = torch.cat([value, added])
    rival = getattr(torch.optim, name)(larger.parameters(), lr=0.1)
    rival.load_state_dict(states)
    reference = larger
    for _ in range(3):
        step(9)
    assert model.embed.weight is model.head.weight is weight
    assert model.head.bias is bias
    assert (model.head.out_features, model.embed.num_embeddings) == (9, 9)
    assert model.embed.padding_idx == 1
    assert_same_bits(weight.data, reference.embed.weight.data)
    assert_same_bits(bias.data, reference.head.bias.data)


def test_columns_of_a_one_hot_layer():
    torch.manual_seed(0)
    layers = [hotrow.OneHotLinear(5, 3)]
    layers.append(copy.deepcopy(layers[0]))
    Table.adopt(layers[0].weight, columns=True)
    for layer, library in zip(layers, (hotrow.optim, torch.optim), strict=True):
        torch.manual_seed(1)
        optimizer = library.AdamW(layer.parameters(), lr=0.1)
        for rows in (5, 7, 4):
            new = torch.randn(max(0, rows - layer.in_features), 3)
            vocabulary.resize(layer, rows, optimizer, init=new)
            assert layer.weight.shape == (3, rows)
            for _ in range(3):
                optimizer.zero_grad()
                layer(torch.randint(rows, (4,))).pow(2).sum().backward()
                optimizer.step()
        remap = vocabulary.take(layer, [3, -1, 0], optimizer, init=torch.ones(1, 3))
        assert remap.tolist() == [2, -1, -1, 0]
        assert layer.in_features == 3
    assert isinstance(layers[0].weight, Table)
    assert isinstance(layers[0].weight.lag, RowLag)
    torch.testing.assert_close(layers[0].weight.data, layers[1].weight.data)
    assert layers[0].bias.shape == (3,)


def test_a_bag_keeps_its_padding_row():
    layer = nn.EmbeddingBag(6, 2, padding_idx=4)
    vocabulary.resize(layer, 8)
    assert (layer.num_embeddings, layer.padding_idx) == (8, 4)
    assert vocabulary.take(layer, [4, 0]).tolist() == [1, -1, -1, -1, 0, -1, -1, -1]
    assert (layer.num_embeddings, layer.padding_idx) == (2, 0)
    assert layer(torch.tensor([[0, 1]])).shape == (1, 2)


def test_default_values_of_added_rows():
    torch.manual_seed(0)
    embedding = vocabulary.resize(nn.Embedding(2, 50), 1000)
    assert 0.9 < float(embedding.weight.data[2:].std()) < 1.1
    head = vocabulary.resize(nn.Linear(100, 2), 1000)
    assert 0.09 < float(head.weight.data[2:].abs().max()) <= 0.1
    assert head.out_features == 1000
    assert not head.bias[2:].any()
    filled = vocabulary.resize(nn.Embedding(2, 3), 4, init=lambda rows: rows.fill_(7))
    assert filled.weight[2:].flatten().tolist() == [7] * 6


def test_state_dicts_move_between_torch_and_hotrow_after_a_growth():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=10)
    runs.steps(4)
    runs.resize(14)
    runs.steps(4)
    weights, state = runs.table.layer.state_dict(), runs.table.optimizer.state_dict()
    plain = nn.Embedding(14, 3)
    plain.load_state_dict(weights)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=0.1)
    optimizer.load_state_dict(state)
    assert_same_bits(optimizer.state[plain.weight]["exp_avg"], runs.table.state["exp_avg"])
    # A checkpoint from before the resize loads once the table has its old size again.
    runs.table.resize(10, torch.empty(0, 3))
    runs.table.layer.load_state_dict({"weight": weights["weight"][:10]})
    runs.table.step(torch.tensor([3]), torch.ones(1, 3))


def test_resizing_frees_nothing_that_the_optimizer_needs():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()
    optimizer.state_dict()  # closes the lag
    assert layer.weight.lag is None
    vocabulary.resize(layer, 9, optimizer)
    assert optimizer.state[layer.weight]["momentum_buffer"].shape == (9, 2)
    layer(torch.tensor([8])).sum().backward()
    optimizer.step()


def close_with_state_dict(optimizer):
    optimizer.state_dict()


def close_with_load(optimizer):
    optimizer.load_state_dict(optimizer.state_dict())


def close_with_dense_step(optimizer):
    (table,) = optimizer.param_groups[0]["params"]
    optimizer.zero_grad()
    table.square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("close", [close_with_state_dict, close_with_load, close_with_dense_step])
def test_the_optimizer_is_needed_even_if_no_row_is_stale(close):
    layer = hotrow.convert(nn.Embedding(4, 2), min_entries=0)
    table = layer.weight
    assert isinstance(table, Table)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    layer(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    close(optimizer)
    assert table.lag is None
    before, rival = table.detach().clone(), hotrow.optim.SGD(layer.parameters(), momentum=0.9)
    words = vocabulary.Vocabulary(layer, keys=["a", "b", "c", "d"])
    for change in (
        lambda: vocabulary.resize(layer, 6),
        lambda: vocabulary.take(layer, [3, 2, 1, 0]),
        lambda: words.evict(2),
        lambda: words.admit(["e"]),
    ):
        with pytest.raises(HotrowError, match="has state for each row: pass the optimizer too"):
            change()
    with pytest.raises(HotrowError, match="this SGD did not take the last step of the"):
        vocabulary.resize(layer, 6, rival)
    assert_same_bits(table.detach(), before)
    assert words.keys() == ["a", "b", "c", "d"]
    rival.load_state_dict(optimizer.state_dict())
    vocabulary.resize(layer, 6, rival)
    with pytest.raises(HotrowError, match="pass the optimizer too"):
        vocabulary.resize(layer, 4)
    del optimizer, rival
    gc.collect()
    assert vocabulary.resize(layer, 4).num_embeddings == 4


@pytest.mark.parametrize(
    ("is_new", "keep"),
    grid(
        itertools.product([True, False], ["nothing", "state", "states"]),
        lambda is_new, keep: is_new == (keep == "states"),
    ),
)
def test_a_table_changes_if_its_last_optimizer_no_longer_exists(is_new, keep):
    layer = hotrow.convert(nn.Embedding(4, 2), min_entries=0)
    assert type(layer.weight) is Table
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    assert layer.weight.lag is not None
    expected = layer.weight.detach().clone()
    kept = {
        "nothing": lambda: None,
        "state": lambda: optimizer.state[layer.weight],
        "states": lambda: optimizer.state,
    }[keep]()
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1) if is_new else None
    gc.collect()
    vocabulary.take(layer, [3, 2, 1, 0, -1, -1], optimizer, init=torch.zeros(2, 2))
    assert_same_bits(layer.weight.detach()[:4].flip(0), expected)
    if keep == "nothing":
        return
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    optimizer.state[layer.weight] = kept if keep == "state" else kept[layer.weight]
    layer(torch.tensor([1, 2])).sum().backward()
    with pytest.raises(HotrowError, match="rows of its state did not"):
        optimizer.step()


def test_the_optimizer_is_needed_after_it_has_loaded_a_state():
    layers = [hotrow.convert(nn.Embedding(4, 2), min_entries=0) for _ in range(2)]
    assert all(isinstance(layer.weight, Table) for layer in layers)
    optimizers = [hotrow.optim.Adam(layer.parameters()) for layer in layers]
    layers[0](torch.tensor([0, 1])).sum().backward()
    optimizers[0].step()
    optimizers[1].load_state_dict(optimizers[0].state_dict())
    with pytest.raises(HotrowError, match="has state for each row: pass the optimizer too"):
        vocabulary.take(layers[1], [3, 2, 1, 0])
    vocabulary.take(layers[1], [3, 2, 1, 0], optimizers[1])
    exp_avg = optimizers[1].state[layers[1].weight]["exp_avg"]
    assert exp_avg.any(1).tolist() == [False, False, True, True]


@pytest.mark.parametrize("origin", ["row step", "load", "dense step"])
@pytest.mark.parametrize("dense", [True, False])
@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_an_optimizer_whose_state_has_the_old_rows_raises(name, dense, origin):
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    adam = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    last = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1)

    def step(optimizer, dense=False):
        optimizer.zero_grad()
        (layer.weight if dense else layer(torch.tensor([0, 1]))).square().sum().backward()
        optimizer.step()

    step(adam, dense=origin == "dense step")
    if origin == "load":
        adam.load_state_dict(adam.state_dict())
    step(last)
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0], last)
    step(last)
    last.state_dict()  # closes the lag, so that no optimizer's step is pending
    with pytest.raises(HotrowError, match="rows of its state did not"):
        vocabulary.take(layer, [5, 4, 3, 2, 1, 0], adam)
    before = layer.weight.detach().clone()
    message = "rows of its state did not: del optimizer.state"
    for use in (lambda: step(adam, dense), adam.state_dict):
        with pytest.raises(HotrowError, match=message):
            use()
        assert_same_bits(layer.weight.detach(), before)
    del adam.state[layer.weight]
    step(adam, dense)
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0], adam)
    step(adam, dense)


def two_optimizers(layer):
    return [
        kind(layer.parameters(), lr=0.1, **options)
        for kind, options in ((hotrow.optim.AdamW, {}), (hotrow.optim.SGD, {"momentum": 0.9}))
    ]


def take_step(layer, optimizer):
    optimizer.zero_grad()
    layer(torch.tensor([0, 1])).square().sum().backward()
    optimizer.step()


@pytest.mark.parametrize("origin", ["copied", "older than the table"])
def test_a_state_with_old_rows_is_found_wherever_it_comes_from(origin):
    layer = nn.Embedding(6, 2)
    if origin == "copied":
        layer = hotrow.convert(layer, min_entries=0)
    optimizers = two_optimizers(layer)
    for optimizer in optimizers:
        take_step(layer, optimizer)
    if origin == "copied":
        layer, optimizers = copy.deepcopy((layer, optimizers))
        with pytest.raises(HotrowError, match="pass the optimizer too"):
            vocabulary.take(layer, [5, 4, 3, 2, 1, 0])
    layer = hotrow.convert(layer, min_entries=0)
    assert isinstance(layer.weight, Table)
    take_step(layer, optimizers[0])
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0], optimizers[0])
    take_step(layer, optimizers[0])
    with pytest.raises(HotrowError, match="rows of its state did not"):
        take_step(layer, optimizers[1])


RESETS = [
    lambda optimizer: optimizer.state.clear(),
    lambda optimizer: optimizer.state.popitem(),
    lambda optimizer: setattr(optimizer, "state", collections.defaultdict(dict)),
    None,  # assign another state
]


@pytest.mark.parametrize("reset", RESETS)
def test_rows_can_be_added_after_the_state_was_reset(reset):
    found = []
    for library in (hotrow, torch):
        torch.manual_seed(0)
        layer = nn.Embedding(6, 2)
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert isinstance(layer.weight, Table)
        optimizer = library.optim.Adam(layer.parameters(), lr=0.1)
        for _ in range(3):
            take_step(layer, optimizer)
        weight = layer.weight
        if reset is None:
            optimizer.state[weight] = {k: v * 2 for k, v in optimizer.state[weight].items()}
        else:
            reset(optimizer)
        vocabulary.resize(layer, 8, optimizer, init=nn.init.zeros_)
        for _ in range(3):
            take_step(layer, optimizer)
        found.append([layer.weight.detach(), optimizer.state[layer.weight]["exp_avg_sq"]])
    for ours, theirs in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


@pytest.mark.filterwarnings("ignore:SGD updates every row")
@pytest.mark.parametrize("given", ["None", "hotrow's"])
def test_a_torch_optimizer_whose_state_has_the_old_rows_raises(given):
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizers = [torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)]
    if given == "hotrow's":
        optimizers.append(hotrow.optim.AdamW(layer.parameters()))
    for optimizer in reversed(optimizers):
        take_step(layer, optimizer)
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0], *optimizers[1:])
    before = layer.weight.detach().clone()
    with pytest.raises(HotrowError, match="SGD's last step, but the rows of its state"):
        take_step(layer, optimizers[0])
    assert_same_bits(layer.weight.detach(), before)
    del optimizers[0].state[layer.weight]
    take_step(layer, optimizers[0])
    assert not torch.equal(layer.weight.detach(), before)


@pytest.mark.filterwarnings("ignore:SGD updates every row")
def test_a_torch_optimizer_that_is_passed_continues_with_its_state():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    twin = nn.Embedding.from_pretrained(layer.weight.detach().clone(), freeze=False)
    assert isinstance(layer.weight, Table)
    optimizers = [
        torch.optim.SGD(each.parameters(), lr=0.1, momentum=0.9) for each in (layer, twin)
    ]
    for _ in range(2):
        for each, optimizer in zip((layer, twin), optimizers, strict=True):
            take_step(each, optimizer)
            vocabulary.take(each, [5, 4, 3, 2, 1, 0], optimizer)
    assert_same_bits(layer.weight.detach(), twin.weight.detach())


def keep_all_rows(layer, optimizers):
    vocabulary.take(layer, range(6), optimizers[0])
    vocabulary.resize(layer, 6, optimizers[0])


def move_rows_by_hand(layer, optimizers):
    sources = [3, 4, 5, 0, 1, 2]
    vocabulary.take(layer, sources, optimizers[0])
    state = optimizers[1].state[layer.weight]
    state["momentum_buffer"] = state["momentum_buffer"][sources]


def move_state_to_another_table(layer, optimizers):
    vocabulary.resize(layer, 8, optimizers[0], init=nn.init.ones_)
    old, new = layer.weight, nn.Embedding(8, 2)
    new.weight.data.copy_(old.detach())
    layer.weight = hotrow.convert(new, min_entries=0).weight
    optimizers[0].state[layer.weight] = optimizers[0].state.pop(old)
    del optimizers[1].state[old]
    for optimizer in optimizers:
        optimizer.param_groups[0]["params"] = [layer.weight]


def share_the_state(layer, optimizers):
    first, second = optimizers[0], hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    second.state = first.state
    vocabulary.take(layer, [5, 4, 3, 2, 1, 0], second)
    optimizers[1] = second


@pytest.mark.parametrize(
    "change", [keep_all_rows, move_rows_by_hand, move_state_to_another_table, share_the_state]
)
def test_a_state_with_current_rows_is_not_refused(change):
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    optimizers = two_optimizers(layer)
    for optimizer in (*optimizers, optimizers[0]):
        take_step(layer, optimizer)
    change(layer, optimizers)
    assert isinstance(layer.weight, Table)
    for optimizer in optimizers:
        take_step(layer, optimizer)
        optimizer.state_dict()


def test_a_fused_step_of_a_plain_weight_with_state_of_another_shape_raises():
    layer = nn.Embedding(6, 2)
    last, fused = (
        kind(layer.parameters(), **options)
        for kind, options in ((hotrow.optim.Adam, {}), (hotrow.optim.Adagrad, {"fused": True}))
    )
    take_step(layer, last)
    vocabulary.resize(layer, 4000, last)
    with pytest.raises(HotrowError, match="the optimizer state 'sum' of a 4000 x 2 weight has"):
        take_step(layer, fused)


def test_an_optimizer_without_state_for_rows_continues():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizers = [hotrow.optim.SGD(layer.parameters(), lr=0.1) for _ in "ab"]
    for optimizer in (*optimizers, None, *optimizers):
        if optimizer is None:
            vocabulary.take(layer, [5, 4, 3, 2, 1, 0], optimizers[0])
            continue
        layer(torch.tensor([0, 1])).sum().backward()
        optimizer.step()
        optimizer.state_dict()
        optimizer.zero_grad()


@pytest.mark.usefixtures("small_tables")
def test_the_rows_of_a_linear_layer_whose_inputs_are_a_table_are_ambiguous():
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(8, 3)

        def forward(self, ids):
            return self.linear(torch.nn.functional.one_hot(ids, 8).float())

    model = hotrow.convert(Model())
    optimizer = hotrow.optim.Adam(model.parameters())
    vocabulary.resize(model.linear, 5, optimizer)
    for _ in range(2):
        take_step(model, optimizer)
    assert isinstance(model.linear.weight, Table)
    assert model.linear.weight.columns
    with pytest.raises(HotrowError, match="outputs, but the layer multiplies one-hots"):
        vocabulary.resize(model.linear, 7, optimizer)
    assert model.linear.weight.shape == (5, 8)


@pytest.mark.usefixtures("small_tables")
def test_the_state_of_a_step_that_created_the_table_has_old_rows_too():
    weight = nn.Parameter(torch.randn(3, 8))
    layer = hotrow.OneHotLinear(8, 3, bias=False)
    layer.weight = weight
    adam, last = (kind([weight], lr=0.1) for kind in (hotrow.optim.Adam, hotrow.optim.SGD))
    for optimizer in (adam, last):
        optimizer.zero_grad()
        layer(torch.tensor([0, 1])).square().sum().backward()
        optimizer.step()
    assert isinstance(weight, Table)
    vocabulary.take(layer, [7, 6, 5, 4, 3, 2, 1, 0], last)
    with pytest.raises(HotrowError, match="rows of its state did not"):
        adam.step()


def test_a_fused_step_with_state_of_another_shape_raises():
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    last = hotrow.optim.SGD(layer.parameters(), lr=0.1)
    fused = torch.optim.Adagrad(layer.parameters(), fused=True)
    layer(torch.tensor([0, 1])).sum().backward()
    last.step()
    last.zero_grad()
    vocabulary.resize(layer, 400, last)
    layer.weight.sum().backward()
    with pytest.raises(HotrowError, match="state 'sum' of a 400 x 2 weight has shape"):
        fused.step()


@pytest.mark.filterwarnings("ignore:SGD updates every row")
def test_an_optimizer_from_torch_can_replace_the_last_optimizer():
    layer = hotrow.convert(nn.Embedding(4, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    other = torch.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
    for each in (optimizer, other):
        each.zero_grad()
        layer.weight.square().sum().backward()
        each.step()
    assert vocabulary.resize(layer, 6, other).num_embeddings == 6
    assert other.state[layer.weight]["momentum_buffer"].shape == (6, 2)


def test_no_optimizer_is_needed_if_it_has_no_state_for_rows():
    layer = hotrow.convert(nn.Embedding(4, 2), min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1)
    layer(torch.tensor([0, 1])).sum().backward()
    optimizer.step()
    optimizer.state_dict()
    assert vocabulary.resize(layer, 6).num_embeddings == 6
    assert vocabulary.resize(layer, 5, hotrow.optim.Adam(layer.parameters())).num_embeddings == 5


class Examples:
    """Example layers with four rows, and their optimizers."""

    def __init__(self):
        self.layer, self.other = nn.Embedding(4, 2), nn.Embedding(4, 2)
        self.both = nn.ModuleList([self.layer, self.other])
        self.padded = nn.Embedding(4, 2, padding_idx=3)
        self.table = hotrow.convert(nn.Embedding(4, 2), min_entries=0)
        self.optimizer = hotrow.optim.Adam(self.table.parameters())
        self.rival = hotrow.optim.Adam(self.table.parameters())
        self.adafactor = torch.optim.Adafactor(self.layer.parameters())
        for layer, optimizer in ((self.table, self.optimizer), (self.layer, self.adafactor)):
            layer(torch.tensor([1])).sum().backward()
            optimizer.step()
            layer.zero_grad()


resize, take = vocabulary.resize, vocabulary.take
INVALID = {
    "rows is 0": lambda x: resize(x.layer, 0),
    "rows = 2.5, but it must be a non-negative int": lambda x: resize(x.layer, 2.5),
    "layer is a int, but it must be a torch module": lambda x: resize(3, 2),
    "model is a int": lambda x: resize(x.layer, 2, model=3),
    "ModuleList has 2 embeddings: 0, 1: pass the layer": lambda x: resize(x.both, 5),
    "ReLU has no embedding": lambda x: resize(nn.ReLU(), 5),
    "the weight of LazyLinear is not": lambda x: resize(nn.LazyLinear(5), 5),
    "none of its groups has this parameter: pass": lambda x: resize(
        x.layer, 5, torch.optim.SGD(x.other.parameters())
    ),
    "the optimizer that trains the (4, 2) table has state": lambda x: resize(x.table, 5),
    "this Adam did not take the last step": lambda x: resize(x.table, 5, x.rival),
    "optimizer is a str": lambda x: resize(x.layer, 5, "Adam"),
    "the optimizer state 'row_var' has shape (4, 1)": lambda x: resize(x.layer, 5, x.adafactor),
    "drop row 3, which is the padding row": lambda x: resize(x.padded, 3),
    "would drop row 3": lambda x: take(x.padded, [0, 1]),
    "ids[0] and ids[2] are both 1": lambda x: take(x.layer, [1, 0, 1]),
    "ids[1] is 4, but this vocabulary's ids are 0 to 3": lambda x: take(x.layer, [1, 4]),
    "ids[0] is -2": lambda x: take(x.layer, [-2]),
    "must list at least one row": lambda x: take(x.layer, []),
    "init has shape (1, 2), but the 2 new rows": lambda x: resize(
        x.layer, 6, init=torch.ones(1, 2)
    ),
}


@pytest.mark.parametrize("message", INVALID)
def test_errors_are_raised_before_any_change(message):
    examples = Examples()
    layers = [examples.layer, examples.other, examples.padded, examples.table]
    before = [copy.deepcopy(layer.state_dict()) for layer in layers]
    lag = examples.table.weight.lag
    assert lag is not None
    with pytest.raises(HotrowError, match=re.escape(message)):
        INVALID[message](examples)
    for layer, old in zip(layers, before, strict=True):
        assert layer.num_embeddings == 4
        assert_same_bits(layer.weight.data, old["weight"])
    assert examples.table.weight.lag is lag
    assert examples.optimizer.state[examples.table.weight]["exp_avg"].shape == (4, 2)


def test_a_compiled_model_sees_the_change():
    torch.manual_seed(0)
    layers = [hotrow.convert(nn.Embedding(6, 3), min_entries=0) for _ in range(2)]
    layers[1].load_state_dict(layers[0].state_dict())
    forwards = torch.compile(layers[0], backend="aot_eager"), layers[1]
    runs = [
        (layer, hotrow.optim.AdamW(layer.parameters(), lr=0.1), forward)
        for layer, forward in zip(layers, forwards, strict=True)
    ]
    for rows in (6, 9, 5):
        new, ids = torch.randn(max(0, rows - 6), 3), torch.randint(rows, (4,))
        for layer, optimizer, forward in runs:
            vocabulary.resize(layer, rows, optimizer, init=new)
            for _ in range(2):
                optimizer.zero_grad()
                forward(ids).pow(2).sum().backward()
                optimizer.step()
    assert isinstance(layers[0].weight, Table)
    # Compiled lookups settle rows at different times, which can change the rounding.
    torch.testing.assert_close(layers[0].weight.data, layers[1].weight.data)


@exhaustive
def test_large_tables_grow_without_a_copy_and_continue_to_train():
    rows = MIN_BYTES // (4 * COLUMNS) + 5
    runs = ThreeRuns("Adam", {"lr": 0.1}, rows=rows)
    runs.steps(2)
    runs.resize(rows + 3)
    lag = runs.table.lag
    for tensor in (lag.values, *lag.slots.values()):
        assert tensor.untyped_storage().nbytes() == 2 * rows * 4 * COLUMNS
    runs.steps(2)
    runs.check()


@pytest.mark.parametrize("change", ["take", "shrink and grow"])
@pytest.mark.parametrize(
    ("name", "on", "off"),
    [("SGD", {"momentum": 0.9}, {"momentum": 0}), ("Adam", {"amsgrad": True}, {"amsgrad": False})],
)
def test_state_that_the_options_do_not_use_keeps_its_rows(name, on, off, change):
    outcomes = []
    for keeps_lag in (True, False):  # without a ledger, all state tensors are changed as in torch
        torch.manual_seed(0)
        layer = hotrow.convert(nn.Embedding(6, 2, dtype=torch.float64), min_entries=0)
        assert type(layer.weight) is Table
        optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1, **on)
        for t in range(5):
            optimizer.param_groups[0].update(off if t == 3 else on)
            optimizer.zero_grad()
            rows = torch.tensor([t % 3, 2, 5]) if len(layer.weight) == 6 else torch.tensor([0])
            (layer(rows) * torch.arange(1.0, 7).reshape(3, 2)[: len(rows)]).sum().backward()
            optimizer.step()
            if t == 3:
                if not keeps_lag:
                    optimizer.state_dict()
                optimizer.zero_grad()
                if change == "take":
                    vocabulary.take(layer, [5, 4, 3, 2, 1, 0], optimizer)
                else:
                    vocabulary.resize(layer, 3, optimizer)
                    vocabulary.resize(layer, 6, optimizer, init=torch.zeros(3, 2))
        state = optimizer.state_dict()["state"][0]
        outcomes.append([layer.weight.detach(), *state.values()])
    for one, other in zip(*outcomes, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("change", ["take", "grow"])
@pytest.mark.parametrize(
    ("name", "on", "off"),
    [
        ("SGD", {"momentum": 0.9}, {"momentum": 0}),
        ("Adam", {"amsgrad": True}, {"amsgrad": False}),
        ("RMSprop", {"centered": True, "momentum": 0.5}, {"centered": False, "momentum": 0}),
    ],
)
def test_an_option_is_switched_off_before_the_rows_change(name, on, off, change):
    outcomes = []
    for library in (hotrow.optim, torch.optim):
        torch.manual_seed(0)
        layer = nn.Embedding(6, 2)
        if library is hotrow.optim:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        optimizer = getattr(library, name)(layer.parameters(), lr=0.1, **on)
        for t in range(12):
            optimizer.param_groups[0].update(off if 4 <= t < 8 else on)
            if t in (4, 8):  # the last step had other options
                if library is hotrow.optim:
                    assert isinstance(layer.weight.lag, RowLag)
                if change == "take":
                    vocabulary.take(layer, [5, 4, 3, -1, 1, 0], optimizer, init=torch.ones(1, 2))
                else:
                    count = len(layer.weight) + 2
                    vocabulary.resize(layer, count, optimizer, init=torch.ones(2, 2))
            optimizer.zero_grad()
            rows = torch.tensor([t % 3, 2, len(layer.weight) - 1])
            (layer(rows) * torch.arange(1.0, 7).reshape(3, 2)).sum().backward()
            optimizer.step()
        state = optimizer.state_dict()["state"][0]
        outcomes.append([layer.weight.detach(), *(state[key] for key in sorted(state))])
    for ours, torchs in zip(*outcomes, strict=True):
        torch.testing.assert_close(ours, torchs)
