"""`hotrow bench`: what is asked for in, tables and an exit code out."""

from __future__ import annotations

import json as _json
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import torch
import typer

from hotrow.cli import terminal
from hotrow.errors import HotrowError
from hotrow.inputs import files
from hotrow.inputs.text import escape_unprintable

if TYPE_CHECKING:
    from rich.console import Console

RAN, FAILED = 0, 1

# A line with nothing but \b keeps the lines up to the next blank one as they are.
BENCH = """Measure what a step costs, beside its peers and beside the speed of the memory.

Each workload first holds hotrow's numbers to dense torch's, and says of every peer by how much
its are not equal. Then all take turns in one process, each with its best settings. The floor is
the time this machine takes to copy the bytes that a step must move. A peer that is not installed
is left out, and the report says how to install it.

\b
Examples:
  hotrow bench --list
  hotrow bench
  hotrow bench --suite full --json bench.json --plot figures
  hotrow bench --suite adamw-50k-768,sgd-1k-16 --peers "torch sparse"
  hotrow bench --suite adamw-threads --threads 4

\b
Exit code:
  0 all measured, 1 a workload failed (hotrow's numbers not being dense
  torch's is such a failure), 2 input that cannot be used, 3 a fault of
  hotrow's own. A goal that is not met is no failure.
"""


def bench_command(
    suite: Annotated[
        list[str] | None,
        typer.Option(
            help="quick, full, or names of workloads, separated by commas; quick unless given.",
            metavar="NAMES",
        ),
    ] = None,
    listed: Annotated[
        bool, typer.Option("--list", help="Print the workloads and the peers, measure nothing.")
    ] = False,
    peers: Annotated[
        list[str] | None,
        typer.Option(
            help="Who takes part beside hotrow, separated by commas; all unless given.",
            metavar="NAMES",
        ),
    ] = None,
    threads: Annotated[
        int | None,
        typer.Option(help="Of torch and its peers; as many as torch takes.", min=1, metavar="N"),
    ] = None,
    json: Annotated[
        str | None,
        typer.Option(help="Also write every record into one JSON file.", metavar="FILE"),
    ] = None,
    plot: Annotated[
        str | None,
        typer.Option(help="Also draw each record, as SVG in this folder.", metavar="DIR"),
    ] = None,
    records: Annotated[
        str | None,
        typer.Option(help="Also keep each record in this folder, a file each.", metavar="DIR"),
    ] = None,
    small: Annotated[bool, typer.Option(hidden=True)] = False,
) -> None:
    """Measure, print each workload as it is done, and exit with whether all were."""
    from benchmarks import records as recorded
    from benchmarks import running, workloads

    if listed:
        terminal.write_output(terminal.render(_list))
        raise typer.Exit(RAN)
    names = _names(suite or ["quick"])
    chosen = None if peers is None else _known("--peers", peers, list(_kinds()), "peer")
    if json is not None:
        files.check_writable(json)
    folders = {name: _folder(name, where) for name, where in (("plot", plot), ("records", records))}
    asked = running.Asked(threads or torch.get_num_threads(), chosen, small)
    estimate = sum(workloads.chosen(name, small, chosen).seconds for name in names)
    for name in names:
        absent = set(chosen or ()) - _kinds_in(workloads.WORKLOADS[name])
        if absent:
            _say(f"{name}: without {', '.join(sorted(absent))}, which it does not have")
    many = f"{len(names)} workload" + "s" * (len(names) != 1)
    _say(f"{many}, about {_minutes(estimate)} on two quiet cores")
    found: list[dict[str, Any]] = []

    def show(record: dict[str, Any]) -> None:
        found.append(record)
        _clear()
        terminal.write_output(terminal.render(lambda console: _show(record, console)) + "\n")
        if folders["records"] is not None:
            recorded.write(record, record["workload"], folders["records"])
        if folders["plot"] is not None:
            from benchmarks import plots

            drawn = plots.plot(record)
            if drawn is not None:
                files.write_text(folders["plot"] / f"{record['workload']}.svg", drawn)
        if json is not None:  # all that there are: what comes later may be interrupted
            content = {each["workload"]: each for each in found}
            files.write_text(json, _json.dumps(content, indent=1) + "\n")

    failed = running.measure(names, asked, _tell, show)
    _clear()
    if not small:
        _leave_times(found)
    for name, why in failed:
        _say(f"{name} failed: {why}")
    raise typer.Exit(FAILED if failed else RAN)


def _leave_times(found: list[dict[str, Any]]) -> None:
    """Where `hotrow learn` finds them."""
    from hotrow.lesson import times

    measured = [timing for timing in map(times.from_record, found) if timing is not None]
    try:
        if measured:
            times.save_times(measured)
            _say("hotrow learn shows the times of look-up and matmul in its chart")
    except (HotrowError, OSError, RuntimeError) as error:  # no folder for caches
        _say(f"the times are not left for hotrow learn: {error}")


def _kinds_in(workload: Any) -> set[str]:
    """Who takes part; of what is no table, all, as nobody is chosen there."""
    return (
        {entry.kind for entry in workload.entries} if hasattr(workload, "entries") else {*_kinds()}
    )


def _kinds() -> dict[str, str]:
    """The peers, and what each is."""
    from benchmarks.kinds import KINDS

    return {name: kind.about for name, kind in KINDS.items()}


def _names(suite: list[str]) -> list[str]:
    """The workloads that are meant, each once."""
    from benchmarks.workloads import SUITES, WORKLOADS

    given = _known("--suite", suite, [*SUITES, *WORKLOADS], "suite or workload")
    return list(dict.fromkeys(name for each in given for name in SUITES.get(each, (each,))))


def _known(option: str, given: list[str], known: list[str], what: str) -> list[str]:
    """The names, each of them one that there is."""
    import difflib

    names = [name.strip() for text in given for name in text.split(",") if name.strip()]
    for name in names or [""]:
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            fix = f"did you mean {near[0]}? " if near else ""
            raise HotrowError(
                f"{option} {name!r:.60} is no {what}",
                fix=f"{fix}hotrow bench --list names them all",
            )
    return names


def _folder(option: str, where: str | None) -> Path | None:
    """The folder, made if need be."""
    if where is None:
        return None
    folder = Path(where)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise HotrowError(f"--{option} {where} cannot be a folder ({error.strerror})") from None
    files.check_writable(folder / "record")
    return folder


def _list(console: Console) -> None:
    """Workloads by suite, and peers."""
    from rich import box
    from rich.table import Table

    from benchmarks.workloads import SUITES, WORKLOADS

    def grid() -> Table:
        return Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)

    table = grid()
    for column in ("workload", "what", "suites", "about"):
        table.add_column(column, overflow="fold", justify="right" if column == "about" else "left")
    for name, workload in WORKLOADS.items():
        suites = ", ".join(suite for suite, names in SUITES.items() if name in names)
        table.add_row(name, _what(workload), suites, f"{workload.seconds:.0f} s")
    console.print(table)
    for suite, names in SUITES.items():
        all_ = sum(WORKLOADS[name].seconds for name in names)
        console.print(f"{suite}: {len(names)} workloads, about {_minutes(all_)}")
    console.print()
    table = grid()
    for column in ("peer", "what"):
        table.add_column(column, overflow="fold")
    for kind, about in _kinds().items():
        table.add_row(kind, about)
    console.print(table)


def _what(workload: Any) -> str:
    """In a line, with the sizes where they are not part of it."""
    if not hasattr(workload, "rows"):
        return str(workload.about)
    return f"{workload.about}: {workload.rows:,} x {workload.columns}, {workload.ids:,} ids"


def _show(record: dict[str, Any], console: Console) -> None:
    """A record, fitting 80 columns."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    from benchmarks.telling import tell

    told = tell(record, brief=True)
    heading = Text(f"{record['workload']}  ", style="bold")
    console.print(heading.append(told.title, style="not bold"))
    console.print(Padding(Text(told.setting, style="dim"), (0, 0, 1, 2), expand=False))
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    for place, column in enumerate(told.head):
        table.add_column(column, overflow="fold", justify="right" if place else "left")
    for row in told.rows:
        table.add_row(*(Text(escape_unprintable(cell.replace("**", ""))) for cell in row))
    console.print(Padding(table, (0, 0, 1, 2), expand=False))
    for remark in told.remarks:
        console.print(
            Padding(Text(f"- {escape_unprintable(remark.replace('**', ''))}"), (0, 0, 0, 2))
        )


def _tell(share: float, doing: str, spent: float, left: float) -> None:
    """One line on standard error, over and over on a terminal."""
    text = f"{share:4.0%}  {doing}, {_minutes(spent)} spent, about {_minutes(left)} left"
    if sys.stderr.isatty():
        columns = os.get_terminal_size(sys.stderr.fileno()).columns or 80
        print(f"\r\033[K{text[: columns - 1]}", end="", file=sys.stderr, flush=True)
    else:
        print(text, file=sys.stderr, flush=True)


def _clear() -> None:
    """End the line of `_tell`."""
    if sys.stderr.isatty():
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _say(text: str) -> None:
    print(escape_unprintable(text), file=sys.stderr, flush=True)


def _minutes(seconds: float) -> str:
    """About how long.

    >>> _minutes(43), _minutes(754)
    ('43 s', '12 min 34 s')
    """
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest} s" if minutes else f"{rest} s"
