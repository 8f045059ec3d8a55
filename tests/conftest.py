"""Set up all tests: random seeds, expected skips, a browser, and the command line."""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Generator, Iterator
from typing import TYPE_CHECKING, Any

import pytest
import torch

if not torch.cuda.is_available():  # Triton reads this variable when it is first imported
    os.environ["TRITON_INTERPRET"] = "1"

from hypothesis import settings

from hotrow.cli import main as cli
from tests.support.browser import (
    BROWSER_ARGUMENTS,
    BROWSER_NAMES,
    OpenPage,
    RecordedPage,
    find_browser,
)
from tests.support.command_line import Result, Run

if TYPE_CHECKING:
    from playwright.sync_api import Browser

# A shell lets its background jobs ignore SIGINT.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("hotrow", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("hotrow")

# Outside CI, tests may also be skipped because a browser or the real table is missing. On CI, only
# a GPU and the benchmark peers, which `make bench` installs, may be missing.
EXPECTED_SKIPS = ("needs a GPU", "needs a benchmark peer")


@pytest.fixture(autouse=True)
def _seed() -> None:
    # `torch.manual_seed` formats the stack three times, for devices that don't exist here.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _forget_compiled_code() -> None:
    # torch.compile gives up on a function that earlier tests have compiled in many variants.
    if "torch._dynamo" in sys.modules:
        torch._dynamo.reset()


@pytest.fixture(scope="session", autouse=True)
def _end_rank_processes() -> Generator[None]:
    yield
    if "tests.support.ranks" in sys.modules:
        sys.modules["tests.support.ranks"].close_all()


@pytest.fixture
def threads() -> Generator[None]:
    """Restore torch's number of threads after the test."""
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
    """Set the default `min_entries` to 0, so that one-hot products of any size become lookups."""
    monkeypatch.setattr("hotrow.conversion.sampling.MIN_ENTRIES", 0)


@pytest.fixture
def small_tables(monkeypatch):
    """Make `hotrow.convert` turn embeddings of any size into tables."""
    monkeypatch.setattr("hotrow.table.lookup.MIN_TABLE_ENTRIES", 0)


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    path = find_browser()
    if path is None:
        reason = f"no browser: install one of {', '.join(BROWSER_NAMES)}"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright  # `make test-torch` doesn't install playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def open_recorded(browser: Browser) -> Iterator[OpenPage]:
    """Return a function that opens a URL in a new browser context and records the page."""
    contexts = []

    def open_recorded(
        address: str, width: int = 1280, scheme: str = "light", **options: Any
    ) -> RecordedPage:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if scheme == "dark" else "light",
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        recorded = RecordedPage(page)
        context.on("request", lambda request: recorded.requests.append(request.url))
        context.on("console", lambda message: recorded.messages.append(message.text))
        context.on("weberror", lambda error: recorded.messages.append(str(error.error)))
        context.on(
            "dialog", lambda dialog: (recorded.messages.append(dialog.message), dialog.dismiss())
        )
        page.goto(address)
        return recorded

    yield open_recorded
    for context in contexts:
        context.close()


@pytest.fixture
def run_hotrow(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Return a function that runs `hotrow` in this process."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HOTROW_DEBUG", raising=False)

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["hotrow", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return run
