"""The options of the optimizer in a save, and saves that `open` could not read."""

import json
from unittest import mock

import numpy as np
import pytest
import torch

import hotrow
from hotrow import HotrowError, disk
from hotrow.disk import record as record_module
from hotrow.disk.folder import Folder
from tests.disk.folders import change_record, snapshot
from tests.support.tolerance import assert_same_bits

ROWS, COLUMNS = 60, 4


def step(store, optimizer):
    optimizer.zero_grad()
    store.layer(torch.tensor([1, 2, 40])).sum().backward()
    optimizer.step()


def assert_reopens(store):
    expected = store.layer.weight.detach().clone()
    store.close()
    disk.verify(store.folder)
    with disk.open(store.folder) as again:
        assert_same_bits(again.layer.weight.detach(), expected)


@pytest.mark.parametrize(
    "options",
    [
        {"lr": np.float32(0.1)},
        {"lr": np.array(0.1)},
        {"lr": np.int64(1)},
        {"eps": np.float16(1e-4), "weight_decay": np.float64(0.1)},
        {"betas": (np.float64(0.9), 0.99)},
        {"betas": (torch.tensor(0.9), torch.tensor(0.99)), "foreach": False},
        {"amsgrad": np.bool_(True)},
        {"lr": 1},
    ],
    ids=str,
)
@pytest.mark.parametrize("name", ["AdamW", "NAdam"])
def test_numbers_of_numpy_are_saved(name, options, tmp_path):
    if name == "NAdam" and "amsgrad" in options:
        options = {"momentum_decay": np.float32(0.01)}
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), **options)
    for _ in range(3):
        step(store, optimizer)
    store.save()
    assert_reopens(store)


@pytest.mark.parametrize("value", [10**400, [-(10**400)], 2**900], ids=["10^400", "list", "2^900"])
def test_a_large_option_of_other_code_does_not_prevent_a_save(value, tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    optimizer = hotrow.optim.Adam(store.layer.parameters())
    optimizer.param_groups[0]["seed"] = value
    step(store, optimizer)
    store.save()
    assert_reopens(store)


def test_a_schedule_of_numpy_numbers_is_saved(tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    optimizer = hotrow.optim.NAdam(store.layer.parameters(), lr=0.1)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda t: np.float32(0.5))
    for _ in range(3):
        step(store, optimizer)
        schedule.step()
    store.save()
    assert_reopens(store)


@pytest.mark.parametrize(
    ("name", "options", "dtype"),
    [
        ("SGD", {"lr": 1e200, "weight_decay": 1e200}, torch.float64),
        ("Adamax", {"betas": (0.5, 1.0)}, torch.float32),
    ],
)
def test_a_run_whose_options_overflow_is_saved(name, options, dtype, tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS, dtype=dtype)
    optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), lr=0.1)
    step(store, optimizer)
    optimizer.param_groups[0].update(options)
    for _ in range(4):
        step(store, optimizer)
    store.save()
    assert_reopens(store)


@pytest.mark.parametrize("code", [float("nan"), float("inf"), -1, 0.5, 99])
@pytest.mark.parametrize("name", ["ASGD", "NAdam"])
def test_an_invalid_dtype_of_the_scalars_is_refused(name, code, tmp_path):
    with disk.create(tmp_path / "t", ROWS, COLUMNS) as store:
        step(store, getattr(hotrow.optim, name)(store.layer.parameters()))
        store.save()
    run = json.loads((tmp_path / "t" / "run.json").read_bytes())["run"]
    change_record(tmp_path / "t", run=run | {"carried": run["carried"] | {"_dtype": code}})
    with pytest.raises(HotrowError, match=r"run.json is damaged .'_dtype' in 'carried' is not"):
        disk.open(tmp_path / "t")


@pytest.mark.parametrize("value", [{"a": 1}, [[1]], {1}, [None, {"a": 1}], len], ids=str)
def test_options_that_no_rule_needs_may_have_any_type(value, tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    group = {"params": list(store.layer.parameters()), "tags": value, 3: "x"}
    optimizer = hotrow.optim.Adam([group])
    step(store, optimizer)
    store.save({"epoch": 1})
    assert_reopens(store)


@pytest.mark.parametrize("cause", ["size", "option", "run"])
def test_a_save_that_open_could_not_read_is_refused_before_anything_changes(
    cause, tmp_path, monkeypatch
):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    optimizer = hotrow.optim.Adam(store.layer.parameters())
    step(store, optimizer)
    store.save("first")
    step(store, optimizer)
    before = snapshot(store.folder)
    with monkeypatch.context() as patch:
        if cause == "size":
            limit = (store.folder / "run.json").stat().st_size + 500
            patch.setattr(record_module, "MAX_RECORD_BYTES", limit)
            patch.setitem(store.table.lag.group_options, "note", 500 * "x")
            text = f"it has more than {limit:,} bytes"
        elif cause == "option":
            patch.setitem(store.table.lag.group_options, "eps", {"a": 1})
            text = "KeyError: 'eps'"
        else:
            patch.setattr(store.table.lag, "settled_steps", 7)
            text = "'settled' is not an integer from 0 to 2"
        with pytest.raises(HotrowError, match=rf"t cannot be saved, because .* \({text}"):
            store.save("second")
    assert snapshot(store.folder) == before
    store.save("second")
    assert_reopens(store)


# --- A disk that is full while the state is created ----------------------------------------------


@pytest.mark.parametrize("name", ["exp_avg", "exp_avg_sq", "last"])
@pytest.mark.parametrize("grown", [False, True])
def test_a_step_is_repeated_after_the_disk_was_full(name, grown, tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    if grown:
        hotrow.vocabulary.resize(store.layer, ROWS + 3, init=torch.zeros(3, COLUMNS))
    optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.1)
    reserve = Folder.reserve

    def fail(self, file, size):
        if file.name.startswith(f"{name}."):
            raise OSError(28, "No space left on device")
        reserve(self, file, size)

    with mock.patch.object(Folder, "reserve", fail):
        for _ in range(2):
            with pytest.raises(HotrowError, match=rf"{name}\S+ could not be created .*repeat the"):
                step(store, optimizer)
    assert not [path.name for path in store.folder.iterdir() if path.name.endswith(".new")]
    with torch.no_grad():
        store.layer.weight[5] = 7
    store.save("without a state")
    step(store, optimizer)
    store.save("with a state")
    assert store.layer.weight[5].tolist() == [7] * COLUMNS
    assert (store.layer.weight[40] != 0).all()
    assert_reopens(store)


def test_another_optimizer_steps_after_the_disk_was_full(tmp_path):
    store = disk.create(tmp_path / "t", ROWS, COLUMNS)
    optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.1)

    def fail(*arguments):
        raise OSError(28, "No space left on device")

    with (
        mock.patch.object(Folder, "reserve", fail),
        pytest.raises(HotrowError, match=r"exp_avg\S+ could not be created"),
    ):
        step(store, optimizer)
    step(store, hotrow.optim.SGD(store.layer.parameters(), lr=0.1, momentum=0.9))
    store.save()
    assert {path.layout.name for path in store.files()} == {"weight", "last", "momentum_buffer"}
    assert_reopens(store)
