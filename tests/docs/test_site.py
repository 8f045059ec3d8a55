"""Test that the documentation site builds without warnings and makes no network requests."""

import subprocess
import sys

import pytest

from tests.support.exhaustive import exhaustive
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def site(tmp_path_factory):
    pytest.importorskip(
        "furo", reason="the packages for the site are not installed; run `make docs`"
    )
    folder = tmp_path_factory.mktemp("site")
    words = [
        "-q",
        "-W",
        "--keep-going",
        "-n",
        "-d",
        folder / "trees",
        ROOT / "docs",
        folder / "html",
    ]
    command = [sys.executable, "-m", "sphinx", *words]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return folder / "html"


@exhaustive
@pytest.mark.parametrize("width", [390, 1280])
def test_a_page_makes_no_request_and_does_not_scroll_sideways(site, open_recorded, width):
    for name in ("index", "reference/compatibility", "reference/optim", "performance"):
        opened = open_recorded((site / f"{name}.html").as_uri(), width=width)
        assert all(request.startswith("file:") for request in opened.requests), opened.requests
        assert opened.messages == []
        wider = "document.documentElement.scrollWidth - innerWidth"
        assert opened.page.evaluate(wider) <= 0, name
