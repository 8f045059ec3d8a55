"""Build and run the lesson's notebooks in both languages, and draw the README's first figure.

The source is a Markdown file in this folder. `<!-- en -->` and `<!-- zh-CN -->` start the text of a
cell in that language. Each Python block becomes a cell in both notebooks; only the line
`lang = "en"` differs. `<!-- measured -->` before a block means that its output depends on the
machine. `<!-- slider -->` means that the cell needs user input, so the build doesn't run it.

    python lessons/build.py
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

import nbformat
from nbclient import NotebookClient

import hotrow
from hotrow.inputs.examples import A

HERE = Path(__file__).parent
SOURCE = HERE / "embedding-vs-linear.md"
FILES = {"en": "embedding-vs-linear.ipynb", "zh-CN": "embedding-vs-linear.zh-CN.ipynb"}
FIGURES = {
    "en": HERE.parent / "docs" / "lookup.svg",
    "zh-CN": HERE.parent / "docs" / "lookup.zh-CN.svg",
}
MARK = re.compile(r"^(<!-- (?:en|zh-CN|measured|slider) -->|```(?:python)?)\n", re.MULTILINE)
# Markdown must not turn line breaks after Chinese characters or punctuation into spaces.
HAN, STOPS = "[\u3000-\u9fff\uff00-\uffef]", "[，。；：！？、）]"
JOINED = re.compile(f"(?<={HAN})\n(?={HAN})|(?<={STOPS})\n(?=[`\\w])(?!\\d+\\. )")
LANG = 'lang = "en"'
TAGS = {"measured": "measured", "slider": "skip-execution"}  # nbclient skips the latter


@dataclass(frozen=True)
class Text:
    """A Markdown cell, with its text in each language."""

    words: dict[str, str]


@dataclass(frozen=True)
class Code:
    """A code cell, the same in every language."""

    code: str
    kind: str = ""  # "measured" or "slider"


def parse(source: str) -> list[Text | Code]:
    """Parse the source into cells, in order."""
    _, _, body = source.partition("\n---\n")
    marks = MARK.split(body)
    if marks[0].strip():
        raise ValueError(f"text before the first mark: {marks[0].strip():.40}")
    cells: list[Text | Code] = []
    words: dict[str, str] = {}
    kind = ""
    for mark, text in zip(marks[1::2], marks[2::2], strict=True):
        if mark == "```python":
            cells.append(Code(text.strip(), kind))
            kind = ""
        elif mark[5:-4] in TAGS:
            kind = mark[5:-4]
        elif mark != "```":
            words[mark[5:-4]] = text.strip()
            if words.keys() == FILES.keys():
                cells.append(Text(words))
                words = {}
            continue
        elif text.strip():
            raise ValueError(f"text without a mark after a block of code: {text.strip():.40}")
        if words:
            raise ValueError(f"text without a translation: {words}")
    return cells


def notebook(cells: list[Text | Code], lang: str) -> nbformat.NotebookNode:
    """Create the notebook for one language, without outputs."""
    v4 = nbformat.v4
    made = []
    for place, cell in enumerate(cells):
        if isinstance(cell, Text):
            words = JOINED.sub("", cell.words[lang])
            made.append(v4.new_markdown_cell(words, id=f"cell-{place}"))
        else:
            code = cell.code.replace(LANG, f'lang = "{lang}"')
            made.append(v4.new_code_cell(code, id=f"cell-{place}"))
            if cell.kind:
                made[-1].metadata["tags"] = [TAGS[cell.kind]]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel})


def run(unrun: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run a notebook from top to bottom, and raise any error from its cells."""
    # Merge outputs that arrive in several messages, so that the file doesn't depend on timing.
    client = NotebookClient(unrun, timeout=300, record_timing=False, coalesce_streams=True)
    done = client.execute(cwd=str(HERE))
    done.metadata["language_info"] = {
        "name": "python"
    }  # omits the Python version, which differs between machines
    return done


def first_figure(lang: str) -> str:
    """Draw the README's first figure, the lookup in Example A, as SVG."""
    return hotrow.figure("lookup", A.table(), A.ids, lang=lang).svg + "\n"


def main() -> None:
    """Write both notebooks, and the figures for the READMEs."""
    for lang, path in FIGURES.items():
        path.write_text(first_figure(lang), encoding="utf-8")
    cells = parse(SOURCE.read_text())
    for lang, name in FILES.items():
        nbformat.write(run(notebook(cells, lang)), HERE / name)


if __name__ == "__main__":
    main()
