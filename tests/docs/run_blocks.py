"""Run a page's code blocks: Python and `hotrow` in this process, other commands in a shell."""

from __future__ import annotations

import contextlib
import doctest
import io
import os
import re
import shlex
import subprocess
import sys
from dataclasses import dataclass, replace
from pathlib import Path
from types import ModuleType

from typer.main import get_command

from hotrow.cli import main as cli
from tests.docs.blocks import Block, read_page

EXEMPT = ("diff", "text")
# Don't run commands that change the machine or that tests/test_examples.py already covers.
COMMANDS_NOT_RUN = re.compile(r"(make|pip|git|cd)\b|(python|torchrun .*) examples/")
COMMAND = re.compile(r"^\$ ((?:.*\\\n)*.*)\n?", re.MULTILINE)
FLAGS = doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE  # long messages wrap on pages
EXIT_CODE = re.compile(r"# exit code (\d+)")
# A time, a size in bytes or a ratio, but not the "x" in "4 x 5".
MEASURED = re.compile(
    r"\d[\d.,]*(e[-+]?\d+)?( ?(ns|µs|us|ms|s|min|kB|MB|GB|GB/s)(?![\w/])| ?x(?!\w| \d))"
)


class BlockError(AssertionError):
    """Raised when a code block doesn't do what its page shows."""


@dataclass
class PageRun:
    """A page whose blocks run in order, in one folder and one namespace."""

    path: Path
    folder: Path
    main: ModuleType

    def run(self) -> int:
        """Run every block, and return the number of blocks that ran."""
        return sum(self._run_block(block) for block in read_page(self.path.read_text()).blocks)

    def _run_block(self, block: Block) -> bool:
        place = f"{self.path}:{block.line}"
        runners = {
            "python": self._run_python,
            "setup": self._execute,
            "console": self._run_console,
            "bash": self._run_bash,
        }
        if block.file is not None:
            path = self.folder / block.file
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(block.source)
            return False
        if block.not_run is not None or block.language in EXEMPT:
            if block.not_run == "":
                raise BlockError(f"{place}: the comment <!-- not run --> gives no reason")
            check_options(block.source, place)
            return False
        if block.language not in runners:
            known = ", ".join([*runners, *EXEMPT])
            raise BlockError(f"{place}: unknown language {block.language!r}; use one of {known}")
        try:
            runners[block.language](block)
        except BlockError:
            raise
        except Exception as error:
            raise BlockError(f"{place}: {type(error).__name__}: {error}") from error
        return True

    def _run_python(self, block: Block) -> None:
        if not re.search(r"^\s*>>> ", block.source, re.MULTILINE):
            self._execute(block)
            return
        test = doctest.DocTestParser().get_doctest(
            block.source, {}, f"{self.path.name}:{block.line}", str(self.path), block.line - 1
        )
        test.globs = vars(self.main)
        self._run_doctest(block, test)

    def _run_doctest(self, block: Block, test: doctest.DocTest) -> None:
        said = io.StringIO()
        runner = doctest.DocTestRunner(optionflags=FLAGS, verbose=False)
        if runner.run(test, out=said.write, clear_globs=False).failed:
            raise BlockError(said.getvalue())

    def _execute(self, block: Block) -> None:
        lines = "\n" * (block.line - 1)
        exec(compile(lines + block.source, str(self.path), "exec"), vars(self.main))

    def _run_bash(self, block: Block) -> None:
        """Run the commands of a block that has neither prompts nor output."""
        source = re.sub(r"(?<!\\\n)^(?=\S)", "$ ", block.source, flags=re.MULTILINE)
        self._run_console(replace(block, source=source))

    def _run_console(self, block: Block) -> None:
        if not block.source.startswith("$ "):
            raise BlockError(f"{self.path}:{block.line}: a console block must start with `$ `")
        parts = COMMAND.split(block.source)[1:]
        for command, shown in zip(parts[::2], parts[1::2], strict=True):
            if COMMANDS_NOT_RUN.match(command):
                continue
            code, output = self._run_command(command)
            match = EXIT_CODE.search(command)
            expected = int(match[1]) if match else 0
            place = f"{self.path}:{block.line}: $ {command}"
            if code != expected:
                raise BlockError(f"{place}\nexit code {code}, not {expected}:\n{output}")
            if shown.strip():
                self._check_output(place, command, shown, output)

    def _check_output(self, place: str, command: str, shown: str, printed: str) -> None:
        if not same_output(shown, printed):
            raise BlockError(f"{place}\nshown:\n{shown}\nprinted:\n{printed}")

    def _run_command(self, command: str) -> tuple[int, str]:
        """Return a command's exit code and its combined stdout and stderr."""
        words = shlex.split(os.path.expandvars(command.replace("\\\n", " ")), comments=True)
        if words[:1] == ["hotrow"] and not {"|", ">", "&&"} & set(words):
            return run_hotrow(words)
        path = f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"
        done = subprocess.run(
            ["bash", "-euo", "pipefail", "-c", command],
            cwd=self.folder,
            env=os.environ | {"PATH": path},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        return done.returncode, done.stdout


def check_options(source: str, place: str) -> None:
    """Raise `BlockError` if a `hotrow` command line uses an unknown option."""
    for command, arguments in re.findall(
        r"^(?:\$ )?hotrow (\w+)(.*(?:\\\n.*)*)", source, re.MULTILINE
    ):
        options = get_command(cli.app).commands[command].params
        known = [name for option in options for name in option.opts]
        for option in re.findall(r"\s(--[a-z-]+)", arguments):
            if option not in known:
                raise BlockError(f"{place}: hotrow {command} has no option {option}")


def run_hotrow(words: list[str]) -> tuple[int, str]:
    """Run `hotrow` in this process; return the exit code and the output."""
    output = io.StringIO()
    before = sys.argv
    sys.argv = words
    try:
        with contextlib.redirect_stdout(output), contextlib.redirect_stderr(output):
            cli.main()
    except SystemExit as exit:
        return int(exit.code or 0), output.getvalue()
    finally:
        sys.argv = before
    raise AssertionError("hotrow returned without exiting")


def same_output(shown: str, printed: str) -> bool:
    """Return whether the outputs agree, ignoring measured values and column widths."""
    pattern = re.escape(_plain(shown)).replace(r"\.\.\.", ".*")
    return re.fullmatch(pattern, _plain(printed), re.DOTALL) is not None


def _plain(text: str) -> str:
    lines = [re.sub(r"[ ─]+", " ", MEASURED.sub("#", line)).strip() for line in text.splitlines()]
    return "\n".join(line for line in lines if line)
