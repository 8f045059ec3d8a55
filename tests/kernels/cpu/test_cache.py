"""Test the on-disk cache of compiled code, which processes read and write concurrently."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from filelock import FileLock

import hotrow
from hotrow.kernels.cpu.cache import source_digest
from tests.support.exhaustive import exhaustive

NAMES = "SGD", "Adagrad"
SOURCES = Path(hotrow.__file__).parent

# The processes run at the same time, and each compiles a different kernel.
PROCESS = """
import sys, torch, hotrow
name = sys.argv[1]
model = hotrow.convert(torch.nn.Embedding(100, 8), min_entries=0)
torch.nn.init.ones_(model.weight)
optimizer = getattr(hotrow.optim, name)(model.parameters(), lr=0.01)
for ids in ([1, 2], [3], [1], [4], [5], [6], [7], [8], [9], [10], [2]):
    optimizer.zero_grad()
    model(torch.tensor(ids)).sum().backward()
    optimizer.step()
print(model.weight.double().sum().item())
"""


def begin(name, folder):
    return subprocess.Popen(
        [sys.executable, "-W", "ignore", "-c", PROCESS, name],
        env=os.environ | {"NUMBA_CACHE_DIR": str(folder)},
        stdout=subprocess.PIPE,
        text=True,
    )


def results(processes):
    found = [process.communicate(timeout=200)[0] for process in processes]
    assert [process.returncode for process in processes] == [0] * len(processes)
    return found


@pytest.fixture(scope="module")
def filled(tmp_path_factory):
    """Return the folder of a cache filled by concurrent processes, and each process's output."""
    folder = tmp_path_factory.mktemp("cache")
    return folder, results([begin(name, folder) for name in NAMES])


@exhaustive
def test_processes_that_compile_at_once_load_their_own_kernels(filled):
    folder, first = filled
    assert first == results([begin(name, folder) for name in NAMES])
    assert len(set(first)) == len(NAMES)


@exhaustive
def test_loading_waits_for_the_lock_of_another_process(filled):
    folder, first = filled
    (lock,) = folder.rglob("hotrow.lock")
    with FileLock(lock):
        process = begin(NAMES[0], folder)
        with pytest.raises(subprocess.TimeoutExpired):
            process.communicate(timeout=8)
    assert results([process]) == first[:1]


@exhaustive
def test_a_lock_that_is_never_released_is_ignored(filled):
    folder, first = filled
    (lock,) = folder.rglob("hotrow.lock")
    before = sorted(folder.rglob("*"))
    script = f"from hotrow.kernels.cpu import cache\ncache._LOCK_SECONDS = 0.5\n{PROCESS}"
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", script, NAMES[0]]
    with FileLock(lock):
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True)
    assert done.stdout == first[0]
    assert sorted(folder.rglob("*")) == before


@exhaustive
def test_a_compiled_kernel_is_loaded_without_the_compiler(filled):
    folder, _ = filled
    script = PROCESS + 'print("numba" in sys.modules, "numba.np.npyimpl" in sys.modules)\n'
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", script, NAMES[0]]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    assert done.stdout.split()[-2:] == ["True", "False"]


@exhaustive
def test_code_compiled_from_other_sources_is_not_used(tmp_path):
    shutil.copytree(SOURCES, tmp_path / "hotrow", ignore=shutil.ignore_patterns("__pycache__"))
    script = """
import torch
from hotrow.kernels.grouping import group, sum_by_row
print(sum_by_row(group(torch.tensor([1, 1]), torch.ones(2, 1), 2)).item())
"""

    def run():
        return subprocess.run(
            [sys.executable, "-W", "ignore", "-c", script],
            env=os.environ | {"PYTHONPATH": str(tmp_path), "NUMBA_CACHE_DIR": str(tmp_path / "c")},
            cwd=tmp_path,
            capture_output=True,
            text=True,
            check=True,
        ).stdout

    assert run() == "2.0\n"
    access = tmp_path / "hotrow/kernels/cpu/access.py"  # imported by `grouping.py`
    original, changed = "return lambda table, x: x\n", "return lambda table, x: x + x\n"
    text = access.read_text()
    assert text.count(original) == 1
    access.write_text(text.replace(original, changed))
    assert run() == "6.0\n"


@exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_loads_kernels_that_its_parent_has_not(filled):
    folder, _ = filled
    script = """
import os, torch
import hotrow.kernels.cpu.grouping
from hotrow.kernels import grouping
child = os.fork()
if not child:
    grouping.sum_by_row(grouping.group(torch.tensor([1, 1]), torch.ones(2, 1), 2))
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
"""
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", script]
    subprocess.run(command, env=environment, check=True, timeout=120)


@exhaustive
def test_each_process_compiles_without_a_writable_folder(tmp_path):
    script = """
import torch
from numba.core.caching import CacheImpl
CacheImpl._locator_classes = []  # as if neither the package nor the home folder were writable
from hotrow.kernels.grouping import group, sum_by_row
print(sum_by_row(group(torch.tensor([1, 1]), torch.ones(2, 1), 2)).item())
"""
    command = [sys.executable, "-W", "ignore", "-c", script]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert done.stdout == "2.0\n"


def flip_bits(data):
    """Flip a bit in every 64 bytes, which also damages the machine code."""
    return bytes(byte ^ (number % 64 == 32) for number, byte in enumerate(data))


@exhaustive
@pytest.mark.parametrize(
    ("pattern", "damage"),
    [("rows*.nbi", lambda data: data[:50]), ("rows*.nbc", flip_bits)],
    ids=["cut index", "flipped code"],
)
def test_a_damaged_cache_is_written_again(filled, tmp_path, pattern, damage):
    source, first = filled
    folder = shutil.copytree(source, tmp_path / "cache")
    damaged = [damage(file.read_bytes()) for file in folder.rglob(pattern)]
    assert damaged
    for file, data in zip(list(folder.rglob(pattern)), damaged, strict=True):
        file.write_bytes(data)
    assert results([begin(NAMES[0], folder)]) == first[:1]
    assert any(file.read_bytes() not in damaged for file in folder.rglob(pattern))


@exhaustive
def test_a_flipped_bit_of_a_kernel_is_noticed(filled, tmp_path):
    source, first = filled
    folder = shutil.copytree(source, tmp_path / "cache")
    for file in folder.rglob("rows*.nbc"):
        data = bytearray(file.read_bytes())
        data[len(data) // 2] ^= 1
        file.write_bytes(data)
        damaged = bytes(data)
    assert results([begin(name, folder) for name in NAMES]) == first
    assert damaged not in [file.read_bytes() for file in folder.rglob("rows*.nbc")]


LIMITED = """
import resource, signal
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # writes raise an error instead, as on a full disk
resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
"""


def run_limited(name, folder):
    environment = os.environ | {"NUMBA_CACHE_DIR": str(folder)}
    command = [sys.executable, "-W", "ignore", "-c", LIMITED + PROCESS, name]
    return subprocess.run(command, env=environment, capture_output=True, text=True, check=True)


@exhaustive
@pytest.mark.skipif(sys.platform == "win32", reason="Windows has no resource limits")
@pytest.mark.parametrize("is_stale", [False, True])
def test_a_kernel_that_cannot_be_cached_is_compiled_again(is_stale, filled, tmp_path):
    _, first = filled
    if is_stale:
        results([begin(NAMES[0], tmp_path)])
        for index in tmp_path.rglob("rows*.nbi"):
            index.write_bytes(index.read_bytes()[:50])
    assert run_limited(NAMES[1], tmp_path).stdout == first[1]
    assert results([begin(NAMES[1], tmp_path)]) == first[1:]
    assert results([begin(NAMES[1], tmp_path)]) == first[1:]
    (kernel,) = tmp_path.rglob("rows*.nbc")
    assert kernel.stat().st_size > 4096


def test_the_digest_of_a_file_that_changed_after_the_import_is_unique(tmp_path):
    file = tmp_path / "rule.py"
    file.write_text("lr = 1")
    assert source_digest([file]) != source_digest([file])
    assert source_digest([hotrow.__file__]) == source_digest([hotrow.__file__])
