"""Optimizers of another class train a saved table; if their first step fails, nothing is lost."""

import copy
import errno
import itertools
import pickle
import shutil
from unittest import mock

import pytest
import torch

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.disk import journal
from hotrow.optim import step as step_module
from hotrow.optim import updater
from hotrow.table.parameter import Table
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits

ROWS, COLUMNS = 60, 4


def create(path):
    values = torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(5))
    return disk.create(path, ROWS, COLUMNS, fill=lambda block: block.copy_(values))


def step(layer, optimizer, t):
    random = torch.Generator().manual_seed(t)
    ids = torch.randint(ROWS, (9,), generator=random)
    optimizer.zero_grad()
    (layer(ids) * torch.randn(9, COLUMNS, generator=random)).sum().backward()
    optimizer.step()


def make(name, layer):
    options = {"momentum": 0.9} if name == "SGD" else {}
    return getattr(hotrow.optim, name)(layer.parameters(), lr=0.1, **options)


def save_run(path, name, steps=3):
    """Save a run, and return the weight and the optimizer state."""
    with create(path) as store:
        optimizer = make(name, store.layer)
        for t in range(steps):
            step(store.layer, optimizer, t)
        store.save()
        return store.layer.weight.detach().clone(), copies(optimizer)


def copies(optimizer):
    return {key: value.clone() for key, value in optimizer.state_dict()["state"][0].items()}


def assert_contains(folder, name, weight, state):
    """Check the run in a copy of the folder, as after a crash."""
    copied = shutil.copytree(folder, folder.with_name(f"{folder.name}-copy"))
    disk.verify(copied)
    with disk.open(copied) as store:
        assert_same_bits(store.layer.weight.detach(), weight)
        found = copies(make(name, store.layer))
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert_same_bits(found[key], value)
    shutil.rmtree(copied)


def fail(*arguments):
    raise MemoryError


NEXT = dict(itertools.pairwise([*hotrow.optim.__all__, hotrow.optim.__all__[0]]))


@pytest.mark.parametrize(
    ("first", "second"),
    grid(
        itertools.permutations(hotrow.optim.__all__, 2),
        lambda first, second: second == NEXT[first],
    ),
)
def test_an_optimizer_of_another_class_starts_without_state(first, second, tmp_path):
    weight, _ = save_run(tmp_path / "t", first)
    memory = hotrow.convert(torch.nn.Embedding(ROWS, COLUMNS, _weight=weight), min_entries=0)
    assert type(memory.weight) is Table
    expected = make(second, memory)
    with disk.open(tmp_path / "t") as store:
        optimizer = make(second, store.layer)
        for t in range(3, 6):
            step(memory, expected, t)
            step(store.layer, optimizer, t)
        store.save()
    assert_contains(tmp_path / "t", second, memory.weight.detach(), copies(expected))


@pytest.mark.parametrize("then", ["step", "earlier class", "save"])
@pytest.mark.parametrize("cause", ["options", "kernel", "disk"])
@pytest.mark.parametrize(("first", "second"), [("Adam", "RMSprop"), ("Adam", "AdamW")])
def test_a_failed_first_step_keeps_the_state_of_another_class(first, second, cause, then, tmp_path):
    folder = tmp_path / "t"
    weight, state = save_run(folder, first)
    with disk.open(folder) as store:
        optimizer = make(second, store.layer)
        failure = {
            "options": mock.patch.dict(optimizer.param_groups[0], lr=10**400),
            "kernel": mock.patch.object(updater, "step_rows_together", fail),
            "disk": mock.patch.object(store.state_files, "create_slot", fail),
        }
        with failure[cause], pytest.raises((MemoryError, HotrowError)):
            step(store.layer, optimizer, 3)
        assert_contains(folder, first, weight, state)
        if then == "step":
            step(store.layer, optimizer, 3)
            assert copies(optimizer)["step"] == 1
            assert_contains(folder, first, weight, state)  # until the next save
            first, weight, state = second, store.layer.weight.detach().clone(), copies(optimizer)
        elif then == "earlier class":
            assert copies(make(first, store.layer))["step"] == 3
        store.save()
    assert_contains(folder, first, weight, state)


@pytest.mark.parametrize("deletes", [False, True])
@pytest.mark.parametrize("is_open", [False, True])
@pytest.mark.parametrize(("first", "second"), [("SGD", "Adam"), ("AdamW", "Adam")])
def test_a_failed_later_step_keeps_the_state_of_another_class(
    first, second, is_open, deletes, tmp_path
):
    with create(tmp_path / "t") as store:
        earlier, later = make(first, store.layer), make(second, store.layer)
        step(store.layer, earlier, 0)
        own = copies(earlier)
        step(store.layer, later, 1)
        step(store.layer, later, 2)
        weight, state = store.layer.weight.detach().clone(), copies(later)
        if not is_open:
            store.layer.weight.data = store.layer.weight.data  # closes the ledger
        if deletes:
            del later
        with (
            mock.patch.object(updater, "step_rows_together", fail),
            pytest.raises(MemoryError),
        ):
            step(store.layer, earlier, 3)
        store.save()
        assert_contains(tmp_path / "t", second, weight, state)
        for key, value in copies(earlier).items():
            assert_same_bits(value, own[key])
        memory = hotrow.convert(torch.nn.Embedding(ROWS, COLUMNS, _weight=weight), min_entries=0)
        assert type(memory.weight) is Table
        expected = make(first, memory)
        expected.state[memory.weight] = own
        for layer, optimizer in ((memory, expected), (store.layer, earlier)):
            step(layer, optimizer, 3)
        store.save()
        assert_contains(tmp_path / "t", first, memory.weight.detach(), copies(expected))


def test_a_step_that_fails_after_it_has_changed_rows_is_not_saved(tmp_path):
    with create(tmp_path / "t") as store:
        earlier, later = make("SGD", store.layer), make("Adam", store.layer)
        for t, optimizer in enumerate((earlier, later)):
            step(store.layer, optimizer, t)
        weight, state = store.layer.weight.detach().clone(), copies(later)
        store.save()
        with mock.patch.object(step_module, "finish_step", fail), pytest.raises(MemoryError):
            step(store.layer, earlier, 2)
        with pytest.raises(HotrowError, match="an error has interrupted a step or a read"):
            store.save()
    assert_contains(tmp_path / "t", "Adam", weight, state)


@pytest.mark.parametrize("saves", [False, True])
@pytest.mark.parametrize("cause", ["groups", "parameters", "hook"])
def test_a_failed_load_keeps_the_state_of_the_last_step(cause, saves, tmp_path):
    with create(tmp_path / "t") as store:
        earlier, later = make("SGD", store.layer), make("Adam", store.layer)
        for t, optimizer in enumerate((earlier, later, later)):
            step(store.layer, optimizer, t)
        weight, state, loaded = store.layer.weight.detach().clone(), copies(later), earlier
        own, saved = copies(earlier), copy.deepcopy(earlier.state_dict())
        if cause == "groups":
            saved["param_groups"] *= 2
        elif cause == "parameters":
            saved["param_groups"][0]["params"] += [1]
        else:
            loaded.register_load_state_dict_pre_hook(fail)
        with pytest.raises((ValueError, MemoryError)):
            loaded.load_state_dict(saved)
        if saves:
            store.save()
            assert_contains(tmp_path / "t", "Adam", weight, state)
        assert_same_bits(copies(earlier)["momentum_buffer"], own["momentum_buffer"])
        step(store.layer, later, 3)
        assert copies(later)["step"] == 3
        store.save()
        weight = store.layer.weight.detach()
        assert_contains(tmp_path / "t", "Adam", weight, copies(later))


def test_a_failed_first_step_of_two_tables_keeps_the_state_of_both(tmp_path):
    folders = [tmp_path / name for name in "ab"]
    saved = [save_run(folder, "Adam") for folder in folders]
    with disk.open(folders[0]) as one, disk.open(folders[1]) as two:
        optimizer = hotrow.optim.RMSprop([one.layer.weight, two.layer.weight])
        for store in (one, two):
            store.layer(torch.tensor([1, 2])).sum().backward()
        with mock.patch.object(two.state_files, "create_slot", fail), pytest.raises(MemoryError):
            optimizer.step()
        optimizer.step()
        for folder, (weight, state) in zip(folders, saved, strict=True):
            assert_contains(folder, "Adam", weight, state)
        for store in (one, two):
            store.save()
    for folder in folders:
        with disk.open(folder) as store:
            assert copies(make("RMSprop", store.layer))["step"] == 1


@pytest.mark.parametrize("reads", [1, 2])
@pytest.mark.parametrize("saved", [False, True])
def test_reading_the_state_creates_no_slot_for_changed_options(reads, saved, tmp_path):
    def train(layer, optimizer):
        step(layer, optimizer, 0)
        optimizer.param_groups[0].update(momentum=0.9, dampening=0.5)
        for _ in range(reads):
            assert optimizer.state_dict()["state"] == {}
        if saved and layer is store.layer:
            store.save()
        step(layer, optimizer, 1)
        return layer.weight.detach().clone(), copies(optimizer)["momentum_buffer"]

    store = create(tmp_path / "t")
    dense = torch.nn.Embedding(ROWS, COLUMNS, _weight=store.layer.weight.detach().clone())
    layers = hotrow.convert(dense, min_entries=0), store.layer
    assert all(type(layer.weight) is Table for layer in layers)
    expected, found = (
        train(layer, hotrow.optim.SGD(layer.parameters(), lr=0.1)) for layer in layers
    )
    store.close()
    for one, other in zip(found, expected, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("then", ["step", "read", "save"])
@pytest.mark.parametrize("trained", [False, True])
def test_a_new_optimizer_continues_after_an_assignment_to_the_data(trained, then, tmp_path):
    _, state = save_run(tmp_path / "t", "Adam")
    with disk.open(tmp_path / "t") as store:
        if trained:
            optimizer = make("Adam", store.layer)
            step(store.layer, optimizer, 3)
            state = copies(optimizer)
            del optimizer
        store.layer.weight.data = store.layer.weight.data.clone()  # closes the ledger
        if then == "step":
            optimizer = make("Adam", store.layer)
            step(store.layer, optimizer, 4)
            assert copies(optimizer)["step"] == state["step"] + 1
            return
        if then == "save":
            store.save()
            assert_contains(tmp_path / "t", "Adam", store.layer.weight.detach(), state)
        found = copies(make("Adam", store.layer))
        assert found.keys() == state.keys()
        for key, value in state.items():
            assert_same_bits(found[key], value)


def test_a_class_that_loads_an_empty_state_can_be_saved_and_trained(tmp_path):
    weight, state = save_run(tmp_path / "t", "Adam")
    with disk.open(tmp_path / "t") as store:
        optimizer = make("AdamW", store.layer)
        optimizer.load_state_dict(optimizer.state_dict())
        store.save()
        assert_contains(tmp_path / "t", "Adam", weight, state)
        step(store.layer, optimizer, 3)
        store.save()
        weight, state = store.layer.weight.detach(), copies(optimizer)
        assert state["step"] == 1
        assert_contains(tmp_path / "t", "AdamW", weight, state)


def test_loading_an_empty_state_resets_the_state_of_the_same_class(tmp_path):
    save_run(tmp_path / "t", "Adam")
    with disk.open(tmp_path / "t") as store:
        optimizer = make("Adam", store.layer)
        step(store.layer, optimizer, 3)
        optimizer.load_state_dict({**optimizer.state_dict(), "state": {}})
        assert optimizer.state_dict()["state"] == {}
        with pytest.raises(HotrowError, match="cannot be saved, because it was emptied"):
            store.save()
        step(store.layer, optimizer, 4)
        store.save()
        state = copies(optimizer)
        assert state["step"] == 1
        assert_contains(tmp_path / "t", "Adam", store.layer.weight.detach(), state)


def test_changed_options_can_be_repaired_after_a_failed_first_step(tmp_path):
    with create(tmp_path / "t") as store:
        step(store.layer, hotrow.optim.SGD(store.layer.parameters(), lr=0.1), 0)
        store.save()
    with disk.open(tmp_path / "t") as store:
        optimizer = make("SGD", store.layer)  # with momentum
        with mock.patch.object(updater, "step_rows_together", fail), pytest.raises(MemoryError):
            step(store.layer, optimizer, 1)
        step(store.layer, optimizer, 1)
        store.save()
        assert copies(optimizer).keys() == {"momentum_buffer"}


@pytest.mark.parametrize("name", ["Adam", "SGD"])
@pytest.mark.parametrize("earlier_steps", [0, 1])
def test_a_run_can_be_saved_once_an_invalid_option_is_put_back(name, earlier_steps, tmp_path):
    options = {"lr": 0.1}
    with create(tmp_path / "t") as store:
        optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), **options)
        for t in range(earlier_steps):
            step(store.layer, optimizer, t)
            store.layer.weight.data = store.layer.weight.data.clone()  # closes the ledger
        with mock.patch.dict(optimizer.param_groups[0], lr="x"), pytest.raises(HotrowError):
            step(store.layer, optimizer, 1)
        store.save()
        step(store.layer, optimizer, 1)
        store.save()
        weight = store.layer.weight.detach()
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), weight.clone())


def test_a_class_whose_files_a_completed_save_dropped_gets_new_files(tmp_path):
    with create(tmp_path / "t") as store:
        earlier = make("Adam", store.layer)
        for t in range(3):
            step(store.layer, earlier, t)
        store.save()
        step(store.layer, hotrow.optim.SGD(store.layer.parameters(), lr=0.1), 3)
        full = OSError(errno.ENOSPC, "full")
        with (
            mock.patch.object(journal._Journal, "apply", side_effect=full),
            pytest.raises(HotrowError, match="free disk space"),
        ):
            store.save()  # the journal is complete
        for optimizer in (make("AdamW", store.layer), earlier):
            step(store.layer, optimizer, 4)
            store.save()
            name = type(optimizer).__name__
            weight, state = store.layer.weight.detach(), copies(optimizer)
            assert_contains(tmp_path / "t", name, weight, state)


@pytest.mark.parametrize("name", hotrow.optim.__all__)
@pytest.mark.parametrize(
    ("is_closed", "keeps"),
    grid(
        itertools.product((False, True), (False, True)),
        lambda is_closed, keeps: is_closed == keeps,
    ),
)
def test_a_state_that_replaces_the_last_one_is_saved(name, is_closed, keeps, tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = make(name, store.layer)
        for t in range(3):
            step(store.layer, optimizer, t)
        weight = store.layer.weight
        state = {key: value + 1 for key, value in optimizer.state[weight].items()}
        if is_closed:
            weight.data = weight.data
        optimizer.state[weight] = state if keeps else copy.deepcopy(state)
        store.save()
        assert bool(optimizer.state[weight].aliases) == keeps
        assert_contains(tmp_path / "t", name, weight.detach(), state)
        memory = hotrow.convert(copy.deepcopy(store.layer), min_entries=0)
        assert type(memory.weight) is Table
        expected = make(name, memory)
        twin = copy.deepcopy(state)  # kept tensors have current rows, so each step settles them
        expected.state[memory.weight] = twin if keeps else copy.deepcopy(twin)
        for t in range(3, 6):
            step(memory, expected, t)
            step(store.layer, optimizer, t)
        store.save()
        assert_contains(tmp_path / "t", name, memory.weight.detach(), copies(expected))


@pytest.mark.parametrize("removal", ["pop", "clear", "empty"])
def test_a_state_that_was_removed_is_not_saved_silently(removal, tmp_path):
    weight, state = save_run(tmp_path / "t", "Adam")
    with disk.open(tmp_path / "t") as store:
        optimizer = make("Adam", store.layer)
        step(store.layer, optimizer, 3)
        if removal == "pop":
            optimizer.state.pop(store.layer.weight)
        elif removal == "clear":
            optimizer.state.clear()
        else:
            optimizer.state[store.layer.weight] = {}
        with pytest.raises(HotrowError, match=r"was removed from optimizer\.state"):
            store.save()
    assert_contains(tmp_path / "t", "Adam", weight, state)


def test_an_incomplete_state_is_not_saved(tmp_path):
    weight, state = save_run(tmp_path / "t", "Adam")
    with disk.open(tmp_path / "t") as store:
        optimizer = make("Adam", store.layer)
        step(store.layer, optimizer, 3)
        incomplete = copies(optimizer)
        del incomplete["exp_avg"]
        optimizer.state[store.layer.weight] = incomplete
        with pytest.raises(HotrowError, match="the optimizer state has no 'exp_avg'"):
            store.save()
        assert_contains(tmp_path / "t", "Adam", weight, state)
        incomplete["exp_avg"] = torch.ones(ROWS, COLUMNS)
        optimizer.state[store.layer.weight] = incomplete
        store.save()
        assert_contains(tmp_path / "t", "Adam", store.layer.weight.detach(), incomplete)


def test_an_optimizer_without_state_can_be_cleared(tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = hotrow.optim.SGD(store.layer.parameters(), lr=0.1, weight_decay=0.1)
        for t in range(4):
            step(store.layer, optimizer, t)
            optimizer.state.clear()
            store.save()
        weight = store.layer.weight.detach().clone()
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), weight)


@pytest.mark.parametrize("name", ["Adagrad", "ASGD", "RMSprop"])
def test_one_assigned_state_tensor_does_not_silently_replace_the_saved_state(name, tmp_path):
    weight, state = save_run(tmp_path / "t", name)
    with disk.open(tmp_path / "t") as store:
        optimizer = make(name, store.layer)
        slot = next(key for key, value in state.items() if value.ndim)
        optimizer.state[store.layer.weight][slot] = state[slot] * 2
        with pytest.raises(HotrowError, match=r"has no 'step', but .*call optimizer\.state_dict"):
            step(store.layer, optimizer, 3)
        store.save()
        assert_contains(tmp_path / "t", name, weight, state)


@pytest.mark.parametrize("in_group", [False, True])
@pytest.mark.parametrize("decoupled", [False, True])
@pytest.mark.parametrize("name", ["Adam", "AdamW", "NAdam", "RAdam"])
def test_a_run_resumes_whatever_the_form_of_weight_decay(name, decoupled, in_group, tmp_path):
    def optimizer_of(layer):
        option = {"decoupled_weight_decay": decoupled}
        if name == "AdamW" and not in_group:  # its constructor doesn't have the option
            option = {}
        group = {"params": list(layer.parameters()), **(option if in_group else {})}
        return getattr(hotrow.optim, name)([group], **({} if in_group else option))

    with create(tmp_path / "t") as store:
        step(store.layer, optimizer_of(store.layer), 0)
        store.save()
    for steps, other in ((2, optimizer_of), (3, lambda layer: make(name, layer))):
        with disk.open(tmp_path / "t") as store:
            optimizer = other(store.layer)
            step(store.layer, optimizer, steps)
            assert copies(optimizer)["step"] == steps
            store.save()


@pytest.mark.parametrize("then", ["save", "earlier class"])
def test_a_failed_first_step_without_slots_keeps_the_state_of_another_class(then, tmp_path):
    weight, state = save_run(tmp_path / "t", "Adam")
    with disk.open(tmp_path / "t") as store:
        optimizer = hotrow.optim.SGD(store.layer.parameters(), lr=0.1)
        with mock.patch.object(updater, "step_rows_together", fail), pytest.raises(MemoryError):
            step(store.layer, optimizer, 3)
        if then == "earlier class":
            optimizer = make("Adam", store.layer)
            step(store.layer, optimizer, 3)
            weight, state = store.layer.weight.detach().clone(), copies(optimizer)
            assert state["step"] == 4
        store.save()
    assert_contains(tmp_path / "t", "Adam", weight, state)


def test_a_state_that_was_never_saved_survives_a_failed_step_of_another_class(tmp_path):
    with create(tmp_path / "t") as store:
        for t in range(3):
            step(store.layer, make("Adam", store.layer), t)
        other = make("AdamW", store.layer)
        with mock.patch.object(updater, "step_rows_together", fail), pytest.raises(MemoryError):
            step(store.layer, other, 3)
        optimizer = make("Adam", store.layer)
        step(store.layer, optimizer, 3)
        store.save()
        weight, state = store.layer.weight.detach().clone(), copies(optimizer)
        assert state["step"] == 4
    assert_contains(tmp_path / "t", "Adam", weight, state)


def test_a_state_tensor_that_the_options_no_longer_use_is_not_dropped_silently(tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = make("SGD", store.layer)
        step(store.layer, optimizer, 0)
        optimizer.param_groups[0]["momentum"] = 0
        step(store.layer, optimizer, 1)
        with pytest.raises(HotrowError, match=r"save .* 'momentum_buffer'.* del optimizer.state"):
            store.save()
        del optimizer.state[store.layer.weight]["momentum_buffer"]
        step(store.layer, optimizer, 2)
        store.save()


def test_a_loaded_state_tensor_that_the_options_do_not_use_is_not_dropped_silently(tmp_path):
    dense = torch.nn.Embedding(ROWS, COLUMNS)
    before = torch.optim.SGD(dense.parameters(), lr=0.1, momentum=0.9)
    dense(torch.tensor([1])).sum().backward()
    before.step()
    before.param_groups[0]["momentum"] = 0
    with create(tmp_path / "t") as store:
        optimizer = make("SGD", store.layer)
        optimizer.load_state_dict(before.state_dict())
        with pytest.raises(HotrowError, match=r"save .* 'momentum_buffer'"):
            store.save()
        with pytest.raises(HotrowError, match=r"change the rows .* 'momentum_buffer'"):
            vocabulary.resize(store.layer, ROWS + 2, optimizer)
        assert len(store.layer.weight) == ROWS


def test_an_error_before_the_state_is_created_keeps_the_state_of_another_class(tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = make("Adam", store.layer)
        for t in range(3):
            step(store.layer, optimizer, t)
        weight, state = store.layer.weight.detach().clone(), copies(optimizer)
        del optimizer
        other = make("Rprop", store.layer)
        other.param_groups[0]["lr"] = 10**400
        with pytest.raises(OverflowError):
            step(store.layer, other, 3)
        store.save()
    assert_contains(tmp_path / "t", "Adam", weight, state)


@pytest.mark.parametrize("copy_of", [copy.deepcopy, lambda each: pickle.loads(pickle.dumps(each))])
def test_an_adagrad_of_a_table_on_disk_is_copied_before_its_first_step(copy_of, tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = make("Adagrad", store.layer)
        assert optimizer.state_dict()["state"] == {}
        with mock.patch.object(updater, "step_rows_together", fail), pytest.raises(MemoryError):
            step(store.layer, optimizer, 0)
        copy_of(optimizer)


def test_adagrad_has_no_state_of_a_table_on_disk_before_its_first_step(tmp_path):
    _, state = save_run(tmp_path / "t", "Adagrad")
    with disk.open(tmp_path / "t") as store:
        optimizer = make("Adagrad", store.layer)
        assert store.layer.weight not in optimizer.state
        for key, value in copies(optimizer).items():
            assert_same_bits(value, state[key])
