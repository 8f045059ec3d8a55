"""The `hotrow check` report, for the terminal and as JSON."""

from __future__ import annotations

import json
import math
from typing import TYPE_CHECKING

from hotrow import __version__
from hotrow.inputs.text import format_count
from hotrow.verify.sameness import SLACK, Distance, Sameness

if TYPE_CHECKING:
    from rich.console import Console


def to_json(sameness: Sameness) -> str:
    """Return all values of the check as one JSON object."""
    content = {"hotrow": __version__, **sameness.to_dict()}
    return json.dumps(content, indent=2, allow_nan=False)


def _title(sameness: Sameness) -> str:
    """Return the optimizer and its options, written as a constructor call."""
    settings = ", ".join(f"{name}={value}" for name, value in sameness.options.items())
    return f"{sameness.optimizer}({settings})"


def distance_row(distance: Distance) -> tuple[str, ...]:
    """Return a table row: scale, both errors (also in ulp), share of equal weights, result."""

    def error(value: float) -> tuple[str, str]:
        return f"{value:.3g}", f"{value / distance.ulp:,.1f}"

    return (
        f"{distance.scale:g}",
        *error(distance.hotrow_error),
        *error(distance.torch_error),
        f"{math.floor(1000 * distance.bitwise_count / distance.value_count) / 10:.1f}%",
        "yes" if distance.within_bound else "NO",
    )


def print_sameness(sameness: Sameness, console: Console) -> None:
    """Print the result of the check to a terminal, at most 80 columns wide."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    batches = sameness.batches
    untouched, longest = batches.count_idle()
    console.print(Text(_title(sameness), style="bold"))
    setting = (
        f"table {batches.rows:,} x {batches.columns:,}, {format_count(batches.steps, 'step')} of "
        f"{format_count(batches.ids, 'id')}, seed {batches.seed}; "
        f"{format_count(untouched, 'row')} never touched, others idle for "
        f"up to {format_count(longest, 'step')}"
    )
    console.print(Padding(Text(setting), (0, 0, 1, 2), expand=False))

    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    headers = "gradients", "hotrow", "ulp", "torch", "ulp", "same bits", "within"
    for header in headers:
        table.add_column(header, justify="right", overflow="fold")
    for distance in sameness.distances:
        style = "" if distance.within_bound else "bold red"
        table.add_row(*distance_row(distance), style=style)
    console.print(Padding(table, (0, 0, 1, 2), expand=False))
    meaning = (
        "hotrow and torch: the largest error of float32 training, compared with torch in float64. "
        "ulp: the same error in ulp of the largest weight. "
        f"within: hotrow's error is at most torch's plus {SLACK} ulp."
    )
    console.print(Padding(Text(meaning, style="dim"), (0, 0, 1, 2), expand=False))
    style = "bold green" if sameness else "bold red"
    console.print(Padding(Text(_verdict(sameness), style=style), (0, 0, 0, 2)))


def _verdict(sameness: Sameness) -> str:
    """Return the result in one line."""
    if sameness:
        return "same step: as close to float64 as torch's own float32 training"
    return "NOT the same step: less accurate than torch's own float32 training"
