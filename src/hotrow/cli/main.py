"""The command-line app: its commands, its help and its error handling."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import hotrow
from hotrow.cli.bench import BENCH_HELP, bench_command
from hotrow.cli.check import CHECK_HELP, check_command
from hotrow.cli.compare import COMPARE_HELP, compare_command
from hotrow.cli.disk import disk_app
from hotrow.cli.learn import LEARN_HELP, learn_command
from hotrow.cli.terminal import BROKEN, UNUSABLE
from hotrow.errors import HotrowError
from hotrow.inputs.text import escape_unprintable

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"hotrow {hotrow.__version__}")
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
    """Train large PyTorch embeddings fast, with exactly the same results as dense training."""


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
app.add_typer(disk_app, name="disk", short_help="Check a folder with a table on disk.")


def main() -> None:
    """Run the command line."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run the app and exit with its exit code; print errors without a traceback."""
    try:
        sys.exit(app(standalone_mode=True))
    except HotrowError as error:
        code = _print_error(f"Error: {error.problem}", error.fix, UNUSABLE)
    except Exception as error:
        if os.environ.get("HOTROW_DEBUG"):
            raise
        code = _print_error(
            f"internal error in hotrow: {type(error).__name__}: {error}",
            "set HOTROW_DEBUG=1 to see the traceback, and please report this error",
            BROKEN,
        )
    sys.exit(code)


def _print_error(problem: str, fix: str | None, code: int) -> int:
    lines = [*problem.splitlines(), *([] if fix is None else [f"  try: {fix}"])]
    for line in lines:
        print(escape_unprintable(line), file=sys.stderr)
    return code
