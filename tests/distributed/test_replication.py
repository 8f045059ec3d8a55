"""Replicated tables stay bitwise equal on all ranks, and match training in one process."""

import collections
import copy
import functools
import itertools
import math
import pickle
import re
import warnings
from unittest.mock import patch

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import hotrow
from hotrow import vocabulary
from hotrow.distributed import hashing, look_up, replicate, replication, shard
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
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
    train_whole_batches,
    train_with_ddp,
)
from tests.support.exhaustive import grid
from tests.support.ranks import mesh_of_all, rank_processes
from tests.support.tolerance import assert_no_worse, assert_same_bits


def assert_all_the_same(results):
    for found in results[1:]:
        assert found.keys() == results[0].keys()
        for key, value in results[0].items():
            assert_same_bits(found[key], value)


@pytest.mark.parametrize("count", grid(WORLD_SIZES, (3).__eq__))
def test_replicas_with_ddp_are_no_worse_than_torch_in_one_process(count):
    truth, rival = map(train_whole_batches, (torch.float64, torch.float32))
    results = rank_processes(count).run(train_with_ddp, "replicate", count)
    assert_all_the_same(results)
    for name, value in truth.items():
        assert_no_worse(results[0][name], rival[name], value)


def by_torch(count, name):
    """Train with torch and DistributedDataParallel, which averages dense gradients."""
    rank = dist.get_rank()
    model = dense_model()
    trained = DistributedDataParallel(model)
    optimizer = getattr(torch.optim, name)(model.parameters(), **OPTIMIZERS[name])
    train_rank(trained, optimizer, count, rank, range(STEPS))
    return state_values(model, optimizer)


def by_hotrow(count, name):
    rank = dist.get_rank()
    model = distribute(converted_model(dense=True), "replicate", count)
    trained = DistributedDataParallel(model)
    optimizer = make_optimizer(name, model)
    train_rank(trained, optimizer, count, rank, range(STEPS))
    by_rows = all(
        isinstance(each.weight.grad, RowGradient) for each in (model.user, model.word, model.bag)
    )
    return state_values(model, optimizer), by_rows


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_replicas_match_ddp_with_dense_gradients(name):
    expected = rank_processes(2).run(by_torch, 2, name)[0]
    results = rank_processes(2).run(by_hotrow, 2, name)
    assert_all_the_same([found for found, _ in results])
    assert all(by_rows for _, by_rows in results)
    for key, value in results[0][0].items():
        torch.testing.assert_close(value, expected[key], rtol=1e-4, atol=1e-5)


def gathered(count):
    model = distribute(hotrow.convert(nn.Sequential(nn.Embedding(4, 1))), "replicate", count)
    share = (2.0**24, 1.0, -(2.0**24))[dist.get_rank()]
    model(torch.tensor([2])).backward(torch.tensor([[3 * share]]))
    return model[0].weight.grad.as_dense()


def test_gradients_are_summed_in_rank_order():
    """In float32, 2**24 + 1 - 2**24 is 0 if summed left to right, and 1 if summed right to left."""
    for found in rank_processes(3).run(gathered, 3):
        assert found.flatten().tolist() == [0, 0, 0, 0]


READS = {
    "a checkpoint": lambda model, optimizer: (model.state_dict(), optimizer.state_dict()),
    "a value": lambda model, optimizer: model.user.weight[5].tolist(),
    "an evaluation": lambda model, optimizer: model.eval()(*make_batch(2)[0]),
    "the state": lambda model, optimizer: optimizer.state[model.user.weight]["exp_avg"].sum(),
    "settle": lambda model, optimizer: optimizer.settle(),
}


def read_on_one_rank(count, name, when):
    """Train while only rank 0 reads its table."""
    rank = dist.get_rank()
    model = distribute(converted_model(), "replicate", count)
    optimizer = hotrow.optim.Adam(model.parameters(), lr=0.05)

    def look():
        if rank == 0:
            with torch.no_grad():
                READS[name](model, optimizer)
            model.train()

    for t in range(40):
        optimizer.zero_grad()
        values = rank_batch(make_batch(t), count, rank)
        if when == "before" and t in (11, 30):
            look()
        backward(model, values, count)
        if when == "between" and t in (11, 30):
            look()
        optimizer.step()
    return state_values(model, optimizer)


@pytest.mark.parametrize(
    ("name", "when"),
    grid(
        itertools.product(READS, ["before", "between"]),
        lambda name, when: when == "between" and name in ("a checkpoint", "a value", "the state"),
    ),
)
def test_replicas_keep_the_same_bits_when_one_rank_reads(name, when):
    assert_all_the_same(rank_processes(2).run(read_on_one_rank, 2, name, when))


GRADIENT_READS = {
    "a hook": None,
    "a view": lambda weight: weight.grad.view(-1).abs().max(),
    "a transposed view": lambda weight: weight.grad.t().sum(),
    "a row": lambda weight: weight.grad[3].tolist(),
    "chunks": lambda weight: [part.sum() for part in weight.grad.chunk(2)],
    "the storage": lambda weight: weight.grad.untyped_storage().data_ptr(),
    "a quantile": lambda weight: torch.quantile(weight.grad, 0.5),
    "a product": lambda weight: weight.grad @ weight.grad.T,
    "a write of the same values": lambda weight: weight.grad.add_(0.0),
    "a dense copy": lambda weight: setattr(weight, "grad", weight.grad.as_dense()),
    "dense data": lambda weight: setattr(weight.grad, "data", weight.grad.as_dense()),
}
ASSIGNMENTS = ["a dense copy", "dense data"]  # these change the order of the sum in a norm


def read_gradient_on_one_rank(count, name, accumulate):
    """Train while only rank 0 reads the gradient of a table, or assigns its dense values."""
    model = distribute(converted_model(), "replicate", count)
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=0.05)
    weight, reads = model.user.weight, dist.get_rank() == 0
    assert isinstance(weight, Table)
    if name == "a hook" and reads:
        weight.register_hook(lambda gradient: (gradient.data.reshape(-1), None)[1])
    values = []
    for t in range(40):
        optimizer.zero_grad(set_to_none=t % 8 > 0 or name in ASSIGNMENTS)
        for part in range(1 + accumulate):
            backward(model, rank_batch(make_batch(2 * t + part), count, dist.get_rank()), count)
            assert isinstance(weight.grad, RowGradient)
            if name != "a hook" and reads:
                GRADIENT_READS[name](weight)
        if t == 30:
            vocabulary.resize(model.user, len(weight) + 3, optimizer)
        if t in (20, 35):
            vocabulary.take(model.user, torch.arange(len(weight)).flip(0), optimizer)
        if name not in ASSIGNMENTS and t != 30:  # without a norm, the step merges the rows
            values.append(nn.utils.clip_grad_norm_(weight, 0.01))
        optimizer.step()
        values.append(weight.grad.norm())
    if name not in ASSIGNMENTS:
        assert weight.lag is not None  # the steps use only rows
    else:
        values = values[:0]
    return state_values(model, optimizer) | dict(enumerate(values))


@pytest.mark.parametrize(
    ("name", "accumulate"),
    grid(
        (
            (name, accumulate)
            for name in GRADIENT_READS
            for accumulate in (False, True)
            if not (accumulate and name in ASSIGNMENTS)
        ),
        lambda name, accumulate: (
            not accumulate and name in ("a hook", "a view", "a row", "a product", "a dense copy")
        ),
    ),
)
def test_replicas_keep_the_same_bits_when_one_rank_reads_a_gradient(name, accumulate):
    assert_all_the_same(rank_processes(2).run(read_gradient_on_one_rank, 2, name, accumulate))


def take_rows_of_a_gradient(count, keeps_all, read):
    """Return norms of gradients whose rows were taken after only rank 0 has read them."""
    norms = []
    for seed in range(12):
        torch.manual_seed(seed)
        layer = hotrow.convert(nn.Embedding(7, 3), min_entries=0)
        distribute(layer, "replicate", count)
        assert isinstance(layer.weight, Table)
        optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1)
        ids = torch.randperm(7)[: 7 if keeps_all else 4]
        (layer(ids) * torch.randn(len(ids), 3)).sum().backward()
        if dist.get_rank() == 0:
            read(layer.weight.grad)
        if keeps_all:
            vocabulary.resize(layer, 9, optimizer)
        else:
            vocabulary.take(layer, ids.sort().values.flip(0), optimizer)
        norms.append(nn.utils.clip_grad_norm_(layer.weight, 0.01))
        optimizer.step()
        norms.append(layer.weight.detach())
    return norms


@pytest.mark.parametrize("keeps_all", [True, False])
@pytest.mark.parametrize("read", [torch.norm, torch.t])
def test_norms_have_the_same_bits_if_rows_are_taken_after_a_read(keeps_all, read):
    ranks = rank_processes(2).run(take_rows_of_a_gradient, 2, keeps_all, read)
    for values in zip(*ranks, strict=True):
        assert_same_bits(*values)


class OneHotLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(40, 3)

    def forward(self, ids):
        return self.linear(F.one_hot(ids, 40).float())


def one_hot_model(convert):
    torch.manual_seed(0)
    model = OneHotLayer()
    return hotrow.convert(model) if convert else model


def train_one_hots_with_ddp(count, options):
    found, rank = [], dist.get_rank()
    with patch("hotrow.table.lookup.MIN_TABLE_ENTRIES", 0):
        for library in (torch.optim, hotrow.optim):
            model = one_hot_model(library is hotrow.optim)
            parallel = DistributedDataParallel(model, **options)
            optimizer = library.SGD(model.parameters(), lr=0.1)
            for t in range(5):
                optimizer.zero_grad()
                parallel(torch.tensor([t, 20 + rank])).square().sum().backward()
                optimizer.step()
                if rank == 0:
                    model.linear.weight.view(-1)
                    model(torch.tensor([7]))
            found.append(model.linear.weight.detach().clone())
        record = hotrow.convert.report(model).findings
    return found, [finding.outcome for finding in record]


@pytest.mark.parametrize("option", ["find_unused_parameters", "static_graph", "broadcast_buffers"])
def test_ddp_averages_the_gradients_of_weights_for_one_hots(option):
    for (expected, values), outcomes in rank_processes(2).run(
        train_one_hots_with_ddp, 2, {option: True}
    ):
        torch.testing.assert_close(values, expected)
        assert outcomes == ["linear(40, 3) looked up"]


def share_without_ddp(count):
    """Broadcast a trained weight for one-hots, then average gradients without DDP."""
    found = []
    with patch("hotrow.table.lookup.MIN_TABLE_ENTRIES", 0):
        for library in (torch.optim, hotrow.optim):
            model = one_hot_model(library is hotrow.optim)
            optimizer = library.Adam(model.parameters(), lr=0.1)
            for t in range(6):
                optimizer.zero_grad()
                if t < 3 or dist.get_rank() == 0:
                    model(torch.tensor([t, 20])).square().sum().backward()
                if t == 3:
                    dist.broadcast(model.linear.weight.data, 0)
                for weight in model.parameters() if t >= 3 else ():
                    if weight.grad is None:
                        weight.grad = torch.zeros_like(weight)
                    dist.all_reduce(weight.grad)
                optimizer.step()
            found.append(model.linear.weight.detach().clone())
        assert isinstance(model.linear.weight, Table)
    return found


def test_collectives_of_weights_for_one_hots_are_those_of_torch():
    for expected, values in rank_processes(2).run(share_without_ddp, 2):
        torch.testing.assert_close(values, expected)


def switch_optimizers_under_ddp(count):
    found = []
    with patch("hotrow.table.lookup.MIN_TABLE_ENTRIES", 0):
        for convert in (False, True):
            model, library = one_hot_model(convert), hotrow.optim if convert else torch.optim
            optimizers = [kind.Adam(model.parameters(), lr=0.1) for kind in (library, torch.optim)]
            parallel = model
            for t, optimizer in enumerate(optimizers[k] for k in (0, 0, 1, 1, 0, 1)):
                optimizer.zero_grad()
                parallel(torch.tensor([t, 20 + t])).square().sum().backward()
                optimizer.step()
                if t == 0:
                    parallel = DistributedDataParallel(model)
            assert isinstance(model.linear.weight, Table) == convert
            found.append(model.linear.weight.detach().clone())
    return found


@pytest.mark.filterwarnings("ignore:.* updates every row")
def test_ddp_and_changing_optimizers_train_a_table_as_torch_does():
    for expected, values in rank_processes(2).run(switch_optimizers_under_ddp, 2):
        torch.testing.assert_close(values, expected)


def train_with_an_alias(count):
    """Train while rank 1 has an alias of a table, so every step settles all rows on rank 1."""
    rank = dist.get_rank()
    model = distribute(converted_model(), "replicate", count)
    optimizer = hotrow.optim.Adam(model.parameters(), lr=0.05)
    alias = model.user.weight.data if rank == 1 else None
    for t in range(8):
        optimizer.zero_grad()
        backward(model, rank_batch(make_batch(t), count, rank), count)
        optimizer.step()
    same = alias is None or torch.equal(alias, model.user.weight)
    del alias
    return state_values(model, optimizer) | {"same": torch.tensor(float(same))}


def test_replicas_keep_the_same_bits_when_one_rank_has_an_alias():
    results = rank_processes(3).run(train_with_an_alias, 3)
    assert_all_the_same(results)
    assert results[1]["same"]


def different_starts(count, is_transposed):
    torch.manual_seed(dist.get_rank())
    model = hotrow.convert(nn.Sequential(nn.Embedding(5, 2)))
    if is_transposed and dist.get_rank() == 0:
        model[0].weight.data = model[0].weight.t().contiguous().t()
        assert model[0].weight.stride() == (1, 5)
    own = model[0].weight.detach().clone()
    replicate(model, mesh_of_all(count))
    return own, model[0].weight.detach().clone()


@pytest.mark.parametrize("is_transposed", [True, False])
def test_replicas_start_with_the_values_of_the_first_rank(is_transposed):
    results = rank_processes(2).run(different_starts, 2, is_transposed)
    assert not torch.equal(results[0][0], results[1][0])
    for _, found in results:
        assert_same_bits(found, results[0][0])


def pickled(model):
    return pickle.loads(pickle.dumps(model))


def with_new_weight(model):
    model[0].weight = nn.Parameter(model[0].weight.detach().clone())
    return model


def with_new_layer(model):
    layer = nn.Embedding(6, 2)
    layer.load_state_dict(model[0].state_dict())
    model[0] = layer
    return model


def train_after_a_replacement(count, replace):
    """Train a model whose replicated table was replaced with a dense parameter."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1))
    if replace is not None:
        model = replicate(hotrow.convert(model, min_entries=0), mesh_of_all(count))
        assert isinstance(model[0].weight, Table)
        model = replace(model)
    assert not isinstance(model[0].weight, Table)
    trained = DistributedDataParallel(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for t in range(2):
        optimizer.zero_grad()
        trained(torch.tensor([dist.get_rank(), 2 + t])).sum().backward()
        optimizer.step()
    model.load_state_dict(model.state_dict(), assign=True)
    return {name: value.detach() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("replace", [pickled, with_new_weight, with_new_layer])
def test_ddp_trains_the_dense_parameter_that_replaces_a_table(replace):
    expected = rank_processes(2).run(train_after_a_replacement, 2, None)
    assert_all_the_same(expected + rank_processes(2).run(train_after_a_replacement, 2, replace))


def ignored_names(count):
    """Return the names that DistributedDataParallel ignores, of the model and of copies."""
    model = hotrow.convert(nn.Sequential(nn.Embedding(6, 2), nn.Linear(2, 1)), min_entries=0)
    model._ddp_params_and_buffers_to_ignore = ["1.bias"]
    mesh = init_device_mesh("cpu", (1, count), mesh_dim_names=("shards", "replicas"))
    replicate(shard(model, mesh["shards"]), mesh["replicas"])
    copied = copy.deepcopy(model)
    del model[0].weight.shards  # because a sharded table can't be pickled
    names = [
        DistributedDataParallel(each).parameters_to_ignore
        for each in (model, copied, pickled(model))
    ]
    del copied[0]
    return [*map(sorted, names), list(copied._ddp_params_and_buffers_to_ignore)]


def test_ddp_goes_on_ignoring_tables_in_copies_and_the_names_of_other_code():
    both = ["0.weight", "1.bias"]
    for names in rank_processes(2).run(ignored_names, 2):
        assert names == [both, both, ["1.bias"], ["1.bias"]]


INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
CHANGES_OF_ROWS = {
    "the sign": torch.neg,
    "the signs of every other column": lambda rows: torch.cat([-rows[:, ::2], rows[:, 1::2]], 1),
    "a factor of 2": lambda rows: rows * 2,
    "the order of the rows": lambda rows: rows.roll(1, 0),
    "the order of the columns": lambda rows: rows.roll(2, 1),
    "one value": lambda rows: rows.index_fill(0, torch.tensor([7]), 0.25),
    "all bits": lambda rows: rows.view(INTEGERS[rows.itemsize]).bitwise_not().view(rows.dtype),
}


@pytest.mark.parametrize("change", CHANGES_OF_ROWS.values(), ids=CHANGES_OF_ROWS)
@pytest.mark.parametrize("columns", [64, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_hash_of_a_gradient_notices_every_change(dtype, columns, change):
    rows = (torch.randint(1, 9, (64, columns)) / 4).to(dtype)
    changed = change(rows)
    assert not torch.equal(changed, rows)
    ids = torch.arange(0, 640, 10)
    found = [
        hashing.hash_gradient(RowGradient(ids, each, (900, columns)), False)
        for each in (rows, changed)
    ]
    assert found[0] != found[1]


# With equal columns, halves of words are equal, and the sum of the keys decides.
@pytest.mark.parametrize("columns", [1, 2, 64, *grid([638, 734, 3316, 4892], (734).__eq__)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_hash_notices_changes_of_rows_with_equal_columns(dtype, columns):
    rows = torch.zeros(40, columns, dtype=dtype)
    rows[[3, 7, 11, 20]] = 1
    variants = [rows, *(rows * sign * 2.0**power for sign in (1, -1) for power in range(1, 15))]
    variants += [rows.roll(shift, 0) for shift in (1, 8, 16)]
    variants += [rows.index_fill(0, torch.tensor([row]), 0) for row in (3, 7, 11, 20)]
    hashes = {hashing.hash_gradient(variant, False) for variant in variants}
    assert len(hashes) == len(variants)
    assert 0 not in hashes


@pytest.mark.parametrize("columns", [1, 2, 5, 16, 64])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_hash_notices_changes_of_a_single_row(dtype, columns):
    rows = torch.randn(40, columns).to(dtype)
    changes = -1.0, 2.0, 0.5, 256.0, 0.0
    hashes = {hashing.hash_gradient(rows, False)}
    for row, scale in itertools.product(range(40), changes):
        changed = rows.clone()
        changed[row] *= scale
        hashes.add(hashing.hash_gradient(changed, False))
    assert len(hashes) == 1 + 40 * len(changes)


@pytest.mark.parametrize("columns", [64, 5])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_a_row_gradient_and_its_dense_copy_have_the_same_hash(dtype, columns):
    rows = torch.randn(8, columns).to(dtype)
    rows[3] = -0.0
    gradient = RowGradient(torch.tensor([5, 2, 9, 2, 7, 0, 1, 8]), rows, (900, columns))
    dense = gradient.as_dense()
    found = hashing.hash_gradient(gradient, False)
    assert found == hashing.hash_gradient(dense, False)
    assert found == hashing.hash_gradient(dense.t().contiguous(), True)
    assert found == hashing.hash_gradient(dense + 0.0, False)  # without -0.0
    assert found != 0


@pytest.mark.parametrize("shape", [(0, 1), (0, 2), (5, 0), (5, 1), (1, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_strides_of_a_gradient_do_not_change_its_hash(dtype, shape):
    gradient = torch.randn(shape).to(dtype)
    strided = gradient.new_empty(shape[0], 3 * shape[1])[:, ::3]
    variants = [gradient, gradient.t().contiguous().t(), strided.copy_(gradient)]
    found = {hashing.hash_gradient(each, False) for each in variants}
    found |= {hashing.hash_gradient(each.t(), True) for each in variants}
    assert len(found) == 1
    assert (found == {0}) == (gradient.numel() == 0)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_nan_and_zeros_with_other_bits_have_the_same_hash(dtype):
    rows = torch.randn(8, 64).to(dtype)
    rows[3, 5], rows[4, 0] = math.nan, math.inf
    other = rows.clone()
    integer = INTEGERS[rows.itemsize]
    other.view(integer)[3, 5] ^= 1  # another NaN
    assert other[3, 5].isnan()
    assert not rows.view(integer).equal(other.view(integer))
    rows[0, 1], other[0, 1] = 0.0, -0.0
    assert hashing.hash_gradient(rows, False) == hashing.hash_gradient(other, False)
    assert hashing.hash_values({"exp_avg": rows}) == hashing.hash_values({"exp_avg": other})
    other[4, 0] = math.nan
    assert hashing.hash_gradient(rows, False) != hashing.hash_gradient(other, False)
    assert hashing.hash_values({"exp_avg": rows}) != hashing.hash_values({"exp_avg": other})


def bad_id(count):
    """Look up an invalid id on one rank in the forward pass, then train on all ranks."""
    rank = dist.get_rank()
    model = distribute(converted_model(dense=True), "replicate", count)
    trained = DistributedDataParallel(model)
    optimizer = make_optimizer("AdamW", model)
    inputs, _ = rank_batch(make_batch(1), count, rank)
    if rank == 1:
        inputs[2] = inputs[2] + 17
    error = error_text(trained, *inputs)
    train_rank(trained, optimizer, count, rank, range(STEPS))
    return error, state_values(model, optimizer)


def test_a_bad_id_on_one_rank_raises_on_all_ranks():
    found = rank_processes(3).run(bad_id, 3)
    expected, _ = rank_processes(3).run(by_hotrow, 3, "AdamW")[0]
    for rank, (error, values) in enumerate(found):
        assert error.startswith("input[" if rank == 1 else "rank 1 of 3 could not look up ids in ")
        assert "but the table has 17 rows (valid ids: 0..16)" in error
        for name, value in expected.items():  # bits may differ, because DDP's buckets may differ
            torch.testing.assert_close(values[name], value, rtol=1e-4, atol=1e-5)
    assert_all_the_same([values for _, values in found])


def refused(count):
    short = hotrow.convert(nn.Sequential(nn.Embedding(5, 2, max_norm=1.0)))
    twice = distribute(converted_model(), "replicate", count)
    frozen = hotrow.convert(nn.Embedding(5, 2))
    vocabulary.freeze(frozen, [dist.get_rank()])
    empty = hotrow.convert(nn.Embedding(5, 2, device="meta"))
    return [
        error_text(replicate, frozen, mesh_of_all(count)),
        error_text(replicate, short, mesh_of_all(count)),
        error_text(replicate, empty, mesh_of_all(count)),
        error_text(replicate, twice, mesh_of_all(count)),
        error_text(lambda: twice.load_state_dict(twice.state_dict(), assign=True)),
        error_text(lambda: nn.functional.linear(torch.ones(1, 6), twice.user.weight)),
        error_text(twice.word, torch.eye(17)),
    ]


def test_unsupported_models_raise_on_every_rank():
    texts = [
        "rank 0 has weight of Embedding(5, 2) in torch.float32, 1 frozen rows (ids ",
        "the layer of 0.weight has max_norm, which replicate does not support",
        "weight is on the meta device",
        "user.weight is already replicated",
        "load_state_dict(assign=True) would replace the table user.weight",
        "linear with a sharded or replicated table as an argument cannot be differentiated",
        "one-hots or probabilities",
    ]
    for found in rank_processes(2).run(refused, 2):
        for error, text in zip(found, texts, strict=True):
            assert text in error


def distribute_with_a_gradient(method, count):
    model = hotrow.convert(nn.Sequential(nn.Embedding(5, 2)))
    assert isinstance(model[0].weight, Table)
    if dist.get_rank() == 1:
        model(torch.tensor([3])).sum().backward()
    before = model[0].weight.detach().clone()
    error = error_text({"replicate": replicate, "shard": shard}[method], model, mesh_of_all(count))
    return error, torch.equal(model[0].weight, before) and not model[0].weight.spans_processes


@pytest.mark.parametrize("method", ["replicate", "shard"])
def test_a_gradient_from_before_raises_on_every_rank(method):
    for error, is_unchanged in rank_processes(2).run(distribute_with_a_gradient, method, 2):
        assert "0 has a gradient, which" in error
        assert f"call optimizer.zero_grad() before {method}" in error
        assert is_unchanged


def look_up_in_transforms(count):
    layer = replicate(hotrow.convert(nn.Embedding(10, 3)), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    ids = torch.tensor([[1], [7]])
    errors = [
        error_text(torch.vmap(layer), ids),
        error_text(torch.func.grad(lambda x: (layer(ids) * x).sum()), torch.tensor(1.0)),
        error_text(torch.jit.trace, layer, ids),
    ]
    with torch.no_grad():
        evaluated = torch.equal(torch.vmap(layer)(ids), layer(ids))
    return errors, evaluated


def test_a_transform_of_a_lookup_in_a_replica_raises_only_in_training():
    for errors, evaluated in rank_processes(2).run(look_up_in_transforms, 2):
        for error in errors:
            assert "a replicated table cannot be looked up inside a torch.func transform" in error
        assert evaluated


def look_up_with_options(count, on_one_rank):
    """Look up rows with options that use only the ids of one rank."""
    torch.manual_seed(0)
    if count == 4:
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
        layer = shard(hotrow.convert(nn.Embedding(10, 3)), mesh["shards"])
        replicate(layer, mesh["replicas"])
    else:
        layer = replicate(hotrow.convert(nn.Embedding(10, 3)), mesh_of_all(count))
    weight, ids = layer.weight, torch.arange(10)
    assert isinstance(weight, Table)
    before = weight.detach().clone()
    is_chosen = dist.get_rank() == 1 or not on_one_rank
    norm, by_frequency = (0.1, True) if is_chosen else (None, False)
    errors = [
        error_text(lambda: F.embedding(ids, weight, max_norm=norm)),
        error_text(lambda: F.embedding_bag(ids[None], weight, max_norm=norm)),
        error_text(lambda: F.embedding(ids, weight, scale_grad_by_freq=by_frequency)),
    ]
    if is_chosen and not (on_one_rank and count == 4):  # evaluation of shards needs all ranks
        with torch.no_grad():
            evaluated = functools.partial(F.embedding, ids, weight, max_norm=norm)
            errors.append(error_text(evaluated))
    layer.max_norm = norm
    errors.append(error_text(layer, ids))
    if count == 4:
        errors.append(error_text(look_up, (layer, ids)))
    return errors, torch.equal(weight.detach(), before)


@pytest.mark.parametrize("on_one_rank", [False, True])
@pytest.mark.parametrize("count", grid([2, 4], (2).__eq__))
def test_options_that_use_the_ids_of_one_rank_raise_at_the_lookup(count, on_one_rank):
    for errors, unchanged in rank_processes(count).run(look_up_with_options, count, on_one_rank):
        assert unchanged
        for error in errors:
            assert "is not supported for a " in error


def grow_while_training(rank_count):
    """Train, add and reorder rows on all ranks; each rank draws its own values for new rows."""
    rank = dist.get_rank()
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(10, 3), min_entries=0)
    replicate(layer, mesh_of_all(rank_count))
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    torch.manual_seed(rank)

    def step():
        optimizer.zero_grad()
        (layer(torch.randint(layer.num_embeddings, (4,))) * (rank + 1)).sum().backward()
        optimizer.step()

    step()
    vocabulary.resize(layer, 14, optimizer)
    step()
    vocabulary.take(layer, [3, -1, 13, 0, 5], optimizer)
    step()
    step()
    assert layer.weight.lag is not None
    state = optimizer.state[layer.weight]
    return {"weight": layer.weight.data, "exp_avg": state["exp_avg"]}


def test_replicas_stay_equal_when_their_rows_change():
    results = rank_processes(2).run(grow_while_training, 2)
    assert_all_the_same(results)
    assert results[0]["weight"].shape == (5, 3)


def grow_differently(rank_count):
    layer = replicate(hotrow.convert(nn.Embedding(10, 3), min_entries=0), mesh_of_all(rank_count))
    return error_text(vocabulary.resize, layer, 11 + dist.get_rank())


def test_replicas_that_change_differently_raise_on_every_rank():
    for text in rank_processes(2).run(grow_differently, 2):
        assert "the ranks run different operations" in text
        assert "rank 1: change the row count from 10 to 12" in text


def reconnect_after_a_resize(rank_count, name, how):
    """Add random rows that differ between the ranks, reconnect the optimizer, and train."""
    torch.manual_seed(0)
    model = hotrow.convert(nn.Sequential(nn.Embedding(5, 2), nn.Linear(2, 1)), min_entries=0)
    replicate(model, mesh_of_all(rank_count))
    optimizer = getattr(hotrow.optim, name)(model.parameters(), lr=0.1)
    table, ids = model[0].weight, torch.tensor([dist.get_rank(), 3])

    def step():
        optimizer.zero_grad()
        model[0](ids).sum().backward()
        optimizer.step()

    step()
    torch.manual_seed(1 + dist.get_rank())
    larger = torch.cat([table.detach(), torch.randn(3, 2)])
    if how == "in place":
        table.data = larger
    else:
        model[0] = nn.Embedding.from_pretrained(larger, freeze=False)
    error = None
    if how == "on one rank":
        model[0] = nn.Embedding(8, 2) if dist.get_rank() else model[0]
        error = error_text(vocabulary.reconnect, model, optimizer)
    else:
        vocabulary.reconnect(model, optimizer)
        assert model[0].weight is table
        ids = torch.tensor([5 + dist.get_rank(), 7])
        step()
    return error, {"weight": table.detach()}


@pytest.mark.parametrize(
    ("name", "how"), [("SGD", "a new layer"), ("Adam", "a new layer"), ("Adam", "in place")]
)
def test_reconnected_replicas_get_the_rows_of_the_first_rank(name, how):
    results = rank_processes(2).run(reconnect_after_a_resize, 2, name, how)
    assert_all_the_same([values for _, values in results])
    assert results[0][1]["weight"].shape == (8, 2)


def test_a_failed_reconnect_raises_on_every_rank():
    for error, values in rank_processes(2).run(reconnect_after_a_resize, 2, "Adam", "on one rank"):
        assert "no new parameter with the same requires_grad can continue its rows" in error
        assert values["weight"].shape == (5, 2)


def initialize(weight):
    with torch.no_grad():
        weight.normal_()


def assign_data(weight):
    weight.data = torch.randn(weight.shape)


WRITES = {
    "copy_": lambda weight: weight.detach().copy_(torch.randn(weight.shape)),
    "load_state_dict": lambda weight: nn.ParameterList([weight]).load_state_dict(
        {"0": torch.randn(weight.shape)}
    ),
    "init": initialize,
    "init of data": lambda weight: weight.data.normal_(),
    "data": assign_data,
}


def hash_rows(rank_count, name, when):
    """Write to a replicated table, and count how often the replicas are hashed."""
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(rank_count))
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    words = vocabulary.Vocabulary(layer, optimizer, keys=range(7), key_type=int)
    hashed, errors = [], []

    def step(dense=False):
        optimizer.zero_grad()
        layer(torch.tensor([1 + dist.get_rank()])).sum().backward()
        if dense:
            layer.weight.grad = layer.weight.grad.as_dense()
        optimizer.step()

    hash_of = replication._hash_copy
    with patch.object(replication, "_hash_copy", lambda t: hashed.append(t) or hash_of(t)):
        step()
        step(dense=True)
        step()
        words.admit([0, 7])
        vocabulary.resize(copy.deepcopy(layer), 9)
        step()
        words.evict(7)
        vocabulary.freeze(layer, [0])
        layer.state_dict(), optimizer.state_dict()
        step()
        counts = [len(hashed)]
        torch.manual_seed(dist.get_rank() if when == "differently" else 0)
        if when != "on one rank" or dist.get_rank() == 1:
            WRITES[name](layer.weight)
        if when != "equally":
            errors = [error_text(layer, torch.tensor([0])) for _ in range(2)]
            layer.load_state_dict({"weight": torch.zeros(7, 3)})
        for _ in range(3):
            step()
        counts.append(len(hashed))
    assert isinstance(layer.weight, Table)
    return counts, errors, {"weight": layer.weight.detach()}


@pytest.mark.parametrize(
    ("name", "when"),
    grid(
        itertools.product(WRITES, ["on one rank", "differently", "equally"]),
        lambda name, when: when == "on one rank" or name == "init",
    ),
)
def test_copies_are_compared_after_other_code_has_written_to_them(name, when):
    results = rank_processes(2).run(hash_rows, 2, name, when)
    assert_all_the_same([values for *_, values in results])
    for counts, errors, _ in results:
        assert counts == [0, 1 if when == "equally" else 3]
        for error in errors:
            assert "the copies of weight on rank 0 and rank 1 differ" in error


def compare_copies(rank_count, rows, columns, dtype):
    """Write to one replica of a table with an unusual shape or dtype."""
    layer = hotrow.convert(nn.Embedding(rows, columns, dtype=dtype), min_entries=0)
    replicate(layer, mesh_of_all(rank_count))
    if dist.get_rank() == 1:
        with torch.no_grad():
            layer.weight[-1:] += 1
    ids = torch.zeros(1 if rows else 0, dtype=torch.long)
    return error_text(layer, ids)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
@pytest.mark.parametrize(("rows", "columns"), [(0, 3), (3, 0), (2, 1), (3, 1 << 20)])
def test_copies_of_any_size_are_compared(rows, columns, dtype):
    for error in rank_processes(2).run(compare_copies, 2, rows, columns, dtype):
        assert (error is None) == (rows * columns == 0)


def double_the_rate(optimizer):
    optimizer.param_groups[0]["lr"] *= 2


def change_the_dtype(optimizer):
    optimizer.param_groups[0]["lr"] = torch.tensor(optimizer.param_groups[0]["lr"])


def change_betas(optimizer):
    optimizer.param_groups[0]["betas"] = [0.9, 0.99]


def change_numbers_to_equal_numbers(optimizer):
    group = optimizer.param_groups[0]
    group.update(lr=np.float64(group["lr"]), betas=[*group["betas"]], weight_decay=0, name="a")


def step_with_options(count, change, on_all_ranks, dense):
    """Change the options of an optimizer on rank 1 or on all ranks, and take a step."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    before = {name: optimizer.param_groups[0][name] for name in optimizer.defaults}

    def step():
        optimizer.zero_grad()
        layer(torch.tensor([1 + rank])).sum().backward()
        if dense:
            layer.weight.grad = layer.weight.grad.as_dense()
        return error_text(optimizer.step)

    step()
    weight = layer.weight.detach().clone()
    if on_all_ranks or rank == 1:
        change(optimizer)
    error = step()
    unchanged = torch.equal(layer.weight.detach(), weight)
    optimizer.param_groups[0].update(before)
    assert step() is None
    assert optimizer.state[layer.weight]["step"] == (2 if unchanged else 3)
    return error, unchanged, {"weight": layer.weight.detach()}


@pytest.mark.parametrize("dense", [False, True])
@pytest.mark.parametrize(
    ("change", "on_all_ranks", "text"),
    [
        (double_the_rate, False, "with lr=0.1, but rank 1 with lr=0.2: use the same optimizer"),
        (change_the_dtype, False, "lr=0.1, but rank 1 with lr=0.10000000149011612 (torch.float32)"),
        (change_betas, False, "with betas=(0.9, 0.999), but rank 1 with betas=(0.9, 0.99)"),
        (change_numbers_to_equal_numbers, False, None),
        (double_the_rate, True, None),
    ],
)
def test_steps_with_different_options_raise_on_every_rank(change, on_all_ranks, text, dense):
    results = rank_processes(2).run(step_with_options, 2, change, on_all_ranks, dense)
    assert_all_the_same([values for *_, values in results])
    for error, unchanged, _ in results:
        assert unchanged == (text is not None)
        assert (error is None) if text is None else (text in error)


def skip_a_step(count, skip):
    """Let rank 1 skip the step of a replicated table, and continue after the error."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    errors = []
    for t in range(6 + rank):  # the lookup after the skipped step fails
        optimizer.zero_grad()
        error = error_text(lambda: layer(torch.tensor([1 + rank])).sum().backward())
        if error is None and (t != 2 or rank == 0):
            error = error_text(optimizer.step)
        elif error is None and skip == "no gradient":
            layer.weight.grad = None
            error = error_text(optimizer.step)
        errors.append(error)
    return errors, {"weight": layer.weight.detach()}


@pytest.mark.parametrize("skip", ["no step", "no gradient"])
def test_a_step_that_one_rank_skips_raises_on_every_rank(skip):
    results = rank_processes(2).run(skip_a_step, 2, skip)
    assert_all_the_same([values for _, values in results])
    text = "(rank 0: take a step; rank 1: look up ids in weight for training): "
    for rank, (errors, _) in enumerate(results):
        assert f"{text}run the same model and take the same steps" in errors[2 + rank]
        assert [error for t, error in enumerate(errors) if t != 2 + rank] == [None] * (5 + rank)


def skip_one_of_two_tables(count):
    """Let rank 1 step without a gradient for the second table, and continue after the errors."""
    model = nn.ModuleList([nn.Embedding(6, 1), nn.Embedding(6, 1)])
    model = replicate(hotrow.convert(model, min_entries=0), mesh_of_all(count))
    assert all(isinstance(weight, Table) for weight in model.parameters())
    optimizer = hotrow.optim.SGD(model.parameters(), lr=0.1)
    ids, errors = torch.tensor([dist.get_rank(), 5]), []
    for t in range(5 + dist.get_rank()):  # the lookup after the step fails on rank 1
        optimizer.zero_grad()
        error = error_text(lambda: sum(layer(ids).sum() for layer in model).backward())
        if error is None:
            if t == 1 and dist.get_rank() == 1:
                model[1].weight.grad = None
            error = error_text(optimizer.step)
        errors.append(error)
    return errors


def test_copies_are_compared_after_one_rank_has_skipped_one_of_two_tables():
    for rank, errors in enumerate(rank_processes(2).run(skip_one_of_two_tables, 2)):
        assert errors[: 1 + rank] == [None] * (1 + rank)
        assert "the ranks run different operations" in errors[1 + rank]
        for error in errors[2 + rank :]:
            assert "the copies of 0.weight on rank 0 and rank 1 differ" in error


def fail_a_step(count, on_all_ranks):
    """Let the dense part of a step fail, and continue after the error."""
    torch.manual_seed(0)
    model = hotrow.convert(nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 1)), min_entries=0)
    replicate(model, mesh_of_all(count))
    table, dense = model[0].weight, model[1].weight
    assert isinstance(table, Table)
    optimizer = hotrow.optim.Adam(model.parameters(), lr=0.1)

    def step():
        optimizer.zero_grad()
        error = error_text(lambda: model(torch.tensor([1 + dist.get_rank()])).sum().backward())
        try:
            return error or error_text(optimizer.step)
        except RuntimeError:  # of torch's step
            return "failed"

    errors = [step()]
    state = optimizer.state[dense]
    if on_all_ranks or dist.get_rank() == 1:
        state["exp_avg"], kept = torch.zeros(5), state["exp_avg"]
        errors.append(step())
        state["exp_avg"] = kept
    else:
        errors.append(step())
    return [*errors, step()], {"weight": table.detach()}


@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_copies_are_compared_after_a_step_that_failed(on_all_ranks):
    results = rank_processes(2).run(fail_a_step, 2, on_all_ranks)
    for rank, ((first, failed, last), _) in enumerate(results):
        assert first is None
        assert (failed is None) == (rank == 0 and not on_all_ranks)
        assert (last is None) == on_all_ranks
        assert on_all_ranks or "the copies of 0.weight on rank 0 and rank 1 differ" in last
    if on_all_ranks:
        assert_all_the_same([values for _, values in results])


def skip_a_step_on_a_two_dimensional_mesh():
    """Let rank 3 skip the second step; stop at the first error."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    layer = shard(hotrow.convert(nn.Embedding(12, 3), min_entries=0), mesh["shards"])
    replicate(layer, mesh["replicas"])
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    for t in range(4):
        optimizer.zero_grad()
        ids = torch.tensor([dist.get_rank(), 5, 11])
        error = error_text(lambda ids=ids: layer(ids).sum().backward())
        if error is None and (t != 1 or dist.get_rank() < 3):
            error = error_text(optimizer.step)
        if error is not None:
            return t, error
    return None


def test_a_step_that_one_rank_of_a_two_dimensional_mesh_skips_raises_on_every_rank():
    results = rank_processes(4).run(skip_a_step_on_a_two_dimensional_mesh)
    assert [t for t, _ in results] == [1, 1, 1, 2]
    assert all("take a step" in error and "look up ids" in error for _, error in results)


def write_to_one_rank_of_a_two_dimensional_mesh():
    """Let rank 1 write to its rows; after the error, load the same values on all ranks."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    layer = shard(hotrow.convert(nn.Embedding(8, 3), min_entries=0), mesh["shards"])
    replicate(layer, mesh["replicas"])
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
    errors = []

    def step():
        optimizer.zero_grad()
        layer(torch.tensor([1, 2, 5, 7])).sum().backward()
        optimizer.step()

    for t in range(4):
        if t == 1:
            saved = {key: value.clone() for key, value in layer.state_dict().items()}
            if dist.get_rank() == 1:
                with torch.no_grad():
                    layer.weight.add_(1)
        errors.append(error_text(step))
        if errors[-1] is not None:
            layer.load_state_dict(saved)
    return errors, {"weight": layer.state_dict()["weight"].full_tensor()}


def test_copies_that_differ_on_a_two_dimensional_mesh_raise_on_every_rank():
    results = rank_processes(4).run(write_to_one_rank_of_a_two_dimensional_mesh)
    for (first, error, *last), _ in results:
        assert "the copies of weight on rank 1 and rank 3 differ" in error
        assert [first, *last] == [None] * 3
    assert_all_the_same([values for _, values in results])


def step_half_of_a_table():
    """Change an option on one rank of a mesh with two dimensions."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(8, 1), min_entries=0)
    assert isinstance(layer.weight, Table)
    replicate(hotrow.distributed.shard(layer, mesh["shards"]), mesh["replicas"])
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=1.0)
    before, errors = layer.weight.detach().clone(), []
    for t in range(3):
        optimizer.zero_grad()
        layer(torch.arange(8)).sum().backward()
        optimizer.param_groups[0]["lr"] = 2.0 if t == 1 and dist.get_rank() == 0 else 1.0
        errors.append(error_text(optimizer.step))
    return errors, (before - layer.weight.detach()).flatten().tolist()


def test_a_step_with_different_options_fails_for_all_rows_of_a_table():
    for (first, error, last), change in rank_processes(4).run(step_half_of_a_table):
        assert first is last is None
        assert "steps the replicated table weight with lr=2.0, but rank 2 with lr=1.0" in error
        torch.testing.assert_close(change, [2.0] * 4)


def load_optimizer_state(count, on_all_ranks, steps):
    """Load another optimizer state on rank 1 or on all ranks, and continue training."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adagrad(layer.parameters(), lr=0.1)
    state = {"step": torch.tensor(float(steps)), "sum": torch.ones(7, 3)}
    saved = {"state": {0: state}, "param_groups": optimizer.state_dict()["param_groups"]}

    def step():
        optimizer.zero_grad()
        layer(torch.tensor([1 + rank])).sum().backward()
        optimizer.step()

    for _ in range(steps):
        step()
    if on_all_ranks or rank == 1:
        optimizer.load_state_dict(saved)
    if steps:
        optimizer = copy.copy(optimizer)  # must not forget that it has loaded a state
    errors = [error_text(step) for _ in range(2)]
    return errors, {"weight": layer.weight.detach()}


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("on_all_ranks", [False, True])
def test_optimizer_states_are_compared_after_one_was_loaded(on_all_ranks, steps):
    results = rank_processes(2).run(load_optimizer_state, 2, on_all_ranks, steps)
    assert_all_the_same([values for _, values in results])
    for errors, _ in results:
        for error in errors:
            assert (error is None) == on_all_ranks
            text = r"with hash of the state=[\w ]+, but rank 1 with hash of the state=\w+:"
            assert on_all_ranks or re.search(text, error)


def forget_optimizer_state(count, name, options, how):
    """Train with a new or an empty optimizer state on rank 1 or on all ranks."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    make = getattr(hotrow.optim, name)
    optimizer = make(layer.parameters(), lr=0.1, **options)

    def step():
        optimizer.zero_grad()
        layer(torch.tensor([1 + rank])).sum().backward()
        optimizer.step()

    for _ in range(2):
        step()
    before = layer.weight.detach().clone()
    if how == "new on all ranks" or (how == "new" and rank == 1):
        optimizer = make(layer.parameters(), lr=0.1, **options)
    elif how == "cleared" and rank == 1:
        optimizer.state.clear()
    elif how == "replaced":
        state = optimizer.state_dict()["state"][0]
        optimizer.state[layer.weight] = {key: value + rank for key, value in state.items()}
    elif how == "updated":
        values = {key: value + rank for key, value in optimizer.state_dict()["state"][0].items()}
        optimizer.state[layer.weight].update(values)
    error = error_text(step)
    return error, torch.equal(before, layer.weight), {"weight": layer.weight.detach()}


@pytest.mark.parametrize("how", ["new", "cleared", "replaced", "updated", "new on all ranks"])
@pytest.mark.parametrize(
    ("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9}), ("Adagrad", {})]
)
def test_an_optimizer_state_that_starts_again_on_one_rank_raises(name, options, how):
    results = rank_processes(2).run(forget_optimizer_state, 2, name, options, how)
    assert_all_the_same([values for *_, values in results])
    for error, is_unchanged, _ in results:
        assert is_unchanged == (error is not None) == (how != "new on all ranks")
        assert error is None or re.search(r"with .*state=\w.*, but rank 1 with .*state=\w", error)


def use_another_slot(count):
    """Load different momentum on the ranks, and use it only after the first step."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1)
    state = {"momentum_buffer": torch.full((7, 3), float(rank))}
    groups = optimizer.state_dict()["param_groups"]
    optimizer.load_state_dict({"state": {0: state}, "param_groups": groups})
    optimizer.state[layer.weight]["note"] = rank  # other code may store what it likes
    layer(torch.tensor([1 + rank])).sum().backward()
    return error_text(optimizer.step)


def test_slots_that_the_first_step_does_not_use_are_compared():
    for error in rank_processes(2).run(use_another_slot, 2):
        assert error is not None
        assert "with hash of the state=" in error


def exchange_states(count, how):
    """Train two tables, and exchange equally old states on rank 1 only."""
    rank = dist.get_rank()
    layers = nn.ModuleList(nn.Embedding(7, 3) for _ in range(2))
    replicate(hotrow.convert(layers, min_entries=0), mesh_of_all(count))
    first, second = layers[0].weight, layers[1].weight
    assert isinstance(first, Table)
    assert isinstance(second, Table)
    optimizer, other = (
        hotrow.optim.NAdam(layers.parameters(), lr=0.1, weight_decay=0.1) for _ in range(2)
    )

    def step(optimizer):
        optimizer.zero_grad()
        (layers[0](torch.tensor([1 + rank])) + layers[1](torch.tensor([2]))).sum().backward()
        optimizer.step()

    for each in (optimizer, other):
        step(each)
    if how == "tables" and rank == 1:
        states = optimizer.state
        states[first], states[second] = states[second], states[first]
    elif how == "optimizers" and rank == 1:
        optimizer = other
    elif how == "scalars" and rank == 1:
        optimizer.state[first]["mu_product"] = torch.tensor(0.5)
    elif how == "data" and rank == 1:
        average = optimizer.state[first]["exp_avg"]
        average.data = torch.ones(7, 3)
    elif how == "equal states" and rank == 1:
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    errors = [error_text(lambda: step(optimizer)) for _ in range(2)]
    return errors, {"first": first.detach(), "second": second.detach()}


@pytest.mark.parametrize("how", ["tables", "optimizers", "scalars", "data", "equal states"])
def test_exchanged_optimizer_states_are_compared(how):
    results = rank_processes(2).run(exchange_states, 2, how)
    assert_all_the_same([values for _, values in results])
    for errors, _ in results:
        for error in errors:
            assert (error is None) == (how == "equal states")
            assert error is None or "with hash of the state=" in error


def fail_on_one_rank(count):
    """Continue with other momentum on rank 1, whose last step has failed in torch's code."""
    rank = dist.get_rank()
    model = nn.Sequential(hotrow.convert(nn.Embedding(7, 3), min_entries=0), nn.Linear(3, 1))
    table = replicate(model, mesh_of_all(count))[0].weight
    assert isinstance(table, Table)
    optimizer = hotrow.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    start = table.detach().clone()

    def step():
        optimizer.zero_grad()
        model(torch.tensor([1 + rank])).sum().backward()
        optimizer.step()

    step()
    state = optimizer.state[model[1].bias]
    if rank == 1:
        state["momentum_buffer"] = torch.zeros(5)
    failure = error_text(step, error_type=RuntimeError)
    state["momentum_buffer"] = torch.zeros(1)
    model.load_state_dict({**model.state_dict(), "0.weight": start})
    return failure, error_text(step)


def test_optimizer_states_are_compared_after_one_rank_has_failed():
    (first, second), (other_failure, other_second) = rank_processes(2).run(fail_on_one_rank, 2)
    assert first is None
    assert "broadcast shape" in other_failure
    for error in (second, other_second):
        assert "with hash of the state=" in error


def unfreeze_other_rows(count):
    """Unfreeze all rows on rank 0, but no rows on the others."""
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    vocabulary.freeze(layer, [1, 2])
    error = error_text(vocabulary.unfreeze, layer, None if dist.get_rank() == 0 else [])
    frozen = layer.weight.frozen_rows.tolist()
    vocabulary.unfreeze(layer)
    return error, frozen, layer.weight.frozen_rows


def test_ranks_that_unfreeze_other_rows_raise():
    for error, frozen, last in rank_processes(2).run(unfreeze_other_rows, 2):
        assert "rank 0: unfreeze all rows of weight; rank 1: unfreeze 0 rows (ids" in error
        assert frozen == [1, 2]
        assert last is None


def grow_with_other_options(count):
    """Add rows while the learning rate, from which Rprop's state starts, differs."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Rprop(layer.parameters(), lr=0.1)
    layer(torch.tensor([rank])).sum().backward()
    optimizer.step()
    optimizer.zero_grad()
    optimizer.param_groups[0]["lr"] = 0.2 if rank == 1 else 0.1
    error = error_text(vocabulary.resize, layer, 9, optimizer)
    optimizer.param_groups[0]["lr"] = 0.1
    vocabulary.resize(layer, 9, optimizer)
    return error, optimizer.state[layer.weight]["step_size"][7:].unique().tolist()


def test_added_rows_start_with_the_same_state_on_all_ranks():
    for error, step_sizes in rank_processes(2).run(grow_with_other_options, 2):
        assert "rank 0: change the row count from 7 to 9 with prev, step_size (0.1) of" in error
        assert "rank 1: change the row count from 7 to 9 with prev, step_size (0.2) of" in error
        assert step_sizes == torch.tensor([0.1]).tolist()


def write_before_a_step(count):
    """Write to the weight on one rank before a step, then load the earlier values on all ranks."""
    rank = dist.get_rank()
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1, weight_decay=0.1)
    for t in range(3):
        optimizer.zero_grad()
        layer(torch.tensor([1 + rank])).square().sum().backward()
        if t == 1:
            start = layer.weight.detach().clone()
            if rank == 0:
                with torch.no_grad():
                    layer.weight.mul_(2)
        error = error_text(optimizer.step)
        if t == 1:
            assert error is None
            layer.load_state_dict({"weight": start})
    return error


def test_states_are_compared_after_a_step_from_other_rows():
    for error in rank_processes(2).run(write_before_a_step, 2):
        assert error is not None
        assert "with hash of the state=" in error


def replace_states(layer, optimizer):
    """Train, and replace the dict of all states, as code does that resets an optimizer."""
    for t in range(4):
        if t % 2:
            optimizer.state = collections.defaultdict(dict)
        optimizer.zero_grad()
        layer(torch.tensor([t])).sum().backward()
        optimizer.step()
    return layer.weight.detach()


def replace_states_of_replicas(weight, name, options):
    layer = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    replicate(hotrow.convert(layer, min_entries=0), mesh_of_all(2))
    assert isinstance(layer.weight, Table)
    return replace_states(layer, getattr(hotrow.optim, name)(layer.parameters(), **options))


@pytest.mark.parametrize("name", ["RMSprop", "AdamW"])  # RMSprop decays all rows in torch's step
def test_all_optimizer_states_can_be_replaced(name):
    weight, options = torch.rand(7, 3), {"lr": 0.1, "weight_decay": 0.1}
    layer = nn.Embedding.from_pretrained(weight.clone(), freeze=False)
    expected = replace_states(layer, getattr(torch.optim, name)(layer.parameters(), **options))
    for found in rank_processes(2).run(replace_states_of_replicas, weight, name, options):
        torch.testing.assert_close(found, expected)


def load_start_values(count):
    """Train twice from the same values; rank 0 keeps the first optimizer."""
    rank, kept = dist.get_rank(), []
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    start = {"weight": layer.weight.detach().clone()}
    for _ in range(2):
        layer.load_state_dict(start)
        optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1)
        layer(torch.tensor([1 + rank])).sum().backward()
        optimizer.step()
        if rank == 0:
            kept.append(optimizer)
        del optimizer
    return {"weight": layer.weight.detach()}


def test_a_rank_may_keep_an_optimizer_that_is_not_in_use():
    assert_all_the_same(rank_processes(2).run(load_start_values, 2))


def step_in_another_order(count, optimizer_count, call_count):
    """Train two tables; rank 1 lists them in another order than rank 0.

    With a `call_count` of 0, one table is a copy of the other.
    """
    rank = dist.get_rank()
    model = hotrow.convert(nn.ModuleList([nn.Embedding(7, 3), nn.Embedding(7, 3)]), min_entries=0)
    if call_count == 0:
        replicate(model[0], mesh_of_all(count))
        copies = [copy.deepcopy(model[0]) for _ in range(1 + rank)]
        model[1] = copies[0]
    else:
        for each in [model] if call_count == 1 else model:  # both tables then have the same path
            replicate(each, mesh_of_all(count))
    assert all(isinstance(layer.weight, Table) for layer in model)
    tables = [model[0].weight, model[1].weight][:: -1 if rank == 1 else 1]
    groups = [{"params": [table], "lr": 0.1 if table is tables[rank] else 0.2} for table in tables]
    lists = [groups] if optimizer_count == 1 else [[group] for group in groups]
    optimizers = [hotrow.optim.AdamW(each) for each in lists]
    for _ in range(3):
        for optimizer in optimizers:
            optimizer.zero_grad()
        sum(layer(torch.tensor([1 + rank])).sum() for layer in model).backward()
        if rank == 0:
            model[0].weight.detach().sum()  # settles the rows
        errors = [error_text(optimizer.step) for optimizer in optimizers]
        if any(errors):
            return errors, {}
    return errors, {str(i): layer.weight.detach() for i, layer in enumerate(model)}


@pytest.mark.parametrize(("optimizer_count", "call_count"), [(1, 1), (2, 1), (1, 2), (1, 0)])
def test_ranks_may_list_the_parameters_of_an_optimizer_in_any_order(optimizer_count, call_count):
    results = rank_processes(2).run(step_in_another_order, 2, optimizer_count, call_count)
    assert_all_the_same([values for _, values in results])
    for errors, _ in results:
        if optimizer_count == 1:
            assert errors == [None]
        else:
            assert "0.weight with table=0.weight, but rank 1 with table=1.weight" in errors[0]
            assert "1.weight with table=1.weight, but rank 1 with table=0.weight" in errors[1]


def step_with_torch(count, fused):
    """Take a step of a torch optimizer with another learning rate on each rank."""
    layer = replicate(hotrow.convert(nn.Embedding(7, 3), min_entries=0), mesh_of_all(count))
    assert isinstance(layer.weight, Table)
    rate = 0.1 * (1 + dist.get_rank())
    optimizer = torch.optim.AdamW(layer.parameters(), lr=rate, fused=fused)
    layer(torch.tensor([1])).sum().backward()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        optimizer.step()
    return error_text(layer, torch.tensor([1]))


@pytest.mark.parametrize("fused", [False, True])
def test_replicas_are_compared_after_a_step_of_torch(fused):
    for error in rank_processes(2).run(step_with_torch, 2, fused):
        assert error is not None
        assert "the copies of weight on rank 0 and rank 1 differ" in error
