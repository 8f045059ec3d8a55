"""The command-line app: its commands, its help and its error handling."""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from typing import Annotated

import typer

import hotrow
from hotrow.cli.bench import BENCH_HELP, bench_command
from hotrow.cli.check import CHECK_HELP, check_command
from hotrow.cli.compare import COMPARE_HELP, compare_command
from hotrow.cli.disk import disk_app
from hotrow.cli.learn import LEARN_HELP, learn_command
from hotrow.cli.terminal import BROKEN, EQUAL, UNUSABLE, check_output_is_open, write_output
from hotrow.errors import HotrowError
from hotrow.inputs.text import escape_unprintable, message_of

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        write_output(f"hotrow {hotrow.__version__}")
        raise typer.Exit


@app.callback()
def root(
    version: Annotated[
        bool,
        typer.Option(
            "--version", callback=_print_version, is_eager=True, help="Show the version and exit."
        ),
    ] = False,
) -> None:
    """Train large PyTorch embeddings fast, with the same results as dense training."""


app.command("compare", help=COMPARE_HELP, short_help="Compare the lookup with the one-hot matmul.")(
    compare_command
)
app.command("check", help=CHECK_HELP, short_help="Check an optimizer's steps against torch.optim.")(
    check_command
)
app.command("bench", help=BENCH_HELP, short_help="Benchmark hotrow and torch on a training step.")(
    bench_command
)
app.command("learn", help=LEARN_HELP, short_help="Open the interactive lesson.")(learn_command)
app.add_typer(disk_app, name="disk", short_help="Check the folder of a table on disk.")


def main() -> None:
    """Run the command line."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run the app and exit with its exit code; print errors without a traceback."""
    try:
        check_output_is_open()  # typer would print the help to a closed stream without an error
        sys.exit(app(standalone_mode=True))
    except SystemExit as stop:
        # typer writes the help itself. If the pipe is closed, it exits with 1, which is also the
        # code for `DIFFERENT`.
        if isinstance(stop.__context__, BrokenPipeError):
            sys.exit(EQUAL)
        raise
    except HotrowError as error:
        code = _print_error(error, UNUSABLE)
    except OSError as error:
        # Code that reads or writes a file handles its own errors, so an error without a file name
        # comes from a standard stream.
        output = error.filename is None
        code = _print_error(
            HotrowError(
                f"the {'output cannot be written' if output else 'system reports an error'} "
                f"({error.strerror or error})",
                fix="redirect the output to a disk with free space" if output else None,
            ),
            UNUSABLE,
        )
    except BaseException as error:  # a panic in Rust code is not an Exception
        if os.environ.get("HOTROW_DEBUG"):
            raise
        code = _print_error(
            HotrowError(
                f"internal error in hotrow: {type(error).__name__}: {message_of(error)}",
                fix="set HOTROW_DEBUG=1 to see the traceback, and please report this error",
            ),
            BROKEN,
        )
    sys.exit(code)


def _print_error(error: HotrowError, code: int) -> int:
    prefix = "Error: " if code == UNUSABLE else ""
    lines = [
        *f"{prefix}{error.problem}".splitlines(),
        *([] if error.fix is None else [f"  try: {error.fix}"]),
    ]
    text = "".join(f"{escape_unprintable(line)}\n" for line in lines)
    # The exit code must be right even if writing to standard error fails.
    with suppress(OSError, AttributeError):
        sys.stderr.write(text)
        sys.stderr.flush()
    return code
