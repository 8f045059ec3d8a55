"""What the whole suite shares: seeds, skips that are no surprise, a browser, a command line."""

from __future__ import annotations

import os
import shutil
import sys
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import torch
from hypothesis import settings
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from hotrow.cli import main as cli

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

settings.register_profile("hotrow", deadline=None, derandomize=True, print_blob=True)
settings.load_profile("hotrow")

# Elsewhere than on CI a reader may lack a browser or the real table; on CI nothing may be missing
# but an accelerator, and the peers that only `make bench` installs.
EXPECTED_SKIPS = ("needs a GPU", "needs a peer of the benchmark")


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session", autouse=True)
def _no_process_is_left() -> Generator[None]:
    yield
    if "ranks" in sys.modules:
        sys.modules["ranks"].close_all()


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
    monkeypatch.setattr("hotrow.conversion.resting.LEAST", 0)


@pytest.fixture
def small_tables(monkeypatch):
    """What is looked up becomes a table whatever its size."""
    monkeypatch.setattr("hotrow.table.lookup.WORTHWHILE", 0)


BROWSER_ARGUMENTS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--no-first-run",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
    "--host-resolver-rules=MAP * ~NOTFOUND",
]


@dataclass
class Watched:
    """A page, and everything that its browser context saw it do."""

    page: Page
    requests: list[str] = field(default_factory=list)
    noise: list[str] = field(default_factory=list)


Watch = Callable[..., Watched]


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    names = ("chromium", "chromium-browser", "google-chrome")
    path = next(filter(None, map(shutil.which, names)), None)
    if path is None:
        reason = f"no browser was found: none of {', '.join(names)} is installed"
        (pytest.fail if os.environ.get("CI") else pytest.skip)(reason)
    from playwright.sync_api import sync_playwright  # `make test-torch` installs none

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=path, args=BROWSER_ARGUMENTS)
        yield browser
        browser.close()


@pytest.fixture
def watch(browser: Browser) -> Iterator[Watch]:
    """Opens an address in a context of its own, and watches it."""
    contexts = []

    def watch(address: str, width: int = 1280, scheme: str = "light", **options: Any) -> Watched:
        context = browser.new_context(
            viewport={"width": width, "height": 800},
            color_scheme="dark" if scheme == "dark" else "light",
            **options,
        )
        contexts.append(context)
        page = context.new_page()
        watched = Watched(page)
        context.on("request", lambda request: watched.requests.append(request.url))
        context.on("console", lambda message: watched.noise.append(message.text))
        context.on("weberror", lambda error: watched.noise.append(str(error.error)))
        context.on(
            "dialog", lambda dialog: (watched.noise.append(dialog.message), dialog.dismiss())
        )
        page.goto(address)
        return watched

    yield watch
    for context in contexts:
        context.close()


@dataclass(frozen=True)
class Result:
    code: int
    out: str
    err: str


Run = Callable[..., Result]


def save_tokenizer(vocabulary: dict[str, int], path: Path) -> None:
    tokenizer = Tokenizer(WordLevel(vocabulary, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = Whitespace()
    tokenizer.save(str(path))


@pytest.fixture
def hotrow_(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """`hotrow` in this process."""
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("HOTROW_DEBUG", raising=False)

    def run(*arguments: str) -> Result:
        monkeypatch.setattr(sys, "argv", ["hotrow", *arguments])
        with pytest.raises(SystemExit) as exit:
            cli.main()
        captured = capsys.readouterr()
        return Result(int(exit.value.code or 0), captured.out, captured.err)

    return run
