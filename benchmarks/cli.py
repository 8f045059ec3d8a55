"""`python -m benchmarks`: run workloads, print tables, return an exit code."""

from __future__ import annotations

import difflib
import os
import sys
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich import box
from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from benchmarks import record_files, suite, workloads
from benchmarks.registry import PEER_TYPES
from benchmarks.report import describe
from benchmarks.tables import TableBenchmark
from benchmarks.workload import Workload
from hotrow.bench.workload import Record
from hotrow.cli import terminal
from hotrow.cli.main import run_app
from hotrow.errors import HotrowError
from hotrow.inputs import files
from hotrow.inputs.text import escape_unprintable

RAN, FAILED = 0, 1

# Click doesn't rewrap a paragraph that follows a line with only \b.
HELP = """Run the workloads shown in docs/performance.md.

Each workload first compares hotrow's rows with those of dense training. Then it times hotrow,
torch, FBGEMM and JAX, which take turns in one process. Each library uses its fastest settings. If a
library is not installed, the report shows the install command.

\b
Examples:
  python -m benchmarks --list
  python -m benchmarks
  python -m benchmarks --suite full --records benchmarks/records
  python -m benchmarks --suite adamw-50k-768,sgd-1k-16 \\
      --peers "torch sparse"
  python -m benchmarks --suite adamw-threads --threads 4

\b
Exit code:
  0 all workloads measured, 1 a workload failed, 2 invalid input, 3 internal error.
  A missed goal doesn't count as a failure.
"""

app = typer.Typer(
    add_completion=False,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 80},
)


def main() -> None:
    """Run the command."""
    run_app(app)


@app.command(help=HELP)
def run_command(
    suite_names: Annotated[
        list[str] | None,
        typer.Option(
            "--suite",
            help="Suites (quick, full, narrow, tables) or workloads, comma-separated. "
            "Default: quick.",
            metavar="NAMES",
        ),
    ] = None,
    is_list: Annotated[bool, typer.Option("--list", help="List workloads and peers.")] = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Peers to compare with hotrow, comma-separated. Default: all.",
            metavar="NAMES",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Number of threads. Default: torch's.", min=1, metavar="N"),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(help="Also write each record to a file in this folder.", metavar="DIR"),
    ] = None,
    small: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure the workloads and print their records; exit with code 1 if any workload failed."""
    if is_list:
        terminal.write_output(terminal.render(_print_list))
        raise typer.Exit(RAN)
    names = _workload_names(suite_names or ["quick"])
    peer_types = None if peers is None else _parse_names("--peers", peers, list(PEER_TYPES), "peer")
    folder = None if records is None else _make_folder(records)
    options = suite.Options(threads or torch.get_num_threads(), peer_types, small)
    for name in names:
        absent = set(peer_types or ()) - _peer_types_of(workloads.WORKLOADS[name])
        if absent:
            _print_error(f"{name} has no peer {', '.join(sorted(absent))}")
    estimate = sum(workloads.select(name, small, peer_types).seconds for name in names)
    count = f"{len(names)} workload" + "s" * (len(names) != 1)
    _print_error(f"{count}, about {_minutes(estimate)} on two idle cores")

    def handle_record(record: Record) -> None:
        _clear_progress()
        terminal.write_output(
            terminal.render(lambda console: _print_record(record, console)) + "\n"
        )
        if folder is not None:
            record_files.write(record, folder)

    failures = suite.run_suite(names, options, _print_progress, handle_record)
    _clear_progress()
    for name, reason in failures:
        _print_error(f"{name} failed: {reason}")
    raise typer.Exit(FAILED if failures else RAN)


def _peer_types_of(workload: Workload) -> set[str]:
    """Return the peer types of a workload, or all types if its peers are fixed."""
    if isinstance(workload, TableBenchmark):
        return {peer.type_name for peer in workload.peers}
    return set(PEER_TYPES)


def _workload_names(texts: list[str]) -> list[str]:
    """Return workload names without duplicates; expand the names of suites."""
    known = [*workloads.SUITES, *workloads.WORKLOADS]
    names = _parse_names("--suite", texts, known, "suite or workload")
    return list(dict.fromkeys(n for name in names for n in workloads.SUITES.get(name, (name,))))


def _parse_names(option: str, texts: list[str], known: list[str], kind: str) -> list[str]:
    """Parse comma-separated names and check that they are known."""
    names = [name.strip() for text in texts for name in text.split(",") if name.strip()]
    for name in names or [""]:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]}? " if near else ""
            raise HotrowError(
                f"{option} {name!r:.60} is not a {kind}",
                fix=f"{fix}python -m benchmarks --list shows all names",
            )
    return names


def _make_folder(path: str) -> Path:
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotrowError(f"--records {path}: cannot create folder ({error.strerror})") from None
    files.check_writable(folder / "record")
    return folder


def _print_list(console: Console) -> None:
    """Print the workloads with their suites, then the peers."""
    table = _new_table()
    for column in ("workload", "what", "suites", "about"):
        table.add_column(column, overflow="fold", justify="right" if column == "about" else "left")
    for name, workload in workloads.WORKLOADS.items():
        suites = ", ".join(suite for suite, names in workloads.SUITES.items() if name in names)
        table.add_row(name, _about(workload), suites, f"{workload.seconds:.0f} s")
    console.print(table)
    for suite_name, names in workloads.SUITES.items():
        seconds = sum(workloads.WORKLOADS[name].seconds for name in names)
        console.print(f"{suite_name}: {len(names)} workloads, about {_minutes(seconds)}")
    console.print()
    table = _new_table()
    for column in ("peer", "what"):
        table.add_column(column, overflow="fold")
    for name, peer_type in PEER_TYPES.items():
        table.add_row(name, peer_type.about)
    console.print(table)


def _new_table() -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)


def _about(workload: Any) -> str:
    """Return a one-line description of a workload, with its sizes."""
    if not isinstance(workload, TableBenchmark):
        return str(workload.about)
    return f"{workload.about}: {workload.rows:,} x {workload.columns}, {workload.ids:,} ids"


def _print_record(record: Record, console: Console) -> None:
    """Print a record within 80 columns."""
    report = describe(record, brief=True)
    heading = Text(f"{record['workload']}  ", style="bold")
    console.print(heading.append(report.title, style="not bold"))
    console.print(Padding(Text(report.setting, style="dim"), (0, 0, 1, 2), expand=False))
    table = _new_table()
    for place, column in enumerate(report.head):
        table.add_column(column, overflow="fold", justify="right" if place else "left")
    for row in report.rows:
        table.add_row(*(Text(escape_unprintable(cell.replace("**", ""))) for cell in row))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for remark in report.remarks:
        console.print(
            Padding(Text(f"- {escape_unprintable(remark.replace('**', ''))}"), (0, 0, 0, 2))
        )


def _print_progress(share: float, activity: str, spent: float, left: float) -> None:
    """Print progress to standard error; on a terminal, overwrite the previous line."""
    text = f"{share:4.0%}  {activity}, {_minutes(spent)} elapsed, about {_minutes(left)} left"
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        print(f"\r\033[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _clear_progress() -> None:
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _print_error(text: str) -> None:
    print(escape_unprintable(text), file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    """Format a duration.

    >>> _minutes(43), _minutes(754)
    ('43 s', '12 min 34 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
