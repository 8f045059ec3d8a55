"""Test measurements in a child process."""

import os
import sys

import pytest
import torch

from hotrow.bench import process
from hotrow.bench.environment import SETTINGS, describe_environment
from tests.support.exhaustive import exhaustive


def work(case, report_progress):
    """The job that the child process imports from this module and runs."""
    report_progress(0.5, "half")
    if case == "fails":
        raise ValueError("no such number")
    if case == "dies":
        os.write(2, b"last words\n")
        os._exit(7)
    settings = {name: os.environ[name] for name in SETTINGS}
    return {"settings": settings, "threads": torch.get_num_threads(), "here": "" in sys.path}


def run(case):
    seen = []
    function = f"{__name__}:work"
    result = process.run_job(function, {"case": case}, 1, lambda *progress: seen.append(progress))
    return result, seen


@exhaustive
def test_a_job_has_its_settings_threads_and_progress():
    result, seen = run("works")
    assert result == {"settings": SETTINGS, "threads": 1, "here": False}
    assert seen == [(0.5, "half")]


@exhaustive
def test_a_job_that_fails_or_dies_raises():
    with pytest.raises(process.JobError, match=r"^ValueError: no such number$") as failed:
        run("fails")
    assert failed.value.kind == "ValueError"
    with pytest.raises(process.JobError, match=r"^last words$") as failed:
        run("dies")
    assert failed.value.kind == ""


def test_a_job_without_its_settings_raises(monkeypatch):
    monkeypatch.delenv("THP_MEM_ALLOC_ENABLE", raising=False)
    with pytest.raises(AssertionError, match="THP_MEM_ALLOC_ENABLE=1 must be set"):
        process._run({"function": f"{__name__}:work", "arguments": {}, "threads": 1})


def test_the_environment_has_the_machine_and_the_versions():
    seen = describe_environment(3)
    assert seen["threads"] == 3
    assert seen["versions"]["torch"] == torch.__version__
    assert {"cpu", "memory_bytes", "transparent_hugepage", "settings"} <= set(seen)
