"""Kernels on threads: torch's own where they can be had, Python's elsewhere."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest
import torch
from tolerance import assert_same_bits

from hotrow.kernels import pool
from hotrow.kernels.grouping import group

ENOUGH = 10 * pool.GRAIN


@pytest.fixture(params=["torch's threads", "Python's threads"])
def two(request, monkeypatch, threads):
    if request.param == "Python's threads":
        monkeypatch.setattr(pool, "_by_torch", None)
    torch.set_num_threads(2)


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux")
def test_on_linux_the_threads_are_torchs():
    assert pool._by_torch is not None


def test_each_thread_is_called_once_with_one_count(two):
    found, together = [], threading.Barrier(2, timeout=30)

    def work(taken):
        together.wait()  # both are there at once
        found.append((threading.get_ident(), taken))

    pool.spread(work, ENOUGH, pool.ENOUGH)
    (one, count), (other, same) = found
    assert one != other
    assert count is same


def test_little_work_stays_on_this_thread(two):
    found = []
    pool.spread(lambda taken: found.append(threading.get_ident()), pool.GRAIN, pool.ENOUGH)
    pool.spread(lambda taken: found.append(threading.get_ident()), pool.ENOUGH, 1)
    pool.spread(found.append, 0, 1)
    assert found == [threading.get_ident()] * 2


@pytest.mark.skipif(sys.platform != "linux", reason="torch brings GNU's OpenMP on Linux")
def test_torchs_threads_live_on_when_fewer_are_used(threads):
    def alive():
        names = Path("/proc/self/task").iterdir()
        return {int(task.name) for task in names}

    torch.set_num_threads(4)
    torch.ones(1_000_000).mul_(2)
    everybody, calls = alive(), []
    for _ in range(20):
        pool.spread(lambda taken: calls.append(taken), 3 * pool.GRAIN, pool.ENOUGH)
        torch.ones(1_000_000).mul_(2)
    assert alive() <= everybody
    assert len(calls) == 20 * 2


@pytest.mark.parametrize("error", [ValueError, KeyboardInterrupt])
def test_an_error_reaches_the_caller(two, error):
    def work(taken):
        raise error("in a thread")

    with pytest.raises(error, match="in a thread"):
        pool.spread(work, ENOUGH, pool.ENOUGH)


def test_the_bits_are_the_same(two):
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(0, 1000, (5000,), generator=generator)
    grads = torch.randn(5000, 99, generator=generator)
    found = group(ids, grads, 1000).sums()
    torch.set_num_threads(1)
    assert_same_bits(found, group(ids, grads, 1000).sums())


FORKED = """
import os, torch
from hotrow.kernels.grouping import group
torch.set_num_threads(2)
ids, grads = torch.arange(5000) % 1000, torch.ones(5000, 200)
first = group(ids, grads, 1000).sums().numpy()
child = os.fork()
if not child:
    second = group(ids, grads, 1000).sums().numpy()
    os._exit(0 if (first == second).all() else 3)
assert os.waitpid(child, 0)[1] == 0
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="this system does not fork")
def test_a_forked_child_has_threads_of_its_own():
    subprocess.run([sys.executable, "-W", "ignore", "-c", FORKED], check=True, timeout=120)
