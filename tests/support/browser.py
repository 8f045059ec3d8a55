"""A browser page whose requests and messages are recorded."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from playwright.sync_api import Page

BROWSER_NAMES = ("chromium-headless-shell", "chromium", "chromium-browser", "google-chrome")
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


def find_browser() -> str | None:
    """Return the path to an installed browser, or None."""
    return next(filter(None, map(shutil.which, BROWSER_NAMES)), None)


@dataclass
class RecordedPage:
    """A page with its recorded requests and messages (console output, errors and dialogs)."""

    page: Page
    requests: list[str] = field(default_factory=list)
    messages: list[str] = field(default_factory=list)


OpenPage = Callable[..., RecordedPage]
