"""Every damaged page is found before its values are used, and a full tmpfs raises an error."""

import copy
import errno
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch.testing._internal.two_tensor import TwoTensor
from torch.utils.flop_counter import FlopCounterMode

import hotrow
from hotrow import HotrowError, disk, vocabulary
from hotrow.disk.folder import Folder
from hotrow.disk.mapped_tensor import MappedTensor
from hotrow.table.parameter import Table
from tests.disk.folders import COLUMNS, ROWS, equal, make_folder, read_values, snapshot, train
from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT

TENSORS = ["weight", "exp_avg", "exp_avg_sq", "last"]
MISMATCH = "is damaged .the checksum of rows {} does not match"
NO_DIGEST = "is damaged .its checksums do not match the digest in its header"


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "t")


def flip(path, offset, bit=0):
    with open(path, "r+b") as file:
        file.seek(offset)
        (value,) = file.read(1)
        file.seek(offset)
        file.write(bytes([value ^ 1 << bit]))


def flip_row(folder, name, row):
    """Flip one bit of a value in this row."""
    with disk.open(folder) as store:
        (layout,) = (file.layout for file in store.files() if file.layout.name == name)
    row_bytes = layout.value_bytes // ROWS
    flip(folder / layout.file_name, 4096 + row * row_bytes + 2)


def lose_page(folder, name, page=0):
    """Replace a page of values and its checksum by zeros."""
    values, sums = (folder / f"{name}{kind}.safetensors" for kind in ("", ".checksums"))
    for path, begin, size in ((values, page * 4096, 4096), (sums, page * 4, 4)):
        content = path.read_bytes()
        size = min(size, len(content) - 4096 - begin)
        path.write_bytes(content[: 4096 + begin] + bytes(size) + content[4096 + begin + size :])


@pytest.mark.parametrize("name", TENSORS)
def test_a_flipped_bit_is_found_when_its_rows_are_first_read(folder, name):
    flip_row(folder, name, 3)
    rows = "0 to 699" if name == "last" else "0 to 204"
    text = f"{name}.safetensors {MISMATCH.format(rows)}"
    with pytest.raises(HotrowError, match=text):
        disk.verify(folder)
    with disk.open(folder) as store:
        ids = torch.tensor([3])
        for read in (
            lambda: store.layer(ids),
            lambda: F.embedding(ids, store.layer.weight),
            lambda: F.embedding_bag(ids[None], store.layer.weight),
            lambda: store.layer(ids.int()),
            lambda: store.layer.weight.sum(),
            lambda: store.layer.weight[3],
            lambda: store.layer.state_dict(),
            lambda: store.table.settle(),
        ):
            with pytest.raises(HotrowError, match=text):
                read()
            with torch.no_grad(), pytest.raises(HotrowError, match=text):
                read()
        if name != "last":
            store.layer(torch.tensor([600])).sum().backward()  # on another page


class Ids(torch.Tensor):
    """Ids in a tensor subclass."""


def jagged(ids):
    return torch.nested.nested_tensor([ids, ids], layout=torch.jagged)


def look_up_in_mode(look_up):
    def run(layer, ids):
        with FlopCounterMode(display=False):
            return look_up(layer, ids)

    return run


UNUSUAL_LOOKUPS = {
    "jagged": lambda layer, ids: layer(jagged(ids)).values(),
    "subclass": lambda layer, ids: layer(ids.as_subclass(Ids)),
    "parameter": lambda layer, ids: F.embedding(
        torch.nn.Parameter(ids, requires_grad=False), layer.weight
    ),
    "dispatch mode": look_up_in_mode(lambda layer, ids: layer(ids)),
    "bag": lambda layer, ids: F.embedding_bag(ids.as_subclass(Ids)[None], layer.weight),
    "bag in a mode": look_up_in_mode(lambda layer, ids: F.embedding_bag(ids[None], layer.weight)),
}


@pytest.mark.parametrize("name", ["weight", "last"])
@pytest.mark.parametrize("look_up", UNUSUAL_LOOKUPS.values(), ids=UNUSUAL_LOOKUPS)
def test_lookups_with_unusual_ids_are_checked(look_up, name, folder):
    with disk.open(folder) as store:
        assert isinstance(store.layer.weight, Table)
        expected = store.layer(torch.tensor([3])).detach()
    with disk.open(folder) as store:
        assert torch.equal(look_up(store.layer, torch.tensor([3]))[:1], expected)
    with pytest.raises(HotrowError, match="is closed"):
        look_up(store.layer, torch.tensor([3]))
    flip_row(folder, name, 3)
    text = rf"{name}.safetensors is damaged"
    with disk.open(folder) as store, pytest.raises(HotrowError, match=text):
        look_up(store.layer, torch.tensor([3]))


def test_only_the_rows_of_a_lookup_in_a_dispatch_mode_are_checked(folder):
    flip_row(folder, "weight", 3)
    for look_up in (
        lambda layer, ids: layer(jagged(ids)),
        lambda layer, ids: layer(ids.as_subclass(Ids)),
        look_up_in_mode(lambda layer, ids: layer(ids)),
    ):
        with disk.open(folder) as store:
            look_up(store.layer, torch.tensor([600]))  # on another page


def test_a_lookup_whose_ids_cannot_be_read_checks_all_rows(tmp_path):
    make_folder(tmp_path / "t", steps=0)
    ids = torch.tensor([600])
    with disk.open(tmp_path / "t") as store:
        assert isinstance(store.layer.weight, Table)
        assert torch.equal(store.layer(TwoTensor(ids, ids)).a, store.layer(ids))
    flip_row(tmp_path / "t", "weight", 3)
    with disk.open(tmp_path / "t") as store:
        store.layer(ids)
        with pytest.raises(HotrowError, match=MISMATCH.format("0 to 204")):
            store.layer(TwoTensor(ids, ids))


def test_a_gradient_without_a_lookup_does_not_use_damaged_rows(folder):
    with disk.open(folder) as store:
        store.layer(torch.tensor([3])).sum().backward()
        gradient = store.layer.weight.grad
    flip_row(folder, "exp_avg", 3)
    with disk.open(folder) as store:
        optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.05)
        store.layer.weight.grad = gradient
        with pytest.raises(HotrowError, match=r"exp_avg.safetensors is damaged"):
            optimizer.step()


def test_reads_of_the_optimizer_state_are_checked(folder):
    with disk.open(folder) as store:
        store.table.settle()  # no row is stale, so reading the state doesn't settle any
        store.save()
    flip_row(folder, "exp_avg", 3)
    with disk.open(folder) as store:
        with pytest.raises(HotrowError, match=r"exp_avg.safetensors is damaged"):
            store.table.lag.state["exp_avg"]
        with pytest.raises(HotrowError, match=r"exp_avg.safetensors is damaged"):
            train(store, range(1)).state_dict()


def test_reads_of_an_untrained_table_are_checked(tmp_path):
    make_folder(tmp_path / "t", steps=0)
    flip_row(tmp_path / "t", "weight", 3)
    for read in (
        lambda store: store.layer(torch.tensor([3])),
        lambda store: store.layer.weight.sum(),
        lambda store: store.layer.state_dict(),
        lambda store: copy.deepcopy(store.layer),
    ):
        with disk.open(tmp_path / "t") as store:
            with pytest.raises(HotrowError, match=MISMATCH.format("0 to 204")):
                read(store)
            store.save()  # nothing has changed


@pytest.mark.parametrize("name", ["weight", "weight.checksums"])
@pytest.mark.parametrize("offset", [0, 8, 30, 100, 4000])
def test_flipped_bits_in_a_header_are_found(folder, name, offset):
    flip(folder / f"{name}.safetensors", offset)
    with pytest.raises(HotrowError, match=rf"{name}.safetensors is damaged"):
        disk.verify(folder)


@pytest.mark.parametrize("offset", [4096, 4099])
def test_flipped_bits_in_the_checksums_are_found(folder, offset):
    flip(folder / "weight.checksums.safetensors", offset)
    with pytest.raises(HotrowError, match=f"weight.checksums.safetensors {NO_DIGEST}"):
        disk.open(folder)
    text = r"weight.safetensors is damaged .* does not match the one in weight.checksums.safetens"
    with disk.open(folder, verify=False) as store, pytest.raises(HotrowError, match=text):
        store.files()[0].check_rows(None)


@pytest.mark.parametrize("name", TENSORS)
def test_a_page_that_is_lost_together_with_its_checksum_is_found(folder, name):
    """Both are zero, for example after an interrupted copy, so they match each other."""
    lose_page(folder, name)
    before = snapshot(folder)
    for operation in (disk.open, disk.verify):
        with pytest.raises(HotrowError, match=rf"{name}.checksums.safetensors {NO_DIGEST}"):
            operation(folder)
    assert snapshot(folder) == before


@pytest.mark.parametrize("rows", [None, ROWS + 900, ROWS // 3])
def test_a_save_does_not_hide_a_lost_page(folder, rows):
    with disk.open(folder) as store:
        lose_page(folder, "weight", page=0)
        if rows is not None:
            optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.05)
            vocabulary.resize(store.layer, rows, optimizer)
        with torch.no_grad():
            store.layer.weight[220:] = 1.0  # on the other pages
        store.save()
    with pytest.raises(HotrowError, match=rf"weight.checksums.safetensors {NO_DIGEST}"):
        disk.open(folder)


def test_a_folder_without_digests_is_read_and_gets_them(folder):
    """Earlier versions wrote the same format without digests."""
    for path in folder.glob("*.checksums.safetensors"):
        content = path.read_bytes()
        changed = re.sub(rb', "digest": "[0-9a-f]{16}"', b"", content[:4096])
        path.write_bytes(changed.ljust(4096) + content[4096:])
        assert len(changed) < 4096
    expected = read_values(folder)
    with disk.open(folder) as store:
        store.save()
    assert equal(read_values(folder), expected)
    lose_page(folder, "weight")
    with pytest.raises(HotrowError, match=NO_DIGEST):
        disk.open(folder)


def test_flipped_bits_in_the_other_files_are_found(folder):
    for name in ("run.json", "rest.pt"):
        size = (folder / name).stat().st_size
        for offset in range(0, size, 7):
            flip(folder / name, offset)
            with pytest.raises(HotrowError, match=name):
                disk.open(folder)
            flip(folder / name, offset)
    disk.open(folder).close()


def test_a_save_does_not_hide_damage_in_the_rows_beside_its_changes(folder):
    with disk.open(folder) as store:
        flip(folder / "weight.safetensors", 4096 + 62)
        before = snapshot(folder)
        store.table.raw_data[200] = 1.0  # on the damaged page, before hotrow has checked it
        with pytest.raises(HotrowError, match=MISMATCH.format("0 to 204")):
            store.save()
        assert snapshot(folder) == before


def test_checks_can_be_switched_off(folder):
    flip_row(folder, "weight", 3)
    with disk.open(folder, verify=False) as store:
        store.layer(torch.tensor([3]))
        store.save()


def test_zeros_need_no_space_and_are_checked(tmp_path):
    with disk.create(tmp_path / "t", 1_000_000, 64) as store:
        store.layer(torch.tensor([500_000])).sum().backward()
        hotrow.optim.Adam(store.layer.parameters()).step()
        store.save()
    path = tmp_path / "t" / "weight.safetensors"
    assert path.stat().st_blocks * 512 < 100_000
    assert disk.verify(tmp_path / "t") == 3 * 256_000_000 + 4_000_000
    flip(path, 4096 + 3_000_000)  # in a hole
    with pytest.raises(HotrowError, match=MISMATCH.format("11,712 to 11,727")):
        disk.verify(tmp_path / "t")


@exhaustive
def test_checking_all_rows_takes_no_memory_for_each_row(tmp_path):
    disk.create(tmp_path / "small", 1000, 1).close()
    disk.create(tmp_path / "large", 150_000_000, 1).close()
    code = (
        "import sys; from hotrow import disk; from hotrow.bench.memory import resident_bytes\n"
        "disk.verify(sys.argv[1])  # loads Numba\n"
        "before = resident_bytes('VmHWM'); disk.verify(sys.argv[2])\n"
        "print(resident_bytes('VmHWM') - before)"
    )
    done = subprocess.run(
        [sys.executable, "-c", code, str(tmp_path / "small"), str(tmp_path / "large")],
        capture_output=True,
        text=True,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) < 10e6  # a bit for each row would be 19 MB


@pytest.mark.parametrize("checks_all", [True, False])
def test_rows_stay_checked_after_a_change_of_the_rows(checks_all, folder):
    flip_row(folder, "weight", 600)
    with disk.open(folder) as store:
        optimizer = hotrow.optim.Adam(store.layer.parameters(), lr=0.05)
        ids = torch.arange(3)
        store.layer(ids)
        hotrow.vocabulary.resize(store.layer, 400, optimizer)  # removes the damaged row
        if checks_all:
            store.table.settle()
        hotrow.vocabulary.resize(store.layer, 900, optimizer)
        store.layer(torch.tensor([3, 399, 400, 899]))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(MappedTensor, "check_rows", None)
            store.layer(torch.tensor([0, 2, 399, 600]))
            if checks_all:
                store.layer(torch.tensor([250]))
                store.layer.weight.sum()


def test_values_replaced_by_a_hole_are_found(folder):
    with disk.open(folder) as store:
        layout = store.files()[0].layout
    content = (folder / "weight.safetensors").read_bytes()
    with open(folder / "weight.safetensors", "r+b") as file:
        file.truncate(4096)
        file.truncate(layout.file_bytes)
    assert len(content) == layout.file_bytes
    with pytest.raises(HotrowError, match=MISMATCH.format("0 to 204")):
        disk.verify(folder)


def test_training_reads_and_checks_only_the_pages_of_its_rows(folder):
    with disk.open(folder) as store:
        calls = []
        check_rows = store.check_rows
        store.check_rows = lambda rows: (calls.append(rows), check_rows(rows))
        train(store, range(4, 8))
        store.save()
        assert calls
        assert all(rows is not None for rows in calls)


def test_rows_wider_than_a_page_are_checked(tmp_path):
    disk.create(tmp_path / "t", 9, 3000, fill=torch.nn.init.normal_).close()
    flip(tmp_path / "t" / "weight.safetensors", 4096 + 4 * 3000 * 4 + 8000)
    with disk.open(tmp_path / "t") as store:
        store.layer(torch.tensor([2, 6, 8]))
        with pytest.raises(HotrowError, match=MISMATCH.format("4 to 4")):
            store.layer(torch.tensor([4]))


# --- A full disk ---------------------------------------------------------------------------------


@pytest.fixture
def memory_folder():
    path = Path(tempfile.mkdtemp(dir="/dev/shm"))
    yield path
    shutil.rmtree(path)


def test_a_table_in_a_tmpfs_reserves_its_space(memory_folder, tmp_path):
    assert Folder(memory_folder).is_tmpfs()
    make_folder(memory_folder / "t")
    path = memory_folder / "t" / "weight.safetensors"
    assert path.stat().st_blocks * 512 >= path.stat().st_size
    with disk.create(memory_folder / "u", 100_000, 5):
        path = memory_folder / "u" / "weight.safetensors"
        assert path.stat().st_blocks * 512 >= path.stat().st_size
        size = path.stat().st_size
    os.truncate(path, 4096)  # creates holes, which a copied file can also have
    os.truncate(path, size)
    assert path.stat().st_blocks * 512 < path.stat().st_size
    disk.open(memory_folder / "u").close()
    assert path.stat().st_blocks * 512 >= path.stat().st_size


def test_a_table_larger_than_its_tmpfs_is_an_error(memory_folder):
    status = os.statvfs(memory_folder)
    rows = status.f_blocks * status.f_frsize // 4
    with pytest.raises(HotrowError, match=r"t could not be created .*No space left"):
        disk.create(memory_folder / "t", rows, 2)
    assert not list(memory_folder.iterdir())


@pytest.mark.parametrize(
    ("owner", "name", "error", "why"),
    [
        (Folder, "create", OSError(errno.ENOSPC, "it is full"), "it is full"),
        (disk.mapped_file._Memory, "__init__", MemoryError(), "too little memory"),
    ],
)
def test_an_error_while_the_state_is_created_is_told(
    tmp_path, monkeypatch, owner, name, error, why
):
    def fail(*arguments, **options):
        raise error

    with disk.create(tmp_path / "t", ROWS, COLUMNS) as store:
        with monkeypatch.context() as failing:
            failing.setattr(owner, name, fail)
            with pytest.raises(HotrowError, match=rf"exp_avg\S+ could not be created .*{why}"):
                train(store, range(1))
        train(store, range(1))
        store.save()
    read_values(tmp_path / "t")
