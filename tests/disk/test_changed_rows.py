"""Rows of a table on disk change like rows in memory, and the last save survives a crash."""

import errno
import gc
import os
import random
import shutil
import tempfile
import warnings
from pathlib import Path
from unittest import mock

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.disk import mapped_file
from hotrow.disk.folder import Folder
from hotrow.optim.lag import RowLag
from hotrow.table.parameter import Table
from tests.disk.test_store import Crash, raise_at_line, save_raises
from tests.support.exhaustive import exhaustive, grid
from tests.support.tolerance import assert_same_bits
from tests.support.vocabularies import COLUMNS, TableRun, ThreeRuns

OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.1, "amsgrad": True},
    "AdamW": {"lr": 0.1},
    "NAdam": {"lr": 0.1},
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},
}


class DiskRun(TableRun):
    """Train a table on disk; `reopen` saves it and continues from the files."""

    def __init__(self, name, kwargs, weights, path):
        self.kwargs, self.t, self.name, self.path = kwargs, 0, name, path
        self.store = disk.create(path, *weights.shape, fill=lambda block: block.copy_(weights))
        self._start()

    def _start(self):
        self.layer = self.store.layer
        self.weight = self.layer.weight
        assert isinstance(self.weight, Table)
        self.optimizer = getattr(hotrow.optim, self.name)([self.weight], **self.kwargs)

    def reopen(self, save=True):
        if save:
            self.store.save({"t": self.t, "rows": len(self.layer.weight)})
        self.store.close()
        assert disk.verify(self.path)
        self.store = disk.open(self.path)
        self._start()


@pytest.fixture
def disk_run(tmp_path):
    runs = []

    def make(name, kwargs, weights):
        runs.append(DiskRun(name, kwargs, weights, tmp_path / f"t{len(runs)}"))
        return runs[-1]

    yield make
    for run in runs:
        run.store.close()


@pytest.fixture(params=[True, False], ids=["pagemap", "no pagemap"])
def pagemap(request, monkeypatch):
    """Run a test with and without access to `/proc/self/pagemap`."""
    if not request.param:

        def deny(*arguments, **options):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), "/proc/self/pagemap")

        monkeypatch.setattr(mapped_file, "open", deny, raising=False)


@pytest.mark.parametrize("rows", [12, 340], ids=["one page", "two pages"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_continues_as_if_the_surgery_was_done_by_hand(name, rows, disk_run):
    runs = ThreeRuns(name, OPTIMIZERS[name], rows)
    runs.table = disk_run(name, OPTIMIZERS[name], runs.rival.weights)
    runs.resize(rows + 3)  # no step has been taken and nothing has been saved
    runs.steps(5)
    runs.resize(2 * rows)
    runs.steps(4)
    runs.table.reopen()
    runs.resize(2 * rows + 5)  # the reopened table's optimizer has not taken a step
    runs.steps(3)
    assert isinstance(runs.table.weight.lag, RowLag)
    runs.check()
    runs.steps(2)
    runs.resize(rows - 4)
    runs.take([3, -1, rows - 5, 0, 2, -1])
    runs.steps(3)
    runs.table.reopen()
    runs.resize(rows)
    runs.steps(2)
    runs.check()


def test_old_rows_keep_the_steps_that_they_have_missed(disk_run):
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=50)
    runs.table = disk_run("AdamW", {"lr": 0.1}, runs.rival.weights)
    runs.steps(6)
    runs.table.reopen()
    lag, missed = runs.table.lag, runs.table.lag.row_steps.clone()
    assert missed.min() == 0
    runs.resize(60)
    assert runs.table.lag is lag
    assert lag.row_steps.tolist() == [*missed.tolist(), *[6] * 10]
    runs.table.reopen()
    assert runs.table.lag.row_steps.tolist() == [*missed.tolist(), *[6] * 10]
    runs.steps(3)
    runs.check()


@pytest.mark.parametrize("saves", ["", "trained", "shrunk", "trained and shrunk"])
@pytest.mark.parametrize(
    ("rows", "growths"), [(20, [1]), (1000, [1]), (1000, [5]), (1000, [1, 5])], ids=str
)
def test_a_row_added_where_another_row_was_removed_begins_from_the_initial_state(
    rows, growths, saves, disk_run
):
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows)
    runs.table = disk_run("AdamW", {"lr": 0.1}, runs.rival.weights)
    runs.steps(5, batch=rows)
    if "trained" in saves:
        runs.table.store.save()
    runs.resize(rows // 4)
    if "shrunk" in saves:
        runs.table.store.save()
    for factor in growths:  # five times as many rows need new addresses
        runs.resize(factor * rows)
    assert not runs.table.state["exp_avg"][rows // 4 :].any()
    runs.steps(5)
    runs.check()
    runs.table.reopen()
    runs.steps(1)
    runs.check()


def test_the_optimizer_changes_between_changes_of_the_rows(disk_run):
    weights = torch.randn(500, COLUMNS)
    runs = disk_run("Adam", {"lr": 0.1}, weights), TableRun("Adam", {"lr": 0.1}, weights)
    for name, kwargs in (("Adam", {"lr": 0.1}), ("SGD", OPTIMIZERS["SGD"]), ("Adam", {"lr": 0.1})):
        added = torch.ones(300, COLUMNS)
        for run in runs:
            run.optimizer = getattr(hotrow.optim, name)([run.weight], **kwargs)
            run.kwargs = kwargs
            run.step(torch.tensor([3, 400]), torch.ones(2, COLUMNS))
            run.resize(len(run.layer.weight) + 300, added)
            run.step(torch.tensor([3, 700]), torch.ones(2, COLUMNS))
        runs[0].store.save()
    runs[0].reopen()
    assert_same_bits(*(run.weights for run in runs))


@pytest.mark.usefixtures("pagemap")
@pytest.mark.parametrize("seed", range(6))
def test_any_sequence_of_changes_has_the_same_bits_as_in_memory(seed, disk_run, monkeypatch):
    monkeypatch.setattr(disk.resized_files, "_BLOCK_VALUES", 10 ** (seed + 1))
    chance, generator = random.Random(seed), torch.Generator().manual_seed(seed)
    name = chance.choice(list(OPTIMIZERS))
    weights = torch.randn(chance.randrange(1, 900), COLUMNS, generator=generator)
    runs = disk_run(name, OPTIMIZERS[name], weights), TableRun(name, OPTIMIZERS[name], weights)
    for _ in range(40):
        rows = len(runs[0].layer.weight)
        operation = chance.choice(["step", "step", "resize", "resize", "take", "save", "reopen"])
        if operation == "step":
            ids = torch.randint(rows, (9,), generator=generator)
            factors = torch.randn(9, COLUMNS, generator=generator)
            for run in runs:
                run.step(ids, factors)
        elif operation == "resize":
            new_rows = chance.choice([1, rows + 1, 2 * rows, chance.randrange(1, 3000)])
            added = torch.randn(max(0, new_rows - rows), COLUMNS, generator=generator)
            added *= chance.random() < 0.7  # sometimes only zeros, which need no space
            for run in runs:
                run.resize(new_rows, added)
        elif operation == "take":
            sources = torch.randperm(rows, generator=generator)[: chance.randrange(1, rows + 1)]
            sources[torch.rand(len(sources), generator=generator) < 0.2] = -1
            added = torch.randn(int((sources < 0).sum()), COLUMNS, generator=generator)
            for run in runs:
                run.take(sources, added)
        elif runs[0].weight.lag is None:
            continue
        elif operation == "save":
            runs[0].store.save()
        else:
            runs[0].reopen()
        if chance.random() < 0.2:
            ids = torch.arange(len(runs[0].layer.weight))
            with torch.no_grad():
                assert_same_bits(*(run.layer(ids) for run in runs))
    ids, factors = torch.tensor([0]), torch.ones(1, COLUMNS)
    for run in runs:
        run.step(ids, factors)
    runs[0].reopen()
    runs[0].step(ids, factors)
    runs[1].step(ids, factors)
    assert_same_bits(*(run.weights for run in runs))
    assert runs[0].state.keys() == runs[1].state.keys()
    for key, value in runs[1].state.items():
        assert_same_bits(runs[0].state[key], value)


# --- Cost ----------------------------------------------------------------------------------------


def test_a_growth_writes_only_the_new_rows(tmp_path):
    path = tmp_path / "t" / "weight.safetensors"
    with disk.create(tmp_path / "t", 1_000_000, 64) as store:
        optimizer = hotrow.optim.Adam(store.layer.parameters())
        store.layer(torch.tensor([500_000])).sum().backward()
        optimizer.step()
        store.save()
        size, address = path.stat().st_size, store.table.raw_data.data_ptr()
        for rows in range(1_000_010, 1_000_200, 10):
            vocabulary.resize(store.layer, rows, optimizer)
        assert store.table.raw_data.data_ptr() == address
        written = {file.layout.name: len(file.file.written_pages()) for file in store.files()}
        # A page holds 16 rows of the weight, or the step numbers of 1,024 rows.
        assert written == {"weight": 12, "exp_avg": 0, "exp_avg_sq": 0, "last": 1}
        assert path.stat().st_size == size
        store.save()
        assert path.stat().st_size == size + 190 * 256
        assert path.stat().st_blocks * 512 < 200_000
    with disk.open(tmp_path / "t") as store:
        assert store.layer.weight.shape == (1_000_190, 64)
        with torch.no_grad():
            new = store.layer(torch.arange(1_000_000, 1_000_190))
        assert 0.9 < float(new.std()) < 1.1
    assert disk.verify(tmp_path / "t") == 1_000_190 * (3 * 256 + 4)


def test_a_saved_state_with_old_rows_is_refused_after_reopening(tmp_path):
    for open_store in (
        lambda: disk.create(tmp_path / "t", 6, 2),
        lambda: disk.open(tmp_path / "t"),
    ):
        with open_store() as store:
            adam, last = (
                kind(store.layer.parameters(), lr=0.1)
                for kind in (hotrow.optim.Adam, hotrow.optim.SGD)
            )
            for optimizer in (adam, last):
                optimizer.zero_grad()
                store.layer(torch.tensor([0, 1])).sum().backward()
                optimizer.step()
                if optimizer is adam:
                    store.save()
            vocabulary.take(store.layer, [5, 4, 3, 2, 1, 0], last)
            last.zero_grad()
            store.layer(torch.tensor([0, 1])).sum().backward()
            with pytest.raises(HotrowError, match="rows of its state did not"):
                adam.step()


def test_new_rows_of_zeros_take_no_space(tmp_path):
    with disk.create(tmp_path / "t", 1000, 64) as store:
        vocabulary.resize(store.layer, 50_000, init=torch.zeros(49_000, 64))
        store.save()
        assert store.table.detach().sum() == 0
        vocabulary.resize(store.layer, 90_000, init=torch.zeros(40_000, 64))
        store.save()
    status = (tmp_path / "t" / "weight.safetensors").stat()
    assert status.st_size == 4096 + 90_000 * 256
    assert status.st_blocks * 512 < 50_000
    assert disk.verify(tmp_path / "t") == 90_000 * 256


def test_a_save_frees_the_memory_of_removed_rows(disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(5000, COLUMNS))
    run.resize(9000, None)
    run.step(torch.arange(9000), torch.ones(9000, COLUMNS))
    run.resize(10, None)
    run.store.save()
    run.store.check_rows(None)
    for file in run.store.files():
        file.file.bytes = file.file._memory.bytes  # include the addresses of removed rows
        assert not file.file._pages_in_memory().size


@pytest.mark.usefixtures("pagemap")
def test_a_table_that_outgrows_its_addresses_moves_with_its_unsaved_changes(disk_run):
    weights = torch.randn(2000, COLUMNS)
    runs = disk_run("Adam", {"lr": 0.1}, weights), TableRun("Adam", {"lr": 0.1}, weights)
    address = runs[0].weight.raw_data.data_ptr()
    for rows, ids in ((3000, [0, 1999]), (100_000, [0, 2500]), (100_001, [99_000, 5])):
        added = torch.randn(rows - len(runs[0].layer.weight), COLUMNS)
        for run in runs:
            run.resize(rows, added)
            run.step(torch.tensor(ids), torch.ones(2, COLUMNS))
    assert runs[0].weight.raw_data.data_ptr() != address
    assert_same_bits(*(run.weights for run in runs))


# --- A crash at any time -------------------------------------------------------------------------


def changed_run(run, count, rows):
    """Train for 3 steps, change the number of rows, and train for 3 more steps."""
    generator = torch.Generator().manual_seed(1)
    for t in range(count):
        if t == 3:
            added = max(0, rows - len(run.layer.weight))
            run.resize(rows, torch.randn(added, COLUMNS, generator=generator))
        ids = torch.tensor([t, len(run.layer.weight) - 1 - t])
        run.step(ids, torch.randn(2, COLUMNS, generator=generator))
        if t == 2 and isinstance(run, DiskRun):
            run.store.save(3)


@pytest.mark.parametrize(
    ("rows", "stride"),
    grid([(1500, 521), (1500, 37), (200, 193), (9, 53)], lambda _, stride: stride == 521),
)
def test_a_crash_at_any_line_of_a_save_leaves_this_save_or_the_previous_one(rows, stride, disk_run):
    weights = torch.randn(500, COLUMNS)
    expected = {}
    for count in (3, 6):
        run = TableRun("AdamW", {"lr": 0.1}, weights)
        changed_run(run, count, rows)
        expected[count] = run.weights.clone(), run.state["exp_avg"].clone()
    found, number, raised = [], 1, True
    while raised:
        run = disk_run("AdamW", {"lr": 0.1}, weights)
        changed_run(run, 6, rows)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", ResourceWarning)  # the crash leaves files open
            raised = save_raises(run.store, raise_at_line(number, Crash()), Crash)
            gc.collect()
        run.store.close()
        run.reopen(save=False)
        found.append(run.store.rest)
        assert_same_bits(run.weights, expected[run.store.rest][0])
        assert_same_bits(run.lag.state["exp_avg"], expected[run.store.rest][1])
        number += stride
    assert found == sorted(found)
    assert set(found) == {3, 6}


def fail_in_replay(store, monkeypatch, rest):
    """Save on a disk that becomes full after the journal is complete."""
    replay = disk.journal.replay_journal

    def fail(folder):
        with monkeypatch.context() as failing:
            failing.setattr(disk.journal, "flush", full_disk_after(1))
            replay(folder)

    with monkeypatch.context() as failing:
        failing.setattr(disk.journal, "replay_journal", fail)
        with pytest.raises(HotrowError, match=r"could not be saved .*No space left"):
            store.save(rest)
    assert (store.folder / "journal").exists()


def full_disk_after(count):
    """Return a function like `flush` that raises an error after `count` calls."""
    left = [count]

    def flush(file):
        left[0] -= 1
        if left[0] < 0:
            raise OSError(28, os.strerror(28))
        file.flush()

    return flush


@pytest.mark.usefixtures("pagemap")
@pytest.mark.parametrize("trained", [False, True])
def test_rows_change_again_after_a_disk_was_full_during_a_save(trained, disk_run, monkeypatch):
    weights = torch.randn(500, COLUMNS)
    runs = disk_run("AdamW", {"lr": 0.1}, weights), TableRun("AdamW", {"lr": 0.1}, weights)
    ids, factors = torch.tensor([3, 400]), torch.ones(2, COLUMNS)
    for rows in (2000, 300, 900):
        added = torch.ones(max(0, rows - len(runs[0].layer.weight)), COLUMNS)
        for run in runs:
            run.resize(rows, added)
            if trained:
                run.step(ids % rows, factors)
        fail_in_replay(runs[0].store, monkeypatch, rows)
    for run in runs:
        run.resize(1500, torch.zeros(600, COLUMNS))
        run.step(ids, factors)
    runs[0].reopen()
    runs[0].step(ids, factors)
    runs[1].step(ids, factors)
    assert_same_bits(*(run.weights for run in runs))
    assert_same_bits(*(run.state["exp_avg"] for run in runs))


@pytest.mark.usefixtures("pagemap")
def test_a_table_moves_after_a_disk_was_full_while_its_files_became_shorter(disk_run, monkeypatch):
    weights = torch.randn(5000, COLUMNS)
    runs = disk_run("AdamW", {"lr": 0.1}, weights), TableRun("AdamW", {"lr": 0.1}, weights)
    for rows in (10, 5000, 20_000):
        added = torch.ones(max(0, rows - len(runs[0].layer.weight)), COLUMNS)
        for run in runs:
            run.resize(rows, added)
            run.step(torch.tensor([3]), torch.ones(1, COLUMNS))
        if rows == 10:
            fail_in_replay(runs[0].store, monkeypatch, rows)
    runs[0].reopen()
    assert_same_bits(*(run.weights for run in runs))


@pytest.mark.usefixtures("pagemap")
def test_rows_that_become_zero_after_a_disk_was_full_during_a_save(disk_run, monkeypatch):
    run = disk_run("AdamW", {"lr": 0.1}, torch.ones(500, COLUMNS))
    run.resize(2000, torch.ones(1500, COLUMNS))
    fail_in_replay(run.store, monkeypatch, 1)
    with torch.no_grad():
        run.weight[400:] = 0
    run.reopen()
    assert run.weights.sum() == 400 * COLUMNS


@pytest.mark.usefixtures("pagemap")
def test_a_change_that_is_undone_after_a_failed_save_is_saved(disk_run):
    run = disk_run("SGD", {"lr": 0.1}, torch.ones(500, COLUMNS))
    with torch.no_grad():
        run.weight[3] = 5
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    failing = mock.patch.object(Folder, "rename", side_effect=full)
    with failing, pytest.raises(HotrowError, match="free disk space and save again"):
        run.store.save()
    with torch.no_grad():
        run.weight[3] = 1
    run.reopen()
    assert run.weights.sum() == 500 * COLUMNS


@pytest.mark.parametrize("name", ["weight", "exp_avg", "last.checksums"])
def test_an_unfinished_save_with_a_file_of_another_length_is_refused(name, disk_run, monkeypatch):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    changed_run(run, 6, 4000)
    fail_in_replay(run.store, monkeypatch, 6)
    run.store.close()
    path = run.path / f"{name}.safetensors"
    content = path.read_bytes()
    for size in (4096, len(content) + 100_000):
        os.truncate(path, size)
        with pytest.raises(HotrowError, match=rf"{name}\S+ is damaged .it has {size:,} bytes inst"):
            disk.open(run.path)
        path.write_bytes(content)
    with disk.open(run.path) as store:
        assert (store.rest, len(store.layer.weight)) == (6, 4000)


# --- Errors --------------------------------------------------------------------------------------


def assert_unchanged(run, message, operation):
    before, files = run.weights.clone(), run.store.files()
    rows = len(before)
    with pytest.raises(HotrowError, match=message):
        operation()
    assert run.store.files() == files
    assert run.layer.num_embeddings == len(run.weight) == rows
    assert_same_bits(run.weights, before)
    run.step(torch.tensor([1, rows - 1]), torch.ones(2, COLUMNS))
    run.reopen()
    assert len(run.weights) == rows


@pytest.mark.parametrize("what", ["weight", "state", "state dict", "earlier state dict"])
def test_a_tensor_that_shares_the_memory_is_an_error(what, disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))
    alias = {
        "weight": lambda: run.weight.data,
        "state": lambda: run.state["exp_avg"],
        "state dict": lambda: run.optimizer.state_dict(),
        "earlier state dict": lambda: run.optimizer.state_dict(),
    }[what]()
    if what == "earlier state dict":
        run.step(torch.tensor([2, 3]), torch.ones(2, COLUMNS))
    message = "another tensor, such as .* shares the memory of .*delete that tensor, or keep a copy"
    for operation in (lambda: run.resize(900, None), lambda: run.resize(3, None)):
        with pytest.raises(HotrowError, match=message):
            operation()
    assert_unchanged(run, message, lambda: run.take([1, -1], None))
    del alias
    run.resize(900, None)


@pytest.mark.parametrize("missing", [0, 1])
def test_too_little_disk_space_is_an_error(missing, disk_run, monkeypatch):
    free = 2 * 2000 * COLUMNS * 4 - missing  # the new rows are written to the journal and the file
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))
    monkeypatch.setattr(Folder, "free_bytes", lambda self: free)
    if missing:
        message = r"2,000 more rows need 48,000 bytes of disk space, but .* has 47,999: free disk"
        assert_unchanged(run, message, lambda: run.resize(2500, None))
    else:
        run.resize(2500, None)


@exhaustive
def test_a_full_tmpfs_is_an_error_before_the_rows_change(disk_run):
    parent = Path(tempfile.mkdtemp(dir="/dev/shm"))
    try:
        with disk.create(parent / "t", 1000, 64) as store:
            optimizer = hotrow.optim.Adam(store.layer.parameters())
            store.layer(torch.tensor([5])).sum().backward()
            optimizer.step()
            vocabulary.resize(store.layer, 3000, optimizer)
            store.save()
            for file in store.files():
                status = file.file.path.stat()
                assert status.st_blocks * 512 >= status.st_size == file.layout.file_bytes
            rows = Folder(parent).free_bytes() // 700  # the files together need 772 bytes per row
            with pytest.raises(HotrowError, match=r"more rows need .* bytes of disk space, but"):
                vocabulary.resize(
                    store.layer, rows, optimizer, init=torch.empty(1, 64).expand(rows - 3000, 64)
                )
            assert store.layer.weight.shape == (3000, 64)
    finally:
        shutil.rmtree(parent)


def test_too_little_memory_is_an_error(disk_run, monkeypatch):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))

    def fail(*arguments):
        raise MemoryError

    monkeypatch.setattr(disk.mapped_file._Memory, "__init__", fail)
    with pytest.raises(HotrowError, match=r"could not be mapped with 2,500 rows .there is too li"):
        run.resize(2500, None)
    monkeypatch.undo()
    run.resize(2500, None)


def test_damaged_rows_are_not_moved(disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))
    run.reopen()
    with (run.path / "weight.safetensors").open("r+b") as file:
        file.seek(4096 + 499 * COLUMNS * 4)
        file.write(b"damage")
    with pytest.raises(HotrowError, match="the checksum of rows 341 to 499 does not match"):
        run.take([3, 2], None)
    run.resize(600, None)  # the new rows are on the damaged page
    with pytest.raises(HotrowError, match="the checksum of rows 341 to 499 does not match"):
        run.layer(torch.tensor([499]))
    run.step(torch.tensor([599]), torch.ones(1, COLUMNS))
    with pytest.raises(HotrowError, match="the checksum of rows 341 to 499 does not match"):
        run.store.save()
    run.resize(300, None)  # this drops the damaged rows
    run.store.save()


def test_rows_on_disk_cannot_be_frozen(disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    with pytest.raises(HotrowError, match="freeze is not supported for a table on disk"):
        vocabulary.freeze(run.layer, [1])


def test_a_closed_store_is_an_error(disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.store.close()
    with pytest.raises(HotrowError, match="is closed, and another process may have opened it"):
        run.resize(600, None)


def test_the_optimizer_of_a_saved_state_is_needed(disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))
    run.reopen()
    with pytest.raises(HotrowError, match="has state for each row: pass the optimizer too"):
        vocabulary.resize(run.layer, 600)
    other = hotrow.optim.SGD(run.layer.parameters())
    with pytest.raises(HotrowError, match="this SGD did not take the last step"):
        vocabulary.resize(run.layer, 600, other)


def test_rows_change_only_after_a_step_with_an_assigned_state(disk_run):
    run = disk_run("Adam", {"lr": 0.1}, torch.randn(500, COLUMNS))
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))
    weight = run.layer.weight
    run.optimizer.state[weight] = {k: v.clone() for k, v in run.optimizer.state[weight].items()}
    with pytest.raises(HotrowError, match=r"replaced the Adam.s state of the .* run a step before"):
        vocabulary.resize(run.layer, 600, run.optimizer)
    run.step(torch.tensor([1, 2]), torch.ones(2, COLUMNS))
    vocabulary.resize(run.layer, 600, run.optimizer)


# --- Vocabularies of keys ------------------------------------------------------------------------


def test_a_vocabulary_of_keys_is_saved_together_with_its_rows(tmp_path):
    def train(words, batch):
        words.layers[0](words.admit(batch)).sum().backward()
        words.optimizer.step()
        words.optimizer.zero_grad()

    def start(layer, keys=()):
        optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
        return vocabulary.Vocabulary(layer, optimizer, keys, unknown="row", init=nn.init.ones_)

    layer = hotrow.convert(nn.Embedding(1, 4, _weight=torch.zeros(1, 4)), min_entries=0)
    memory = start(layer)
    with disk.create(tmp_path / "t", 1, 4) as store:
        words = start(store.layer)
        for batch in (["a", "b"], ["c", "b"], [str(i) for i in range(700)]):
            train(words, batch)
            train(memory, batch)
        store.save({"keys": words.keys()})
        words.admit(["lost"])
    with disk.open(tmp_path / "t") as store:
        words = start(store.layer, store.rest["keys"])
        assert words.look_up(["b", "699", "lost"]).tolist() == [2, 703, 0]
        for each in (words, memory):
            train(each, ["new", "c"])
            each.evict(400)
            train(each, ["newer"])
        assert words.keys() == memory.keys()
        assert len(words) == 401
        assert_same_bits(store.layer.weight.detach(), layer.weight.detach())
        store.save({"keys": words.keys()})
    with disk.open(tmp_path / "t") as store:
        assert len(store.layer.weight) == 401 == len(store.rest["keys"]) + 1


def test_keys_of_another_save_are_an_error(tmp_path):
    """A crash between the saves of two folders leaves one of them with the previous rows."""
    with disk.create(tmp_path / "a", 1, 2) as vectors, disk.create(tmp_path / "b", 1, 1) as biases:
        layers = [vectors.layer, biases.layer]
        optimizer = hotrow.optim.SGD([each.weight for each in layers])
        words = vocabulary.Vocabulary(layers, optimizer, unknown="row")
        words.admit(["a", "b", "c", "d"])
        for store in (vectors, biases):
            store.save(words.state_dict())
        words.admit(["c", "d"])
        words.evict(3)
        vectors.save(words.state_dict())
    with disk.open(tmp_path / "a") as vectors, disk.open(tmp_path / "b") as biases:
        layers = [vectors.layer, biases.layer]
        assert all(isinstance(each.weight, Table) for each in layers)
        optimizer = hotrow.optim.SGD([each.weight for each in layers])
        for rest, rows, found in ((vectors.rest, 3, 5), (biases.rest, 5, 3)):
            message = f"the table on disk has {found} rows, but the vocabulary has {rows}: load"
            with pytest.raises(HotrowError, match=message):
                vocabulary.Vocabulary.load(rest, layers, optimizer)
            assert [each.num_embeddings for each in layers] == [3, 5]
        words = vocabulary.Vocabulary.load(biases.rest, biases.layer, optimizer)
        assert words.look_up(["a", "d"]).tolist() == [1, 4]


def test_a_table_on_disk_that_was_resized_accepts_the_keys(tmp_path):
    layer = hotrow.convert(nn.Embedding(3, 4), min_entries=0)
    keys = vocabulary.Vocabulary(layer, keys=["a", "b", "c"]).state_dict()
    with disk.create(tmp_path / "t", 1, 4) as store:
        vocabulary.resize(store.layer, 3)
        words = vocabulary.Vocabulary.load(keys, store.layer)
        store.layer.load_state_dict(layer.state_dict())
        assert_same_bits(store.layer(words.look_up(["b"])).detach(), layer.weight[1:2].detach())


def test_rows_change_after_an_earlier_optimizer_returned_its_state(tmp_path):
    with disk.create(tmp_path / "t", 40, 8) as store:
        layer = store.layer
        optimizer = hotrow.optim.Adam(layer.parameters())
        layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        optimizer.state_dict()
        optimizer = hotrow.optim.Adam(layer.parameters())
        gc.collect()
        vocabulary.resize(layer, 60, optimizer)
        assert optimizer.state[layer.weight]["exp_avg"].shape == (60, 8)
        assert torch.count_nonzero(optimizer.state[layer.weight]["exp_avg"]) == 16
