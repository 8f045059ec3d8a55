"""Kernels run on torch's threads where possible, and otherwise on Python threads."""

import ctypes
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from numba import njit
from numba.core.errors import TypingError

from hotrow.kernels.cpu import threads as kernel_threads
from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS, claim_rows, join_team
from hotrow.kernels.cpu.threads import (
    CLAIMED,
    GRAIN_SIZE,
    VALUES_PER_THREAD,
    run_on_threads,
    thread_count,
)
from hotrow.kernels.grouping import group, sum_by_row
from tests.support.exhaustive import exhaustive
from tests.support.tolerance import assert_same_bits

ROWS = 10 * GRAIN_SIZE
this_thread = ctypes.CDLL(None).pthread_self
this_thread.restype, this_thread.argtypes = ctypes.c_uint64, ()


@njit(**JIT_OPTIONS)
def sign_rows(rows, barrier, members, team):
    """Wait for `members` threads to start, then record in each row the thread that claims it."""
    thread = join_team(team, (rows, barrier, members, team))
    if thread < 0:
        return
    claim_rows(barrier, 1)
    while claim_rows(barrier, 0) < members:
        pass
    while True:
        start = claim_rows(team, GRAIN_SIZE)
        if start >= len(rows):
            break
        for row in rows[start : start + GRAIN_SIZE]:
            row[0] += this_thread()
            row[1] = thread


def signatures(threads, members=1, rows=ROWS):
    """Return each row's thread id and thread number, (rows, 2), and the number of threads."""
    signed, barrier = np.zeros((rows, 2), np.uint64), np.zeros(5, np.int64)
    run_on_threads(sign_rows, (signed, barrier, members), threads)
    return signed, int(barrier[CLAIMED])


@pytest.fixture(params=["torch's threads", "Python's threads"])
def two_threads(request, monkeypatch, threads):
    if request.param == "Python's threads":
        monkeypatch.setattr(kernel_threads, "_gomp_parallel", 0)
    torch.set_num_threads(2)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP only on Linux")
def test_kernels_use_torchs_threads_on_linux():
    assert kernel_threads._gomp_parallel


def test_each_thread_runs_the_kernel_once_and_claims_rows(two_threads):
    for _ in range(20):
        found, threads = signatures(2, members=2)
        assert threads == 2
        assert set(found[:, 1]) <= {0, 1}
        threads_of = {
            int(number): set(found[found[:, 1] == number, 0]) for number in set(found[:, 1])
        }
        assert all(len(each) == 1 for each in threads_of.values())  # no two threads share a number
        assert len(set.union(*threads_of.values())) == len(threads_of)


def test_small_work_runs_on_the_calling_thread(two_threads):
    for count, columns, threads in (
        (GRAIN_SIZE, VALUES_PER_THREAD, 1),
        (ROWS, 1, 1),
        (ROWS, VALUES_PER_THREAD, 2),
        (0, VALUES_PER_THREAD, 0),
        (ROWS, 0, 0),
    ):
        assert thread_count(count, columns) == threads
    found, _ = signatures(1)
    assert set(found[:, 0]) == {this_thread()}
    assert signatures(0) == (pytest.approx(np.zeros((ROWS, 2))), 0)


@pytest.mark.skipif(sys.platform != "linux", reason="torch has GNU OpenMP only on Linux")
def test_torchs_threads_stay_alive_when_fewer_are_used(threads):
    def alive():
        names = Path("/proc/self/task").iterdir()
        return {int(task.name) for task in names}

    torch.set_num_threads(4)
    torch.ones(1_000_000).mul_(2)
    before = alive()
    for _ in range(20):
        assert signatures(2, members=2)[1] == 2
        torch.ones(1_000_000).mul_(2)
    assert alive() <= before


def test_an_error_reaches_the_caller(two_threads):
    with pytest.raises(TypingError):
        run_on_threads(sign_rows, ("no rows", 0, 0), 2)


def test_the_number_of_threads_does_not_change_the_sums(two_threads):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (5000,), generator=generator)
    grads = torch.randn(5000, 99, generator=generator)
    found = sum_by_row(group(ids, grads, 1000))
    torch.set_num_threads(1)
    assert_same_bits(found, sum_by_row(group(ids, grads, 1000)))


FORKED = """
import os, torch
from hotrow.kernels.grouping import group, sum_by_row
torch.set_num_threads(2)
ids, grads = torch.arange(5000) % 1000, torch.ones(5000, 200)
first = sum_by_row(group(ids, grads, 1000)).numpy()
child = os.fork()
if not child:
    second = sum_by_row(group(ids, grads, 1000)).numpy()
    os._exit(0 if (first == second).all() else 3)
assert os.waitpid(child, 0)[1] == 0
"""


@exhaustive
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs os.fork")
def test_a_forked_child_starts_new_threads():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=120)
