"""Build and run the lesson's notebooks, one for each language, from one source beside this file.

And draw the first figure of each README.

The source is Markdown. `<!-- en -->` and `<!-- zh-CN -->` start the text of a cell in that
language; a block of Python is a cell of both, but for its line `lang = "en"`; `<!-- measured -->`
before it says that its output depends on the machine.

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
MARK = re.compile(r"^(<!-- (?:en|zh-CN|measured) -->|```(?:python)?)\n", re.MULTILINE)
# Line breaks that Chinese has no space for: between two of its characters, and after its marks.
HAN, STOPS = "[\u3000-\u9fff\uff00-\uffef]", "[，。；：！？、）]"
JOINED = re.compile(f"(?<={HAN})\n(?={HAN})|(?<={STOPS})\n(?=[`\\w])(?!\\d+\\. )")
LANG = 'lang = "en"'


@dataclass(frozen=True)
class Text:
    """A cell of words, by language."""

    words: dict[str, str]


@dataclass(frozen=True)
class Code:
    """A cell of code, for every language."""

    code: str
    measured: bool = False


def parse(source: str) -> list[Text | Code]:
    """The cells of the source, in order."""
    _, _, body = source.partition("\n---\n")
    marks = MARK.split(body)
    if marks[0].strip():
        raise ValueError(f"before the first mark stands {marks[0].strip():.40}")
    cells: list[Text | Code] = []
    words: dict[str, str] = {}
    measured = False
    for mark, text in zip(marks[1::2], marks[2::2], strict=True):
        if mark == "```python":
            cells.append(Code(text.strip(), measured))
            measured = False
        elif mark == "<!-- measured -->":
            measured = True
        elif mark != "```":
            words[mark[5:-4]] = text.strip()
            if words.keys() == FILES.keys():
                cells.append(Text(words))
                words = {}
            continue
        elif text.strip():
            raise ValueError(f"after a block of code comes no mark, but {text.strip():.40}")
        if words:
            raise ValueError(f"this has no translation: {words}")
    return cells


def notebook(cells: list[Text | Code], lang: str) -> nbformat.NotebookNode:
    """The notebook of a language, not yet run."""
    v4 = nbformat.v4
    made = []
    for place, cell in enumerate(cells):
        if isinstance(cell, Text):
            words = JOINED.sub("", cell.words[lang])
            made.append(v4.new_markdown_cell(words, id=f"cell-{place}"))
        else:
            code = cell.code.replace(LANG, f'lang = "{lang}"')
            made.append(v4.new_code_cell(code, id=f"cell-{place}"))
            if cell.measured:
                made[-1].metadata["tags"] = ["measured"]
    kernel = {"name": "python3", "display_name": "Python 3", "language": "python"}
    return v4.new_notebook(cells=made, metadata={"kernelspec": kernel})


def run(unrun: nbformat.NotebookNode) -> nbformat.NotebookNode:
    """Run it from top to bottom; an error in a cell is an error here."""
    # However its output is cut into messages: together.
    client = NotebookClient(unrun, timeout=300, record_timing=False, coalesce_streams=True)
    done = client.execute(cwd=str(HERE))
    done.metadata["language_info"] = {"name": "python"}  # no version, which differs
    return done


def first_figure(lang: str) -> str:
    """What the README shows first: the look-up of Example A, as SVG."""
    return hotrow.figure("lookup", A.table(), A.ids, lang=lang).svg + "\n"


def main() -> None:
    """Write both notebooks, and the README's figures."""
    for lang, path in FIGURES.items():
        path.write_text(first_figure(lang), encoding="utf-8")
    cells = parse(SOURCE.read_text())
    for lang, name in FILES.items():
        nbformat.write(run(notebook(cells, lang)), HERE / name)


if __name__ == "__main__":
    main()
