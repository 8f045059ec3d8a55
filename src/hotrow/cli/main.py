"""The command line: arguments in, a report and an exit code out."""

from __future__ import annotations

import os
import sys
from typing import Annotated

import typer

import hotrow
from hotrow.cli.bench import BENCH_HELP, bench_command
from hotrow.cli.check import CHECK_HELP, check_command
from hotrow.cli.compare import COMPARE_HELP, compare_command
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
            "--version", callback=_print_version, is_eager=True, help="Print it and exit."
        ),
    ] = False,
) -> None:
    """A linear layer over one-hot input is a row look-up: the same numbers, none of the zeros."""


app.command("compare", help=COMPARE_HELP, short_help="Is the look-up the same as the matmul?")(
    compare_command
)
app.command("check", help=CHECK_HELP, short_help="Is the optimizer's step the same as torch's?")(
    check_command
)
app.command("bench", help=BENCH_HELP, short_help="How fast is a training step beside torch's?")(
    bench_command
)
app.command("learn", help=LEARN_HELP, short_help="The lesson: an embedding, to see and to change.")(
    learn_command
)


def main() -> None:
    """Run the command line."""
    run_app(app)


def run_app(app: typer.Typer) -> None:
    """Run a command line and exit; no traceback reaches its user."""
    try:
        sys.exit(app(standalone_mode=True))
    except HotrowError as error:
        code = _print_error(f"Error: {error.problem}", error.fix, UNUSABLE)
    except Exception as error:
        if os.environ.get("HOTROW_DEBUG"):
            raise
        code = _print_error(
            f"hotrow failed, by a fault of its own: {type(error).__name__}: {error}",
            "set HOTROW_DEBUG=1 to see where, and please report it",
            BROKEN,
        )
    sys.exit(code)


def _print_error(problem: str, fix: str | None, code: int) -> int:
    lines = [*problem.splitlines(), *([] if fix is None else [f"  try: {fix}"])]
    for line in lines:
        print(escape_unprintable(line), file=sys.stderr)
    return code
