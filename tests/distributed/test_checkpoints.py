"""A saved run continues with the same bits on any number of ranks or in one process."""

import os
import shutil
import signal
import warnings

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_state_dict,
    set_state_dict,
)

import hotrow
from hotrow.table.parameter import Table
from tests.support.distributed_training import (
    OPTIMIZERS,
    STEPS,
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
)
from tests.support.exhaustive import exhaustive, grid
from tests.support.ranks import RankProcesses, rank_processes
from tests.support.tolerance import assert_same_bits

HALF = STEPS // 2
# These optimizers have different kinds of state; Adagrad's state starts above zero.
SAVED = "SGD", "AdamW", "Adagrad"


def full_state(model, optimizer):
    """Return the state to save in a distributed checkpoint."""
    weights, state = get_state_dict(model, optimizer)
    return {"model": weights, "optimizer": state}


def resume(model, optimizer, path):
    """Load a checkpoint the way torch's documentation does."""
    state = full_state(model, optimizer)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "torch.distributed is disabled")  # in a single process
        dcp.load(state, checkpoint_id=path)
    set_state_dict(
        model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"]
    )


def first_half(name, count, path):
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer(name, model)
    train_rank(model, optimizer, count, dist.get_rank(), range(HALF))
    dcp.save(full_state(model, optimizer), checkpoint_id=path)
    train_rank(model, optimizer, count, dist.get_rank(), range(HALF, STEPS))
    return state_values(model, optimizer)


def second_half(name, count, path):
    torch.manual_seed(99)
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer(name, model)
    resume(model, optimizer, path)
    train_rank(model, optimizer, count, dist.get_rank(), range(HALF, STEPS))
    return state_values(model, optimizer)


def train_alone(name, before, after):
    """In one process, emulate training on `before` ranks until the save, then on `after` ranks."""
    model = converted_model()
    optimizer = make_optimizer(name, model)
    train_single_process(model, optimizer, before, range(HALF))
    model.state_dict(), optimizer.state_dict()  # saving settles the rows
    train_single_process(model, optimizer, after, range(HALF, STEPS))
    return state_values(model, optimizer)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return a checkpoint from halfway through a run on two ranks, and each rank's final values."""
    found = {}
    for name in SAVED:
        path = tmp_path_factory.mktemp(name)
        found[name] = path, rank_processes(2).run(first_half, name, 2, path)
    return found


@exhaustive
@pytest.mark.parametrize("name", SAVED)
def test_saving_does_not_change_the_run(saved, name):
    expected = train_alone(name, 2, 2)
    for found in saved[name][1]:
        for key, value in expected.items():
            assert_same_bits(found[key], value)


@pytest.mark.parametrize("count", grid([1, 3, 4], (3).__eq__))
@pytest.mark.parametrize("name", SAVED)
def test_a_run_continues_with_another_number_of_ranks(saved, name, count):
    expected = train_alone(name, 2, count)
    for found in rank_processes(count).run(second_half, name, count, saved[name][0]):
        for key, value in expected.items():
            assert_same_bits(found[key], value)


@pytest.mark.parametrize("name", SAVED)
def test_a_run_continues_in_a_single_process(saved, name):
    model = converted_model()
    optimizer = make_optimizer(name, model)
    resume(model, optimizer, saved[name][0])
    train_single_process(model, optimizer, 1, range(HALF, STEPS))
    found, expected = state_values(model, optimizer), train_alone(name, 2, 1)
    for key, value in expected.items():
        assert_same_bits(found[key], value)


def from_torch(name, count, path):
    """Load a single process's `torch.save` file into shards, train, and return the full state."""
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer(name, model)
    weights, state = torch.load(path, weights_only=True)
    model.load_state_dict(weights)
    optimizer.load_state_dict(state)
    train_rank(model, optimizer, count, dist.get_rank(), range(HALF, STEPS))
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    return state_values(model, optimizer), get_state_dict(model, optimizer, options=options)


@pytest.mark.parametrize("name", SAVED)
def test_a_checkpoint_of_torch_loads_into_shards_and_back(name, tmp_path):
    model = dense_model()
    model.layer.requires_grad_(False)
    chosen = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = getattr(torch.optim, name)(chosen, **OPTIMIZERS[name])
    train_single_process(model, optimizer, 1, range(HALF))
    path = tmp_path / "checkpoint.pt"
    torch.save((model.state_dict(), optimizer.state_dict()), path)
    single = converted_model()
    its = make_optimizer(name, single)
    single.load_state_dict(model.state_dict())
    its.load_state_dict(optimizer.state_dict())
    train_single_process(single, its, 3, range(HALF, STEPS))
    expected = state_values(single, its)
    results = rank_processes(3).run(from_torch, name, 3, path)
    for found, _ in results:
        for key, value in expected.items():
            assert_same_bits(found[key], value)
    weights, state = results[0][1]  # only the first rank receives the full state dicts
    model.load_state_dict(weights)
    set_state_dict(model, optimizer, model_state_dict=weights, optim_state_dict=state)
    for key, value in state_values(model, optimizer).items():
        torch.testing.assert_close(value, expected[key])


def wrong_tables(count, rows):
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer("AdamW", model)
    other = make_optimizer("AdamW", converted_model())
    state = other.state_dict()
    state["state"][0] = {"exp_avg": torch.zeros(rows, 6), "step": torch.tensor(1.0)}
    before = state_values(model, optimizer)
    error = error_text(optimizer.load_state_dict, state)
    after = state_values(model, optimizer)
    return error, all(torch.equal(before[key], after[key]) for key in before)


@pytest.mark.parametrize("rows", [7, 51])  # 51: as many as rank 0 has
def test_the_state_of_another_table_raises(rows):
    for error, unchanged in rank_processes(2).run(wrong_tables, 2, rows):
        assert (
            f"state[0]['exp_avg'] has shape ({rows}, 6), but its table has shape (101, 6)" in error
        )
        assert unchanged


def save_with_torch(count, path):
    """Save a sharded model and optimizer with `torch.save`, one file for each rank."""
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer("AdamW", model)
    train_rank(model, optimizer, count, dist.get_rank(), range(HALF))
    torch.save((model.state_dict(), optimizer.state_dict()), path / f"{dist.get_rank()}.pt")
    return state_values(model, optimizer)


def load_with_torch(count, path, of_first_rank):
    """Load the file of the first rank or of this rank."""
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer("AdamW", model)
    rank = 0 if of_first_rank else dist.get_rank()
    weights, state = torch.load(path / f"{rank}.pt", weights_only=True)
    texts = error_text(model.load_state_dict, weights), error_text(optimizer.load_state_dict, state)
    dist.barrier()
    return texts, None if of_first_rank and count == 2 else state_values(model, optimizer)


def test_a_file_with_the_rows_of_another_rank_raises(tmp_path):
    rank_processes(2).run(save_with_torch, 2, tmp_path)
    (first, _), (second, _) = rank_processes(2).run(load_with_torch, 2, tmp_path, True)
    assert first == (None, None)
    for text in second:
        assert text is not None
        assert "has only the rows of the rank that saved it, but rank 1 needs other rows" in text


@pytest.mark.parametrize(("saved_by", "count"), [(3, 2), (2, 3)])
def test_the_files_of_another_number_of_ranks_raise(tmp_path, saved_by, count):
    rank_processes(saved_by).run(save_with_torch, saved_by, tmp_path)
    if count > saved_by:
        shutil.copy(tmp_path / "0.pt", tmp_path / f"{saved_by}.pt")
    for rank, (texts, _) in enumerate(
        rank_processes(count).run(load_with_torch, count, tmp_path, False)
    ):
        for text in texts:
            assert text is not None
            assert f"the rank that saved it, but rank {rank} needs other rows" in text


@pytest.mark.parametrize(("saved_by", "count"), [(2, 2), (1, 3)])
def test_the_files_of_torch_load_if_they_have_the_rows_of_their_rank(tmp_path, saved_by, count):
    expected = rank_processes(saved_by).run(save_with_torch, saved_by, tmp_path)[0]
    arguments = count, tmp_path, saved_by == 1
    for texts, found in rank_processes(count).run(load_with_torch, *arguments):
        assert texts == (None, None)
        for key, value in expected.items():
            assert_same_bits(found[key], value)


def kill_a_rank(count, path):
    """Kill the last rank during a step, after a checkpoint."""
    rank = dist.get_rank()
    model = distribute(converted_model(), "shard", count)
    optimizer = make_optimizer("AdamW", model)
    train_rank(model, optimizer, count, rank, range(HALF))
    dcp.save(full_state(model, optimizer), checkpoint_id=path)
    inputs, gradient = rank_batch(make_batch(HALF), count, rank)
    output = model(*inputs)
    if rank == count - 1:
        os.kill(os.getpid(), signal.SIGKILL)
    try:
        (output * gradient).sum().backward()
    except (RuntimeError, dist.DistBackendError) as error:
        return type(error).__name__
    return "no error"


@exhaustive
def test_a_killed_rank_ends_the_step_on_the_others_and_keeps_the_checkpoint(tmp_path):
    processes = RankProcesses(3)
    try:
        for pipe in processes.pipes:
            pipe.send((kill_a_rank, (3, tmp_path)))
        first, second, last = processes.answers()
    finally:
        processes.close()
    assert isinstance(last, EOFError)
    for error in (first, second):
        assert error in ("RuntimeError", "DistBackendError", "DistNetworkError")
    model = converted_model()
    optimizer = make_optimizer("AdamW", model)
    resume(model, optimizer, tmp_path)
    train_single_process(model, optimizer, 1, range(HALF, STEPS))
    found, expected = state_values(model, optimizer), train_alone("AdamW", 3, 1)
    for key, value in expected.items():
        assert_same_bits(found[key], value)


class SavedByItself(nn.Embedding):
    """A layer that overrides how torch saves it."""

    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.data


class WithExtraState(nn.Embedding):
    def get_extra_state(self):
        return self.weight.detach().tolist()

    def set_extra_state(self, state):
        pass


def save_again(module, state, prefix, metadata):
    state[prefix + "weight"] = module.weight.detach().clone()


def save_rows_in_other_ways(count):
    model = nn.Sequential(SavedByItself(8, 3), WithExtraState(8, 3), nn.Embedding(8, 3))
    model[2].register_state_dict_post_hook(save_again)
    model = distribute(hotrow.convert(model, min_entries=0), "shard", count)
    assert all(isinstance(layer.weight, Table) for layer in model)
    state = model.state_dict()
    assert state["1._extra_state"] == model[1].weight.detach().tolist()
    return [
        (state[f"{i}.weight"].full_tensor(), layer(torch.arange(8)).detach())
        for i, layer in enumerate(model)
    ]


def test_layers_that_save_themselves_save_all_rows():
    for pairs in rank_processes(2).run(save_rows_in_other_ways, 2):
        for values, rows in pairs:
            assert torch.equal(values, rows)


class SavedInPart(nn.Embedding):
    def _save_to_state_dict(self, destination, prefix, keep_vars):
        destination[prefix + "weight"] = self.weight.detach()[:-1]


def save_in_part(count):
    model = distribute(hotrow.convert(SavedInPart(8, 3), min_entries=0), "shard", count)
    assert isinstance(model.weight, Table)
    return error_text(model.state_dict)


def test_a_layer_that_saves_other_rows_than_it_stores_raises():
    for error in rank_processes(2).run(save_in_part, 2):
        assert "saves weight with the shape (3, 3), but this rank stores (4, 3)" in error


class TiedAfterSharding(nn.Module):
    """A sharded layer, and another layer that is tied to it afterwards."""

    def __init__(self, count):
        super().__init__()
        self.first = distribute(hotrow.convert(nn.Embedding(8, 3)), "shard", count)
        self.second = nn.Embedding(8, 3)
        self.second.weight = self.first.weight
        self.register_parameter("third", self.first.weight)


def save_a_layer_that_is_tied_afterwards(count):
    model = TiedAfterSharding(count)
    assert isinstance(model.second.weight, Table)
    state = model.state_dict()
    whole = [state[name].full_tensor() for name in ("first.weight", "second.weight", "third")]
    with pytest.raises(RuntimeError, match="size mismatch for second"):
        model.load_state_dict(state)
    return whole, model.first(torch.arange(8)).detach()


def test_a_layer_that_is_tied_after_sharding_saves_all_rows():
    for whole, rows in rank_processes(2).run(save_a_layer_that_is_tied_afterwards, 2):
        for values in whole:
            assert torch.equal(values, rows)
