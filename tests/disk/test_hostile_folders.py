"""Nothing in a folder can make hotrow write outside it, and errors name the wrong file."""

import errno
import hashlib
import io
import json
import os
import shutil
import struct
import subprocess
import sys
from unittest import mock

import pytest
import torch

from hotrow import HotrowError, disk
from hotrow.disk import mapped_tensor, record
from hotrow.disk import store as store_module
from hotrow.inputs import checkpoint
from tests.disk.folders import (
    COLUMNS,
    ROWS,
    change_record,
    equal,
    make_folder,
    read_values,
    snapshot,
    train,
)
from tests.support.exhaustive import exhaustive

FILES = [
    "exp_avg.checksums.safetensors",
    "exp_avg.safetensors",
    "exp_avg_sq.checksums.safetensors",
    "exp_avg_sq.safetensors",
    "last.checksums.safetensors",
    "last.safetensors",
    "rest.pt",
    "run.json",
    "weight.checksums.safetensors",
    "weight.safetensors",
]
WHOLE_FILE = (1 << 64) - 1


@pytest.fixture
def folder(tmp_path):
    return make_folder(tmp_path / "t")


def journal(*writes, magic=b"hotrow journal 2\n"):
    """Return a journal with a valid hash."""
    data = magic
    for name, offset, content in writes:
        name = name if isinstance(name, bytes) else name.encode()
        data += struct.pack("<HQQ", len(name), offset, len(content)) + name + content
    return data + hashlib.sha256(data).digest()


def complete_save(folder):
    """Return the two writes at the start of a journal that make a save complete."""
    record, rest = (folder / "run.json").read_bytes(), (folder / "rest.pt").read_bytes()
    return ("run.json", WHOLE_FILE, record), ("rest.pt", WHOLE_FILE, rest)


def assert_refused(folder, text):
    """Assert that `open` and `verify` raise this error, and that no file changes."""
    before = snapshot(folder.parent)
    for function in (disk.open, disk.verify):
        with pytest.raises(HotrowError, match=text):
            function(folder)
    assert snapshot(folder.parent) == before


# --- Nothing is written outside the folder -------------------------------------------------------


@pytest.mark.parametrize(
    "name", ["{outside}", "../outside", "./rest.pt", "rest.pt\0", "lock", "weight", ""]
)
def test_a_journal_cannot_write_to_other_files(folder, name):
    outside = folder.parent / "outside"
    outside.write_text("untouched")
    name = name.format(outside=outside)
    for offset in (WHOLE_FILE, 0):
        (folder / "journal").write_bytes(
            journal(*complete_save(folder), (name, offset, b"overwritten"))
        )
        assert_refused(folder, "journal is damaged .it changes a file that is not part of the save")
    (folder / "journal").write_bytes(journal((name, WHOLE_FILE, b"overwritten")))
    assert_refused(folder, "journal is damaged .it does not start with run.json")


@pytest.mark.parametrize("name", [*FILES, "journal"])
def test_links_are_never_followed(folder, name):
    outside = folder.parent / "outside"
    path = folder / name
    if path.exists():
        shutil.move(path, outside)
    else:
        outside.write_bytes(journal(*complete_save(folder)))
    path.symlink_to(outside)
    assert_refused(folder, rf"{name} is damaged .it is a symbolic link")
    path.unlink()
    os.link(outside, path)
    assert_refused(folder, rf"{name} has 2 hard links.*copy the folder with cp -r")
    path.unlink()
    path.symlink_to(folder.parent / "none")
    assert_refused(folder, rf"{name} is damaged .it is a symbolic link")


@pytest.mark.parametrize("name", [*FILES, "journal"])
def test_pipes_and_folders_are_refused(folder, name):
    path = folder / name
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    assert_refused(folder, rf"{name} is damaged .it is not a regular file")
    path.unlink()
    path.mkdir()
    assert_refused(folder, rf"{name} is damaged .it is not a regular file")


@pytest.mark.parametrize(
    "name", ["journal.new", "run.json.new", "rest.pt.new", "weight.safetensors.new", "lock"]
)
def test_a_save_replaces_links_with_its_own_files(folder, name):
    outside = folder.parent / "outside"
    outside.write_text("untouched")
    (folder / name).symlink_to(outside)
    expected = read_values(folder)
    with disk.open(folder) as store:
        store.save({"after": 1})
    assert outside.read_text() == "untouched"
    assert equal(read_values(folder), {**expected, "rest": {"after": 1}})


@pytest.mark.parametrize("name", ["exp_avg.safetensors", "exp_avg.safetensors.new"])
def test_the_first_step_replaces_links_with_its_own_files(tmp_path, name):
    outside = tmp_path / "outside"
    outside.write_text("untouched")
    with disk.create(tmp_path / "t", ROWS, 5) as store:
        (tmp_path / "t" / name).symlink_to(outside)
        train(store, range(2))
        store.save()
    assert outside.read_text() == "untouched"
    read_values(tmp_path / "t")


def test_the_folder_itself_may_not_be_a_link(folder):
    link = folder.with_name("link")
    link.symlink_to(folder)
    with pytest.raises(HotrowError, match=f"link is a symbolic link.*: open '{folder}'"):
        disk.open(link)
    with pytest.raises(HotrowError, match="link already exists"):
        disk.create(link, 2, 2)
    with pytest.raises(HotrowError, match=r"run.json is not a folder"):
        disk.open(folder / "run.json")


# --- Journals with a valid hash ------------------------------------------------------------------


def test_a_journal_with_nonsense_is_an_error(folder):
    save = complete_save(folder)
    huge = struct.pack("<HQQ", 1, 0, 1 << 62) + b"x"
    for content, text in (
        (b"", "it is too short"),
        (b"hotrow journal 2\n", "it is too short"),
        (journal()[:-1] + b"x", "it does not contain a complete save"),
        (journal(*save)[:-1] + b"x", "its checksum does not match"),
        (journal(*save, ("weight.safetensors", 0, b"x" * 4097)), "it writes more than a page"),
        (journal(), "it does not contain a complete save"),
        (journal(magic=b"hotrow journal 2\n" + huge), "it ends in the middle of a write"),
        (journal(magic=b"hotrow journal 2\n" + b"x" * 7), "it ends in the middle of a write"),
        (journal((b"\xff" * 9, 0, b"")), "it does not start with run.json"),
        (journal((b"x" * 60_000, 0, b"")), "it ends in the middle of a write"),
        (journal(("run.json", WHOLE_FILE, b"{" * 99_999)), "it is not JSON"),
        (journal(("run.json", WHOLE_FILE, b"[" * 99_999)), "it is not JSON"),
        (journal(("run.json", WHOLE_FILE, b"\xff")), "it is not JSON"),
        (journal(("run.json", 3, save[0][2])), "it does not start with run.json"),
        (journal(save[0]), "it does not contain a complete save"),
        (journal(save[0], ("rest.pt", WHOLE_FILE, b"x")), "it does not contain all of rest.pt"),
        (journal(save[0], ("rest.pt", 0, save[1][2])), "it does not contain all of rest.pt"),
        (journal(*save, ("last.safetensors", 1 << 40, b"x")), "it writes beyond the end of last"),
        (journal(*save, ("last.safetensors", WHOLE_FILE, b"")), "it writes beyond the end of last"),
        (journal(*save, ("run.json", WHOLE_FILE, b"")), "it changes a file that is not part"),
        (journal(*save, save[1]), "it changes a file that is not part"),
        (journal(save[0], save[0]), "it does not contain all of rest.pt"),
    ):
        (folder / "journal").write_bytes(content)
        assert_refused(folder, f"journal is damaged .{text}")
    (folder / "journal").write_bytes(journal(magic=b"hotrow journal 1\n"))
    assert_refused(
        folder, "journal is damaged, or another version of hotrow wrote it: open and close the"
    )


@pytest.mark.parametrize("name", ["../outside", "{outside}", "other", "run.json"])
def test_a_journal_that_changes_after_the_check_cannot_write_to_other_files(
    folder, name, monkeypatch
):
    outside, other = folder.parent / "outside", folder / "other"
    for path in (outside, other):
        path.write_text("untouched")
    name = name.format(outside=outside)
    # The journal is larger than a file buffer, so `apply` has to read from the file again.
    page = (folder / "weight.safetensors").read_bytes()[8192:12288]
    pages = [("weight.safetensors", 8192, page)] * 99
    last = ("weight.safetensors", 8192, page)
    (folder / "journal").write_bytes(journal(*complete_save(folder), *pages, last))
    length = len(page) + len("weight.safetensors") - len(name)  # keeps the journal's length
    apply = disk.journal._Journal.apply

    def change_and_apply(self):
        changed = journal(*complete_save(folder), *pages, (name, 0, (2 * page)[:length]))
        with (folder / "journal").open("r+b") as file:
            file.write(changed)
        apply(self)

    monkeypatch.setattr(disk.journal._Journal, "apply", change_and_apply)
    with pytest.raises(HotrowError, match="journal is damaged"):
        disk.open(folder)
    assert outside.read_text() == other.read_text() == "untouched"


@pytest.mark.parametrize("name", ["journal", "rest.pt"])
def test_a_sparse_file_is_refused_without_reading_it(folder, name):
    with (folder / name).open("ab") as file:
        file.write(b"hotrow journal 2\n" if name == "journal" else b"")
        file.truncate(1 << 43)
    text = {
        "journal": r"journal is a sparse file: only [\d,]+ of its 8,796,093,022,208 bytes are on",
        "rest.pt": "rest.pt is damaged .it does not belong",
    }
    with pytest.raises(HotrowError, match=text[name]):
        disk.open(folder)


def test_a_sparse_rest_is_refused_even_if_the_record_gives_its_length(folder):
    change_record(folder, rest=[1 << 35, 0])
    os.truncate(folder / "rest.pt", 1 << 35)
    with pytest.raises(HotrowError, match=r"rest.pt is a sparse file: only [\d,]+ of its 34,"):
        disk.open(folder)


def test_a_rest_that_changes_after_its_checks_is_not_loaded(folder, monkeypatch):
    buffer = io.BytesIO()
    torch.save([7, 8], buffer)
    with disk.open(folder) as store:
        store.save([1, 2])
    check = checkpoint.check_program

    def check_and_change(*arguments):
        check(*arguments)
        (folder / "rest.pt").write_bytes(buffer.getvalue())

    monkeypatch.setattr(checkpoint, "check_program", check_and_change)
    with disk.open(folder) as store:
        assert store.rest == [1, 2]


@pytest.mark.parametrize("count", [1, 2])
def test_a_journal_whose_rest_is_a_hole_is_refused_without_reading_it(folder, count):
    size = 1 << 35
    change_record(folder, rest=[size, 0])
    (name, offset, record), _ = complete_save(folder)
    with (folder / "journal").open("wb") as file:
        file.write(journal((name, offset, record))[:-32])
        for _ in range(count):
            file.write(struct.pack("<HQQ", 7, WHOLE_FILE, size) + b"rest.pt")
            file.seek(size, os.SEEK_CUR)
        file.write(bytes(32))
    with pytest.raises(HotrowError, match=r"journal is a sparse file: .*cp -r --sparse=never"):
        disk.open(folder)


def test_a_journal_with_smaller_holes_is_read(folder):
    """Copies and file systems may turn zeros into holes."""
    with disk.open(folder) as store, mock.patch.object(disk.journal, "replay_journal"):
        store.save({"zeros": torch.zeros(1 << 20)})
    subprocess.run(["fallocate", "--dig-holes", folder / "journal"], check=True)
    status = (folder / "journal").stat()
    assert status.st_blocks * 512 < status.st_size / 10
    with disk.open(folder) as store:
        assert store.rest["zeros"].shape == (1 << 20,)


def test_a_journal_of_another_save_is_refused(folder):
    other = make_folder(folder.with_name("other"), steps=5)
    (folder / "journal").write_bytes(journal(*complete_save(other)))
    assert_refused(folder, r"\w+.safetensors is damaged .it is not from the same save")


# --- Every file belongs to the last save ---------------------------------------------------------


@pytest.mark.parametrize("name", FILES)
def test_a_missing_or_shorter_file_is_refused(folder, name):
    path = folder / name
    whole = path.read_bytes()
    path.unlink()
    assert_refused(folder, rf"{name} is damaged .it is missing")
    for content in (whole[:-1], whole + b"\0", b""):
        path.write_bytes(content)
        if name.endswith("safetensors"):
            text = rf"it has {len(content):,} bytes instead of {len(whole):,}"
        elif name == "rest.pt":
            text = "it does not belong to the last save, or has changed"
        else:
            text = "it is not JSON"
        assert_refused(folder, rf"{name} is damaged .{text}")


@pytest.mark.parametrize("name", FILES)
def test_a_file_of_another_save_is_refused(folder, name):
    old = folder.with_name("old")
    shutil.copytree(folder, old)
    with disk.open(folder) as store:
        train(store, range(4, 6))
        store.save({"step": 6})
    shutil.copy(old / name, folder / name)
    damaged = "exp_avg.safetensors|weight.safetensors" if name == "run.json" else name
    why = "it does not belong to the last" if name == "rest.pt" else "it is not from the same save"
    assert_refused(folder, rf"({damaged}) is damaged .{why}")


def test_a_missing_run_file_loses_no_data(folder):
    expected = read_values(folder)
    saved = (folder / "run.json").read_bytes()
    (folder / "run.json").unlink()
    assert_refused(folder, "run.json is damaged .it is missing")
    (folder / "run.json").write_bytes(saved)
    assert equal(read_values(folder), expected)


def test_wrong_types_in_the_record_are_named(folder):
    record = json.loads((folder / "run.json").read_bytes())
    original = (folder / "run.json").read_bytes()
    run = record["run"]
    for changes, text in (
        ({"save": 3}, "invalid name of a save"),
        ({"previous": "../x"}, "invalid name of a save"),
        ({"previous_rows": 0}, "invalid number of rows of the previous save"),
        ({"previous_rows": 7.0}, "invalid number of rows of the previous save"),
        ({"previous_rows": 1 << 58}, "invalid number of rows of the previous save"),
        ({"rest": "abc"}, "invalid length or checksum of rest.pt"),
        ({"rest": [1 << 40, 2]}, "invalid length or checksum of rest.pt"),
        ({"rest": [-1, 2]}, "invalid length or checksum of rest.pt"),
        ({"behind": None}, "invalid training run"),
        ({"run": []}, "invalid training run"),
        ({"run": {}}, "KeyError: 'rule'"),
        ({"run": None}, "the tensors of the save are not weight"),
        ({"tensors": None}, "invalid"),
        ({"tensors": {}}, "invalid 'weight'"),
        ({"tensors": {"weight": 3}}, "invalid"),
        ({"tensors": {"../weight": ["F32", [2, 2]]}}, "invalid name or dtype of a tensor"),
        ({"tensors": {"weight": ["I32", [2, 2]]}}, "invalid shape or dtype of weight"),
        ({"tensors": {"weight": ["F32", [2]]}}, "invalid shape or dtype of weight"),
        ({"tensors": {"weight": ["F32", [2, True]]}}, "invalid shape of weight"),
        ({"tensors": {"weight": ["F32", [2, 0]]}}, "invalid shape of weight"),
        ({"tensors": {"weight": ["F32", [2, -2]]}}, "invalid shape of weight"),
        ({"tensors": {"weight": ["F32", [1 << 40, 1 << 40]]}}, "invalid shape of weight"),
        (
            {"tensors": {**record["tensors"], "last": ["I32", [7]]}},
            "invalid shape or dtype of last",
        ),
        ({"tensors": {**record["tensors"], "x": record["tensors"]["weight"]}}, "the tensors of"),
        ({"run": {**run, "rule": "None"}}, "KeyError: 'None'"),
        ({"run": {**run, "rule": ["Adam"]}}, "TypeError"),
        ({"run": {**run, "group": 3}}, "AttributeError"),
        ({"run": {**run, "group": {}}}, "KeyError"),
        ({"run": {**run, "group": {**run["group"], "lr": {}}}}, "option 'lr' has an invalid type"),
        ({"run": {**run, "group": {**run["group"], "betas": 3}}}, "TypeError"),
        # Python would repeat a text as often as a step count says.
        ({"run": {**run, "group": {**run["group"], "lr": "x"}}}, "KeyError: 'lr'"),
        # The power of an integer would take years.
        (
            {"run": {**run, "start": 1 << 53, "group": {**run["group"], "betas": [3, 3]}}},
            "OverflowError",
        ),
        ({"run": {**run, "start": 0.5}}, "'start' is not an integer from 0"),
        ({"run": {**run, "settled": 99}}, "'settled' is not an integer from 0 to 4"),
        ({"run": {**run, "still": 1}}, "'still' is not true or false"),
        ({"run": {**run, "carried": {"eta": 1.0}}}, "'carried' does not contain"),
        ({"run": {**run, "carried": []}}, "AttributeError"),
        ({"run": {**run, "entries": {"0": 1}}}, "an entry of the ledger is not a list of 8"),
        ({"run": {**run, "entries": [[1.0]]}}, "an entry of the ledger is not a list of 8"),
        ({"run": {**run, "entries": [["x"] * 8]}}, "an entry of the ledger is not a list of 8"),
        ({"run": {**run, "entries": [[0.0] * 7 + [None]]}}, "an entry of the ledger is not"),
    ):
        (folder / "run.json").write_bytes(original)
        change_record(folder, **changes)
        assert_refused(folder, rf"run.json is damaged \(.*{text}")
    for content, text in (
        (b"[1]", "is damaged .it does not contain a record"),
        (b"null", "is damaged .it does not contain a record"),
        (b"{", "is damaged .it is not JSON"),
        (b"[" * 99_999, "is damaged .it is not JSON"),
        (original.replace(b'"behind": true', b'"behind": false'), "is damaged .its checksum"),
        (b'{"rule": "Adam"}', "was written by hotrow 0.2 or is damaged.*docs/reference/data.md"),
        (b"{}", "was written by hotrow 0.2 or is damaged"),
        (b'{"format": "hotrow.disk 3"}', "has the format 'hotrow.disk 3', but this version"),
        (original.replace(b'"page": 4096', b'"page": 65536'), "was written on a .* of 65536 bytes"),
    ):
        (folder / "run.json").write_bytes(content)
        assert_refused(folder, f"run.json {text}")


@pytest.mark.parametrize("shape", [[10**4000] * 30, [1 << 63, 1], [ROWS, COLUMNS, 1], [-1, 1], 3])
def test_a_shape_is_checked_before_it_is_used(folder, shape, monkeypatch):
    tensors = json.loads((folder / "run.json").read_bytes())["tensors"]
    change_record(folder, tensors={"weight": ["F32", shape]} | tensors | {"weight": ["F32", shape]})
    monkeypatch.setattr(record, "Layout", lambda *_: pytest.fail("the product takes long"))
    assert_refused(folder, "run.json is damaged")


@pytest.mark.parametrize("step", ["check_file", "commit", "map_saved"])
@pytest.mark.parametrize("error", [PermissionError(errno.EACCES, "not allowed"), MemoryError()])
def test_any_error_of_the_system_in_a_save_is_told(folder, step, error):
    owner = mapped_tensor.MappedTensor if step == "map_saved" else store_module
    with disk.open(folder) as store:
        train(store, range(2))
        with (
            mock.patch.object(owner, step, side_effect=error),
            pytest.raises(HotrowError, match=r"could not be saved .*(not allowed|memory)"),
        ):
            store.save(5)
        assert store.rest == (5 if step == "map_saved" else None)
        train(store, range(2))
        store.save(6)
    with disk.open(folder) as store:
        assert store.rest == 6


@pytest.mark.parametrize("key", ["format", "run", "other"])
def test_a_nested_record_is_refused_at_any_depth(folder, key):
    record = json.loads((folder / "run.json").read_bytes())
    text = json.dumps(record | {key: "nested"})
    for depth in (500, *range(800, 1000), 100_000):
        nested = text.replace('"nested"', "[" * depth + "]" * depth)
        (folder / "run.json").write_text(nested)
        with pytest.raises(HotrowError, match=r"run.json (is damaged|has the format)"):
            disk.open(folder)


@pytest.mark.parametrize("path", ["a\0b", "\ud800"])
def test_an_impossible_path_is_refused(path):
    for function in (disk.open, disk.verify, lambda path: disk.create(path, 2, 2)):
        with pytest.raises(HotrowError, match=r"is not a path .*pass another path"):
            function(path)


def test_a_table_that_is_truncated_while_it_is_opened_is_refused(folder, monkeypatch):
    def truncate(*arguments):
        os.truncate(folder / "weight.safetensors", 9000)

    monkeypatch.setattr(disk.store, "read_rest", truncate)
    with pytest.raises(HotrowError, match=r"weight\S+ is damaged .another program has truncated"):
        disk.open(folder)


def test_steps_out_of_range_are_refused_because_kernels_use_them_as_indices(folder):
    values = disk.layout.Layout("last", (ROWS,), torch.int32)
    path = folder / "last.safetensors"
    for wrong in (-1, 5, 1 << 30):
        content = bytearray(path.read_bytes())
        record = json.loads((folder / "run.json").read_bytes())
        steps = torch.full((ROWS,), wrong, dtype=torch.int32)
        disk.mapped_tensor.write_new(disk.folder.Folder(folder), values, record["save"], [steps])
        with disk.open(folder, verify=False) as store:
            with pytest.raises(HotrowError, match=r"last.* has values outside of 0..4"):
                store.layer(torch.tensor([3]))
            with pytest.raises(HotrowError, match=r"last.* has values outside of 0..4"):
                store.layer.weight.sum()
        path.write_bytes(content)


# --- One process at a time -----------------------------------------------------------------------

SECOND = """
import sys
from hotrow import disk
try:
    disk.open(sys.argv[1])
except ValueError as error:
    print(error)
"""


@exhaustive
def test_a_second_process_cannot_open_the_folder_whatever_is_deleted(folder):
    with disk.open(folder) as store:
        for name in ("lock", "run.json"):
            (folder / name).unlink(missing_ok=True)
        command = [sys.executable, "-c", SECOND, str(folder)]
        found = subprocess.run(command, capture_output=True, text=True, check=True).stdout
        assert "is already open, in this process or another process" in found
        with pytest.raises(HotrowError, match="is already open"):
            disk.open(folder)
        with pytest.raises(HotrowError, match=r"run.json is damaged .it is missing"):
            store.save()


def test_a_store_that_is_collected_releases_its_folder(folder):
    import gc

    store = disk.open(folder)
    del store
    gc.collect()
    disk.open(folder).close()


@pytest.mark.parametrize("replace", [os.unlink, lambda path: os.link(path, f"{path}2")])
def test_a_file_that_changes_while_the_folder_is_open_stops_the_save(folder, replace):
    expected = read_values(folder)
    with disk.open(folder) as store:
        saved = (folder / "last.safetensors").read_bytes()
        replace(folder / "last.safetensors")
        with pytest.raises(HotrowError, match=r"last.safetensors (is damaged|has 2 hard links)"):
            store.save("too late")
    (folder / "last.safetensors").unlink(missing_ok=True)
    (folder / "last.safetensors").write_bytes(saved)
    assert equal(read_values(folder), expected)


def test_a_save_by_another_machine_is_not_overwritten(folder):
    with disk.open(folder) as store:
        copy = folder.with_name("copy")
        shutil.copytree(folder, copy)
        with disk.open(copy) as other:
            other.save("by another machine")
        for name in FILES:
            (folder / name).write_bytes((copy / name).read_bytes())
        with pytest.raises(HotrowError, match="contains another save than the last one of this"):
            store.save()
    with disk.open(folder) as store:
        assert store.rest == "by another machine"


def copy_contents(source, target):
    for path in source.iterdir():
        (target / path.name).write_bytes(path.read_bytes())


@pytest.mark.parametrize("replaces", [True, False], ids=["new files", "the same files"])
def test_an_older_save_that_is_restored_while_the_folder_is_open_stops_the_save(folder, replaces):
    older = folder.with_name("older")
    with disk.open(folder) as store:
        train(store, [5])
        store.save("older")
        shutil.copytree(folder, older)
        train(store, [6])
        store.save("newer")
        if replaces:
            for path in folder.iterdir():
                path.unlink()
        copy_contents(older, folder)
        train(store, [7])
        with pytest.raises(HotrowError, match="contains another save than the last one of this"):
            store.save("mixed")
    assert equal(read_values(folder), read_values(older))


@pytest.mark.parametrize("name", ["weight.safetensors", "last.checksums.safetensors"])
def test_a_file_that_is_replaced_by_its_copy_stops_the_save(folder, name):
    with disk.open(folder) as store:
        train(store, [5])
        content = (folder / name).read_bytes()
        (folder / name).unlink()
        (folder / name).write_bytes(content)
        before = snapshot(folder)
        with pytest.raises(HotrowError, match=f"{name} was replaced by another file while"):
            store.save("too late")
        assert snapshot(folder) == before


@pytest.mark.parametrize("creates", [False, True])
def test_a_folder_that_is_replaced_by_a_copy_stops_the_save(folder, tmp_path, creates):
    copy, moved = tmp_path / "copy", tmp_path / "moved"
    if creates:
        shutil.rmtree(folder)
        store = disk.create(folder, ROWS, COLUMNS)
    else:
        store = disk.open(folder)
    shutil.copytree(folder, copy)
    with store:
        train(store, [5])
        folder.rename(moved)
        copy.rename(folder)
        before = snapshot(folder), snapshot(moved)
        with pytest.raises(HotrowError, match=r"another folder has replaced .*: move it back"):
            store.save("too late")
        assert (snapshot(folder), snapshot(moved)) == before
        folder.rename(copy)
        store.save("moved")  # the save goes to the folder that is open
        moved.rename(folder)
        store.save("in place")
    assert read_values(folder)["rest"] == "in place"


def test_a_save_after_chdir_writes_to_the_open_folder(folder, tmp_path, monkeypatch):
    monkeypatch.chdir(folder.parent)
    with disk.open(folder.name) as store:
        other = make_folder(tmp_path / "elsewhere" / folder.name)
        monkeypatch.chdir(other.parent)
        store.save("after chdir")
    assert read_values(folder)["rest"] == "after chdir"
    assert read_values(other)["rest"] is None
