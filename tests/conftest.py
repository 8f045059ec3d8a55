"""Settings of the whole suite: seeds, hypothesis, and skips that are no surprise."""

import os
from collections.abc import Generator

import pytest
import torch
from hypothesis import settings

settings.register_profile("hotrow", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("hotrow")

# Elsewhere than on CI a reader may lack a browser or the real table; on CI nothing may be missing
# but an accelerator, and the peers that only `make bench` installs.
EXPECTED_SKIPS = ("needs a GPU", "needs a peer of the benchmark")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture
def threads() -> Generator[None]:
    """Lets a test set the number of threads, and restores it."""
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(
    item: pytest.Item, call: pytest.CallInfo[None]
) -> Generator[None, pytest.TestReport, pytest.TestReport]:
    report = yield
    if report.skipped and not hasattr(report, "wasxfail") and os.environ.get("CI"):
        reason = str(report.longrepr[2]) if isinstance(report.longrepr, tuple) else ""
        if not any(expected in reason for expected in EXPECTED_SKIPS):
            report.outcome = "failed"
            report.longrepr = f"unexpected skip on CI: {reason}"
    return report


@pytest.fixture(autouse=True)
def _small_one_hots(monkeypatch) -> None:
    """What a converted model multiplies by a one-hot is looked up whatever its size."""
    monkeypatch.setattr("hotrow.resting.LEAST", 0)


@pytest.fixture
def small_tables(monkeypatch):
    """What is looked up becomes a table whatever its size."""
    monkeypatch.setattr("hotrow.lookup.WORTHWHILE", 0)
