"""Links to pages that are in the repository, but outside of docs/: the site has them as well."""

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
    """Let links go to the pages of the site."""
    for outside, inside in PAGES.items():
        text = re.sub(rf"\]\((?:\.\./)+{re.escape(outside)}(?=[#)])", f"]({inside}", text)
    return text


def read(app: Sphinx, name: str, source: list[str]) -> None:
    """Replace the links of a page, and of the file that it includes."""
    source[0] = replace_links(source[0])


def setup(app: Sphinx) -> dict[str, Any]:
    """Change the pages as they are read."""
    app.connect("source-read", read)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
