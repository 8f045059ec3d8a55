"""Tables on disk train like tables in memory, and the last completed save survives any crash."""

import copy
import errno
import gc
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from contextlib import contextmanager
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from unittest.mock import Mock, patch

import pytest
import torch

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.disk import folder as folder_module
from hotrow.disk import journal
from hotrow.disk.folder import Folder
from hotrow.disk.layout import Layout
from hotrow.disk.mapped_tensor import MappedTensor, write_new
from hotrow.disk.record import new_name
from hotrow.inputs import checkpoint
from hotrow.optim import updater
from hotrow.optim.lag import RowLag
from hotrow.table.parameter import Table
from tests.support.children import run_in_child
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT
from tests.support.tolerance import assert_same_bits

ROWS, COLUMNS, STEPS = 700, 5, 12
OPTIMIZERS = {
    "SGD": {"lr": 0.1, "momentum": 0.9, "weight_decay": 0.01},
    "Adam": {"lr": 0.05},
    "AdamW": {"lr": 0.05, "weight_decay": 0.1},
    "NAdam": {"lr": 0.05},  # has a scalar state
    "Adagrad": {"lr": 0.1, "initial_accumulator_value": 0.1},  # its state starts above zero
    "Adadelta": {"lr": 0.5, "weight_decay": 0.1},  # missed steps are replayed one at a time
}


def weights():
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(7))


def create(path):
    """Create a table on disk with the values of `weights()`."""
    values = weights()
    return disk.create(path, ROWS, COLUMNS, fill=lambda block: block.copy_(values))


def in_memory():
    layer = hotrow.Embedding(ROWS, COLUMNS, _weight=weights())
    return hotrow.convert(layer)


def step(layer, optimizer, t):
    random = torch.Generator().manual_seed(t)
    ids = (torch.rand(9, generator=random) ** 3 * ROWS).long()
    optimizer.zero_grad()
    (layer(ids) * torch.randn(9, COLUMNS, generator=random)).sum().backward()
    optimizer.step()


def make(name, layer):
    return getattr(hotrow.optim, name)(layer.parameters(), **OPTIMIZERS[name])


def state_of(optimizer):
    (state,) = optimizer.state_dict()["state"].values()
    return {key: torch.as_tensor(value) for key, value in state.items()}


def assert_same_run(layer, optimizer, other, its):
    assert_same_bits(layer.weight.detach(), other.weight.detach())
    state, expected = state_of(optimizer), state_of(its)
    assert state.keys() == expected.keys()
    for key, value in expected.items():
        assert_same_bits(state[key], value)


# --- The same numbers ----------------------------------------------------------------------------


@pytest.mark.parametrize("read", ["state_dict", "deepcopy"])
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_save_right_after_the_state_was_read_continues_the_run(name, read, tmp_path):
    memory = in_memory()
    its = make(name, memory)
    store = create(tmp_path / "t")
    optimizer = make(name, store.layer)
    for t in range(6):
        step(store.layer, optimizer, t)
        step(memory, its, t)
    for each in (optimizer, its):
        each.state_dict() if read == "state_dict" else copy.deepcopy(each)
    store.save()
    store.close()
    with disk.open(tmp_path / "t") as store:
        assert isinstance(store.layer.weight.lag, RowLag)
        optimizer = make(name, store.layer)
        for t in range(6, STEPS):
            step(store.layer, optimizer, t)
            step(memory, its, t)
        assert_same_run(store.layer, optimizer, memory, its)


def test_a_run_that_continues_without_the_state_of_other_parameters_causes_a_warning(tmp_path):
    def train(store, head, state=None):
        parameters = [*store.layer.parameters(), *head.parameters()]
        optimizer = hotrow.optim.Adam(parameters)
        optimizer.state.update(state or {})
        head(store.layer(torch.tensor([1, 2]))).sum().backward()
        optimizer.step()
        return optimizer

    head = torch.nn.Linear(COLUMNS, 1)
    with create(tmp_path / "t") as store:
        optimizer = train(store, head)
        state = {each: optimizer.state[each] for each in head.parameters()}
        store.save()
    with disk.open(tmp_path / "t") as store:
        train(store, head, state)
        store.save()
    warning = "saved state of a table on disk, but it has no state for its other 2 parameters"
    with disk.open(tmp_path / "t") as store, pytest.warns(UserWarning, match=warning):
        train(store, head)


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_a_run_saved_and_reopened_has_the_same_bits_as_one_in_memory(name, tmp_path):
    layer = in_memory()
    optimizer = make(name, layer)
    for t in range(STEPS):
        step(layer, optimizer, t)
    for begin, end in ((0, 4), (4, 5), (5, STEPS)):
        with create(tmp_path / "t") if not begin else disk.open(tmp_path / "t") as store:
            its = make(name, store.layer)
            for t in range(begin, end):
                step(store.layer, its, t)
            assert isinstance(store.table.lag, RowLag)
            if end < STEPS:
                store.save()
            else:
                assert_same_run(store.layer, its, layer, optimizer)


def test_weight_decay_that_starts_later_is_saved(tmp_path):
    layer, its = in_memory(), None
    optimizer = hotrow.optim.SGD(layer.parameters(), lr=0.1)
    with create(tmp_path / "t") as store:
        its = hotrow.optim.SGD(store.layer.parameters(), lr=0.1)
        for t in range(4):
            for each, trained in ((layer, optimizer), (store.layer, its)):
                trained.param_groups[0]["weight_decay"] = 0.1 * (t > 1)
                step(each, trained, t)
        store.save()
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), layer.weight.detach())


def test_reads_after_opening_are_settled_without_an_optimizer(tmp_path):
    layer = in_memory()
    optimizer = make("Adam", layer)
    with create(tmp_path / "t") as store:
        its = make("Adam", store.layer)
        for t in range(STEPS):
            step(layer, optimizer, t)
            step(store.layer, its, t)
        store.save()
    with disk.open(tmp_path / "t") as store:
        with torch.no_grad():
            ids = torch.arange(0, ROWS, 3)
            assert_same_bits(store.layer(ids), layer(ids))
        assert_same_bits(store.layer.weight.detach(), layer.weight.detach())


def test_several_saves_in_one_run_and_reads_of_the_weight_file(tmp_path):
    layer = in_memory()
    optimizer = make("AdamW", layer)
    with create(tmp_path / "t") as store:
        its = make("AdamW", store.layer)
        for t in range(STEPS):
            step(layer, optimizer, t)
            step(store.layer, its, t)
            store.save({"step": t})
        path = tmp_path / "t" / "weight.safetensors"
        with pytest.raises(HotrowError, match="some rows of its table are not up to date"):
            hotrow.Embedding.from_file(path)
        store.table.settle()
        store.save(store.rest)
    frozen = hotrow.Embedding.from_file(path)
    assert not frozen.weight.requires_grad
    assert_same_bits(frozen(torch.arange(ROWS)), layer.weight.detach())
    with disk.open(tmp_path / "t") as store:
        assert store.rest == {"step": STEPS - 1}


@pytest.mark.parametrize("record", ["missing", "of another save", "of another program"])
def test_a_copied_weight_file_without_its_record_is_refused(record, tmp_path):
    with create(tmp_path / "t") as store:
        step(store.layer, make("AdamW", store.layer), 0)
        store.save()
        path = tmp_path / "copy" / "w.safetensors"
        path.parent.mkdir()
        path.write_bytes((tmp_path / "t" / "weight.safetensors").read_bytes())
        store.table.settle()
        store.save()
    if record == "of another save":
        (tmp_path / "copy" / "run.json").write_bytes((tmp_path / "t" / "run.json").read_bytes())
    elif record == "of another program":
        (tmp_path / "copy" / "run.json").write_text("{}")
    text = r"w.safetensors is from a hotrow.disk folder, but .* not next to it.*hotrow.disk.open"
    with pytest.raises(HotrowError, match=text):
        hotrow.Embedding.from_file(path)
    hotrow.Embedding.from_file(tmp_path / "t" / "weight.safetensors")


def test_values_assigned_by_the_user_are_saved(tmp_path):
    with create(tmp_path / "t") as store:
        with torch.no_grad():
            store.layer.weight[[3, 690]] = 7.0
        store.save()
    with disk.open(tmp_path / "t") as store:
        expected = weights().index_fill_(0, torch.tensor([3, 690]), 7.0)
        assert_same_bits(store.layer.weight.detach(), expected)


def test_a_save_writes_the_changed_pages_and_frees_them(tmp_path):
    folder, layout = Folder(tmp_path), Layout("t", (4096, 4), torch.float32)
    write_new(folder, layout, new_name())
    mapped = MappedTensor(folder, layout)
    values = mapped.tensor()
    assert not values[::256].any()  # reads every page
    assert mapped.file.written_pages().tolist() == []
    values[0], values[4095] = 1.0, 2.0
    assert mapped.file.written_pages().tolist() == [1, 16]  # page 0 is the header
    mapped.map_saved(folder)
    assert not values.any()
    emptied = mapped.emptied(2000)  # all pages change, although all values are still zero
    assert emptied.file.written_pages().tolist() == list(range(1, 9))
    with create(tmp_path / "u") as store:
        step(store.layer, make("Adam", store.layer), 0)
        files = store.files()
        assert [len(each.file.written_pages()) > 0 for each in files] == [True] * 4
        before = store.layer.weight.detach().clone()
        store.save()
        assert [len(each.file.written_pages()) for each in files] == [0] * 4
        assert_same_bits(store.layer.weight.detach(), before)


def test_unsaved_changes_are_lost(tmp_path):
    with create(tmp_path / "t") as store:
        step(store.layer, make("Adam", store.layer), 0)
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), weights())
        step(store.layer, make("SGD", store.layer), 0)  # there is no saved optimizer state
        store.save()


# --- A crash at any time -------------------------------------------------------------------------


class Crash(BaseException):
    """Raised to simulate a crash of the process."""


def raise_at_line(number, error):
    """Return a function that raises `error` at the `number`-th traced line of the disk code."""
    left = [number]

    def trace(frame, event, argument):
        if frame.f_code.co_filename not in (journal.__file__, folder_module.__file__):
            return None
        if event == "line":
            left[0] -= 1
            if left[0] == 0:
                raise error
        return trace

    return trace


def save_raises(store, trace, kind):
    """Return whether the error that `trace` raises interrupts a save."""
    before = sys.gettrace()
    sys.settrace(trace)
    try:
        store.save(6)
    except kind:
        return True
    except HotrowError as caught:
        return any(text in str(caught) for text in ("could not be saved", "could not be opened"))
    finally:
        sys.settrace(before)
    return False


def saved_runs(tmp_path, number, error):
    """Save after 3 training steps, then again after 6 steps, with an error in the second save."""
    path = tmp_path / f"t{number}"
    store = create(path)
    optimizer = make("AdamW", store.layer)
    for t in range(3):
        step(store.layer, optimizer, t)
    store.save(3)
    for t in range(3, 6):
        step(store.layer, optimizer, t)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", ResourceWarning)  # the simulated crash leaves files open
        raised = save_raises(store, raise_at_line(number, error), type(error))
        gc.collect()
    return store, optimizer, raised


def expected_after(count):
    layer = in_memory()
    optimizer = make("AdamW", layer)
    for t in range(count):
        step(layer, optimizer, t)
    return layer.weight.detach().clone()


@exhaustive
def test_a_crash_at_any_line_of_a_save_leaves_this_save_or_the_previous_one(tmp_path):
    stride = 29  # number of lines from one crash point to the next
    found, number, raised = [], 1, True
    values = {count: expected_after(count) for count in (3, 6)}
    while raised:
        store, _, raised = saved_runs(tmp_path, number, Crash())
        store.close()
        with disk.open(store.folder) as again:
            found.append(again.rest)
            assert_same_bits(again.layer.weight.detach(), values[again.rest])
        number += stride
    assert found == sorted(found)
    assert set(found) == {3, 6}


@exhaustive
def test_a_full_disk_at_any_line_of_a_save_loses_nothing(tmp_path):
    stride = 59  # number of lines from one failing line to the next
    number, raised = 1, True
    while raised:
        full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        store, optimizer, raised = saved_runs(tmp_path, number, full)
        with store:
            for t in range(6, 8):
                step(store.layer, optimizer, t)
            store.save(8)
        with disk.open(store.folder) as again:
            assert again.rest == 8
            assert_same_bits(again.layer.weight.detach(), expected_after(8))
        number += stride


def test_a_full_disk_while_the_journal_is_replayed_loses_nothing(tmp_path, monkeypatch):
    store, _, _ = saved_runs(tmp_path, 1 << 60, Crash())  # beyond the last line, so no crash
    with store:
        expected = store.layer.weight.detach().clone()
        with monkeypatch.context() as failing:
            failing.setattr(journal, "replay_journal", lambda folder: False)
            store.save("kept")  # writes the journal but doesn't replay it
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with monkeypatch.context() as failing:
        failing.setattr(journal, "flush", Mock(side_effect=full))
        with pytest.raises(HotrowError, match=r"could not be opened \(.*No space.*free disk"):
            disk.open(store.folder)
    with disk.open(store.folder) as again:
        assert again.rest == "kept"
        assert_same_bits(again.layer.weight.detach(), expected)


LOOP = """
import sys, torch
sys.path.insert(0, {tests!r})
from tests.disk.test_store import disk, make, step
with disk.open(sys.argv[1]) as store:
    optimizer = make("AdamW", store.layer)
    t = 0 if store.rest is None else store.rest
    while True:
        step(store.layer, optimizer, t)
        t += 1
        store.save(t)
        print("saved", flush=True)
"""


@pytest.fixture
def events(monkeypatch):
    """Return a list of all flushes, renames and replays of a journal from now on."""
    found, fsync, rename, apply = [], os.fsync, Folder.rename, journal._Journal.apply

    def record_fsync(descriptor):
        fsync(descriptor)
        found.append(f"flush {Path(os.readlink(f'/proc/self/fd/{descriptor}')).name}")

    def record_rename(self, name, new_name):
        rename(self, name, new_name)
        found.append(f"rename {new_name}")

    def record_apply(self):
        found.append("replay")
        apply(self)

    monkeypatch.setattr(os, "fsync", record_fsync)
    monkeypatch.setattr(Folder, "rename", record_rename)
    monkeypatch.setattr(journal._Journal, "apply", record_apply)
    return found


def test_a_journal_is_flushed_again_before_it_is_replayed(tmp_path, events):
    """The process that wrote the journal may have stopped before it flushed the folder."""
    with create(tmp_path / "t") as store, patch.object(journal, "replay_journal"):
        store.save("new")
    assert events[-1] == "rename journal"
    events.clear()
    with disk.open(tmp_path / "t") as store:
        assert store.rest == "new"
    assert events[:3] == ["flush journal", "flush t", "replay"]


def test_new_files_are_durable_before_the_journal_that_names_them(tmp_path, events):
    with create(tmp_path / "t") as store:
        store.save()
        events.clear()
        step(store.layer, make("Adam", store.layer), 0)
        store.save()
    before = events[: events.index("rename journal")]
    last = max(index for index, event in enumerate(before) if event.startswith("rename "))
    assert before[last] == "rename last.checksums.safetensors"
    assert "flush t" in before[last:]


@exhaustive
def test_a_killed_process_leaves_a_complete_save(tmp_path):
    create(tmp_path / "t").close()
    code = LOOP.format(tests=str(ROOT))
    chance = random.Random(0)
    last = 0
    for _ in range(2):
        command = [sys.executable, "-c", code, str(tmp_path / "t")]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        for _ in range(3):
            assert process.stdout.readline() == "saved\n"
        time.sleep(0.3 * chance.random())
        process.send_signal(signal.SIGKILL)
        process.wait()
        process.stdout.close()
        with disk.open(tmp_path / "t") as store:
            count = store.rest
            assert count is not None
            assert count >= last
            last = count
            assert_same_bits(store.layer.weight.detach(), expected_after(count))
    assert last > 3


# --- Errors --------------------------------------------------------------------------------------


@contextmanager
def as_nobody(path):
    """Run code as a user who can read but not change the files in a folder."""
    for each in (path, *path.iterdir()):
        each.chmod(0o555 if each.is_dir() else 0o444)
    os.seteuid(65534)
    try:
        yield
    finally:
        os.seteuid(0)


@pytest.mark.skipif(os.geteuid() != 0, reason="needs root, to become another user")
@pytest.mark.parametrize("place", [None, "/dev/shm"])
def test_a_folder_that_this_process_cannot_change_can_be_read(place):
    path = Path(tempfile.mkdtemp(dir=place))
    try:
        path.chmod(0o755)
        with create(path / "t") as store:
            step(store.layer, make("Adam", store.layer), 0)
            store.save()
            expected = store.layer.weight.detach().clone()
        with as_nobody(path / "t"), disk.open(path / "t") as store:
            assert_same_bits(store.layer.weight.detach(), expected)
            step(store.layer, make("Adam", store.layer), 1)
            with pytest.raises(
                HotrowError, match=r"Permission denied.*: check the permissions and"
            ):
                store.save()
        disk.open(path / "t").close()
        (path / "t" / "weight.safetensors").chmod(0)
        with as_nobody(path), pytest.raises(HotrowError, match="check the permissions, and open"):
            disk.open(path / "t")
    finally:
        shutil.rmtree(path)


def test_a_folder_can_be_open_only_once(tmp_path):
    text = "is already open, in this process or another process"
    with create(tmp_path / "t"), pytest.raises(HotrowError, match=text):
        disk.open(tmp_path / "t")
    disk.open(tmp_path / "t").close()


def test_missing_and_damaged_folders_raise(tmp_path):
    text = r"the folder .*none does not exist: create it with hotrow.disk.create"
    with pytest.raises(HotrowError, match=text):
        disk.open(tmp_path / "none")
    create(tmp_path / "t").close()
    with pytest.raises(HotrowError, match=r"t already exists: open it with hotrow.disk.open"):
        create(tmp_path / "t")
    for rows, dtype, text in (
        (0, torch.float32, "rows is 0 and columns is 3, but both must be at least 1, and the"),
        (1 << 60, torch.float32, "must have at most 1,152,921,504,606,846,976 bytes: pass 1"),
        (2, torch.int64, "dtype is torch.int64, but a table on disk must be float32 or float64"),
    ):
        with pytest.raises(HotrowError, match=text):
            disk.create(tmp_path / "u", rows, 3, dtype=dtype)


def saved_and_in_memory(path):
    """Save a trained table; return a layer trained the same way in memory, and its optimizer."""
    layer = in_memory()
    optimizer = make("Adam", layer)
    with create(path) as store:
        its = make("Adam", store.layer)
        for t in range(4):
            step(layer, optimizer, t)
            step(store.layer, its, t)
        store.save()
    return layer, optimizer


def test_rows_settle_before_another_optimizer_trains(tmp_path):
    layer, _ = saved_and_in_memory(tmp_path / "t")
    with disk.open(tmp_path / "t") as store:
        for each in (layer, store.layer):
            step(each, make("SGD", each), 4)
        assert_same_bits(store.layer.weight.detach(), layer.weight.detach())


# --- Memory --------------------------------------------------------------------------------------

LARGE = """
import math, sys, torch, hotrow
from hotrow.bench.memory import resident_bytes
from hotrow import disk
ROWS = 80_000_000
with disk.create(sys.argv[1], ROWS, 64) as store:
    optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.01)
    random = torch.Generator().manual_seed(0)
    for t in range(12):
        ids = (torch.rand(4096, generator=random).double() * math.log(ROWS)).exp().long() - 1
        optimizer.zero_grad()
        store.layer(ids).square().sum().backward()
        (store.layer(ids) - 1).square().sum().backward()
        optimizer.step()
        if t % 4 == 3:
            store.save()
    print(resident_bytes("VmHWM"))
"""


@exhaustive
def test_a_table_of_20_gb_trains_in_2_gb(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", LARGE, str(tmp_path / "t")], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 2e9
    size = (tmp_path / "t" / "weight.safetensors").stat()
    assert size.st_size > 20e9
    assert size.st_blocks * 512 < 1e9


def test_a_closed_store_saves_nothing(tmp_path):
    first = create(tmp_path / "t")
    first.save()
    first.close()
    with disk.open(tmp_path / "t") as second:
        with torch.no_grad():
            second.layer.weight[3] = 5
        second.save()
        text = "is closed, and another process may have opened it"
        with pytest.raises(HotrowError, match=text):
            first.save()
        for read in (lambda: first.layer(torch.tensor([3])), lambda: first.layer.weight.sum()):
            with pytest.raises(HotrowError, match=text):
                read()
    with disk.open(tmp_path / "t") as third:
        assert third.layer.weight[3].tolist() == [5] * COLUMNS


@pytest.mark.parametrize(
    "leave",
    [
        lambda layer: layer.double(),
        lambda layer: setattr(layer.weight, "data", torch.ones(ROWS - 1, COLUMNS)),
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(torch.ones(ROWS, COLUMNS))),
    ],
)
def test_saving_a_table_that_no_longer_uses_its_files_raises(leave, tmp_path):
    with create(tmp_path / "t") as store:
        leave(store.layer)
        text = r"no longer uses .* set layer.weight = store.table, and convert it back to torch.flo"
        with pytest.raises(HotrowError, match=text):
            store.save()
        store.layer.weight = store.table
        store.table.data = weights() + 1
        store.layer.float()
        store.save()
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), weights() + 1)


def share_state(layer, optimizer):
    for state in optimizer.state.values():
        for value in state.values():
            if value.ndim:
                value.share_memory_()


MOVES = {
    "state sent to a process": lambda _, optimizer: ForkingPickler.dumps(optimizer.state_dict()),
    "state in shared memory": share_state,
    "weight sent to a process": lambda layer, _: ForkingPickler.dumps(layer.weight),
    "weight in shared memory": lambda layer, _: layer.weight.share_memory_(),
    "layer in shared memory": lambda layer, _: layer.share_memory(),
    "assignment": lambda layer, _: setattr(layer.weight, "data", layer.weight.detach().clone()),
    "cast and back": lambda layer, _: layer.double().float(),
}


@pytest.mark.filterwarnings("ignore:a tensor, such as the result of weight.data:UserWarning")
@pytest.mark.parametrize("grows", [False, True], ids=["same rows", "more rows"])
@pytest.mark.parametrize("move", MOVES.values(), ids=MOVES)
def test_values_that_moved_to_other_memory_are_saved(move, grows, tmp_path):
    memory = in_memory()
    its = make("Adam", memory)
    with create(tmp_path / "t") as store:
        assert isinstance(store.layer.weight, Table)
        own = make("Adam", store.layer)
        runs = (store.layer, own), (memory, its)
        for layer, optimizer in runs:
            step(layer, optimizer, 0)
        store.save()
        for layer, optimizer in runs:
            step(layer, optimizer, 1)
            move(layer, optimizer)
        for t in range(2, 4):
            for layer, optimizer in runs:
                step(layer, optimizer, t)
                if grows:
                    torch.manual_seed(t)  # the values of the new rows are random
                    vocabulary.resize(layer, ROWS + 100 * t, optimizer)
            store.save()
    with disk.open(tmp_path / "t") as store:
        optimizer = make("Adam", store.layer)
        for t in range(4, 6):
            step(store.layer, optimizer, t)
            step(memory, its, t)
        assert_same_run(store.layer, optimizer, memory, its)
    disk.verify(tmp_path / "t")


def test_a_save_of_moved_values_writes_only_the_changed_pages(tmp_path):
    with disk.create(tmp_path / "t", 300_000, 4) as store:
        store.layer.weight.share_memory_()
        with torch.no_grad():
            store.layer.weight[200_000] = 7
        store.save()
        assert (tmp_path / "t" / "weight.safetensors").stat().st_blocks * 512 < 100_000
    with disk.open(tmp_path / "t") as store:
        assert store.layer.weight[200_000].tolist() == [7] * 4
        assert store.layer.weight.sum() == 28


@pytest.mark.parametrize("rest", [Path("x"), {"loss": object()}, {1: lambda: 0}])
def test_an_unreadable_rest_raises_before_anything_changes(rest, tmp_path):
    with create(tmp_path / "t") as store:
        store.save({"step": 1})
        with pytest.raises(
            HotrowError, match=r"rest cannot be saved, because disk\.open could not read it"
        ):
            store.save(rest)
        assert store.rest == {"step": 1}
    with disk.open(tmp_path / "t") as store:
        assert store.rest == {"step": 1}


def test_a_save_without_rest_removes_the_previous_rest(tmp_path):
    with create(tmp_path / "t") as store:
        store.save({"step": 1})
        store.save()
    with disk.open(tmp_path / "t") as store:
        assert store.rest is None


def test_only_one_of_two_concurrent_creates_succeeds(tmp_path):
    path = tmp_path / "t"

    def meanwhile(block):
        block.fill_(1)
        if not path.exists():
            disk.create(path, ROWS, COLUMNS, fill=lambda block: block.fill_(2)).close()

    with pytest.raises(HotrowError, match="could not be created"):
        disk.create(path, ROWS, COLUMNS, fill=meanwhile)
    with disk.open(path) as store:
        assert store.layer.weight.unique().tolist() == [2]
    assert [each.name for each in tmp_path.iterdir()] == ["t"]


@pytest.mark.parametrize(
    "error", [MemoryError(), OSError(errno.EIO, "broken"), KeyboardInterrupt()]
)
@pytest.mark.parametrize(
    "place",
    ["creation.write_new", "store.replay_journal", "store.MappedTensor", "creation._flush_folder"],
)
def test_a_create_that_fails_leaves_nothing_that_it_made(place, error, tmp_path, monkeypatch):
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("kept")
    path = tmp_path / "mine" / "new" / "deep" / "t"
    expected = KeyboardInterrupt if isinstance(error, KeyboardInterrupt) else HotrowError
    with monkeypatch.context() as patch:
        patch.setattr(f"hotrow.disk.{place}", Mock(side_effect=error))
        with pytest.raises(expected):
            create(path)
    assert [each.name for each in tmp_path.rglob("*")] == ["mine", "file"]
    create(path).close()
    assert disk.verify(path) == 4 * ROWS * COLUMNS


@pytest.mark.parametrize("name", ["a" * 255, "\U0001f525" * 63], ids=["ASCII", "UTF-8"])
def test_a_folder_can_have_the_longest_name_that_the_system_allows(name, tmp_path):
    disk.create(tmp_path / name, 3, 2).close()
    disk.open(tmp_path / name).close()
    with pytest.raises(HotrowError, match=r"File name too long.*: use a shorter name"):
        disk.create(tmp_path / (name + "abcd"), 3, 2)
    assert [path.name for path in tmp_path.iterdir()] == [name]


def test_a_create_that_fails_keeps_what_others_made_meanwhile(tmp_path):
    def fill(block):
        (tmp_path / "new" / "other").write_text("kept")
        raise MemoryError

    with pytest.raises(HotrowError, match=r"could not be created .there is too little memory"):
        disk.create(tmp_path / "new" / "t", ROWS, COLUMNS, fill=fill)
    assert [each.name for each in (tmp_path / "new").iterdir()] == ["other"]


# --- State from elsewhere, dense steps, forks, damaged files --------------------------------------


@pytest.mark.parametrize("steps", [0, 2])
@pytest.mark.parametrize("has_state", [False, True], ids=["new files", "files with a state"])
def test_a_loaded_state_is_saved_in_the_files(has_state, steps, tmp_path):
    layer = in_memory()
    optimizer = make("Adam", layer)
    for t in range(4):
        step(layer, optimizer, t)
    store = create(tmp_path / "t")
    own = make("Adam", store.layer)
    if has_state:
        step(store.layer, own, 9)
        store.save()
    store.layer.load_state_dict(layer.state_dict())
    own.load_state_dict(optimizer.state_dict())
    for t in range(4, 4 + steps):
        step(layer, optimizer, t)
        step(store.layer, own, t)
    store.save()
    store.close()
    with disk.open(tmp_path / "t") as again:
        other = make("Adam", again.layer)
        for t in range(6, 8):
            step(layer, optimizer, t)
            step(again.layer, other, t)
        assert_same_run(again.layer, other, layer, optimizer)


@pytest.mark.parametrize("is_first", [False, True])
@pytest.mark.parametrize("name", ["SGD", "NAdam"])
def test_a_reopened_table_does_not_share_the_scalars_of_a_new_table(name, is_first, tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = make(name, store.layer)
        for t in range(4):
            step(store.layer, optimizer, t)
        optimizer.state_dict()  # settles all rows, so the ledger of the save is empty
        store.save()
    weights = []
    for together in (False, True):
        copied = shutil.copytree(tmp_path / "t", tmp_path / str(together))
        with disk.open(copied) as store:
            layers = [store.layer, in_memory()][:: 1 if is_first else -1]
            groups = [layers] if together else [[layer] for layer in layers]
            optimizers = [make(name, torch.nn.ModuleList(each)) for each in groups]
            for t in range(4, 8):
                for each in optimizers:
                    each.zero_grad()
                for layer in layers:
                    layer(torch.arange(t)).square().sum().backward()
                for each in optimizers:
                    each.step()
            weights.append([layer.weight.detach().clone() for layer in layers])
    for one, other in zip(*weights, strict=True):
        assert_same_bits(one, other)


@pytest.mark.parametrize("name", ["ASGD", "SGD"])
def test_a_failed_first_step_is_not_saved(name, tmp_path):
    layer, store = in_memory(), create(tmp_path / "t")
    options = {"lr": 0.1} | ({"momentum": 0.9, "dampening": 0.5} if name == "SGD" else {})
    optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), **options | {"lr": 0.5})
    failing = patch("hotrow.optim.updater.step_rows_together", Mock(side_effect=MemoryError))
    with failing, pytest.raises(MemoryError):
        step(store.layer, optimizer, 0)
    store.save()
    store.close()
    expected = getattr(hotrow.optim, name)(layer.parameters(), **options)
    with disk.open(tmp_path / "t") as again:
        own = getattr(hotrow.optim, name)(again.layer.parameters(), **options)
        for t in range(4):
            step(layer, expected, t)
            step(again.layer, own, t)
        assert_same_run(again.layer, own, layer, expected)


def test_a_reopened_run_keeps_the_dtype_of_the_scalars(tmp_path):
    store = disk.create(tmp_path / "t", 10, 2, dtype=torch.float64)
    optimizer = hotrow.optim.NAdam(store.layer.parameters())
    store.layer(torch.arange(3)).sum().backward()
    optimizer.step()
    optimizer.load_state_dict(optimizer.state_dict())  # casts the scalars to float64, as in torch
    optimizer.step()
    store.save()
    expected = optimizer.state_dict()["state"][0]["mu_product"]
    assert expected.dtype == torch.float64
    store.close()
    with disk.open(tmp_path / "t") as again:
        found = hotrow.optim.NAdam(again.layer.parameters()).state_dict()["state"][0]["mu_product"]
        assert found.dtype == torch.float64
        assert torch.equal(found, expected)


def test_a_loaded_state_whose_step_count_is_0_is_saved(tmp_path):
    layer = in_memory()
    optimizer = make("Adam", layer)
    for t in range(4):
        step(layer, optimizer, t)
    state = optimizer.state_dict()
    state["state"][0]["step"] = torch.zeros(())
    optimizer.load_state_dict(state)
    with create(tmp_path / "t") as store:
        store.layer.load_state_dict(layer.state_dict())
        make("Adam", store.layer).load_state_dict(state)
        store.save()
    with disk.open(tmp_path / "t") as store:
        own = make("Adam", store.layer)
        for t in range(4, 8):
            step(layer, optimizer, t)
            step(store.layer, own, t)
        assert_same_run(store.layer, own, layer, optimizer)


@pytest.mark.parametrize("reopens", [False, True])
@pytest.mark.parametrize("trained", [False, True])
@pytest.mark.parametrize(
    "before", ["nothing", "read", "state_dict", "copy", "failed step", "assignment"]
)
def test_a_first_step_is_not_damped_if_the_loaded_buffer_is_none(
    before, trained, reopens, tmp_path
):
    options = {"lr": 0.1, "momentum": 0.9, "dampening": 0.5}
    store = create(tmp_path / "t")
    if trained:
        step(store.layer, hotrow.optim.SGD(store.layer.parameters(), **options), 9)
    dense = torch.nn.Embedding(ROWS, COLUMNS, _weight=store.layer.weight.detach().clone())
    expected = torch.optim.SGD(dense.parameters(), **options)
    own = hotrow.optim.SGD(store.layer.parameters(), **options)
    groups = expected.state_dict()["param_groups"]
    for optimizer in (expected, own):
        state = {0: {"momentum_buffer": None}}
        optimizer.load_state_dict({"state": state, "param_groups": groups})
    if reopens:
        store.save()
        store.close()
        store = disk.open(tmp_path / "t")
        own = hotrow.optim.SGD(store.layer.parameters(), **options)
    if before == "read" and not reopens:  # otherwise, the state is still in the folder
        assert dict(own.state[store.layer.weight]) == {"momentum_buffer": None}
    elif before == "state_dict":
        assert own.state_dict()["state"] == {0: {"momentum_buffer": None}}
    elif before == "copy":
        assert list(copy.deepcopy(own).state.values()) == [{"momentum_buffer": None}]
    elif before == "failed step":
        with (
            patch.object(updater, "step_rows_together", side_effect=MemoryError),
            pytest.raises(MemoryError),
        ):
            step(store.layer, own, 0)
        assert own.state_dict()["state"] == {0: {"momentum_buffer": None}}
    elif before == "assignment":
        store.layer.weight.data = store.layer.weight.data.clone()  # closes the ledger
    for t in range(3):
        step(store.layer, own, t)
        step(dense, expected, t)
        store.save()
    assert type(store.layer.weight) is Table
    assert store.layer.weight.lag is not None
    torch.testing.assert_close(store.layer.weight.detach(), dense.weight.detach())
    torch.testing.assert_close(own.state_dict()["state"], expected.state_dict()["state"])
    store.close()


@pytest.mark.parametrize("use", ["step", "state_dict"])
def test_a_scalar_that_was_changed_in_place_is_used_before_it_is_saved(use, tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = make("NAdam", store.layer)
        step(store.layer, optimizer, 0)
        store.save()
        for name, value in (("step", 1000), ("mu_product", 0.25)):
            optimizer.state[store.layer.weight][name].fill_(value)
            with pytest.raises(HotrowError, match=r"changed .* call optimizer.state_dict"):
                store.save()
            optimizer.state_dict() if use == "state_dict" else step(store.layer, optimizer, 1)
            store.save()
        expected = state_of(optimizer)
    with disk.open(tmp_path / "t") as store:
        found = state_of(make("NAdam", store.layer))
    assert found["step"] == 1000 + 2 * (use == "step")
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_save_contains_the_state_of_a_closed_ledger(tmp_path):
    layer, optimizer = saved_and_in_memory(tmp_path / "t")
    with disk.open(tmp_path / "t") as store:
        store.table.lag.close()
        store.save()
    with disk.open(tmp_path / "t") as store:
        assert_same_run(store.layer, make("Adam", store.layer), layer, optimizer)


def test_the_state_can_be_read_before_the_first_step(tmp_path):
    layer, optimizer = saved_and_in_memory(tmp_path / "t")
    with disk.open(tmp_path / "t") as again:
        other = make("Adam", again.layer)
        assert_same_run(again.layer, other, layer, optimizer)
        step(layer, optimizer, 4)
        step(again.layer, other, 4)
        again.save()
        assert_same_run(again.layer, other, layer, optimizer)


def test_a_dense_step_raises_before_anything_changes(tmp_path):
    with create(tmp_path / "t") as store:
        weight, before = store.layer.weight, weights()
        weight.square().sum().backward()
        for name, options, text in (
            (
                "Adam",
                {},
                "a table on disk cannot take a dense step, but the gradient is dense: use the",
            ),
            ("RMSprop", {"weight_decay": 0.1}, "RMSprop with weight_decay=0.1 requires one: set"),
        ):
            optimizer = getattr(hotrow.optim, name)([weight], **options)
            with pytest.raises(HotrowError, match=text):
                optimizer.step()
            assert_same_bits(weight.detach(), before)
            optimizer.zero_grad()
            store.layer(torch.tensor([1, 2])).sum().backward()


def refuse_to_use(store, use):
    with pytest.raises(HotrowError, match="was opened before this process was forked"):
        use(store)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
@pytest.mark.parametrize(
    "use", [lambda store: store.save(), lambda store: store.layer(torch.tensor([1])).sum().item()]
)
def test_a_forked_child_cannot_use_its_parents_folder(tmp_path, use):
    """The parent's next save would change some of the pages that the child reads."""
    with create(tmp_path / "t") as store:
        run_in_child(refuse_to_use, store, use)
        use(store)


def test_a_fill_that_changes_the_shape_of_its_block_is_refused(tmp_path):
    with pytest.raises(HotrowError, match=r"changed the shape of its block from \(10, 3\) to \(3,"):
        disk.create(tmp_path / "t", 10, 3, fill=lambda block: block.resize_(3, 10))
    assert not list(tmp_path.iterdir())


def test_a_new_folder_has_the_default_permissions(tmp_path):
    (tmp_path / "plain").mkdir()
    create(tmp_path / "t").close()
    assert (tmp_path / "t").stat().st_mode == (tmp_path / "plain").stat().st_mode
    with pytest.raises(HotrowError, match=r"rows is 2\.5 and columns is 3, but both must be int"):
        disk.create(tmp_path / "u", 2.5, 3)
    with pytest.raises(HotrowError, match=r"rows is True and columns is 3, but both must be int"):
        disk.create(tmp_path / "u", True, 3)


def test_a_save_without_the_state_of_a_second_parameter_is_refused(tmp_path):
    with disk.create(tmp_path / "table", 10, 2) as store:
        weight = torch.nn.Parameter(store.layer.weight)
        optimizer = hotrow.optim.Adam([weight])
        torch.nn.functional.embedding(torch.tensor([1]), weight).sum().backward()
        optimizer.step()
        assert type(weight) is Table
        with pytest.raises(HotrowError, match="second parameter shares the rows"):
            store.save()
        del weight, optimizer
        gc.collect()
        store.save()


@pytest.mark.parametrize("trains", [False, True])
@pytest.mark.parametrize(
    "replace",
    [
        lambda layer: setattr(layer, "weight", torch.nn.Parameter(layer.weight)),
        lambda layer: layer.load_state_dict(layer.state_dict(), assign=True),
    ],
    ids=["assign a parameter", "load with assign"],
)
def test_a_save_without_the_state_of_a_replaced_weight_is_refused(replace, trains, tmp_path):
    with disk.create(tmp_path / "table", 10, 2) as store:
        replace(store.layer)
        if trains:
            optimizer = hotrow.optim.Adam(store.layer.parameters())
            store.layer(torch.tensor([1])).sum().backward()
            optimizer.step()
        with pytest.raises(HotrowError, match=r"no longer uses .* set layer.weight = store.table"):
            store.save()


def test_close_closes_all_files_at_once(tmp_path):
    with disk.create(tmp_path / "table", 10, 2) as store:
        optimizer = hotrow.optim.Adam(store.layer.parameters())
        store.layer(torch.tensor([1])).sum().backward()
        optimizer.step()
        store.save()
    del optimizer
    gc.collect()
    count = len(os.listdir("/proc/self/fd"))
    gc.disable()
    try:
        stores = []
        for _ in range(3):
            stores.append(disk.open(tmp_path / "table"))
            stores[-1].close()
            stores[-1].close()
        assert len(os.listdir("/proc/self/fd")) == count
    finally:
        gc.enable()


@pytest.mark.parametrize("name", ["Adam", "SGD", "NAdam"])
@pytest.mark.parametrize("reopens", [False, True])
def test_rows_can_be_added_after_the_state_was_read(tmp_path, name, reopens):
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}

    def train(layer, optimizer):
        optimizer.zero_grad()
        layer(torch.tensor([1])).sum().backward()
        optimizer.step()

    store = disk.create(tmp_path / "table", 10, 2)
    optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), **options)
    train(store.layer, optimizer)
    optimizer.zero_grad()
    optimizer.state_dict()
    if reopens:
        store.save()
        store.close()
        store = disk.open(tmp_path / "table")
        optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), **options)
    vocabulary.resize(store.layer, 12, optimizer)
    store.save()
    store.close()
    dense = torch.nn.Embedding(12, 2, _weight=torch.zeros(12, 2))
    expected = getattr(torch.optim, name)(dense.parameters(), **options)
    train(dense, expected)
    with disk.open(tmp_path / "table") as store:
        optimizer = getattr(hotrow.optim, name)(store.layer.parameters(), **options)
        for each in ((store.layer, optimizer), (dense, expected)):
            train(*each)
        torch.testing.assert_close(store.layer.weight.detach()[:10], dense.weight.detach()[:10])


@pytest.mark.parametrize(
    "view",
    [lambda w: w[:1].expand_as(w), lambda w: w.t()],
    ids=["expanded", "transposed"],
)
def test_a_view_of_the_mapped_values_is_saved_with_its_own_values(tmp_path, view):
    with disk.create(tmp_path / "t", 40, 40, fill=lambda block: block.normal_()) as store:
        weight = store.layer.weight
        weight.data = view(weight.data)
        expected = store.layer(torch.arange(40)).detach().clone()
        store.save()
        assert_same_bits(store.layer(torch.arange(40)).detach(), expected)
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), expected)


@pytest.mark.parametrize("read", [lambda o: o.state_dict(), copy.deepcopy], ids=["dict", "copy"])
@pytest.mark.parametrize("names", [("Adam", "Adagrad"), ("SGD", "Adam")])
def test_reading_an_earlier_optimizer_does_not_change_what_is_saved(tmp_path, names, read):
    first, second = names
    store = create(tmp_path / "t")
    old, new = make(first, store.layer), make(second, store.layer)
    for t in range(3):
        step(store.layer, old, t)
    for t in range(3, 6):
        step(store.layer, new, t)
    read(old)
    expected = copy.deepcopy(new.state_dict()["state"][0])
    store.save()
    store.close()
    with disk.open(tmp_path / "t") as store:
        found = make(second, store.layer).state_dict()["state"][0]
        assert found.keys() == expected.keys()
        for key, value in expected.items():
            assert_same_bits(torch.as_tensor(found[key]), torch.as_tensor(value))


def test_a_damaged_table_does_not_stop_the_save_of_another_table(tmp_path):
    stores = [create(tmp_path / name) for name in ("a", "b")]
    parameters = [store.layer.weight for store in stores]
    optimizer = hotrow.optim.Adam(parameters, lr=0.1)
    for t in range(2):
        optimizer.zero_grad()
        sum(store.layer(torch.tensor([t, 5])).sum() for store in stores).backward()
        optimizer.step()
    with (
        patch.object(parameters[1].lag, "settle_all", side_effect=HotrowError("damaged")),
        pytest.raises(HotrowError, match="damaged"),
    ):
        optimizer.state_dict()
    stores[0].save()
    for store in stores:
        store.close()


def copy_up(apply):
    """Return `_Journal.apply` as in an overlay: the first write to a file copies it."""

    def apply_to_copies(journal):
        for file in journal.folder.path.glob("*.safetensors"):
            copied = file.with_suffix(".copy")
            shutil.copy(file, copied)
            os.replace(copied, file)
        apply(journal)

    return apply_to_copies


@pytest.mark.parametrize("checks_pages", [True, False])
def test_saves_in_an_overlay_file_system_are_read_again(tmp_path, checks_pages):
    def step(layer, optimizer, t):
        optimizer.zero_grad()
        layer(torch.tensor([t, 5, 2000])).sum().backward()
        optimizer.step()

    memory = hotrow.convert(torch.nn.Embedding(3000, 8, _weight=torch.zeros(3000, 8)))
    expected = hotrow.optim.SGD(memory.parameters(), 0.1, 0.9)
    disk.create(tmp_path / "t", 3000, 8).close()
    with disk.open(tmp_path / "t", verify=checks_pages) as store:
        optimizer = hotrow.optim.SGD(store.layer.parameters(), 0.1, 0.9)
        apply = copy_up(journal._Journal.apply)
        with (
            patch.object(journal._Journal, "apply", apply),
            patch.object(Folder, "is_same", lambda *arguments: True),  # an overlay keeps the inode
        ):
            for t in range(4):
                step(store.layer, optimizer, t)
                step(memory, expected, t)
                store.save()
                ids = torch.tensor([0, 5, 1999, 2000])
                assert_same_bits(store.layer(ids).detach(), memory(ids).detach())
        assert_same_bits(store.layer.weight.detach(), memory.weight.detach())
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.layer.weight.detach(), memory.weight.detach())


def test_rest_of_a_missing_device_is_loaded_to_the_cpu(tmp_path):
    with (
        patch.object(torch.serialization, "location_tag", lambda storage: "cuda:3"),
        patch.object(torch.serialization, "default_restore_location", lambda storage, tag: storage),
        patch.object(checkpoint, "default_restore_location", lambda storage, tag: storage),
        create(tmp_path / "t") as store,
    ):
        store.save({"head": torch.arange(3.0)})
    with disk.open(tmp_path / "t") as store:
        assert_same_bits(store.rest["head"], torch.arange(3.0))
    disk.verify(tmp_path / "t")


def test_a_folder_that_is_opened_in_inference_mode_can_be_read_and_trained(tmp_path):
    with create(tmp_path / "t") as store:
        optimizer = hotrow.optim.AdamW(store.layer.parameters(), lr=0.1)
        store.layer(torch.tensor([1, 2])).sum().backward()
        optimizer.step()
        store.save()
        expected = store.layer.weight.detach().clone()
    with torch.inference_mode():
        store = disk.open(tmp_path / "t")
        assert torch.equal(store.layer.weight.norm(), expected.norm())
    optimizer = hotrow.optim.AdamW(store.layer.parameters(), lr=0.1)
    store.layer(torch.tensor([1, 2])).sum().backward()
    optimizer.step()
    store.close()
