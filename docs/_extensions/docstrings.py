"""Sphinx extension: show indented blocks in docstrings, such as formulas, as literal text."""

from __future__ import annotations

import re
from typing import Any

from sphinx.application import Sphinx


def mark_blocks(
    app: Sphinx, what: str, name: str, obj: object, options: object, lines: list[str]
) -> None:
    """Put `::` before each indented block that follows a paragraph."""
    result: list[str] = []
    last, is_after_blank = "", False
    for line in lines:
        starts_block = line.startswith(" ") and is_after_blank and last and last[0] != " "
        if starts_block and not last.endswith("::") and not last.startswith((">>>", "..", "=")):
            result += ["::", ""]
        # In RST, inline code directly followed by a letter needs an escape, as in `Table`s.
        result.append(re.sub(r"(?<![\w`])(`[^`]+`)(?=\w)", r"\1\\ ", line))
        is_after_blank = not line.strip()
        last = line or last
    lines[:] = result


def setup(app: Sphinx) -> dict[str, Any]:
    """Register `mark_blocks`, which must run before napoleon parses docstring sections."""
    app.setup_extension("sphinx.ext.autodoc")
    app.connect("autodoc-process-docstring", mark_blocks, priority=400)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
