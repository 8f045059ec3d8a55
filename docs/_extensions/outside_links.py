"""Sphinx extension: redirect links to Markdown files outside docs/ to the matching site pages."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx

PAGES = {
    "CHANGELOG.md": "/changes.md",
    "CONTRIBUTING.md": "/contributing.md",
    "README.md": "/index.md",
    "examples/README.md": "/tutorials/examples.md",
}


def replace_links(text: str) -> str:
    """Replace links to files outside docs/ with links to pages of the site."""
    for outside, inside in PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)+{re.escape(outside)}(?=[#)])", f"]({inside}", text)
    return text


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the links in a page's source."""
    source[0] = replace_links(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Make Sphinx call `read` for the source of every page."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
