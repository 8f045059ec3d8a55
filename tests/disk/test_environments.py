"""Folders under other users, limits, sandboxes and process lifetimes."""

import ctypes
import gc
import os
import resource
import shutil
import signal
import stat
import struct
import subprocess
import sys
import tempfile
import time
from contextlib import contextmanager
from pathlib import Path
from unittest.mock import patch

import pytest
import torch

from hotrow import HotrowError, disk, vocabulary
from hotrow.disk import mapped_file
from hotrow.disk.folder import Folder
from tests.disk.folders import COLUMNS, ROWS, equal, make_folder, read_values, train
from tests.support.children import fork, run_in_child
from tests.support.exhaustive import exhaustive
from tests.support.interrupts import InterruptAt

USER = 1000
is_root = pytest.mark.skipif(os.geteuid() != 0, reason="changes the user")


def become(user, umask=0o022, group=USER):
    os.setgroups([group])
    os.setegid(group)
    os.seteuid(user)
    os.umask(umask)


@pytest.fixture
def open_folder():
    """A folder that every user may change."""
    path = Path(tempfile.mkdtemp())
    path.chmod(0o777)
    yield path
    shutil.rmtree(path)


# --- Other users ---------------------------------------------------------------------------------


def fail_to_save(path):
    become(USER)
    with disk.open(path) as store:
        assert store.rest == "by root"
        train(store, range(2))
        with pytest.raises(HotrowError, match=r"Permission denied.*check the permissions and save"):
            store.save("by the user")
    assert not (path / "journal").exists()


@is_root
def test_a_save_that_may_not_write_a_file_leaves_no_journal(open_folder):
    path = open_folder / "t"
    make_folder(path, rest="by root")
    for each in (path, *path.iterdir()):
        if not each.name.startswith("last"):
            os.chown(each, USER, USER)
    values = read_values(path)
    run_in_child(fail_to_save, path)
    assert equal(read_values(path), values)


def fail_to_replace(path):
    become(USER)
    with disk.open(path) as store, pytest.raises(HotrowError, match=r"not permitted: 'run.json'"):
        store.save("by the user")


@is_root
def test_a_save_that_may_not_replace_a_file_leaves_no_journal(open_folder):
    path = open_folder / "t"
    make_folder(path, rest="by root")
    for each in path.iterdir():
        each.chmod(0o666)
    path.chmod(0o1777)  # as in /tmp, only the owner of a file can replace it
    run_in_child(fail_to_replace, path)
    assert read_values(path)["rest"] == "by root"


def save_privately(path):
    become(USER + 1, umask=0o077)
    with disk.open(path) as store:
        store.save("private umask")


def check_rest(path, rest):
    become(USER)
    with disk.open(path) as store:
        assert store.rest == rest


@is_root
def test_a_save_keeps_the_permissions_of_the_files(open_folder):
    path = open_folder / "t"
    make_folder(path)
    for each in (path, *path.iterdir()):
        os.chown(each, USER, USER)
        each.chmod(0o770 if each is path else 0o660)
    run_in_child(save_privately, path)
    run_in_child(check_rest, path, "private umask")
    with disk.open(path) as store:
        store.save("by root")
    for each in path.iterdir():
        found = each.stat()
        assert stat.S_IMODE(found.st_mode) == 0o660
        assert found.st_gid == USER
    assert (path / "run.json").stat().st_uid == USER + 1
    run_in_child(check_rest, path, "by root")


def train_as_user(path):
    become(USER)
    with disk.open(path) as store:
        train(store, range(4, 6))
        store.save("by the user")


@is_root
def test_files_that_root_adds_belong_to_the_owner_of_the_others(open_folder):
    """Another user can continue a run that root has continued, for example in a container."""
    path = open_folder / "t"
    with disk.create(path, ROWS, COLUMNS) as store:
        pass
    for each in (path, *path.iterdir()):
        os.chown(each, USER, USER)
    with disk.open(path) as store:
        train(store, range(4))
        store.save("by root")
    run_in_child(train_as_user, path)
    assert read_values(path)["rest"] == "by the user"


SAVE = """
import os, sys, hotrow
os.umask(0o077)
with hotrow.disk.open(sys.argv[1]) as store:
    try:
        store.save("by the child")
    except hotrow.HotrowError as error:
        print(error)
"""
NO_CAPABILITIES = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
OTHER_NAMESPACE = ["unshare", "--map-root-user"]


def save_in(path, command):
    """Save in another process, and return its error message."""
    done = subprocess.run(
        [*command, sys.executable, "-c", SAVE, path], capture_output=True, text=True, check=True
    )
    return done.stdout


@exhaustive
@is_root
@pytest.mark.parametrize("command", [NO_CAPABILITIES, OTHER_NAMESPACE])
def test_a_root_user_may_not_replace_the_files_of_all_users(open_folder, command):
    path = open_folder / "t"
    make_folder(path, rest="by root")
    for each in path.iterdir():
        each.chmod(0o666)
        os.chown(each, USER, USER)
    path.chmod(0o1777)
    os.chown(path, USER + 1, USER + 1)
    assert "not permitted: 'run.json'" in save_in(path, command)
    assert read_values(path)["rest"] == "by root"
    assert save_in(path, []) == ""  # as the real root user
    assert read_values(path)["rest"] == "by the child"


@exhaustive
@is_root
def test_a_save_keeps_the_permissions_if_it_cannot_keep_the_owner(open_folder):
    path = open_folder / "t"
    make_folder(path)
    for each in (path, *path.iterdir()):
        os.chown(each, USER, USER)
        each.chmod(0o777 if each is path else 0o666)
    assert save_in(path, OTHER_NAMESPACE) == ""
    assert {stat.S_IMODE(each.stat().st_mode) for each in path.iterdir()} == {0o666}
    run_in_child(check_rest, path, "by the child")


def access_list(user, mode):
    """Return the access list of a file that a user may read and write, but its group may not."""
    entries = [(1, 6, -1), (2, 6, user), (4, 0, -1), (16, mode, -1), (32, 0, -1)]
    return struct.pack("<I", 2) + b"".join(struct.pack("<HHi", *each) for each in entries)


WITHOUT_PROC = ["unshare", "-m", "sh", "-c", 'mount -t tmpfs none /proc && exec "$@"', "sh"]
ACCESS_LIST = "system.posix_acl_access"


@exhaustive
@is_root
@pytest.mark.parametrize("command", [[], WITHOUT_PROC])
def test_a_save_keeps_the_access_lists_of_the_files(open_folder, command):
    path = open_folder / "t"
    make_folder(path)
    for each in path.iterdir():
        each.chmod(0o600)
        os.setxattr(each, ACCESS_LIST, access_list(USER, 6))
    assert save_in(path, command) == ""
    for each in path.iterdir():
        assert os.getxattr(each, ACCESS_LIST) == access_list(USER, 6)
    path.chmod(0o777)
    run_in_child(check_rest, path, "by the child")


@exhaustive
@is_root
def test_a_save_does_not_use_the_default_access_list_of_the_folder(open_folder):
    path = open_folder / "t"
    make_folder(path)
    for each in path.iterdir():
        each.chmod(0o660)
    os.setxattr(path, "system.posix_acl_default", access_list(USER, 6))
    assert save_in(path, []) == ""
    for each in path.iterdir():
        assert stat.S_IMODE(each.stat().st_mode) == 0o660
        assert ACCESS_LIST not in os.listxattr(each)


@exhaustive
@is_root
def test_a_save_keeps_the_permissions_without_the_right_to_change_those_of_others(open_folder):
    path = open_folder / "t"
    make_folder(path)
    for each in path.iterdir():
        each.chmod(0o640)
        os.chown(each, USER, USER)
    assert save_in(path, ["setpriv", "--bounding-set=-fowner", "--inh-caps=-fowner"]) == ""
    for each in path.iterdir():
        assert (stat.S_IMODE(each.stat().st_mode), each.stat().st_uid) == (0o640, USER)


def run_in_a_namespace(users, groups, function, *arguments):
    """Run a function as root of a user namespace with these users and groups."""
    (is_ready, ready), (is_mapped, mapped) = os.pipe(), os.pipe()

    def run():
        os.setgroups([])
        assert ctypes.CDLL(None).unshare(0x10000000) == 0  # CLONE_NEWUSER
        os.write(ready, b"1")
        os.read(is_mapped, 1)
        os.setresgid(0, 0, 0)
        os.setresuid(0, 0, 0)
        function(*arguments)

    child = fork(run)
    os.read(is_ready, 1)
    Path(f"/proc/{child}/uid_map").write_text(users)
    Path(f"/proc/{child}/gid_map").write_text(groups)
    os.write(mapped, b"1")
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for pipe in (is_ready, ready, is_mapped, mapped):
        os.close(pipe)


def fail_to_save_in_a_namespace(path):
    with disk.open(path) as store, pytest.raises(HotrowError, match=r"not permitted: 'run.json'"):
        store.save("in the namespace")


def save_in_a_namespace(path):
    with disk.open(path) as store:
        store.save("in the namespace")


@is_root
def test_a_save_in_a_namespace_without_the_group_of_the_files_changes_nothing(open_folder):
    path, user, group = open_folder / "t", 100_000, USER
    make_folder(path, rest="by root")
    path.chmod(0o1777)
    for each in (path, *path.iterdir()):
        os.chown(each, user + 1, group)
    for each in path.iterdir():
        each.chmod(0o666)
    run_in_a_namespace(f"0 {user} 2", f"0 {user} 1", fail_to_save_in_a_namespace, path)
    assert read_values(path)["rest"] == "by root"


@is_root
def test_a_save_in_a_namespace_without_a_user_of_the_access_list_keeps_the_owner(open_folder):
    path, user = open_folder / "t", 100_000
    make_folder(path)
    for each in (path, *path.iterdir()):
        os.chown(each, user + 1, user + 1)
    for each in path.iterdir():
        each.chmod(0o600)
        os.setxattr(each, ACCESS_LIST, access_list(USER, 6))
    run_in_a_namespace(f"0 {user} 2", f"0 {user} 2", save_in_a_namespace, path)
    assert read_values(path)["rest"] == "in the namespace"
    for each in path.iterdir():
        assert (each.stat().st_uid, each.stat().st_gid) == (user + 1, user + 1)


def test_a_save_replaces_a_file_that_was_deleted(tmp_path):
    make_folder(tmp_path / "t")
    with disk.open(tmp_path / "t") as store:
        (tmp_path / "t" / "rest.pt").unlink()
        store.save("again")
    assert read_values(tmp_path / "t")["rest"] == "again"


# --- Limits --------------------------------------------------------------------------------------


@is_root
@pytest.mark.parametrize("kind", ["tmpfs", "ramfs"])
def test_a_file_system_without_a_limit_is_not_full(tmp_path, kind):
    subprocess.run(["mount", "-t", kind, "-o", "size=0", kind, tmp_path], check=True)
    try:
        with disk.create(tmp_path / "t", 10, 4) as store:
            vocabulary.resize(store.layer, 2000)
            store.save("larger")
        with disk.open(tmp_path / "t") as store:
            assert store.rest == "larger"
    finally:
        subprocess.run(["umount", "--lazy", tmp_path], check=True)


@contextmanager
def file_limit(size):
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, limits[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)


def test_rows_for_which_the_files_may_not_grow_leave_the_last_save(tmp_path):
    make_folder(tmp_path / "t", rest=1)
    values = read_values(tmp_path / "t")
    with disk.open(tmp_path / "t") as store:
        optimizer = train(store, range(4, 6))
        vocabulary.resize(store.layer, 20 * ROWS, optimizer, init=torch.nn.init.zeros_)
        # The journal doesn't exceed the limit, because it contains no pages of zeros.
        with file_limit(19 * ROWS * 20), pytest.raises(HotrowError, match="allow longer files"):
            store.save(2)
        assert not (tmp_path / "t" / "journal").exists()
        shutil.copytree(tmp_path / "t", tmp_path / "copy")
        store.save(2)
    assert equal(read_values(tmp_path / "copy"), values)
    assert len(read_values(tmp_path / "t")["weight"]) == 20 * ROWS


def test_a_save_of_files_that_are_too_long_already_leaves_the_last_save(tmp_path):
    make_folder(tmp_path / "t", rest=1)
    values = read_values(tmp_path / "t")
    with disk.open(tmp_path / "t") as store, file_limit(ROWS * COLUMNS * 4):
        train(store, range(4, 6))
        with pytest.raises(HotrowError, match="allow longer files"):
            store.save(2)
    assert equal(read_values(tmp_path / "t"), values)


# --- Sandboxes -----------------------------------------------------------------------------------


def test_saves_without_the_list_of_written_pages(tmp_path):
    """A sandbox may mount an empty file over `/proc/self/pagemap`."""
    for name in ("t", "expected"):
        make_folder(tmp_path / name)
        with disk.open(tmp_path / name) as store:
            train(store, range(4, 6))
            if name == "t":
                opened = []

                def open_empty(path, *options, opened=opened, **more):
                    opened.append(path)
                    return open(os.devnull, *options, **more)

                with patch.object(mapped_file, "open", open_empty, create=True):
                    store.save()
                assert set(opened) == {"/proc/self/pagemap"}
            else:
                store.save()
    assert equal(read_values(tmp_path / "t"), read_values(tmp_path / "expected"))


def test_space_in_a_tmpfs_is_reserved_in_small_parts(tmp_path):
    """Linux starts `fallocate` in a tmpfs again after each signal, for example from a profiler."""
    parts = []
    with (
        patch.object(Folder, "is_tmpfs", return_value=True),
        patch("os.posix_fallocate", lambda file, *part: parts.append(part)),
    ):
        disk.create(tmp_path / "t", 1_000_001, 3).close()
    ends = {begin + length for begin, length in parts}
    assert (tmp_path / "t" / "weight.safetensors").stat().st_size in ends
    assert all(begin == 0 or begin in ends for begin, _ in parts)
    assert max(length for _, length in parts) <= 1 << 22


def test_folders_without_the_list_of_mounts(tmp_path):
    """A mount's name may contain any line separator, and `/proc` may be missing."""
    with patch.object(Path, "read_text", side_effect=FileNotFoundError):
        make_folder(tmp_path / "t")


# --- Forks and exits -----------------------------------------------------------------------------


def open_and_fork(path, pipe):
    store = disk.open(path)
    os.write(pipe, b"%d " % fork(time.sleep, 100))
    time.sleep(100)
    store.close()


@pytest.mark.parametrize("end", ["kill", "drop"])
def test_a_forked_child_does_not_keep_the_lock(end, tmp_path):
    make_folder(tmp_path / "t")
    if end == "kill":
        out, into = os.pipe()
        parent = fork(open_and_fork, tmp_path / "t", into)
        child = int(os.read(out, 20))
        os.close(out)
        os.close(into)
        os.kill(parent, signal.SIGKILL)
        os.waitpid(parent, 0)
    else:
        store = disk.open(tmp_path / "t")
        child = fork(time.sleep, 100)
        with pytest.raises(HotrowError, match="is already open"):
            disk.open(tmp_path / "t")
        del store
        gc.collect()
    try:
        disk.open(tmp_path / "t").close()
        os.kill(child, 0)  # it is still alive
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_forked_child_that_closes_a_store_keeps_the_parents_lock(tmp_path):
    make_folder(tmp_path / "t")
    with disk.open(tmp_path / "t") as store:
        run_in_child(store.close)
        with pytest.raises(HotrowError, match="is already open"):
            disk.open(tmp_path / "t")
        store.save("parent")


SAVE_AT_FORK = """
import os, sys

stores = []
def end():
    for store in stores:
        try:
            getattr(store, sys.argv[2])()
        except Exception as error:
            print(error, flush=True)

os.register_at_fork(after_in_child=end)  # runs before hotrow's own function
from hotrow import HotrowError, disk

store = disk.open(sys.argv[1])
stores.append(store)
if not os.fork():
    os._exit(0)
os.wait()
try:
    disk.open(sys.argv[1])
except HotrowError as error:
    print(error)
store.save("by the parent")
"""


@pytest.mark.parametrize("method", ["save", pytest.param("close", marks=exhaustive)])
def test_a_child_cannot_use_a_folder_before_it_forgets_the_lock(tmp_path, method):
    """As in signal handlers that run at once after a fork."""
    make_folder(tmp_path / "t")
    done = subprocess.run(
        [sys.executable, "-c", SAVE_AT_FORK, tmp_path / "t", method],
        capture_output=True,
        text=True,
        check=True,
    )
    assert ("was opened before this process was forked" in done.stdout) == (method == "save")
    assert "is already open" in done.stdout
    assert read_values(tmp_path / "t")["rest"] == "by the parent"


def test_a_folder_can_be_opened_again_while_a_child_starts(tmp_path):
    make_folder(tmp_path / "t")
    children = []
    for _ in range(30):
        store = disk.open(tmp_path / "t")
        children.append(fork(int))
        store.close()
        disk.open(tmp_path / "t").close()
    for child in children:
        os.waitpid(child, 0)


def test_an_interrupt_while_a_folder_is_locked_does_not_keep_the_lock(tmp_path):
    line, was_interrupted = 0, True
    gc.disable()  # Python ignores exceptions in the callbacks of the garbage collector
    try:
        while was_interrupted:
            folder = Folder(tmp_path)
            sys.settrace(InterruptAt(line))
            try:
                folder.lock()
                was_interrupted = False
            except KeyboardInterrupt:
                line += 1
            finally:
                sys.settrace(None)
            folder.close()
    finally:
        gc.enable()
    assert line > 6


AT_EXIT = """
import atexit, sys
atexit.register(lambda: store.save("at exit"))  # before the import, so it runs last
import torch, hotrow
store = hotrow.disk.open(sys.argv[1])
store.layer(torch.tensor([1])).sum().backward()
hotrow.optim.Adam(store.layer.parameters()).step()
"""


@exhaustive
def test_a_save_at_exit(tmp_path):
    make_folder(tmp_path / "t")
    command = [sys.executable, "-W", "error", "-c", AT_EXIT, str(tmp_path / "t")]
    result = subprocess.run(command, capture_output=True, text=True)
    assert (result.stderr, result.returncode) == ("", 0)
    assert read_values(tmp_path / "t")["rest"] == "at exit"
