"""Test the measurement of peak memory, times and free memory."""

import gc
import weakref

import psutil
import pytest
import torch

from hotrow.verify import measure
from hotrow.verify.measure import Measurement, free_memory, measure_peak_memory, time_interleaved


def test_peak_is_the_most_memory_in_use_at_once():
    def work():
        first = torch.ones(1000)  # 4,000 bytes
        second = torch.ones(1000)  # 8,000 in use
        del first
        third = torch.ones(3000)  # 16,000 in use
        del second
        return third.sum()

    result, peak = measure_peak_memory(work)
    assert peak == 16_000
    assert result.item() == 3000


def test_peak_without_allocations_is_zero(capfd):
    assert measure_peak_memory(lambda: 5) == (5, 0)
    assert capfd.readouterr() == ("", "")


def test_older_tensors_are_not_collected_during_a_measurement():
    """The profiler prints a warning if older tensors are collected during a measurement."""
    tensor = torch.ones(1000)
    cycle = [tensor]
    cycle.append(cycle)
    older = weakref.ref(tensor)
    del cycle, tensor
    assert gc.isenabled()

    def work():
        return len([[] for _ in range(100_000)])  # enough objects to trigger a collection

    assert measure_peak_memory(work) == (100_000, 0)
    assert older() is not None
    assert gc.isenabled()
    with pytest.raises(ZeroDivisionError):
        measure_peak_memory(lambda: 1 // 0)
    assert gc.isenabled()
    gc.disable()
    try:
        measure_peak_memory(work)
        assert not gc.isenabled()
    finally:
        gc.enable()
    gc.collect()
    assert older() is None


@pytest.fixture
def clock(monkeypatch):
    """A fake clock, in seconds, that only the measured functions advance."""
    now = [0.0]
    monkeypatch.setattr(measure.time, "perf_counter", lambda: now[0])

    def work(name, seconds, runs):
        def run():
            runs.append(name)
            now[0] += seconds

        return run

    return work


def test_a_run_on_a_gpu_ends_when_its_kernels_have_run(clock, monkeypatch):
    runs = []
    wait = clock("wait", 3.0, runs)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: wait())
    works, gpu = [clock("a", 1.0, runs)], torch.device("cuda")
    assert list(time_interleaved(works, seconds=0, max_rounds=1, device=gpu)) == [[4000.0]]
    assert runs == ["wait", "a", "wait"]


def test_the_peak_on_a_gpu_excludes_earlier_allocations(monkeypatch):
    calls, gpu = [], torch.device("cuda", 1)
    answers = {"reset_peak_memory_stats": None, "memory_allocated": 7, "max_memory_allocated": 40}
    for name, answer in answers.items():

        def call(device, name=name, answer=answer):
            assert device == gpu
            calls.append(name)
            return answer

        monkeypatch.setattr(torch.cuda, name, call)
    assert measure_peak_memory(lambda: calls.append("work") or 5, gpu) == (5, 33)
    assert calls == [*list(answers)[:2], "work", "max_memory_allocated"]


def test_functions_run_in_turn(clock):
    runs = []
    works = [clock("a", 1.0, runs), clock("b", 2.0, runs)]
    rounds = list(time_interleaved(works, seconds=60, max_rounds=3))
    assert runs == ["a", "b", "a", "b", "a", "b"]
    assert rounds == [[1000.0, 2000.0]] * 3


def test_short_function_runs_several_times_in_its_turn(clock):
    runs = []
    works = [clock("long", 1.0, runs), clock("short", 0.001, runs)]
    (times,) = time_interleaved(works, seconds=0, max_rounds=5)
    assert runs == ["long"] + ["short"] * measure._MAX_RUNS_PER_TURN
    assert times == pytest.approx([1000, 1])


def test_rounds_stop_after_the_given_seconds(clock):
    assert len(list(time_interleaved([clock("a", 1.0, [])], seconds=2.5, max_rounds=5))) == 3
    assert len(list(time_interleaved([clock("a", 1.0, [])], seconds=0, max_rounds=5))) == 1


def test_median():
    assert Measurement((3.0, 1.0, 200.0), 0).median_ms == 3.0


def test_free_memory_is_less_than_total_memory():
    assert 0 < free_memory() <= psutil.virtual_memory().total


@pytest.mark.parametrize(
    ("limit", "used", "expected"), [("1000", "400", [600]), ("max", "400", []), ("10", "40", [0])]
)
def test_control_group_limits_free_memory(monkeypatch, limit, used, expected):
    files = {"/sys/fs/cgroup/memory.max": limit, "/sys/fs/cgroup/memory.current": used}

    class FakePath:
        def __init__(self, path):
            self.path = path

        def read_text(self):
            if self.path not in files:
                raise FileNotFoundError(self.path)
            return files[self.path] + "\n"

    monkeypatch.setattr(measure, "Path", FakePath)
    assert list(measure._cgroup_free_memory()) == expected
