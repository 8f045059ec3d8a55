"""Find a Markdown page's code blocks, and the HTML comments that control how tests run them."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from markdown_it import MarkdownIt

PARSER = MarkdownIt()
COMMENT = re.compile(r"<!--\s*(setup|file|not run|needs)\b:?\s*(.*?)\s*-->", re.DOTALL)
# MyST directives that contain code, for example ```{code-block} python
CODE_DIRECTIVES = ("code", "code-block")


@dataclass(frozen=True)
class Block:
    """A block of code.

    Attributes:
        language: the language named after the opening fence, or "setup" for code in a comment.
        source: the code.
        line: the line number where the code starts, counted from 1.
        file: the file that the block is saved to instead of being run, or None.
        not_run: the reason why the block is not run, or None.
    """

    language: str
    source: str
    line: int
    file: str | None = None
    not_run: str | None = None


@dataclass
class Page:
    """A page's code blocks, and the packages that they need."""

    blocks: list[Block] = field(default_factory=list)
    needs: list[str] = field(default_factory=list)


def read_page(text: str) -> Page:
    """Find a page's blocks in order, including blocks inside directives and lists."""
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
    """Yield (kind, value, source, line) for each code fence and test-control comment."""
    for token in PARSER.parse(text):
        if token.map is None:
            continue
        line = first + token.map[0] + 1  # the line after the fence, or after "<!-- setup"
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
