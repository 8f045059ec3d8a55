"""Update the output shown on a page: `python -m tests.docs.update_page PAGE ...`.

Use this script after changing a help text or a message that a page shows. Review the diff before
you commit the page. Set the environment variables that the page needs, for example `$MODEL`.
"""

from __future__ import annotations

import doctest
import os
import shutil
import sys
import tempfile
import textwrap
from pathlib import Path
from types import ModuleType
from typing import Any

from tests.docs.blocks import Block
from tests.docs.run_blocks import FLAGS, PageRun, same_output

WIDTH = 96


class Recorder(doctest.DocTestRunner):
    """Collect the output of failing examples."""

    def __init__(self) -> None:
        super().__init__(optionflags=FLAGS, verbose=False)
        self.printed: dict[int, str] = {}

    def report_failure(self, out: Any, test: Any, example: Any, got: str) -> None:
        """Record the output, without traceback frames."""
        if got.startswith("Traceback"):
            header, *lines = got.splitlines()
            message = " ".join(line for line in lines if not line.startswith(" "))
            message = textwrap.fill(message, WIDTH, subsequent_indent="    ")
            got = f"{header}\n  ...\n{message}\n"
        self.printed[example.lineno] = got

    def report_unexpected_exception(self, out: Any, test: Any, example: Any, info: Any) -> None:
        """Raise the exception that the example didn't expect."""
        raise info[1]


class PageUpdate(PageRun):
    """A page that gets updated wherever its output differs from the actual output."""

    def update(self) -> None:
        """Run the blocks, and write the updated page."""
        self.changes: list[tuple[str, str]] = []
        self.run()
        text = self.path.read_text()
        for before, after in self.changes:
            if text.count(before) != 1:
                raise SystemExit(
                    f"{self.path}: {text.count(before)} copies of this block, expected 1: {before}"
                )
            text = text.replace(before, after)
        self.path.write_text(text)

    def _run_doctest(self, block: Block, test: doctest.DocTest) -> None:
        recorder = Recorder()
        recorder.run(test, out=lambda text: None, clear_globs=False)
        lines = block.source.splitlines(keepends=True)
        for example in reversed(test.examples):
            if example.lineno in recorder.printed:
                start = example.lineno + example.source.count("\n")
                end = start + example.want.count("\n")
                lines[start:end] = [recorder.printed[example.lineno]]
        if recorder.printed:
            self.changes.append((block.source, "".join(lines)))

    def _check_output(self, place: str, command: str, shown: str, printed: str) -> None:
        if not same_output(shown, printed):
            line = f"$ {command}\n"
            self.changes.append((line + shown, f"{line}{printed.rstrip()}\n"))


def update_pages(paths: list[str]) -> None:
    """Update the pages at the given paths."""
    os.environ["COLUMNS"] = "80"
    for path in [Path(path).resolve() for path in paths]:
        with tempfile.TemporaryDirectory() as folder:
            for file in (Path(__file__).parent / "files").glob("*.py"):
                shutil.copy(file, folder)
            os.chdir(folder)
            main = sys.modules["__main__"] = ModuleType("__main__")
            PageUpdate(path, Path(folder), main).update()


if __name__ == "__main__":
    update_pages(sys.argv[1:])
