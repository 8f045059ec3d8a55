"""Tensors that code keeps, such as `weight.data` or a state dict, have the same values as in torch.

They share memory that is mapped to the files, also while other values are saved to the files.
"""

import copy
import shutil
from unittest import mock

import pytest
import torch

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.disk import journal, mapped_file
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_same_bits

ROWS, COLUMNS = 3000, 8  # 47 pages of float64
BATCHES = [torch.tensor(ids) for ids in ([1, 2, 3], [2, 500, 900], [2999, 7, 3, 3])]


class Sides:
    """A table on disk and a dense embedding in torch, which take the same steps."""

    def __init__(self, folder):
        values = torch.randn(ROWS, COLUMNS, dtype=torch.float64)
        self.folder = folder
        self.store = disk.create(
            folder, ROWS, COLUMNS, dtype=torch.float64, fill=lambda block: block.copy_(values)
        )
        self.dense = torch.nn.Embedding(ROWS, COLUMNS, _weight=values.clone())
        assert type(self.store.layer.weight) is Table

    def make(self, name, **options):
        return Pair(self, name, {"lr": 0.1, **options})

    def save(self):
        """Save, and check a copy of the folder, as after a crash."""
        self.store.save()
        copied = shutil.copytree(self.folder, self.folder.with_name("copy"))
        disk.verify(copied)
        with disk.open(copied) as store:
            assert_same_bits(store.layer.weight.detach(), self.store.layer.weight.detach())
        shutil.rmtree(copied)

    def check(self):
        torch.testing.assert_close(self.store.layer.weight.detach(), self.dense.weight.detach())


class Pair:
    """An optimizer of hotrow and the same one of torch."""

    def __init__(self, sides, name, options):
        self.sides = sides
        self.ours = getattr(hotrow.optim, name)(sides.store.layer.parameters(), **options)
        self.torch = getattr(torch.optim, name)(sides.dense.parameters(), **options)

    def step(self, *numbers):
        for number in numbers:
            for layer, optimizer in (
                (self.sides.store.layer, self.ours),
                (self.sides.dense, self.torch),
            ):
                optimizer.zero_grad()
                rows = layer(BATCHES[number])
                (rows * torch.linspace(0.1, 1, rows.numel()).reshape(rows.shape)).sum().backward()
                optimizer.step()
        assert self.sides.store.table.lag is not None  # hotrow has taken row steps

    def load(self, ours, dense):
        self.ours.load_state_dict(ours)
        self.torch.load_state_dict(copy.deepcopy(dense))

    def state_dicts(self):
        return self.ours.state_dict(), self.torch.state_dict()

    def check(self):
        assert_same_states(*self.state_dicts())


def assert_same_states(ours, dense):
    assert ours["state"][0].keys() == dense["state"][0].keys()
    for name, value in dense["state"][0].items():
        torch.testing.assert_close(ours["state"][0][name], value, msg=name)


@pytest.fixture(params=[True, False], ids=["pagemap", "no pagemap"])
def sides(request, tmp_path, monkeypatch):
    if not request.param:

        def refuse(*arguments):
            raise PermissionError

        monkeypatch.setattr(mapped_file, "_read_exactly", refuse)
    torch.manual_seed(0)
    result = Sides(tmp_path / "t")
    yield result
    result.store.close()


def fail_to_apply():
    """Let a save fail after its journal is complete."""
    return mock.patch.object(journal._Journal, "apply", side_effect=OSError(28, "full"))


@pytest.mark.parametrize("saves", ["save", "fail", "refuse"])
@pytest.mark.parametrize("trained", [False, True])
def test_weights_that_are_swapped_around_a_save_come_back(sides, trained, saves):
    optimizer = sides.make("Adam")
    if trained:
        optimizer.step(0, 1, 2)
        sides.save()
    weights = sides.store.layer.weight, sides.dense.weight
    backups = [weight.data for weight in weights]
    for weight in weights:
        weight.data = weight.detach() * 0.5
    if saves == "save":
        sides.save()
    elif saves == "fail":
        with fail_to_apply(), pytest.raises(HotrowError):
            sides.store.save()
    else:
        with (
            mock.patch.object(sides.store, "_serialize", side_effect=HotrowError("refused")),
            pytest.raises(HotrowError, match="refused"),
        ):
            sides.store.save()
    sides.check()
    torch.testing.assert_close(*backups)
    for weight, backup in zip(weights, backups, strict=True):
        weight.data = backup
    sides.check()
    optimizer.step(0, 1, 2)
    sides.save()
    sides.check()
    optimizer.check()
    torch.testing.assert_close(*backups)


def test_a_state_tensor_that_is_swapped_for_a_step_comes_back(sides):
    optimizer = sides.make("Adam")
    optimizer.step(0, 1, 2)
    states = (
        optimizer.ours.state[sides.store.layer.weight],
        optimizer.torch.state[sides.dense.weight],
    )
    old = [state["exp_avg"] for state in states]
    for state in states:
        state["exp_avg"] = torch.zeros_like(state["exp_avg"])
    optimizer.step(1)
    sides.save()
    torch.testing.assert_close(*old)
    for state, value in zip(states, old, strict=True):
        state["exp_avg"] = value
    optimizer.step(0, 1, 2)
    torch.testing.assert_close(*old)  # still an alias of the state
    sides.save()
    sides.check()
    optimizer.check()


def test_a_kept_state_dict_does_not_change_when_another_state_is_loaded(sides):
    optimizer = sides.make("Adam")
    optimizer.step(0, 1, 2)
    backup = copy.deepcopy(optimizer.state_dicts())
    optimizer.step(0, 1, 2)
    kept = optimizer.state_dicts()
    optimizer.load(*backup)
    sides.save()
    assert_same_states(*kept)
    optimizer.check()
    optimizer.load(*kept)
    optimizer.step(0, 1, 2)
    sides.save()
    sides.check()
    optimizer.check()


def test_a_second_optimizer_that_loads_a_state_does_not_change_the_first(sides):
    one = sides.make("Adam")
    one.step(0, 1, 2)
    states = copy.deepcopy(one.state_dicts())
    for state in states:
        for name in ("exp_avg", "exp_avg_sq"):
            state["state"][0][name].fill_(0.5)
    two = sides.make("Adam")
    two.load(*states)
    for number in (0, 1):
        one.step(number)
        two.step(number)
        sides.save()
    sides.check()
    one.check()
    two.check()


@pytest.mark.parametrize("others", [["AdamW"], ["SGD", "AdamW", "NAdam"]])
def test_optimizers_of_several_classes_train_a_table_in_turn(sides, others):
    first = sides.make("Adam")
    first.step(0, 1)
    kept = first.state_dicts()
    sides.save()
    pairs = [first]
    for name in others:
        pairs.append(sides.make(name))
        for number in (0, 1, 2):
            pairs[-1].step(number)
            sides.save()
            assert_same_states(*kept)
    for number in (0, 1, 2):
        for pair in pairs:
            pair.step(number)
            sides.save()
            sides.check()
    for pair in pairs:
        if type(pair.ours) is not hotrow.optim.SGD:
            pair.check()


def test_two_optimizers_in_turn_write_only_the_pages_that_change(tmp_path):
    sides = Sides(tmp_path / "t")
    # Without weight decay or momentum, no step changes idle rows.
    one, two = sides.make("Adagrad"), sides.make("Adagrad")
    one.step(0)
    two.load(*copy.deepcopy(one.state_dicts()))
    for number in (1, 2, 0, 1):
        for each in (one, two):
            each.step(number)
            file = sides.store.state_files.used["sum"].file
            assert 1 <= len(file.written_pages()) <= 12
            sides.store.save()
            assert len(file.written_pages()) == 0
    sides.check()
    one.check()
    two.check()
    sides.store.close()


@pytest.mark.parametrize("rows", [5, 2900, 3500, 9000])
@pytest.mark.parametrize("fails", [False, True])
def test_kept_weights_survive_changes_in_the_number_of_rows(sides, rows, fails):
    optimizer = sides.make("Adam")
    optimizer.step(0, 1, 2)
    sides.save()
    weight = sides.store.layer.weight
    backup, values = weight.data, weight.detach().clone()
    weight.data = values * 0.5
    sides.save()
    vocabulary.resize(sides.store.layer, rows, optimizer.ours)
    if fails:
        with fail_to_apply(), pytest.raises(HotrowError):
            sides.store.save()
    sides.save()
    assert_same_bits(backup, values)
    weight = sides.store.layer.weight
    assert_same_bits(weight.detach()[:5], values[:5] * 0.5)
    vocabulary.resize(sides.store.layer, ROWS, optimizer.ours)
    sides.save()
    weight.data = backup
    sides.save()
    assert_same_bits(weight.detach(), values)
    assert_same_bits(backup, values)


def test_a_failed_save_of_other_weights_does_not_damage_checksums(sides):
    weight = sides.store.layer.weight
    backup = weight.data
    weight.data = torch.randn_like(backup)
    with fail_to_apply(), pytest.raises(HotrowError):
        sides.store.save()
    weight.data = torch.where(torch.arange(ROWS)[:, None] < 9, weight.data, backup)
    sides.save()
    weight.data = backup
    sides.save()
    sides.check()


def test_memory_that_no_tensor_uses_is_freed(tmp_path):
    sides = Sides(tmp_path / "t")
    weight = sides.store.layer.weight
    memories = sides.store.state_files.used["weight"].file._memories
    for _ in range(3):
        weight.data = weight.detach() * 0.5
        sides.save()
        assert len(memories) == 1
    backup = weight.data
    assert len(memories) == 1
    del backup
    sides.store.close()


@pytest.mark.parametrize("saves", [False, True])
def test_kept_weights_survive_rows_that_are_removed_and_added(sides, saves):
    weight = sides.store.layer.weight
    backup, values = weight.data, weight.detach().clone()
    weight.data = values * 0.5
    for rows in (1000, ROWS):
        vocabulary.resize(sides.store.layer, rows)
        if saves:
            sides.save()
    assert_same_bits(backup, values)
    sides.store.layer.weight.data = backup
    sides.save()
    assert_same_bits(sides.store.layer.weight.detach(), values)


def test_weights_of_fewer_rows_that_share_kept_memory_are_saved(sides):
    weight = sides.store.layer.weight
    backup, values = weight.data, weight.detach().clone()
    weight.data = values * 0.5
    vocabulary.resize(sides.store.layer, 1000)
    sides.store.layer.weight.data = backup[:1000]
    sides.save()
    assert_same_bits(backup, values)
    assert_same_bits(sides.store.layer.weight.detach(), values[:1000])


def test_an_alias_that_is_assigned_to_the_table_is_still_seen(sides):
    weight = sides.store.layer.weight
    alias = weight.data.numpy()
    weight.data = torch.from_numpy(alias)
    with pytest.raises(HotrowError, match="shares the memory"):
        vocabulary.resize(sides.store.layer, 1000)
    del alias
    vocabulary.resize(sides.store.layer, 1000)
    sides.save()


@pytest.mark.parametrize("readable", [True, False])
def test_a_change_after_a_failed_save_is_undone_before_rows_are_added(
    tmp_path, readable, monkeypatch
):
    if not readable:

        def refuse(*_):
            raise PermissionError

        monkeypatch.setattr(mapped_file, "_read_exactly", refuse)
    store = disk.create(tmp_path / "t", 600, COLUMNS)
    values = store.layer.weight.detach().clone()
    with torch.no_grad():
        store.layer.weight[500] = 7
    with fail_to_apply(), pytest.raises(HotrowError):
        store.save()
    with torch.no_grad():
        store.layer.weight.copy_(values)
    vocabulary.resize(store.layer, 2000)  # more addresses than are reserved
    expected = store.layer.weight.detach().clone()
    assert_same_bits(expected[:600], values)
    store.save()
    assert_same_bits(store.layer.weight.detach(), expected)
    store.close()
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), expected)


def test_kept_weights_survive_a_second_removal_after_a_failed_save(sides):
    vocabulary.resize(sides.store.layer, 1000)
    weight = sides.store.layer.weight
    with fail_to_apply(), pytest.raises(HotrowError):
        sides.store.save()
    backup, values = weight.data, weight.detach().clone()
    weight.data = values * 0.5
    sides.save()
    vocabulary.resize(sides.store.layer, 500)
    sides.save()
    assert_same_bits(backup, values)


@pytest.mark.parametrize("can_populate", [True, False])
def test_a_save_does_not_touch_the_values_of_kept_tensors(sides, can_populate, monkeypatch):
    """Other threads may read or write them meanwhile."""
    if not can_populate:
        monkeypatch.setattr(mapped_file, "_POPULATE_WRITE", 0x7FFF)  # EINVAL, as before Linux 5.14
    weight = sides.store.layer.weight
    backup, values = weight.data, weight.detach().clone()
    weight.data = values * 0.5
    vocabulary.resize(sides.store.layer, 500)
    seen = []
    replace = mapped_file._replace_memory

    def watch(target, source):
        seen.append(torch.equal(backup, values))
        replace(target, source)
        seen.append(torch.equal(backup, values))

    monkeypatch.setattr(mapped_file, "_replace_memory", watch)
    sides.store.save()
    assert seen
    assert all(seen)
    assert_same_bits(backup, values)


@pytest.mark.parametrize("change", ["state_dict", "data", "assign"])
def test_adagrad_spreads_a_nan_in_its_state_as_torch_does(sides, change):
    pair = sides.make("Adagrad")
    pair.step(0)
    for optimizer, layer in ((pair.ours, sides.store.layer), (pair.torch, sides.dense)):
        state = optimizer.state[layer.weight]
        if change == "assign":
            values = state["sum"].clone()
            values[5] = torch.nan
            state["sum"] = values
            continue
        state["sum"][5] = torch.nan
        if change == "state_dict":
            optimizer.state_dict()
        else:
            layer.weight.data = layer.weight.data
    pair.step(0)
    expected = sides.dense.weight.detach()
    assert expected[5].isnan().all()
    torch.testing.assert_close(sides.store.layer.weight.detach(), expected, equal_nan=True)
