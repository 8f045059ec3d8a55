"""Sharded tables give the same results as a single process, bit for bit."""

import contextlib
import copy
import functools
import itertools
import math
import pickle
import threading
import time
import warnings
from unittest.mock import patch

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.debugging_hooks import noop_hook
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow import vocabulary
from hotrow.distributed import look_up, replicate, shard
from hotrow.distributed.shards import ShardedRowChange
from hotrow.table.parameter import Table
from hotrow.vocabulary import changing
from tests.support.distributed_training import (
    OPTIMIZERS,
    STEPS,
    WORLD_SIZES,
    backward,
    converted_model,
    dense_model,
    distribute,
    error_text,
    make_batch,
    make_optimizer,
    rank_batch,
    state_values,
    train_rank,
    train_single_process,
    train_whole_batches,
    train_with_ddp,
    trainable_parameters,
)
from tests.support.exhaustive import exhaustive, grid
from tests.support.ranks import mesh_of_all, rank_processes
from tests.support.tolerance import assert_no_worse, assert_same_bits

# --- The same numbers ----------------------------------------------------------------------------


def sharded(name, count, dtype):
    rank = dist.get_rank()
    model = distribute(converted_model(dtype), "shard", count)
    optimizer = make_optimizer(name, model)
    train_rank(model, optimizer, count, rank, range(STEPS), dtype)
    return state_values(model, optimizer)


@pytest.mark.parametrize(
    ("name", "count"),
    grid(
        itertools.product(OPTIMIZERS, WORLD_SIZES),
        lambda name, count: (name, count) in [("AdamW", 2), ("Adagrad", 3), ("RMSprop", 2)],
    ),
)
def test_a_sharded_run_has_the_same_bits_as_one_process(name, count):
    dtype = torch.float64 if name == "Adagrad" else torch.float32
    model = converted_model(dtype)
    optimizer = make_optimizer(name, model)
    train_single_process(model, optimizer, count, range(STEPS), dtype)
    expected = state_values(model, optimizer)
    for found in rank_processes(count).run(sharded, name, count, dtype):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_bits(found[key], value)


@pytest.mark.parametrize("count", grid(WORLD_SIZES, (2).__eq__))
def test_shards_with_ddp_are_no_worse_than_torch_in_one_process(count):
    truth, rival = map(train_whole_batches, (torch.float64, torch.float32))
    for found in rank_processes(count).run(train_with_ddp, "shard", count):
        for name, value in truth.items():
            assert_no_worse(found[name], rival[name], value)


def several(count, together):
    """Look up ids in two tables (one of them twice), with separate calls or in one exchange."""
    torch.manual_seed(1)
    model = hotrow.convert(nn.ModuleList([nn.Embedding(13, 5), nn.Embedding(7, 3)]))
    model[1].double()
    model[1].padding_idx = 2
    shard(model, mesh_of_all(count))
    a, b = model
    torch.manual_seed(2)
    ids = [
        torch.randint(n, (3, 4 * count)).tensor_split(count, 1)[dist.get_rank()]
        for n in (13, 7, 13)
    ]
    pairs = list(zip((a, b, a), ids, strict=True))
    outputs = look_up(*pairs) if together else [layer(each) for layer, each in pairs]
    sum((each.double() ** 2).sum() for each in outputs).backward()
    return [each.detach() for each in outputs] + [layer.weight.grad.as_dense() for layer in (a, b)]


@pytest.mark.parametrize("count", [1, 3])
def test_one_exchange_for_several_tables_equals_separate_lookups(count):
    one_by_one = rank_processes(count).run(several, count, False)
    for found, expected in zip(
        rank_processes(count).run(several, count, True), one_by_one, strict=True
    ):
        for a, b in zip(found, expected, strict=True):
            assert_same_bits(a, b)
    assert any(bool(each[3].any()) for each in one_by_one)


def gradient_of_padding(count, padding):
    layer = nn.Embedding(3 * count, 2, padding_idx=padding)
    model = shard(hotrow.convert(nn.Sequential(layer)), mesh_of_all(count))
    model(torch.arange(3 * count)).sum().backward()
    return model[0].weight.grad.as_dense()[:, 0]


@pytest.mark.parametrize("padding", [0, 2, 3])  # each of these rows is the first or last of a rank
def test_a_padding_row_has_no_gradient_on_any_rank(padding):
    found = torch.cat(rank_processes(2).run(gradient_of_padding, 2, padding))
    assert found.tolist() == [float(row != padding) for row in range(6)]


def unused(count, users):
    """Look up ids in two tables in one exchange; only ranks in `users` use the second output."""
    model = shard(
        hotrow.convert(nn.ModuleList([nn.Embedding(4, 2) for _ in "ab"])), mesh_of_all(count)
    )
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=0.1, weight_decay=0.5)
    before = model[1].weight.detach().clone()
    a, b = look_up(*((layer, torch.arange(4)) for layer in model))
    (a.sum() + (b.sum() if dist.get_rank() in users else 0)).backward()
    optimizer.step()
    return model[1].weight.grad is not None, torch.equal(model[1].weight, before)


@pytest.mark.parametrize("users", [(), (1,), (0, 1)])
def test_a_table_is_not_updated_if_no_rank_used_its_output(users):
    assert rank_processes(2).run(unused, 2, users) == [(bool(users), not users)] * 2


def other_losses(count, many):
    """Look up ids in two tables, and use a different output in the loss of each rank."""
    sizes = (5, 7 if many else 5)
    model = shard(
        hotrow.convert(nn.ModuleList([nn.Embedding(n, 2) for n in sizes])), mesh_of_all(count)
    )
    outputs = [layer(torch.arange(5)) for layer in model]
    return error_text(outputs[dist.get_rank()].sum().backward)


@pytest.mark.parametrize("many", [False, True])
def test_different_losses_on_the_ranks_raise(many):
    for error in rank_processes(2).run(other_losses, 2, many):
        assert "different operations (rank 0: send back the gradients of lookup" in error


def norms(count):
    rank = dist.get_rank()
    model = distribute(converted_model(), "shard", count)
    backward(model, rank_batch(make_batch(1), count, rank), count)
    grads = [parameter.grad for parameter in model.parameters() if parameter.requires_grad]
    return [
        [torch.linalg.vector_norm(grad, order).item() for grad in grads]
        for order in (2, 1, float("inf"))
    ]


@pytest.mark.parametrize("count", [2, 4])
def test_the_norm_of_a_gradient_includes_all_ranks(count):
    model = converted_model()
    backward(model, make_batch(1), 1)
    grads = [parameter.grad.as_dense() for parameter in trainable_parameters(model)]
    for found in rank_processes(count).run(norms, count):
        for order, each in zip((2, 1, float("inf")), found, strict=True):
            expected = torch.tensor([torch.linalg.vector_norm(grad, order) for grad in grads])
            torch.testing.assert_close(torch.tensor(each), expected)


def infinity_norms(count):
    """Return the infinity norm of a gradient with a NaN in each of the rows in turn."""
    model = shard(hotrow.convert(nn.Sequential(nn.Embedding(6, 2))), mesh_of_all(count))
    found = []
    for row in range(6):
        model.zero_grad()
        outputs = model(torch.arange(6))
        outputs.backward(torch.ones(6, 2).index_fill(0, torch.tensor(row), torch.nan))
        found.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0, float("inf")).item())
    return found


@pytest.mark.parametrize("count", [2, 3])
def test_the_infinity_norm_is_nan_if_any_rank_has_a_nan(count):
    for found in rank_processes(count).run(infinity_norms, count):
        assert all(map(math.isnan, found))


def scaled(count):
    """Produce an infinite gradient in a row of the last rank, so that every rank skips the step."""
    model = shard(hotrow.convert(nn.Sequential(nn.Embedding(9, 2))), mesh_of_all(count))
    optimizer = hotrow.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    before = model[0].weight.detach().clone()
    outputs = model(torch.tensor([0, 8]))
    scaler.scale((outputs * torch.tensor([[1.0], [torch.inf]])).sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    return scaler.get_scale(), torch.equal(model[0].weight, before)


def test_a_gradient_scaler_detects_infinities_on_another_rank():
    assert rank_processes(3).run(scaled, 3) == [(2.0, True)] * 3


def assign(kind, parameter):
    """Change a gradient as the code of a model might; assign the result to `parameter.grad`."""
    gradient = parameter.grad
    weight = parameter.detach()
    if kind == "decay":
        parameter.grad = gradient + 0.1 * weight
    elif kind == "power":
        parameter.grad = gradient**3
    elif kind == "lerp":
        parameter.grad = gradient.lerp(weight, 0.1)
    elif kind == "columns":
        parameter.grad = (gradient + 1).t().contiguous().t()
    elif kind == "data":
        gradient.data = gradient.add(weight, alpha=0.1)
    elif kind == "in place":
        gradient.add_(weight, alpha=0.1)
    elif kind == "copy":
        parameter.grad = copy.deepcopy(gradient)


def train_with_dense_gradients(kind, count, is_sharded, name, by_scaler):
    """Clip or unscale dense gradients, which differ between the ranks; return all results."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(20, 3), nn.Flatten(), nn.Linear(6, 2)).double()
    if is_sharded:
        shard(hotrow.convert(model, min_entries=0), mesh_of_all(count))
        assert isinstance(model[0].weight, Table)
        assert model[0].weight.shards is not None
    trained = DistributedDataParallel(model)
    library = hotrow.optim if is_sharded else torch.optim
    optimizer = getattr(library, name)(model.parameters(), lr=0.05, weight_decay=0.01)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    norms = []
    if kind == "hook":
        model[0].weight.register_hook(lambda grad: torch.where(grad.isnan(), 0, grad))
    if kind == "zeros":
        for parameter in model.parameters():
            parameter.grad = torch.zeros_like(parameter)
    for t in range(4):
        optimizer.zero_grad(set_to_none=kind != "zeros")
        torch.manual_seed(t)
        ids = torch.randint(20, (count, 4, 2))[dist.get_rank()]
        last_row = model[0](torch.tensor([19])).sum()
        infinite = by_scaler and t == 1 and dist.get_rank() == 0
        loss = trained(ids).square().sum() + last_row * (torch.inf if infinite else 1)
        (scaler.scale(loss) if by_scaler else loss).backward()
        for parameter in model.parameters():
            assign(kind, parameter)
        if is_sharded:
            assert model[0].weight.grad.row_storage.shards is not None
        if by_scaler:
            scaler.unscale_(optimizer)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 0.5))
        (scaler.step(optimizer), scaler.update()) if by_scaler else optimizer.step()
    values = {key: full(value) for key, value in model.state_dict().items()}
    return {**values, "norms": torch.stack(norms), "scale": torch.tensor(scaler.get_scale())}


DENSE_GRADIENTS = (
    "decay", "power", "lerp", "columns", "data", "in place", "copy", "hook", "zeros"
)  # fmt: skip


@pytest.mark.parametrize(
    ("name", "by_scaler"),  # RMSprop takes dense steps
    grid(
        itertools.product(("SGD", "RMSprop"), (False, True)),
        lambda name, by_scaler: name == "SGD" and not by_scaler,
    ),
)
@pytest.mark.parametrize("kind", DENSE_GRADIENTS)
def test_dense_gradients_of_shards_include_all_ranks(kind, name, by_scaler):
    run = rank_processes(2).run
    expected = run(train_with_dense_gradients, kind, 2, False, name, by_scaler)
    found = run(train_with_dense_gradients, kind, 2, True, name, by_scaler)
    for each, its in zip(found, expected, strict=True):
        torch.testing.assert_close(each, its, equal_nan=True)
        for key, value in found[0].items():
            assert_same_bits(each[key], value)


def multiply_by_a_shard(count):
    layer = shard(hotrow.convert(nn.Embedding(8, 2), min_entries=0), mesh_of_all(count))
    rows = layer.weight.shape[0]
    x = hotrow.one_hot(torch.tensor([0, rows - 1]), rows, torch.float32)
    return [error_text(lambda x=x: x @ layer.weight), error_text(lambda: x.mean(0) @ layer.weight)]


def test_a_one_hot_cannot_be_multiplied_by_a_shard():
    """The product would look up rows of the whole table."""
    for errors in rank_processes(2).run(multiply_by_a_shard, 2):
        assert all("cannot be multiplied by a sharded table" in error for error in errors)


def a_mesh_of_two_dimensions():
    """Train with shards over one mesh dimension and replicas over the other."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(converted_model(), mesh["shards"])
    model = hotrow.distributed.replicate(model, mesh["replicas"])
    optimizer = make_optimizer("AdamW", model)
    train_rank(model, optimizer, 4, dist.get_rank(), range(STEPS))
    return state_values(model, optimizer)


def test_replicated_shards_are_no_worse_than_torch():
    model = dense_model().double()
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZERS["AdamW"])
    rival = dense_model()
    other = torch.optim.AdamW(rival.parameters(), **OPTIMIZERS["AdamW"])
    for each in (model, rival):
        each.layer.requires_grad_(False)
    for t in range(STEPS):
        for each, its, dtype in ((model, optimizer, torch.float64), (rival, other, torch.float32)):
            its.zero_grad()
            backward(each, make_batch(t, dtype), 1)
            its.step()
    results = rank_processes(4).run(a_mesh_of_two_dimensions)
    for found in results:
        for name, value in model.state_dict().items():
            assert_no_worse(found[name], rival.state_dict()[name], value)
            assert_same_bits(found[name], results[0][name])


# --- Memory, copies, initialization --------------------------------------------------------------


def memory(count):
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer("AdamW", model)
    backward(model, rank_batch(make_batch(1), count, dist.get_rank()), count)
    optimizer.step()
    state = optimizer.state[model.user.weight]
    return [
        model.user.weight.untyped_storage().nbytes(),
        state["exp_avg"].untyped_storage().nbytes(),
        len(model.user.weight.lag.row_steps) if model.user.weight.lag else 0,
        len(model.day.weight),
    ]


def test_a_rank_stores_only_its_rows_and_their_state():
    row = 6 * 4
    found = rank_processes(4).run(memory, 4)
    assert [each[0] for each in found] == [26 * row, 26 * row, 26 * row, 23 * row]  # of 101
    assert [each[1] for each in found] == [each[0] for each in found]
    assert [each[2] * row for each in found] == [each[0] for each in found]
    assert [each[3] for each in found] == [1, 1, 0, 0]  # there are fewer rows than ranks


def copies(count):
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer("AdamW", model)
    train_rank(model, optimizer, count, dist.get_rank(), range(2))
    copied = copy.deepcopy((model, optimizer))
    errors = [error_text(pickle.dumps, each) for each in (model.user.weight, optimizer)]
    for each in ((model, optimizer), copied):
        train_rank(*each, count, dist.get_rank(), range(2, STEPS))
        assert isinstance(each[0].user.weight, Table)
    return state_values(model, optimizer), state_values(*copied), errors


def test_a_copy_is_sharded_and_pickling_raises():
    for values, its_values, errors in rank_processes(2).run(copies, 2):
        assert values.keys() == its_values.keys()
        for key, value in values.items():
            assert_same_bits(its_values[key], value)
        for error in errors:
            assert "a sharded table cannot be pickled" in error
            assert "torch.distributed.checkpoint" in error


def of_meta(count):
    with torch.device("meta"):
        model = hotrow.convert(nn.Sequential(nn.Embedding(9, 4, padding_idx=8)))
    shard(model, mesh_of_all(count))
    return model(torch.arange(9)).detach()


def test_a_meta_table_is_initialized_in_shards():
    for found in rank_processes(2).run(of_meta, 2):
        assert found.device.type == "cpu"
        assert 0.3 < float(found[:8].std()) < 3
        assert not found[8].any()  # padding
        assert len(found.unique(dim=0)) == 9  # rows differ although all ranks have the same seed


# --- Errors: every rank raises, and can continue -------------------------------------------------


def bad_ids(count, bad):
    """Look up invalid ids on one rank, then valid ids on all ranks."""
    model = distribute(converted_model(), "shard", count)
    ids = torch.tensor([0, 5])
    mine = bad if dist.get_rank() == 1 else ids
    found = error_text(model.user, mine)
    return found, model.user(ids).tolist() == model.user(ids).tolist()


def end_after_an_error(method, kind, path):
    """Look up NaN on rank 1, which exits right after its error; rank 0 gets the error late."""
    model = distribute(converted_model(), method, 2)
    is_bad, ended_too_early = dist.get_rank() == 1, []
    all_gather = dist.all_gather_object

    def gather_slowly(answers, value, group):
        all_gather(answers, value, group=group)
        if not is_bad:
            time.sleep(0.5)
            ended_too_early.append(path.exists())

    ids = torch.tensor([[float("nan"), 1]]) if is_bad else torch.tensor([[1, 2]])
    with patch.object(dist, "all_gather_object", gather_slowly):
        error = error_text(getattr(model, kind), ids)
    if is_bad:
        path.touch()
    dist.barrier()
    return error, ended_too_early


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize("kind", grid(["user", "word", "bag"], "user".__eq__))
def test_the_reason_reaches_every_rank_before_the_failed_rank_ends(method, kind, tmp_path):
    path = tmp_path / "ended"
    (other, ended), (own, _) = rank_processes(2).run(end_after_an_error, method, kind, path)
    assert ended == [False]
    assert other == f"rank 1 of 2 could not look up ids in {kind}.weight for training: {own}"


@pytest.mark.parametrize(
    ("bad", "text"),
    [
        (torch.tensor([7, 101]), r"input[1] = 101, but the table has 101 rows (valid ids: 0..100)"),
        (torch.tensor([-1]), r"input[0] = -1, but the table has 101 rows"),
        (torch.tensor([1.0]), "input is float32 of shape (1,), but ids must be int64 or int32"),
        ([7], "input is a list, but ids must be a tensor: use torch.tensor(input)"),
    ],
)
def test_a_bad_id_on_one_rank_raises_on_all_ranks(bad, text):
    found = rank_processes(3).run(bad_ids, 3, bad)
    assert text in found[1][0]
    for error, goes_on in (found[0], found[2]):
        assert error.startswith("rank 1 of 3 could not look up ids in user.weight for training: ")
        assert text in error
        assert goes_on


INVALID_IDS = {
    "a list": list,
    "a sparse tensor": lambda ids: torch.tensor(ids).to_sparse(),
    "layout torch.strided": lambda ids: torch.nested.nested_tensor([torch.tensor(ids)]),
    "meta": lambda ids: torch.tensor(ids, device="meta"),
}


def look_up_invalid_ids(method, text):
    """Pass invalid ids or offsets on rank 1, then look up valid ids on all ranks."""
    layers = hotrow.convert(
        nn.ModuleList([nn.Embedding(7, 3), nn.EmbeddingBag(7, 3, mode="sum")]), min_entries=0
    )
    layers = distribute(layers, method, 2)
    errors = []
    make_ids = INVALID_IDS[text] if dist.get_rank() == 1 else torch.tensor
    lookup, bag = layers
    ids, offset = torch.tensor([1, 2]), torch.tensor([0])
    for layer, invalid, valid in (
        (lookup, [make_ids([1, 2])], [ids]),
        (bag, [make_ids([1, 2]), offset], [ids, offset]),
        (bag, [ids, make_ids([0])], [ids, offset]),
    ):
        assert isinstance(layer.weight, Table)
        errors.append(error_text(layer, *invalid, error_type=Exception))
        layer(*valid).sum().backward()
    return errors


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize("text", INVALID_IDS)
def test_invalid_ids_on_one_rank_raise_on_all_ranks(method, text):
    for errors in rank_processes(2).run(look_up_invalid_ids, method, text):
        for error in errors:
            assert error is not None
            assert text in error


def bad_layers(count):
    """Return the errors that hotrow's layers and a converted bag raise on this rank."""
    model = distribute(converted_model(), "shard", count)
    bag = shard(hotrow.convert(nn.EmbeddingBag(5, 2)), mesh_of_all(count))
    first = dist.get_rank() == 0
    word = torch.tensor([17] if first else [3])
    offsets = torch.tensor([0, 9] if first else [0, 1])
    ids = torch.tensor([1, 2])
    return [
        error_text(model.word, word),
        error_text(model.bag, ids, offsets),
        error_text(model.word, torch.eye(17)),
        error_text(model.word, torch.tensor([]) if first else torch.tensor([3])),
        error_text(bag, ids, offsets),
        error_text(look_up, (model.user, word), (model.day, torch.tensor([0, 2 if first else 1]))),
    ]


def test_errors_of_layers_reach_the_other_ranks():
    mine, other = rank_processes(2).run(bad_layers, 2)
    assert "input[0] = 17, but the table has 17 rows" in mine[0]
    assert "offsets[1] = 9, but there are 2 ids" in mine[1]
    assert "one-hots or probabilities" in mine[2]
    assert "one-hots or probabilities" in mine[3]
    assert "offsets[1] = 9, but there are 2 ids" in mine[4]
    assert "input[1] = 2, but the table has 2 rows" in mine[5]
    for a, b in zip(mine, other, strict=True):
        assert a in b  # the other rank's message also names the rank that failed


def bad_arguments(method):
    """Pass bad arguments on rank 1; after each error, look up rows on all ranks."""
    model, is_bad = distribute(converted_model(), method, 2), dist.get_rank() == 1
    assert isinstance(model.user.weight, Table)
    ids, errors = torch.tensor([0, 5]), []
    for use in (
        lambda: nn.functional.embedding(ids, model.user.weight, 101 if is_bad else None),
        lambda: nn.functional.embedding_bag(
            torch.zeros(2, 0 if is_bad else 3, dtype=torch.long), model.bag.weight, mode="sum"
        ),
        lambda: nn.functional.embedding_bag(
            ids[None], model.bag.weight, mode="sum", padding_idx=1000 if is_bad else None
        ),
    ):
        errors.append(error_text(use))
        rows = model.user(ids)
        rows.sum().backward()
        model.user.weight.grad = None
        errors.append(None if torch.equal(rows, model.user(ids)) else "other rows")
    return errors


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_bad_arguments_on_one_rank_raise_on_all_ranks(method):
    other, own = rank_processes(2).run(bad_arguments, method)
    assert other[1::2] == own[1::2] == [None] * 3
    for a, b in zip(own[::2], other[::2], strict=True):
        assert a in b
    assert "padding_idx = 101, but the table has 101 rows" in own[0]
    assert "torch does not accept empty bags of shape (2, 0)" in own[2]
    assert "padding_idx = 1000, but the table has" in own[4]


def bad_id_beside_a_frozen_table(frozen_name, name):
    """On a 2-D mesh, look up an invalid id in a table, together with a frozen table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layers = []
    for each in (frozen_name, name):
        model = nn.ModuleDict({each: nn.Embedding(9, 2)})
        hotrow.convert(model, min_entries=0)[each].requires_grad_(bool(layers))
        shard(model, mesh["shards"])
        layers.append(hotrow.distributed.replicate(model, mesh["replicas"])[each])
    frozen, layer = layers
    assert isinstance(frozen.weight, Table)
    assert not frozen.weight.requires_grad
    ids = torch.tensor([1])
    bad_ids = ids + 8 * (dist.get_rank() == 1)
    return [error_text(look_up, (frozen, ids), (layer, each)) for each in (bad_ids, ids)]


@pytest.mark.parametrize(
    ("frozen_name", "name"),
    grid(
        [("day", "user"), ("id", "user id"), ("id", "user_id"), ("id", "id")],
        lambda frozen_name, name: name == "user_id",
    ),
)
def test_a_bad_id_beside_a_frozen_table_raises_on_all_ranks(frozen_name, name):
    found = rank_processes(4).run(bad_id_beside_a_frozen_table, frozen_name, name)
    for error, following in found:
        assert "input[0] = 9, but the table has 9 rows" in error
        assert following is None


def bad_id_in_a_table_without_replicas():
    """On a 2-D mesh, look up an invalid id in a sharded table, together with a frozen table."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = converted_model()
    model.day.weight.requires_grad_(False)
    shard(model, mesh["shards"])
    hotrow.distributed.replicate(model.day, mesh["replicas"])
    bad = torch.tensor([101 if dist.get_rank() == 1 else 5])
    return error_text(look_up, (model.user, bad), (model.day, torch.tensor([1])))


def test_a_bad_id_in_a_table_without_replicas_raises_on_the_ranks_with_its_shards():
    first, second, *others = rank_processes(4).run(bad_id_in_a_table_without_replicas)
    assert others == [None, None]
    assert second in first
    assert "input[0] = 101, but the table has 101 rows" in second


def bad_id_on_a_mesh():
    """Look up an invalid id on one rank of a 2-D mesh, then continue training on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(converted_model(), mesh["shards"])
    model = hotrow.distributed.replicate(model, mesh["replicas"])
    ids = torch.tensor([101 if dist.get_rank() == 2 else 5])
    errors = [
        error_text(model.user, ids),
        error_text(look_up, (model.day, ids % 2), (model.user, ids)),
    ]
    optimizer = make_optimizer("AdamW", model)
    train_rank(model, optimizer, 4, dist.get_rank(), range(2))
    return errors, state_values(model, optimizer)


def test_a_bad_id_on_a_two_dimensional_mesh_raises_on_all_ranks():
    found = rank_processes(4).run(bad_id_on_a_mesh)
    for errors, values in found:
        for error in errors:
            assert "input[0] = 101, but the table has 101 rows (valid ids: 0..100)" in error
        for name, value in found[0][1].items():
            assert_same_bits(values[name], value)


def one_evaluates_on_a_mesh(name, resizes):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(converted_model(), mesh["shards"])
    model = hotrow.distributed.replicate(model, mesh["replicas"])
    if dist.get_rank() and resizes:
        return error_text(vocabulary.resize, model.user, 102)
    if dist.get_rank():
        return error_text(model.user, torch.tensor([5]))
    with torch.no_grad():
        return error_text(model.get_submodule(name), torch.tensor([5]))


@pytest.mark.parametrize(
    ("name", "resizes"),
    grid(itertools.product(["user", "word"], [False, True]), lambda name, _: name == "word"),
)
def test_one_evaluating_rank_on_a_two_dimensional_mesh_raises_on_all_ranks(name, resizes):
    for error in rank_processes(4).run(one_evaluates_on_a_mesh, name, resizes):
        assert "the ranks run different operations" in error


def other_losses_on_a_mesh():
    """On a 2-D mesh, differentiate another lookup on one rank; then continue on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = shard(converted_model(), mesh["shards"])
    model = hotrow.distributed.replicate(model, mesh["replicas"])
    ids = torch.tensor([5])
    outputs = model.user(ids), model.user(ids + 1)
    error = error_text(outputs[dist.get_rank() == 0].sum().backward)
    model.zero_grad()
    model.user(ids).sum().backward()
    return error, model.user.weight.grad.as_dense()


def test_losses_of_other_lookups_on_a_two_dimensional_mesh_raise_on_all_ranks():
    found = rank_processes(4).run(other_losses_on_a_mesh)
    for rank, (error, gradient) in enumerate(found):
        assert "rank 0: send back the gradients of lookup 2; rank 1: send back the" in error
        assert_same_bits(gradient, found[rank % 2][1])


def other_look_ups(count):
    model = distribute(converted_model(), "shard", count)
    layer = model.user if dist.get_rank() else model.word
    return error_text(layer, torch.tensor([0]))


def take_rows_with_an_lr_per_rank(count, name, option):
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(4, 1), min_entries=0)
    assert isinstance(layer.weight, Table)
    rank, local = dist.get_rank(), slice(2 * dist.get_rank(), 2 * dist.get_rank() + 2)
    dense = nn.Parameter(layer.weight.detach().clone()[local])
    hotrow.distributed.shard(layer, mesh_of_all(count))
    ours = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1)
    theirs = getattr(torch.optim, name)([dense], lr=0.1)
    for t in range(4):
        ids = torch.arange(4) if t == 0 else torch.tensor([0, 2])
        for optimizer in (ours, theirs):
            optimizer.zero_grad()
            group = optimizer.param_groups[0]
            if option == "lr" or t == 0:
                group[option] = {"lr": 0.1 / (1 + t * rank), "betas": (0.9 - rank / 2, 0.9)}[option]
        layer(ids).square().sum().backward()
        ours.step()
        dense[ids[ids // 2 == rank] - 2 * rank].square().sum().backward()
        theirs.step()
    ours.zero_grad()
    vocabulary.take(layer, [2, 3, 0, 1], ours)
    parts = [torch.empty_like(dense) for _ in range(count)]
    dist.all_gather(parts, dense.detach())
    return layer.weight.detach(), torch.cat(parts)[[2, 3, 0, 1]][local]


@pytest.mark.parametrize(("name", "option"), [("AdamW", "lr"), ("AdamW", "betas"), ("Adam", "lr")])
def test_missed_steps_keep_the_options_of_their_rank_when_rows_move(name, option):
    for ours, theirs in rank_processes(2).run(take_rows_with_an_lr_per_rank, 2, name, option):
        torch.testing.assert_close(ours, theirs)


def cast_on_one_rank(count, before, after):
    model = distribute(converted_model().to(getattr(torch, before)), "shard", count)
    assert isinstance(model.user.weight, Table)
    if dist.get_rank():
        getattr(model, after.removesuffix("32"))()
    return error_text(model.user, torch.tensor([0, 100]))


def test_different_operations_on_the_ranks_raise():
    for error in rank_processes(2).run(other_look_ups, 2):
        lookups = [
            f"look up ids in {name}.weight for training in torch.float32 before step 1"
            for name in ("word", "user")
        ]
        assert f"different operations (rank 0: {lookups[0]}; rank 1: {lookups[1]}): run" in error


@pytest.mark.parametrize(("before", "after"), [("bfloat16", "half"), ("float64", "float32")])
def test_a_cast_on_one_rank_raises_on_all_ranks(before, after):
    for error in rank_processes(2).run(cast_on_one_rank, 2, before, after):
        assert (
            f"rank 0: look up ids in user.weight for training in torch.{before} before step 1; rank"
            in error
        )


def ids_of_other_dtypes(count):
    model = distribute(converted_model(), "shard", count)
    ids = torch.tensor([100, 3, 100])
    rows = model.user(ids.int() if dist.get_rank() else ids)
    return rows.detach()


def test_ids_may_have_different_dtypes_on_the_ranks():
    for found in rank_processes(2).run(ids_of_other_dtypes, 2):
        assert_same_bits(found, converted_model().user(torch.tensor([100, 3, 100])).detach())


def refused(count):
    rank = dist.get_rank()
    other = hotrow.convert(nn.Sequential(nn.Embedding(5 + rank, 2)))
    padded = hotrow.convert(nn.Sequential(nn.Embedding(5, 2, padding_idx=rank)))
    bag = nn.EmbeddingBag(5, 2, mode="sum", include_last_offset=rank == 0)
    frozen = hotrow.convert(nn.Sequential(nn.Embedding(5, 2))).requires_grad_(rank == 0)
    counted = hotrow.convert(nn.Sequential(nn.Embedding(5, 2, scale_grad_by_freq=True)))
    kept = hotrow.convert(nn.Embedding(5, 2))
    vocabulary.freeze(kept, [1])
    tied = distribute(converted_model(), "shard", count)
    none = nn.Linear(2, 2) if rank else converted_model()
    inner = shard(hotrow.convert(nn.Sequential(nn.Embedding(2 * count, 2))), mesh_of_all(count))
    wrapped = DistributedDataParallel(nn.Sequential(inner, nn.Linear(2, 2)))
    wide = init_device_mesh("cpu", (count, 1), mesh_dim_names=("a", "b"))
    mesh = mesh_of_all(count)
    return [
        error_text(shard, other, mesh),
        error_text(shard, padded, mesh),
        error_text(shard, frozen, mesh),
        error_text(shard, hotrow.convert(nn.Sequential(bag)), mesh),
        error_text(shard, counted, mesh),
        error_text(shard, kept, mesh),
        error_text(shard, nn.Linear(2, 2), mesh),
        error_text(shard, none, mesh),
        error_text(wrapped, torch.tensor([0])),
        error_text(shard, converted_model(), wide),
        error_text(shard, converted_model(), "cpu"),
        error_text(shard, converted_model(), DeviceMesh("cpu", [1, 0])),
        error_text(shard, converted_model(), DeviceMesh("cpu", [1 - rank], _init_backend=False)),
        error_text(shard, tied, mesh),
        error_text(shard, DistributedDataParallel(nn.Linear(2, 2)), mesh),
        error_text(lambda: tied.load_state_dict(tied.state_dict(), assign=True)),
        error_text(lambda: tied.user.weight.norm()),
        error_text(lambda: nn.functional.linear(torch.ones(1, 6), tied.user.weight)),
        error_text(lambda: look_up((nn.Embedding(3, 2), torch.tensor([0])))),
    ]


def test_unsupported_models_raise_on_every_rank():
    texts = [
        "shard needs the same tables on every rank, but rank 0 has 0.weight of Embedding(5, 2) "
        "in torch.float32 and rank 1 has 0.weight of Embedding(6, 2)",
        "rank 0 has 0.weight of Embedding(5, 2, padding_idx=0) in torch.float32 and rank 1 has "
        "0.weight of Embedding(5, 2, padding_idx=1)",
        "rank 1 has 0.weight of Embedding(5, 2) in torch.float32, frozen",
        "rank 0 has 0.weight of EmbeddingBag(5, 2, mode='sum') in torch.float32, include_last",
        "0 has scale_grad_by_freq",
        "weight has frozen rows, which shard does not support: call hotrow.vocabulary.unfreeze",
        "shard found no tables in this Linear",
        "shard found no tables in this Linear",
        "DistributedDataParallel treats the table 0.weight as a dense parameter",
        "the mesh has 2 dimensions, but shard takes a one-dimensional mesh: use mesh['b']",
        "mesh is a str, but shard takes a DeviceMesh",
        "the mesh has the ranks [1, 0], but shard takes them in ascending order",
        "is not one of the mesh's ranks [",
        "user.weight is already sharded",
        "use DistributedDataParallel(shard(model, mesh))",
        "load_state_dict(assign=True) would replace the table user.weight",
        "norm with a sharded or replicated table as an argument cannot be differentiated",
        "linear with a sharded or replicated table as an argument cannot be differentiated",
        "Embedding(3, 2) is not sharded",
    ]
    for found in rank_processes(2).run(refused, 2):
        for error, text in zip(found, texts, strict=True):
            assert error is not None, text
            assert text in error


def shard_after_destroyed_group(ranks):
    """Shard two layers over some ranks, and destroy another group in between."""
    group = dist.new_group()
    mesh = DeviceMesh("cpu", ranks)
    try:
        if dist.get_rank() not in ranks:
            return None
        shard(hotrow.convert(nn.Embedding(10, 3)), mesh)
        dist.destroy_process_group(group)
        return error_text(shard, hotrow.convert(nn.Embedding(10, 3)), mesh)
    finally:
        dist.barrier()


def test_a_group_that_torch_cannot_create_is_an_error():
    found = rank_processes(3).run(shard_after_destroyed_group, [0, 1])
    for rank in (0, 1):
        assert "torch can't create another process group of the ranks [0, 1]" in found[rank]
    rank_processes(3).close()


# --- Stale rows and partial tables ---------------------------------------------------------------


def shard_after_new_group(ranks):
    """Shard a layer over some ranks, after the first rank alone has entered another group."""
    mesh = DeviceMesh("cpu", ranks)
    group = dist.new_group([0])
    try:
        if dist.get_rank() not in ranks:
            return None
        layer = hotrow.convert(nn.Embedding(10, 3))
        text = error_text(shard, layer, mesh)
        return text or layer(torch.arange(10)).shape
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            dist.destroy_process_group(group)


@pytest.mark.parametrize("ranks", [[0, 1, 2], [0, 1]])
def test_no_rank_waits_if_ranks_are_in_different_numbers_of_groups(ranks):
    found = rank_processes(3).run(shard_after_new_group, ranks)
    for rank in ranks:
        if len(ranks) == 3:
            assert found[rank] == (10, 3)
        else:
            assert "some of the ranks [0, 1] have created process groups" in found[rank]


def trained_before(count):
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(10, 3))
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    for t in range(5):  # makes some rows stale
        optimizer.zero_grad()
        layer(torch.tensor([t, 9 - t, 0])).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    alone = copy.deepcopy(layer)
    shard(layer, init_device_mesh("cpu", (count,)))
    return layer(torch.arange(10)).detach(), alone(torch.arange(10)).detach()


def test_rows_settle_before_they_are_split():
    for found, expected in rank_processes(2).run(trained_before, 2):
        assert_same_bits(found, expected)


def use_a_part_as_the_whole(count):
    layer = shard(hotrow.convert(nn.Embedding(10, 3)), init_device_mesh("cpu", (count,)))
    errors_found = []
    for attempt in (
        lambda: layer.load_state_dict({"weight": torch.zeros(5, 3)}),
        lambda: torch.vmap(layer)(torch.tensor([[1], [7]])),
    ):
        with pytest.raises(hotrow.HotrowError) as caught:
            attempt()
        errors_found.append(str(caught.value))
    return errors_found


def test_using_a_shard_as_the_whole_table_raises():
    for load, transform in rank_processes(2).run(use_a_part_as_the_whole, 2):
        assert "weight has 5 rows in the state dict, but the sharded table has 10" in load
        assert "cannot be looked up inside a torch.func transform" in transform


def replace_the_table(count, by):
    from torch.distributed.fsdp import FullyShardedDataParallel

    model = shard(hotrow.convert(nn.Sequential(nn.Embedding(10, 3))), mesh_of_all(count))
    layer, ids = model[0], torch.tensor([0])
    assert isinstance(layer.weight, Table)
    model(ids)
    if by == "a parameter":
        layer.weight = nn.Parameter(layer.weight.data)
        return [error_text(model, ids), error_text(copy.deepcopy(model), ids)]
    if by == "functional_call":
        values = {"0.weight": layer.weight.data}
        return [error_text(torch.func.functional_call, model, values, ids)]
    use_orig_params = by == "FSDP with the original parameters"
    wrapped = FullyShardedDataParallel(
        model, use_orig_params=use_orig_params, device_id=torch.device("cpu")
    )
    return [error_text(wrapped, ids)]


@pytest.mark.parametrize(
    "by", ["a parameter", "functional_call", "FSDP", "FSDP with the original parameters"]
)
def test_a_layer_whose_sharded_table_was_replaced_raises(by):
    for errors_found in rank_processes(2).run(replace_the_table, 2, by):
        for error in errors_found:
            assert error is not None
            assert "instead of the sharded table" in error


# --- Gradients that don't reach the other ranks ---------------------------------------------------


class Product(torch.autograd.Function):
    """Torch calls this function without the table's `__torch_function__`."""

    @staticmethod
    def forward(ctx, weight, inputs):
        ctx.save_for_backward(inputs)
        return inputs @ weight.t()

    @staticmethod
    def backward(ctx, gradient):
        return gradient.t() @ ctx.saved_tensors[0], None


BYPASSES = {
    "function": lambda weight: Product.apply(weight, torch.ones(3, 2)),
    "checkpoint": lambda weight: checkpoint(
        lambda weight, inputs: inputs @ weight.t(), weight, torch.ones(3, 2), use_reentrant=True
    ),
}


def differentiate_a_bypass(method, count, name, lookups, was_frozen):
    """Backpropagate through lookups and an operation that hotrow doesn't see."""
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(6, 2)).requires_grad_(not was_frozen)
    {"shard": shard, "replicate": replicate}[method](layer, mesh_of_all(count))
    layer.requires_grad_(True)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1)
    before = layer.weight.detach().clone()
    first = [layer(torch.tensor([1, 4])).sum() for _ in range(lookups)]
    loss = BYPASSES[name](layer.weight).sum() + sum(first)
    errors = [error_text(loss.backward)]
    errors.append(
        error_text(
            lambda: torch.autograd.grad(BYPASSES["function"](layer.weight).sum(), layer.weight)
        )
    )
    assert layer.weight.grad is None
    assert torch.equal(layer.weight.detach(), before)
    layer(torch.arange(6)).sum().backward()  # training can continue
    optimizer.step()
    assert isinstance(layer.weight, Table)
    return errors, not torch.equal(layer.weight.detach(), before)


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("name", "lookups", "was_frozen"),
    [
        ("function", 0, False),
        ("function", 0, True),
        ("function", 2, False),
        ("checkpoint", 1, False),
    ],
)
def test_a_gradient_of_another_operation_than_a_lookup_raises(method, name, lookups, was_frozen):
    arguments = method, 2, name, lookups, was_frozen
    for errors, continues in rank_processes(2).run(differentiate_a_bypass, *arguments):
        for error in errors:
            assert "includes an operation that is not a lookup" in error
        assert continues


def look_up_with_a_dense_hook(method, count, is_early):
    """The user's hooks make the gradient of the lookups dense, and compute its norm."""
    layer, norms = hotrow.convert(nn.Embedding(6, 2)), []

    def register_hooks():
        weight = layer.weight
        weight.register_hook(lambda gradient: gradient.as_dense() + 1)
        weight.register_post_accumulate_grad_hook(lambda table: norms.append(table.grad.norm(1)))

    if is_early:
        register_hooks()
    {"shard": shard, "replicate": replicate}[method](layer, mesh_of_all(count))
    if not is_early:
        register_hooks()
    (layer(torch.arange(6)).sum() + layer(torch.tensor([0, 5])).sum()).backward()
    assert isinstance(layer.weight, Table)
    return layer.weight.grad[:, 0], norms


@pytest.mark.parametrize("is_early", [False, True])
@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_a_hook_may_change_the_gradient_of_lookups(method, is_early):
    found = rank_processes(2).run(look_up_with_a_dense_hook, method, 2, is_early)
    rows = torch.cat([rows for rows, _ in found]) if method == "shard" else found[0][0]
    assert rows.tolist() == [3, 2, 2, 2, 2, 3]
    assert [norms for _, norms in found] == [[28], [28]]  # of two columns of all rows


HOOKS = {
    "the same": lambda gradient: gradient * 2,
    "other rows": lambda gradient: gradient * (1 + dist.get_rank()),
    "other values of all rows": lambda gradient: gradient.as_dense() + dist.get_rank(),
    "a dense copy on one rank": lambda gradient: gradient.as_dense(),
    "a change on one rank": lambda gradient: gradient * 2,
}


def step_with_hooks(kind, name):
    """Step a replicated table; return the error, and whether the weight has changed."""
    layer = hotrow.convert(nn.Embedding(6, 2), min_entries=0)
    replicate(layer, mesh_of_all(2))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1)
    if dist.get_rank() or "on one rank" not in name:
        if kind == "tensor":
            layer.weight.register_hook(HOOKS[name])
        else:
            layer.weight.register_post_accumulate_grad_hook(
                lambda table: setattr(table, "grad", HOOKS[name](table.grad))
            )
    before = layer.weight.detach().clone()
    layer(torch.tensor([0, 5])).sum().backward()
    error = error_text(optimizer.step)
    return error, not torch.equal(layer.weight, before)


@pytest.mark.parametrize("kind", ["tensor", "post-accumulate"])
@pytest.mark.parametrize("name", HOOKS)
def test_a_step_compares_the_gradients_of_all_copies(name, kind):
    is_equal = name in ("the same", "a dense copy on one rank")
    for error, has_changed in rank_processes(2).run(step_with_hooks, kind, name):
        assert has_changed == is_equal
        if is_equal:
            assert error is None
        else:
            assert error is not None
            assert "the gradients of weight on rank 0 and rank 1 differ" in error


def clip_in_no_sync(count):
    """Clip gradients after a backward pass in `no_sync`, where the ranks have different norms."""
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1)), min_entries=0)
    wrapped = DistributedDataParallel(replicate(model, mesh_of_all(count)))
    assert isinstance(model[0].weight, Table)
    optimizer = hotrow.optim.SGD(model.parameters(), lr=0.1)
    for context in (wrapped.no_sync(), contextlib.nullcontext()):
        with context:
            wrapped(torch.tensor([1, 2 + dist.get_rank()])).square().sum().backward()
        nn.utils.clip_grad_norm_(model.parameters(), 0.01)
    return error_text(optimizer.step)


def test_a_step_after_clipping_in_no_sync_raises():
    for error in rank_processes(2).run(clip_in_no_sync, 2):
        assert error is not None
        assert "the gradients of 0.weight on rank 0 and rank 1 differ" in error


# --- Optimizers that exchange parameters ---------------------------------------------------------


def step_with_zero_redundancy(method, count):
    from torch.distributed.optim import ZeroRedundancyOptimizer

    model = distribute(converted_model(), method, count)
    assert isinstance(model.user.weight, Table)
    before = copy.deepcopy(model.user.weight)
    optimizer = ZeroRedundancyOptimizer(
        trainable_parameters(model), optimizer_class=hotrow.optim.Adam
    )
    backward(model, rank_batch(make_batch(1), count, dist.get_rank()), count)
    error = error_text(optimizer.step)
    unchanged = torch.equal(model.user.weight.detach(), before.detach())
    return error, unchanged


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_a_zero_redundancy_optimizer_raises(method):
    for error, unchanged in rank_processes(2).run(step_with_zero_redundancy, method, 2):
        assert error is not None
        assert "ZeroRedundancyOptimizer steps each parameter on one rank only" in error
        assert unchanged


def step_with_torch(method, count, name, is_frozen):
    """Take a step on a table with an optimizer of torch, or with a subclass."""

    class Doubled(torch.optim.SGD):
        def step(self, closure=None):
            super().step()
            super().step()

    model = distribute(converted_model(), method, count)
    assert isinstance(model.user.weight, Table)
    if is_frozen:
        for table in trainable_parameters(model):
            table.requires_grad_(False)
        model.layer.requires_grad_()
    before = model.user.weight.detach().clone()
    kind = Doubled if name == "Doubled" else getattr(torch.optim, name)
    optimizer = kind(model.parameters() if is_frozen else trainable_parameters(model), lr=0.1)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)  # it wraps the step
    backward(model, rank_batch(make_batch(1), count, dist.get_rank()), count)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        errors = [error_text(optimizer.step, lambda: 0.0) for _ in range(2)]
        scheduler.step()
    return errors, torch.equal(model.user.weight.detach(), before)


@pytest.mark.parametrize(
    ("method", "name", "is_frozen", "advice"),
    [
        ("shard", "Muon", False, "an optimizer from hotrow.optim"),
        ("shard", "LBFGS", False, "an optimizer from hotrow.optim"),
        ("shard", "Doubled", False, "an optimizer from hotrow.optim"),
        ("shard", "AdamW", False, "hotrow.optim.AdamW"),
        ("shard", "AdamW", True, None),
        ("replicate", "Muon", False, None),
    ],
)
def test_an_optimizer_of_torch_raises_for_shards(method, name, is_frozen, advice):
    results = rank_processes(2).run(step_with_torch, method, 2, name, is_frozen)
    for errors, unchanged in results:
        assert unchanged == (advice is not None or is_frozen)
        for error in errors:
            assert (error is not None) == (advice is not None)
            if advice is not None:
                assert f"{name} does not support a sharded table" in error
                assert f"use {advice} for the sharded tables" in error


def average_models(count, is_frozen, rows):
    """Average the parameters of all ranks; torch skips parameters without a gradient."""
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    model = hotrow.convert(nn.Sequential(nn.Embedding(rows, 3), nn.Linear(3, 1)))
    shard(model, mesh_of_all(count))
    table = model[0].weight.requires_grad_(not is_frozen)
    assert isinstance(table, Table)
    before = table.detach().clone()
    model(torch.arange(rows)).sum().backward()
    averager = PeriodicModelAverager(period=2, warmup_steps=0)
    error = error_text(averager.average_parameters, model.parameters())
    return error, torch.equal(table.detach(), before)


@pytest.mark.parametrize(("is_frozen", "rows"), [(False, 10), (False, 11), (True, 10)])
def test_averaging_the_rows_of_different_ranks_raises(is_frozen, rows):
    for error, unchanged in rank_processes(2).run(average_models, 2, is_frozen, rows):
        assert unchanged
        if is_frozen:
            assert error is None
        else:
            assert error is not None
            assert "model averaging would average the rows of 0.weight with other rows" in error


def broadcast_data(weight):
    dist.broadcast(weight.data, 0)


def broadcast_a_detached_weight(weight):
    dist.broadcast(weight.detach(), 0)


@torch.no_grad()
def broadcast_a_weight(weight):
    dist.broadcast(weight, 0)


def average_data(weight):
    dist.all_reduce(weight.data)
    weight.data /= dist.get_world_size()


@torch.no_grad()
def average_a_flat_copy(weight):
    flat = nn.utils.parameters_to_vector([weight])
    dist.all_reduce(flat)
    nn.utils.vector_to_parameters(flat / dist.get_world_size(), [weight])


def copy_to_the_last_rank(weight):
    last = dist.get_world_size() - 1
    if dist.get_rank() == 0:
        dist.send(weight.data, last)
    elif dist.get_rank() == last:
        dist.recv(weight.data, 0)


def initialize_with_the_same_seed(weight):
    torch.manual_seed(0)
    nn.init.normal_(weight)


def overwrite_shards(method, count, write, dtype):
    """Return the errors of two lookups in overwritten shards; then load the table, and step."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Embedding(24, 4), nn.Linear(4, 1)).to(dtype)
    model = hotrow.convert(model, min_entries=0)
    if method == "both":
        mesh = init_device_mesh("cpu", (2, count // 2), mesh_dim_names=("replicas", "shards"))
        replicate(shard(model, mesh["shards"]), mesh["replicas"])
    else:
        shard(model, mesh_of_all(count))
    weight = model[0].weight
    assert isinstance(weight, Table)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = hotrow.optim.AdamW(model.parameters())
    ids = torch.tensor([3, 23, 3])

    def step():
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()

    step()
    write(weight)
    errors = [error_text(model, ids), error_text(step)]
    model.load_state_dict(saved)
    step()
    return errors


OVERWRITES = [
    broadcast_data,
    broadcast_a_detached_weight,
    broadcast_a_weight,
    average_data,
    average_a_flat_copy,
    copy_to_the_last_rank,
    initialize_with_the_same_seed,
]


@pytest.mark.parametrize(
    ("write", "count", "dtype"),
    grid(
        itertools.product(OVERWRITES, (2, 3), (torch.float32, torch.bfloat16)),
        lambda write, count, dtype: count == 2 and dtype == torch.float32,
    ),
)
def test_a_lookup_raises_if_ranks_have_the_same_rows(write, count, dtype):
    for errors in rank_processes(count).run(overwrite_shards, "shard", count, write, dtype):
        for error in errors:
            assert "have the same rows of 0.weight, but each rank of a sharded table has" in str(
                error
            )


def test_a_lookup_raises_if_replicated_shards_have_the_same_rows():
    for errors in rank_processes(4).run(overwrite_shards, "both", 4, broadcast_data, torch.float64):
        for error in errors:
            assert "have the same rows of 0.weight, but each rank of a sharded table has" in str(
                error
            )


def overwrite_before_a_step(count):
    """Overwrite one of two tables before a step that changes a sampled row of each shard."""
    layers = nn.ModuleDict({"item": nn.Embedding(96, 4), "user": nn.Embedding(96, 4)})
    shard(hotrow.convert(layers, min_entries=0), mesh_of_all(count))
    layers["item"].requires_grad_(False)
    assert all(isinstance(layer.weight, Table) for layer in layers.values())
    # gloo may still use the memory, so one rank alone may settle its rows. Without weight decay,
    # they stay the same.
    optimizer = hotrow.optim.Adam(layers.parameters())
    ids = torch.tensor([0, 95])
    pairs = [(layer, ids) for layer in layers.values()]
    sum(rows.sum() for rows in look_up(*pairs)).backward()
    for parameter in layers.parameters():
        if parameter.requires_grad:
            dist.all_reduce(parameter.data)
            parameter.data /= count
    optimizer.step()
    return error_text(look_up, *pairs), error_text(layers["user"], ids)


@pytest.mark.parametrize("count", [2, 3])
def test_overwritten_shards_are_found_after_a_step_and_beside_another_table(count):
    for errors in rank_processes(count).run(overwrite_before_a_step, count):
        for error in errors:
            assert "rank 0 and rank 1 have the same rows of user.weight" in str(error)


def look_up_similar_shards(count):
    """Look up rows of tables whose shards have the same values, although no code wrote to them."""
    patterns = [
        torch.zeros(24, 4),
        torch.full((24, 4), math.nan),
        torch.randn(1, 4).expand(24, 4),
        torch.eye(4).repeat(6, 1),
        torch.arange(2.0).repeat(12)[:, None],
        torch.randn(1, 4).expand(count * 3, 4),
        (torch.arange(12)[:, None] >> torch.arange(4) & 1).repeat(count, 1) * 0.1,
        torch.cat([torch.randn(count * 12, 4), torch.zeros(count * 12, 4)]),
    ]
    results = []
    for pattern in patterns:
        layer = hotrow.convert(nn.Embedding.from_pretrained(pattern.clone()), min_entries=0)
        shard(layer, mesh_of_all(count))
        assert isinstance(layer.weight, Table)
        ids = torch.arange(len(pattern))
        results.append(torch.equal(layer(ids).nan_to_num(7), pattern.nan_to_num(7)))
    return results


def test_shards_may_have_few_or_similar_values():
    for results in rank_processes(2).run(look_up_similar_shards, 2):
        assert all(results)


def skip_a_step(count, skip):
    """Skip a step on the last rank; return the errors of lookups, and of one after a load."""
    model = shard(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(model.weight, Table)
    saved = {key: value.clone() for key, value in model.state_dict().items()}
    optimizer = hotrow.optim.Adam(model.parameters())
    ids = torch.tensor([2, 6])
    for _ in range(2):
        model(ids).sum().backward()
        optimizer.step()
    model(ids).sum().backward()
    if dist.get_rank() == count - 1:
        skip(model, optimizer)
    else:
        optimizer.step()
    optimizer.zero_grad()
    errors = [error_text(model, ids)]
    with torch.no_grad():
        errors.append(error_text(model, ids))
    model.load_state_dict(saved)
    return errors, error_text(model, ids)


def omit(model, optimizer):
    pass


def step_without_gradients(model, optimizer):
    optimizer.zero_grad()
    optimizer.step()


def fail_to_step(model, optimizer):
    optimizer.param_groups[0]["lr"] = "fast"
    assert error_text(optimizer.step, error_type=Exception) is not None


@pytest.mark.parametrize(
    ("count", "skip"),
    grid(
        itertools.product((2, 3), (omit, step_without_gradients, fail_to_step)),
        lambda count, skip: count == 2,
    ),
)
def test_a_lookup_raises_after_a_rank_has_skipped_a_step(count, skip):
    for errors, loaded in rank_processes(count).run(skip_a_step, count, skip):
        for error in errors:
            assert "rank 0: look up ids in weight" in error
            assert "torch.float32 before step 4; " in error
            assert "torch.float32 before step 3)" in error
            assert "take the same steps on every rank" in error
        assert loaded is None


def all_reduce_gradients(count):
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 3), nn.Linear(3, 1)))
    shard(model, mesh_of_all(count))
    assert isinstance(model[0].weight, Table)
    model(torch.arange(6)).sum().backward()
    before = model[0].weight.grad.as_dense()
    for parameter in model[1].parameters():
        dist.all_reduce(parameter.grad)
    error = error_text(dist.all_reduce, model[0].weight.grad)
    gathered = [torch.empty_like(before) for _ in range(count)]
    dist.all_gather(gathered, model[0].weight.grad)  # combines no rows
    found = model[0].weight.grad.as_dense(), gathered[dist.get_rank()]
    return error, all(torch.equal(each, before) for each in found)


def test_adding_the_gradients_of_different_rows_raises():
    for error, unchanged in rank_processes(2).run(all_reduce_gradients, 2):
        assert unchanged
        assert error is not None
        assert "allreduce would combine different rows of a sharded table's gradient" in error


def scatter_a_gradient(count):
    layer = replicate(hotrow.convert(nn.Embedding(6, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    layer(torch.tensor([1])).sum().backward()
    received, gradient = torch.zeros(6, 3), layer.weight.grad
    error = error_text(dist.scatter, received, [gradient], error_type=RuntimeError)
    dist.scatter(received, [gradient.as_dense()])
    return error, torch.equal(received, gradient.as_dense())


def test_a_collective_never_reads_the_memory_that_a_gradient_does_not_have():
    ((error, is_equal),) = rank_processes(1).run(scatter_a_gradient, 1)
    assert "Cannot access data pointer" in error
    assert is_equal


def replicate_different_shards(count):
    model = hotrow.convert(nn.Sequential(nn.Embedding(7, 3)))
    mesh = mesh_of_all(count)
    table = shard(model, mesh)[0].weight
    assert isinstance(table, Table)
    before = table.detach().clone()
    return error_text(replicate, model, mesh), torch.equal(table, before)


def test_replicating_shards_with_different_rows_raises():
    for error, unchanged in rank_processes(2).run(replicate_different_shards, 2):
        assert unchanged
        assert error is not None
        assert "rank 0 has 0.weight" in error
        assert "sharded (rows 4 to 6)" in error


def look_up_in_a_copy(method):
    """Look up ids in a model on rank 0, and in its deep copy on rank 1."""
    layer = distribute(hotrow.convert(nn.Embedding(7, 3), min_entries=0), method, 2)
    assert isinstance(layer.weight, Table)
    copied, ids = copy.deepcopy(layer), torch.tensor([1, 6])
    error = error_text(copied if dist.get_rank() else layer, ids)
    copied(ids).sum().backward()
    return error


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_ranks_cannot_mix_up_a_table_and_its_copy(method):
    for error in rank_processes(2).run(look_up_in_a_copy, method):
        assert error is not None
        assert "the ranks run different operations" in error
        assert "look up ids in a copy of weight" in error


def use_tables_in_two_threads(method, operation):
    """Run an operation while another thread exchanges messages, and then once more."""
    layer = distribute(hotrow.convert(nn.Embedding(7, 3), min_entries=0), method, 2)
    table = layer.weight
    assert isinstance(table, Table)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=1.0)
    loss = layer(torch.tensor([1, 6])).sum()
    if operation != "backward":
        loss.backward()
    run = {
        "look up": lambda: layer(torch.tensor([1, 6])),
        "backward": lambda: loss.backward(retain_graph=True),
        "norm": lambda: table.grad.norm(),
        "step": optimizer.step,
        "resize": lambda: hotrow.vocabulary.resize(layer, 9, optimizer),
    }[operation]
    ready, done = threading.Event(), threading.Event()

    def exchange():
        with (table.shards or table.replicas).ranks.exchange():
            ready.set()
            done.wait()

    thread = threading.Thread(target=exchange)
    thread.start()
    ready.wait()
    before = table.detach().clone()
    if operation == "resize":
        optimizer.zero_grad()
    error = error_text(run)
    done.set()
    thread.join()
    return error, torch.equal(before, table), error_text(run)


def continue_after_an_interrupt(method):
    """Interrupt rank 1 in an exchange, and then look up rows."""
    layer = distribute(hotrow.convert(nn.Embedding(7, 3), min_entries=0), method, 2)
    assert isinstance(layer.weight, Table)
    ranks = (layer.weight.shards or layer.weight.replicas).ranks
    if dist.get_rank() == 1:
        with contextlib.suppress(KeyboardInterrupt), ranks.exchange():
            raise KeyboardInterrupt
        return error_text(layer, torch.tensor([1, 6]))
    return None


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_a_rank_cannot_continue_after_an_interrupted_exchange(method):
    _, error = rank_processes(2).run(continue_after_an_interrupt, method)
    assert "a KeyboardInterrupt, has interrupted rank 1 while it exchanged messages" in error


@pytest.mark.parametrize(
    ("method", "operation"),
    [("shard", each) for each in ("look up", "backward", "norm", "resize")]
    + [("replicate", each) for each in ("look up", "backward", "step", "resize")],
)
def test_two_threads_cannot_mix_their_messages(method, operation):
    results = rank_processes(2).run(use_tables_in_two_threads, method, operation)
    for rank, (error, is_unchanged, later) in enumerate(results):
        assert f"two threads of rank {rank} use sharded or replicated tables" in error
        assert is_unchanged
        assert later is None


class Shifted(torch.Tensor):
    """Ids that select the rows after them."""

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        if function in (nn.functional.embedding, nn.functional.embedding_bag):
            args = ((args[0].as_subclass(torch.Tensor) + 1) % 7, *args[1:])
        return super().__torch_function__(function, types, args, kwargs or {})


def look_up_shifted_ids(method, name):
    """Look up ids of a class on rank 1, then plain ids on all ranks."""
    make = nn.EmbeddingBag if name == "bag" else nn.Embedding
    layer = distribute(hotrow.convert(make(7, 3), min_entries=0), method, 2)
    assert isinstance(layer.weight, Table)
    ids = torch.tensor([[1, 2]])
    mine = ids.as_subclass(Shifted) if dist.get_rank() else ids
    use = {"look_up": lambda ids: look_up((layer, ids))[0]}.get(name, layer)
    error = error_text(use, mine)
    use(ids).sum().backward()
    return error


@pytest.mark.parametrize(
    ("method", "name"),
    [
        *itertools.product(["shard", "replicate"], ["embedding", "bag"]),
        ("shard", "look_up"),
    ],
)
def test_ids_of_a_class_that_may_replace_lookups_raise_on_all_ranks(method, name):
    for error in rank_processes(2).run(look_up_shifted_ids, method, name):
        assert error is not None
        assert "cannot be looked up with a Shifted" in error


def look_up_jagged_ids(count, make):
    layer = make(7, 3)
    expected = copy.deepcopy(layer)
    model = shard(hotrow.convert(nn.Sequential(layer)), mesh_of_all(count))
    assert isinstance(model[0].weight, Table)
    jagged = torch.nested.nested_tensor(
        [torch.tensor([0, 5]), torch.tensor([dist.get_rank()])], layout=torch.jagged
    )
    results = [each(jagged) for each in (expected, model[0])]
    if isinstance(layer, nn.Embedding):
        results += look_up((model[0], jagged))
    expected, *found = (each.unbind() for each in results)
    return [all(map(torch.equal, each, expected)) for each in found]


@pytest.mark.parametrize(
    "make", [hotrow.Embedding, hotrow.EmbeddingBag, nn.Embedding, nn.EmbeddingBag]
)
def test_jagged_ids_get_rows_of_all_ranks(make):
    for found in rank_processes(2).run(look_up_jagged_ids, 2, make):
        assert found == [True] * (2 if issubclass(make, nn.Embedding) else 1)


def weigh_jagged_ids(count, distribute, layout):
    model = distribute(
        hotrow.convert(nn.Sequential(nn.EmbeddingBag(7, 3, mode="sum")), min_entries=0),
        mesh_of_all(count),
    )
    assert isinstance(model[0].weight, Table)
    jagged = torch.nested.nested_tensor([torch.tensor([0, 5])], layout=torch.jagged)
    weights = torch.nested.nested_tensor_from_jagged(torch.ones(2), jagged.offsets())
    if dist.get_rank():
        weights = (
            torch.ones(2)
            if layout is None
            else torch.nested.nested_tensor([torch.ones(2)], layout=layout)
        )
    return error_text(lambda: model[0](jagged, per_sample_weights=weights))


@pytest.mark.parametrize("layout", [None, torch.strided, torch.jagged], ids=str)
@pytest.mark.parametrize("distribute", [shard, replicate])
def test_invalid_weights_of_jagged_ids_raise_on_all_ranks(distribute, layout):
    for error in rank_processes(2).run(weigh_jagged_ids, 2, distribute, layout):
        assert error is not None
        assert "per_sample_weights" in error


def look_up_bags(count):
    bags = shard(hotrow.convert(nn.Sequential(nn.EmbeddingBag(7, 3))), mesh_of_all(count))[0]
    assert isinstance(bags.weight, Table)
    return error_text(lambda: look_up((bags, torch.tensor([[0, 1]]))))


def test_one_exchange_for_bags_raises():
    for error in rank_processes(2).run(look_up_bags, 2):
        assert error is not None
        assert "look_up takes embeddings" in error


# --- Options of DistributedDataParallel ----------------------------------------------------------


def sum_hook(state, bucket):
    future = dist.all_reduce(bucket.buffer(), async_op=True).get_future()
    return future.then(lambda done: done.value()[0])


def fp16_compress_hook(state, bucket):
    """A hook with the name of a hook of torch."""
    return sum_hook(state, bucket)


def train_with_a_hook(method, count, hook):
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1)))
    wrapped = DistributedDataParallel(distribute(model, method, count))
    assert isinstance(model[0].weight, Table)
    wrapped.register_comm_hook(None, hook)
    error = error_text(lambda: wrapped(torch.arange(6)).sum().backward())
    return error, type(model[0].weight.grad).__name__


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize("hook", [sum_hook, fp16_compress_hook, noop_hook])
def test_a_hook_that_does_not_average_raises(method, hook):
    for error, _ in rank_processes(2).run(train_with_a_hook, method, 2, hook):
        assert error is not None
        assert f"uses the communication hook {hook.__name__} for dense parameters" in error


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize("hook", [default_hooks.allreduce_hook, default_hooks.fp16_compress_hook])
def test_a_hook_that_averages_is_accepted(method, hook):
    for found in rank_processes(2).run(train_with_a_hook, method, 2, hook):
        assert found == (None, "RowGradient")


GROUPS = {
    "all ranks": lambda mesh: None,
    "shards": lambda mesh: mesh["shards"].get_group(),
    "replicas": lambda mesh: mesh["replicas"].get_group(),
}


def train_over_ranks(tables, gradients, hook):
    """Distribute tables over some ranks, and average dense gradients over the same or others."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1)))
    if "shard" in tables:
        shard(model, mesh["shards"])
    if "replicate" in tables:
        replicate(model, mesh["replicas"])
    assert isinstance(model[0].weight, Table)
    group = GROUPS[gradients](mesh)
    wrapped = DistributedDataParallel(model, process_group=None if hook else group)
    if hook == "fp16":
        wrapped.register_comm_hook(group, default_hooks.fp16_compress_hook)
    elif hook == "powerSGD":
        state = powerSGD_hook.PowerSGDState(group)
        wrapped.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    return error_text(lambda: wrapped(torch.arange(6)).sum().backward())


@pytest.mark.parametrize("hook", grid([None, "fp16", "powerSGD"], lambda hook: hook is None))
@pytest.mark.parametrize(
    ("tables", "gradients", "is_accepted"),
    [
        (("shard", "replicate"), "all ranks", True),
        (("shard", "replicate"), "shards", False),
        (("shard",), "all ranks", False),
        (("shard",), "shards", True),
        (("shard",), "replicas", False),
        (("replicate",), "replicas", True),
        (("replicate",), "all ranks", False),
    ],
)
def test_gradients_that_are_averaged_over_other_ranks_raise(tables, gradients, is_accepted, hook):
    if hook and gradients != "all ranks":
        is_accepted = False  # the hook uses a group, but DistributedDataParallel all ranks
    for error in rank_processes(4).run(train_over_ranks, tables, gradients, hook):
        if is_accepted:
            assert error is None
        else:
            assert "averages the gradients of dense parameters over the ranks [" in error


def join_uneven_batches(method, count, is_enabled):
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1)))
    wrapped = DistributedDataParallel(distribute(model, method, count))
    assert isinstance(model[0].weight, Table)
    with wrapped.join(enable=is_enabled):
        return error_text(lambda: wrapped(torch.arange(6)).sum().backward())


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize("is_enabled", [False, True])
def test_join_raises(method, is_enabled):
    for error in rank_processes(2).run(join_uneven_batches, method, 2, is_enabled):
        assert (error is not None) == is_enabled
        assert not is_enabled or "pass empty batches on ranks without data" in error


class Recomputed(nn.Sequential):
    """Modules whose forward pass runs again in the backward pass."""

    def forward(self, ids):
        return checkpoint(super().forward, ids, use_reentrant=False)


def accumulate(method, count, synchronized, by_torch, evaluate):
    """Accumulate the gradients of several batches, then take a step.

    Arguments:
        method: "shard" or "replicate", or None for torch.
        count: the number of ranks.
        synchronized: for each batch, whether DistributedDataParallel averages the gradients.
        by_torch: whether torch's optimizer takes the step.
        evaluate: whether to evaluate the model before the step.
    """
    torch.manual_seed(0)
    model = Recomputed(nn.Embedding(6, 2), nn.Flatten(), nn.Linear(4, 1)).double()
    if method is not None:
        model = distribute(hotrow.convert(model), method, count)
        assert isinstance(model[0].weight, Table)
    wrapped = DistributedDataParallel(model)
    optimizer = (torch.optim if by_torch else hotrow.optim).SGD(model.parameters(), lr=0.1)
    for t, synchronize in enumerate(synchronized):
        torch.manual_seed(t)
        ids = torch.randint(6, (count, 2))[dist.get_rank()][None]
        with contextlib.nullcontext() if synchronize else wrapped.no_sync():
            wrapped(ids).sum().backward()
    with torch.no_grad():
        if evaluate:
            wrapped(torch.zeros(1, 2, dtype=torch.long))
        before = {name: full(value) for name, value in model.state_dict().items()}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            error = error_text(optimizer.step)
        after = {name: full(value) for name, value in model.state_dict().items()}
    return error, before, after


def full(value):
    value = value.full_tensor() if isinstance(value, DTensor) else value
    return value.detach().clone()


@pytest.mark.parametrize(
    ("method", "by_torch"), [("shard", False), ("replicate", False), ("replicate", True)]
)
@pytest.mark.parametrize(
    ("synchronized", "evaluate"),
    [([False, True], False), ([False, False, True], True), ([False], False), ([True, False], True)],
)
def test_a_step_after_gradients_from_no_sync_raises(method, by_torch, synchronized, evaluate):
    torchs = rank_processes(2).run(accumulate, None, 2, synchronized, True, evaluate)
    found = rank_processes(2).run(accumulate, method, 2, synchronized, by_torch, evaluate)
    for (error, before, after), (_, _, expected) in zip(found, torchs, strict=True):
        if synchronized[-1]:
            assert error is None
            torch.testing.assert_close(after, expected)
        else:
            assert "the step follows a backward pass in DistributedDataParallel.no_sync" in error
            for name, value in before.items():
                assert_same_bits(after[name], value)


class Branches(nn.Module):
    """Two branches with an embedding each."""

    def __init__(self):
        super().__init__()
        self.embeddings = nn.ModuleList([nn.Embedding(6, 2), nn.Embedding(6, 2)])
        self.linears = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1), nn.Linear(2, 1)])

    def forward(self, branch, ids):
        # The third branch uses no table.
        rows = self.embeddings[branch](ids) if branch < 2 else torch.ones(3, 2)
        return self.linears[branch](rows)


def train_branches(method, count, passes):
    """Run passes through a model, then a step; return its error and whether ranks have equal rows.

    Arguments:
        method: "shard" or "replicate".
        count: the number of ranks.
        passes: for each forward pass, the branch that it uses and how it runs: "no_sync", "train",
            "no_grad", or "directly" (without DistributedDataParallel).
    """
    model = distribute(hotrow.convert(Branches()), method, count)
    assert isinstance(model.embeddings[0].weight, Table)
    wrapped = DistributedDataParallel(model, find_unused_parameters=True)
    optimizer = hotrow.optim.SGD(model.parameters(), lr=0.1)
    ids = torch.arange(3) + dist.get_rank()
    for branch, how in passes:
        if how == "no_grad":
            with torch.no_grad():
                wrapped(branch, ids)
        elif how == "directly":
            optimizer.zero_grad()
            model(branch, ids).sum().backward()
            for parameter in model.linears.parameters():
                if parameter.grad is not None:
                    dist.all_reduce(parameter.grad)
                    parameter.grad /= count
        else:
            with wrapped.no_sync() if how == "no_sync" else contextlib.nullcontext():
                wrapped(branch, ids).sum().backward()
        pickle.dumps(wrapped._forward_hooks)
    error = error_text(optimizer.step)
    return error, {name: full(value) for name, value in model.linears.state_dict().items()}


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("passes", "count", "raises"),
    [
        ([(0, "no_sync"), (1, "train")], 2, False),
        ([(0, "no_sync"), (1, "train"), (0, "no_grad")], 2, False),
        ([(0, "no_sync"), (2, "train"), (2, "no_grad")], 2, False),
        ([(0, "no_sync"), (1, "no_grad")], 2, True),
        ([(0, "no_sync"), (2, "train"), (1, "no_sync"), (2, "no_grad")], 2, True),
        ([(0, "no_sync"), (2, "train"), (0, "no_sync"), (1, "train")], 2, False),
        ([(0, "no_sync"), (0, "directly")], 2, False),
        ([(0, "no_sync")], 1, False),
    ],
)
def test_only_a_step_after_gradients_from_no_sync_raises(method, passes, count, raises):
    results = rank_processes(count).run(train_branches, method, count, passes)
    for error, values in results:
        assert (error is not None) == raises
        assert not raises or "the step follows a backward pass in Distributed" in error
        for name, value in results[0][1].items():
            assert_same_bits(values[name], value)


# --- Growing and shrinking -----------------------------------------------------------------------

SIZES = 10, 17, 40, 7, 4, 9


def train_with_changing_rows(count, name):
    """Train and change rows; all ranks use one batch, so averaging doesn't change gradients."""
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(SIZES[0], 3, padding_idx=1), min_entries=0)
    if count:
        shard(layer, mesh_of_all(count))
    weight = layer.weight
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), lr=0.1)
    generator = torch.Generator().manual_seed(1)
    for rows in SIZES:
        if count:
            torch.manual_seed(dist.get_rank())  # all ranks get the first rank's new rows
        if rows != SIZES[0]:
            new = torch.randn(max(0, rows - layer.num_embeddings), 3, generator=generator)
            rank = dist.get_rank() if count else 0
            vocabulary.resize(layer, rows, optimizer, init=new + rank)
            sources = torch.randperm(rows, generator=generator)
            sources[torch.rand(rows, generator=generator) < 0.3] = -1
            others = sources[sources != 1]  # the padding row stays where it is
            sources = torch.cat([others[:1], torch.tensor([1]), others[1 : rows - 2]])
            new = torch.randn(int((sources < 0).sum()), 3, generator=generator)
            remap = vocabulary.take(layer, sources, optimizer, init=new + rank)
            kept = (sources >= 0).nonzero()[:, 0]
            assert torch.equal(remap[sources[kept]], kept)
            rows = len(sources)
        for _ in range(3):
            ids = torch.randperm(rows, generator=generator)[:3]
            factors = torch.randn(3, 3, generator=generator)
            optimizer.zero_grad()
            (layer(ids) * factors).sum().backward()
            optimizer.step()
        assert layer.weight is weight
        assert weight.lag.ledger.length > 3 or rows == SIZES[0]
        optimizer.zero_grad()
    return state_values(layer, optimizer)


@pytest.mark.parametrize(  # averaging equal gradients of 2 or 4 ranks is exact
    ("name", "count"), grid([("AdamW", 2), ("AdamW", 4), ("Rprop", 2)], lambda name, n: n == 2)
)
def test_rows_move_between_ranks_when_a_table_changes_its_size(name, count):
    expected = train_with_changing_rows(0, name)
    for found in rank_processes(count).run(train_with_changing_rows, count, name):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_bits(found[key], value)


READS = {
    "norm": lambda layer, optimizer: layer.weight.detach().norm(),
    "state_dict": lambda layer, optimizer: optimizer.state_dict(),
}


def resize_after_a_read(count, name, read, steps_after):
    """Rank 0 reads its rows, and later a row moves from rank 1 to rank 0; `count` is 0 or 2."""
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(6, 2))
    if count:
        shard(layer, mesh_of_all(count))
    optimizer = getattr(hotrow.optim, name)(layer.parameters(), **OPTIMIZERS[name])

    def step(*ids):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).pow(2).sum().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert layer.weight.lag is not None

    step(*range(6))
    for _ in range(3):
        step(0)
    if not count:
        layer.weight.settle(torch.arange(3))
    elif dist.get_rank() == 0:
        READS[read](layer, optimizer)
    for _ in range(steps_after):
        step(0)
    if not count:
        optimizer.settle()
    vocabulary.resize(layer, 8, optimizer, init=torch.zeros(2, 2))
    with torch.no_grad():
        rows = layer(torch.arange(8))
    step(3, 7)
    step(1)
    return {"rows": rows} | state_values(layer, optimizer)


@pytest.mark.parametrize("name", ["SGD", "AdamW"])
@pytest.mark.parametrize(
    ("read", "steps_after"), [("norm", 0), ("state_dict", 0), ("state_dict", 1)]
)
def test_rows_that_move_after_a_read_on_one_rank_keep_their_missed_steps(name, read, steps_after):
    expected = resize_after_a_read(0, name, read, steps_after)
    for found in rank_processes(2).run(resize_after_a_read, 2, name, read, steps_after):
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_bits(found[key], value)


def resize_replicated_shards_after_a_read(reader):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layer = shard(hotrow.convert(nn.Embedding(6, 2)), mesh["shards"])
    hotrow.distributed.replicate(layer, mesh["replicas"])
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    for t in range(30):
        if t in (12, 20) and dist.get_rank() == reader:
            layer.weight.detach().norm()
        if t == 20:
            vocabulary.resize(layer, 8, optimizer, init=torch.zeros(2, 2))
        layer(torch.arange(6) if t == 0 else torch.tensor([t % 2])).pow(2).sum().backward()
        optimizer.step()
        assert layer.weight.lag is not None
        optimizer.zero_grad()
    return state_values(layer, optimizer)


@pytest.mark.parametrize("reader", grid(range(4), (3).__eq__))
def test_replicas_of_moved_rows_stay_equal_after_a_read_on_one_rank(reader):
    first, *others = rank_processes(4).run(resize_replicated_shards_after_a_read, reader)
    for found in others:
        for key, value in first.items():
            assert_same_bits(found[key], value)


def resize_without_the_state_of_a_rank(count):
    layer = shard(hotrow.convert(nn.Embedding(6, 2)), mesh_of_all(count))
    optimizer = hotrow.optim.AdamW(layer.parameters())
    layer(torch.arange(6)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    if dist.get_rank() == 0:
        optimizer.state_dict()
        del optimizer.state[layer.weight]
    before = layer.weight.detach().clone()
    error = error_text(vocabulary.resize, layer, 8, optimizer)
    return error, torch.equal(layer.weight.detach(), before)


def test_ranks_with_different_optimizer_state_cannot_move_rows():
    for error, unchanged in rank_processes(2).run(resize_without_the_state_of_a_rank, 2):
        assert "rank 1: change the row count from 6 to 8 with exp_avg, exp_avg_sq of" in error
        assert unchanged


def fail_to_initialize(method, count):
    def init(rows):
        if dist.get_rank():
            raise ValueError("no values")

    layer = distribute(hotrow.convert(nn.Embedding(6, 2)), method, count)
    assert isinstance(layer.weight, Table)
    before = layer.weight.detach().clone()
    resize = functools.partial(vocabulary.resize, layer, 8, init=init)
    error = error_text(resize, error_type=ValueError)
    return error, torch.equal(layer.weight.detach(), before)


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_an_error_of_init_on_one_rank_reaches_all_ranks(method):
    for error, unchanged in rank_processes(2).run(fail_to_initialize, method, 2):
        assert "no values" in error
        assert unchanged


def change_rows_with_a_bad_argument(method, count, operation):
    layer = distribute(hotrow.convert(nn.Embedding(6, 2)), method, count)
    assert isinstance(layer.weight, Table)
    before = layer.weight.detach().clone()
    is_bad = dist.get_rank() == 1
    arguments = {
        "take": (vocabulary.take, layer, [0, 9] if is_bad else [0, 1]),
        "take without values": (
            vocabulary.take,
            layer,
            torch.ones(2, dtype=torch.int64, device="meta") if is_bad else [0, 1],
        ),
        "resize": (vocabulary.resize, layer, 8.5 if is_bad else 8),
        "optimizer": (vocabulary.resize, layer, 8, "Adam" if is_bad else None),
        "freeze": (vocabulary.freeze, layer, [6 if is_bad else 5]),
    }[operation]
    error = error_text(*arguments, error_type=Exception)
    return error, torch.equal(layer.weight.detach(), before), layer.weight.frozen_rows is None


@pytest.mark.parametrize(
    ("operation", "text", "method"),
    [
        ("take", "ids[1] is 9", "shard"),
        ("take", "ids[1] is 9", "replicate"),
        ("take without values", "meta", "replicate"),
        ("resize", "rows = 8.5", "shard"),
        ("resize", "rows = 8.5", "replicate"),
        ("optimizer", "optimizer is a str", "shard"),
        ("freeze", "[0] = 6", "replicate"),
    ],
)
def test_a_bad_argument_on_one_rank_raises_on_all_ranks(operation, text, method):
    run = change_rows_with_a_bad_argument
    for error, *unchanged in rank_processes(2).run(run, method, 2, operation):
        assert error is not None
        assert text in error
        assert all(unchanged)


def change_rows_without_memory(method, count, place, when):
    """Resize two embeddings and admit a key, while one rank has too little memory."""
    layers = nn.ModuleList([hotrow.convert(nn.Embedding(6, 2), min_entries=0) for _ in range(2)])
    for layer in layers:
        if method == "both":
            mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
            replicate(shard(layer, mesh["shards"]), mesh["replicas"])
        else:
            distribute(layer, method, count)
        assert isinstance(layer.weight, Table)
    words = vocabulary.Vocabulary(list(layers), keys=range(6), key_type=int)

    original = getattr(changing, place)

    def fail(*arguments):
        if when == "after":
            original(*arguments)
        raise RuntimeError("out of memory")

    with patch.object(changing, place, fail if dist.get_rank() == 1 else original):
        error = error_text(words.admit, [6, 7], error_type=Exception)
    sizes = [len(words), *(layer.num_embeddings for layer in layers)]
    ids = words.admit([6, 7])
    return error, sizes, ids.tolist(), [layer(ids).shape[0] for layer in layers]


@pytest.mark.parametrize(("method", "rank_count"), [("shard", 2), ("replicate", 2), ("both", 4)])
@pytest.mark.parametrize(
    ("place", "when"),
    [("_added_rows", "before"), ("prepare_parameters", "before"), ("prepare_parameters", "after")],
)
def test_a_change_that_fails_on_one_rank_changes_no_rows(method, rank_count, place, when):
    arguments = change_rows_without_memory, method, rank_count, place, when
    for error, sizes, ids, counts in rank_processes(rank_count).run(*arguments):
        assert error is not None
        assert "out of memory" in error
        assert sizes == [6, 6, 6]
        assert ids == [6, 7]
        assert counts == [2, 2]


def fail_in_a_move(method, count):
    """Let the allocation of the new rows fail on one rank, then change the rows of all ranks."""
    layer = distribute(hotrow.convert(nn.Embedding(6, 2), min_entries=0), method, count)
    assert isinstance(layer.weight, Table)

    def fail(*arguments):
        raise MemoryError("out of memory")

    place = patch.object(ShardedRowChange, "_owners", fail)
    with place if dist.get_rank() else contextlib.nullcontext():
        error = error_text(vocabulary.take, layer, [5, 0, -1], error_type=Exception)
    before = layer.num_embeddings, len(layer(torch.tensor([5])))
    vocabulary.take(layer, [5, 0, -1])
    return error, before, layer.num_embeddings


def test_too_little_memory_for_moved_rows_on_one_rank_raises_on_all_ranks():
    for error, before, count in rank_processes(2).run(fail_in_a_move, "shard", 2):
        assert error is not None
        assert "out of memory" in error
        assert before == (6, 1)
        assert count == 3


def resize_with_rows_of_the_table(method, count):
    """Initialize new rows with a tensor that shares memory with rows of the table."""
    layer = distribute(hotrow.convert(nn.Embedding(7, 2), min_entries=0), method, count)
    local = layer.weight.detach()
    before = local.clone()
    vocabulary.resize(layer, 9, init=local[:2])
    rank = dist.get_rank() if method == "shard" else 0
    kept = layer.weight.detach()[: len(before)]
    first = before if method == "replicate" or not rank else None
    added = layer(torch.tensor([7, 8])).detach()
    return before, kept, added, first


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_initial_values_may_share_memory_with_the_table(method):
    found = rank_processes(2).run(resize_with_rows_of_the_table, method, 2)
    rows = found[0][0] if method == "replicate" else torch.cat([each[0] for each in found])
    for _, _, added, _ in found:
        assert_same_bits(added, rows[:2])
    kept = torch.cat([each[1] for each in found])
    assert_same_bits(found[0][1][:4], rows[:4])
    assert len(kept) >= 7


def fail_twice(method, count):
    """Raise the same error object in two changes on one rank."""
    layer = distribute(hotrow.convert(nn.Embedding(6, 2), min_entries=0), method, count)
    assert isinstance(layer.weight, Table)
    error = OSError("no file")

    def init(rows):
        if dist.get_rank():
            raise error

    resize = functools.partial(vocabulary.resize, layer, 8, init=init)
    errors = [error_text(resize, error_type=Exception) for _ in range(3)]
    return errors, len(layer(torch.tensor([5])))


@pytest.mark.parametrize("method", ["shard", "replicate"])
def test_an_error_object_may_be_raised_again(method):
    for errors, count in rank_processes(2).run(fail_twice, method, 2):
        assert all(each is not None and "no file" in each for each in errors)
        assert count == 1


def fail_in_a_vocabulary(method, count, operation, order):
    """Make one rank fail in a vocabulary of a distributed table and a plain layer."""
    layers = [hotrow.convert(nn.Embedding(6, 2), min_entries=0), nn.Embedding(6, 1)][:: order or 1]
    if not order:
        hotrow.convert(nn.ModuleList(layers), min_entries=0)
    distribute(nn.ModuleList(layers), method, count)
    assert sum(isinstance(layer.weight, Table) for layer in layers) == (1 if order else 2)
    is_bad = dist.get_rank() == 1

    def init(rows):
        if is_bad and operation == "init" and rows.shape[1] == 1:
            raise OSError("no file")

    words = vocabulary.Vocabulary(layers, keys=range(6), key_type=int, init=init)
    state = words.state_dict()

    def append(keys):
        original(keys)
        if is_bad and operation == "append":
            raise MemoryError("out of memory")

    original, words._rows.keys.append = words._rows.keys.append, append
    arguments = {
        "init": (words.admit, [6]),
        "append": (words.admit, [6]),
        "admit": (words.admit, [None if is_bad else 6]),
        "evict": (words.evict, 2.5 if is_bad else 5),
        "load": (vocabulary.Vocabulary.load, {} if is_bad else state, layers),
        "create": (vocabulary.Vocabulary, layers, None, [0] * 6 if is_bad else list("abcdef")),
    }[operation]
    error = error_text(*arguments, error_type=Exception)
    is_bad = False
    return error, len(words), words.admit([6]).tolist()


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("operation", "order", "text"),
    [
        ("init", 1, "no file"),
        ("init", -1, "no file"),
        ("init", 0, "no file"),
        ("append", 0, "out of memory"),
        ("admit", 1, "array of object"),
        ("admit", 0, "array of object"),
        ("evict", 1, "rows = 2.5"),
        ("evict", 0, "rows = 2.5"),
        ("load", 1, "state_dict"),
        ("load", 0, "state_dict"),
        ("create", 0, "keys[0] is 0"),
        ("create", 1, "keys[0] is 0"),
    ],
)
def test_an_error_of_a_vocabulary_on_one_rank_reaches_all_ranks(method, operation, order, text):
    run = fail_in_a_vocabulary
    for error, count, ids in rank_processes(2).run(run, method, 2, operation, order):
        assert error is not None
        assert text in error
        assert count == 6
        assert ids == [6]


def change_keys(method, count, operation, keys_of_ranks):
    """Create a vocabulary, or admit, evict or load keys, which may differ between the ranks."""
    keys = keys_of_ranks[dist.get_rank()]
    rows = 1 if operation == "admit" else 1 + len(keys)
    layer = hotrow.convert(nn.Embedding(rows, 2))
    make = functools.partial(vocabulary.Vocabulary, key_type=type(keys[0]), unknown="row")
    words = make(layer, keys=keys) if operation == "evict" else None
    if method == "both":
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        replicate(shard(layer, mesh["shards"]), mesh["replicas"])
    else:
        {"shard": shard, "replicate": replicate}[method](layer, mesh_of_all(count))
    if operation == "admit":
        words = make(layer)
        error = error_text(words.admit, [*keys, keys[0]])
    elif operation == "evict":
        error = error_text(words.evict, 2)
    elif operation == "create":
        error = error_text(functools.partial(make, keys=keys), layer)
    else:
        state = make(nn.Embedding(rows, 2), keys=keys).state_dict()
        error = error_text(vocabulary.Vocabulary.load, state, layer)
    known = None if words is None else words.keys()
    return error, known, layer.num_embeddings


KEYS = [["a", "b"], ["c", "d"]], [["a", "b"], ["b", "a"]], [[1, 2], [1, 3]], [["a", "b"], ["a"]]


@exhaustive
@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("operation", "keys_of_ranks"),
    [
        *(("admit", keys) for keys in KEYS),
        ("create", KEYS[1]),
        ("create", KEYS[2]),
        ("evict", KEYS[1]),
        ("evict", KEYS[2]),
        ("load", KEYS[0]),
    ],
)
def test_different_keys_raise_on_every_rank(method, operation, keys_of_ranks):
    found = rank_processes(2).run(change_keys, method, 2, operation, keys_of_ranks)
    for (error, known, rows), keys in zip(found, keys_of_ranks, strict=True):
        assert "the ranks run different operations (rank 0: " in error
        assert " for keys with hash " in error
        assert "make the same calls with the same arguments on every rank" in error
        if operation == "admit":
            assert (known, rows) == ([], 1)
        else:
            assert known in (keys, None)
            assert rows == 3


def test_different_keys_on_a_two_dimensional_mesh_raise_on_every_rank():
    keys = [["a"], ["a"], ["a"], ["b"]]
    for error, known, rows in rank_processes(4).run(change_keys, "both", 4, "admit", keys):
        assert "the ranks run different operations" in error
        assert (known, rows) == ([], 1)


@pytest.mark.parametrize("operation", ["create", "admit", "evict", "load"])
def test_the_same_keys_are_accepted(operation):
    arguments = change_keys, "shard", 2, operation, [["a", "b"]] * 2
    for error, known, rows in rank_processes(2).run(*arguments):
        assert error is None
        assert known in (["a", "b"], ["b"], None)
        assert rows == (2 if operation == "evict" else 3)


def admit_to_earlier_vocabularies(method, count, batches_of_ranks, new_keys):
    """Admit batches before the table is distributed, and the same new keys afterwards."""
    layer = hotrow.convert(nn.Embedding(1, 2))
    words = vocabulary.Vocabulary(layer, key_type=type(new_keys[0]), unknown="row")
    for batch in batches_of_ranks[dist.get_rank()]:
        words.admit(batch)
    {"shard": shard, "replicate": replicate}[method](layer, mesh_of_all(count))
    errors = [error_text(words.admit, new_keys[:1])]
    hash_all = AssertionError("admit hashed all keys again")
    with patch.object(type(words._rows.keys), "to_list", side_effect=hash_all):
        if errors == [None]:
            errors.append(error_text(words.admit, new_keys[1:2]))
    if dist.get_rank() == 1:
        words = copy.copy(words)  # has no hash of all keys
    errors += [error_text(words.evict, 3), error_text(words.admit, new_keys[2:])]
    return errors, words.keys(), layer.num_embeddings


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("batches_of_ranks", "new_keys"),
    [
        ([[["a"], ["b", "c"]], [["a", "b"], ["c"]]], ["d", "e", "f"]),
        ([[[1, 2], [3]], [[1, 2, 3]]], [4, 5, 6]),
    ],
)
def test_the_same_keys_from_different_batches_are_accepted(method, batches_of_ranks, new_keys):
    arguments = admit_to_earlier_vocabularies, method, 2, batches_of_ranks, new_keys
    for errors, known, rows in rank_processes(2).run(*arguments):
        assert errors == [None] * 4
        assert (known, rows) == (new_keys, 4)


@pytest.mark.parametrize("method", ["shard", "replicate"])
@pytest.mark.parametrize(
    ("batches_of_ranks", "new_keys"),
    [
        ([[["a", "b"]], [["b", "a"]]], ["d", "e", "f"]),
        ([[["plumless", "b"]], [["buckeroo", "b"]]], ["d", "e", "f"]),  # with the same CRC-32
        ([[["a", "bc"]], [["ab", "c"]]], ["d", "e", "f"]),
        ([[[1, 2]], [[1, 3]]], [4, 5, 6]),
    ],
)
def test_different_earlier_keys_raise_on_every_rank(method, batches_of_ranks, new_keys):
    arguments = admit_to_earlier_vocabularies, method, 2, batches_of_ranks, new_keys
    results = rank_processes(2).run(*arguments)
    for (errors, known, rows), batches in zip(results, batches_of_ranks, strict=True):
        assert "the ranks run different operations" in errors[0]
        assert "the ranks run different operations" in errors[-1]
        assert (known, rows) == (batches[0], 3)


def change_a_sharded_table_in_unsupported_ways(count):
    layer = shard(hotrow.convert(nn.Embedding(6, 2), min_entries=0), mesh_of_all(count))
    texts = [
        error_text(vocabulary.take, layer, [[0, 1], [1, 0]][dist.get_rank()]),
        error_text(vocabulary.freeze, layer, [0]),
        error_text(vocabulary.reconnect, layer, torch.optim.SGD(layer.parameters())),
        error_text(vocabulary.resize, layer, 7 + dist.get_rank()),
    ]
    layer(torch.tensor([1])).sum().backward()
    texts.append(error_text(vocabulary.resize, layer, 7))
    return texts, layer.weight.shards.rows


def test_unsupported_changes_raise_on_every_rank():
    messages = (
        "the ranks run different operations",
        "freeze is not supported for a sharded table",
        "reconnect does not support the sharded",
        "the ranks run different operations",
        "the sharded table has a gradient for its old rows",
    )
    for texts, rows in rank_processes(2).run(change_a_sharded_table_in_unsupported_ways, 2):
        assert rows == 6
        for text, message in zip(texts, messages, strict=True):
            assert message in text
