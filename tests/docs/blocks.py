"""The code blocks of a Markdown page, and the HTML comments that say what to do with them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from markdown_it import MarkdownIt

PARSER = MarkdownIt()
COMMENT = re.compile(r"<!--\s*(setup|file|not run|needs)\b:?\s*(.*?)\s*-->", re.DOTALL)
# Directives of MyST that hold code of a language: ```{code-block} python
CODE_DIRECTIVES = ("code", "code-block")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: what stands after the fence, or "setup" for code in a comment.
        source: the code.
        line: of the page, counted from 1, where the code starts.
        file: the name under which the block is saved, if it is not run.
        not_run: why it is not run, or None.
    """

    language: str
    source: str
    line: int
    file: str | None = None
    not_run: str | None = None


@dataclass
class Page:
    """What the tests need of a page."""

    blocks: list[Block] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def read_page(text: str) -> Page:
    """Find the blocks of a page in order, those within directives and lists as well."""
    page = Page()
    marks: dict[str, str] = {}
    for kind, value, source, line in _iter_parts(text, 1):
        if kind == "needs":
            page.needs += re.split(r"[\s,]+", value)
        elif kind == "setup":
            page.blocks.append(Block("setup", source, line))
        elif kind == "fence":
            mark = marks.get("file"), marks.get("not run")
            page.blocks.append(Block(value, source, line, *mark))
            marks = {}
        else:
            marks[kind] = value
    if marks:
        raise ValueError(f"no block follows the comment {marks}")
    return page


def _iter_parts(text: str, first: int) -> Iterator[tuple[str, str, str, int]]:
    """Yield (kind, value, source, line) of each fence and of each comment for the tests."""
    for token in PARSER.parse(text):
        if token.map is None:
            continue
        line = first + token.map[0] + 1  # the line below the fence, or below "<!-- setup"
        if token.type == "html_block":
            for kind, value in COMMENT.findall(token.content):
                yield kind, value, f"{value}\n", line
        elif token.type == "fence":
            directive = re.match(r"\{([\w-]+)\}\s*(\S*)", token.info)
            if directive is None:
                yield (
                    "fence",
                    token.info.split()[0] if token.info.strip() else "",
                    token.content,
                    line,
                )
            elif directive[1] in CODE_DIRECTIVES:
                options = re.match(r"(?::[\w-]+:.*\n)*\n?", token.content)
                assert options is not None
                skipped = options[0].count("\n")
                yield "fence", directive[2], token.content[options.end() :], line + skipped
            else:
                yield from _iter_parts(token.content, line)
