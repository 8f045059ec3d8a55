"""What was found, for people: on the terminal, as JSON, and as one self-contained page."""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import TYPE_CHECKING, Any

from hotrow.figures.figure import figure
from hotrow.inputs.text import elide, milliseconds, printable, size
from hotrow.verify.compare import Comparison
from hotrow.verify.models.compare import Saved
from hotrow.verify.sameness import SLACK, Distance, Sameness

if TYPE_CHECKING:
    from rich.console import Console

_IDS_SHOWN = 18
_IDS_DRAWN = 6
_TOKEN_COLUMNS = 24


@dataclass(frozen=True)
class Captioned:
    """A figure of the page and the sentence under it."""

    svg: str
    caption: str


def to_json(comparisons: Sequence[Comparison]) -> str:
    """One JSON object: all figures of all comparisons, units in the names."""
    content = {
        "hotrow": version("hotrow"),
        "equal": all(comparisons),
        "comparisons": [comparison.to_dict() for comparison in comparisons],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def summary(comparison: Comparison) -> str:
    """The table, the ids and what was left out, in a sentence or two."""
    rows, columns = comparison.table.shape
    dtype = str(comparison.table.dtype).removeprefix("torch.")
    given = len(comparison.ids)
    text = f"table {rows:,} x {columns:,} {dtype}, {_count(given, 'id')}"
    if comparison.compared < given:
        text += (
            f"; compared on the first {comparison.compared:,}: for all of them the dense way "
            f"would need about {size(comparison.needed)}, and the budget is "
            f"{size(comparison.budget)}"
        )
    return text


def _count(number: int, what: str) -> str:
    return f"{number:,} {what}{'' if number == 1 else 's'}"


def pairs(comparison: Comparison, most: int = _IDS_SHOWN) -> list[tuple[str, str]]:
    """(id, token) of the first ids, for showing; the token is "" where it is not known."""
    ids = comparison.ids[:most].tolist()
    texts = comparison.tokens or ("",) * len(ids)
    return [
        (str(id), elide(printable(text), _TOKEN_COLUMNS))
        for id, text in zip(ids, texts, strict=False)
    ]


def costs(comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """(what, one-hot matmul, look-up, how many times more) for each figure of cost."""
    matmul, lookup = comparison.cost.matmul, comparison.cost.lookup

    def row(what: str, a: float, b: float, show: Any) -> tuple[str, str, str, str]:
        return what, show(a), show(b), f"{a / b:,.1f} x" if b else ""

    yield row("multiplications", matmul.multiplications, lookup.multiplications, "{:,}".format)
    yield row("  of them by zero", matmul.by_zero, lookup.by_zero, "{:,}".format)
    yield row("bytes written", matmul.bytes_written, lookup.bytes_written, size)
    yield row("peak extra memory", comparison.matmul.bytes_peak, comparison.lookup.bytes_peak, size)
    runs = _count(len(comparison.matmul.milliseconds), "run")
    yield row(
        f"time (median of {runs})",
        comparison.matmul.median_ms,
        comparison.lookup.median_ms,
        milliseconds,
    )


def verdict(comparison: Comparison) -> str:
    """The one line to remember."""
    if not comparison.equal:
        return "NOT equal: the two ways give different numbers here"
    if any(agreement.verdict == "rounding" for agreement in comparison.check.agreements):
        return "equal within rounding: the same sums, none of the zeros"
    return "equal: the same numbers, none of the zeros"


def print_report(comparison: Comparison, console: Console) -> None:
    """The comparison on a terminal, fitting 80 columns."""
    from rich import box
    from rich.columns import Columns
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text(printable(comparison.title), style="bold"))
    console.print(Padding(Text(summary(comparison)), (0, 0, 0, 2), expand=False))
    shown = [Text.assemble((id, "cyan"), " ", token) for id, token in pairs(comparison)]
    if shown:
        console.print(Padding(Columns(shown, padding=(0, 2)), (0, 0, 0, 2)))
    left = len(comparison.ids) - len(shown)
    if left:
        console.print(Padding(Text(f"and {left:,} more", style="dim"), (0, 0, 0, 2)))

    found = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    found.add_column(no_wrap=True)
    found.add_column()
    for agreement in comparison.check.agreements:
        style = "green" if agreement.equal else "bold red"
        found.add_row(agreement.what, Text(str(agreement), style=style))
    console.print(Padding(found, (1, 0, 0, 2), expand=False))
    for note in comparison.check.notes:
        console.print(Padding(Text(note), (0, 0, 0, 2), expand=False))

    spent = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    spent.add_column("forward and gradient", overflow="fold")
    for header in ("one-hot matmul", "look-up", "ratio"):
        spent.add_column(header, justify="right", overflow="fold")
    for row in costs(comparison):
        spent.add_row(*row)
    console.print(Padding(spent, (0, 0, 0, 1), expand=False))
    console.print(
        Padding(
            Text(verdict(comparison), style="bold green" if comparison.equal else "bold red"),
            (0, 0, 1, 2),
            expand=False,
        )
    )


def figures(comparison: Comparison) -> list[Captioned]:
    """The lesson's figures 1 to 5, drawn from this table and these ids."""
    ids = comparison.ids.tolist()
    if not ids or not comparison.table.shape[1]:
        return []
    tokens = comparison.tokens

    def draw(kind: str, places: list[int]) -> str:
        chosen = None if tokens is None else [tokens[place] for place in places]
        return figure(kind, comparison.table, [ids[p] for p in places], tokens=chosen).svg

    other = next((place for place, id in enumerate(ids) if id != ids[0]), None)
    singles = [(0, "One id"), *([] if other is None else [(other, "Another id, another row")])]
    drawn = [
        Captioned(draw("lookup", [place]), f"{text}: id {ids[place]} picks row {ids[place]}.")
        for place, text in singles
    ]
    if len(ids) > 1:
        several = list(range(min(len(ids), _IDS_DRAWN)))
        which = "The ids" if len(several) == len(ids) else f"The first {len(several)} ids"
        drawn.append(
            Captioned(draw("lookup", several), f"{which} pick their rows, in their order.")
        )
    for place, _ in singles:
        drawn.append(
            Captioned(
                draw("product", [place]),
                f"Under the hood: the one-hot row of id {ids[place]} times column 0 of the table, "
                "every product written out.",
            )
        )
    return drawn


def to_html(comparisons: Sequence[Comparison]) -> str:
    """One page with everything in it: no script, and no request to anywhere."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup

    environment = Environment(
        loader=PackageLoader("hotrow.cli"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    sections = [
        {
            "title": printable(comparison.title),
            "equal": comparison.equal,
            "verdict": verdict(comparison),
            "summary": summary(comparison),
            "pairs": pairs(comparison),
            "left": max(len(comparison.ids) - _IDS_SHOWN, 0),
            "agreements": comparison.check.agreements,
            "notes": comparison.check.notes,
            "costs": list(costs(comparison)),
            # The figures escape what they show themselves.
            "figures": [(Markup(each.svg), each.caption) for each in figures(comparison)],
        }
        for comparison in comparisons
    ]
    return environment.get_template("report.html").render(
        sections=sections, version=version("hotrow"), equal=all(comparisons)
    )


def sameness_json(sameness: Sameness) -> str:
    """One JSON object: every figure of a measure of sameness."""
    content = {"hotrow": version("hotrow"), **sameness.to_dict()}
    return json.dumps(content, indent=2, allow_nan=False)


def saved_json(saved: Saved) -> str:
    """One JSON object: every figure of a model, plain and converted."""
    content = {"hotrow": version("hotrow"), **saved.to_dict()}
    return json.dumps(content, indent=2, allow_nan=False)


def sameness_title(sameness: Sameness) -> str:
    """The optimizer as it would be written in Python."""
    given = ", ".join(f"{name}={value}" for name, value in sameness.options.items())
    return f"{sameness.optimizer}({given})"


def sameness_row(distance: Distance) -> tuple[str, ...]:
    """Scale, two errors with their ulp, the share of equal bits, and the verdict."""

    def error(value: float) -> tuple[str, str]:
        return f"{value:.3g}", f"{value / distance.ulp:,.1f}"

    return (
        f"{distance.scale:g}",
        *error(distance.hotrow),
        *error(distance.torch),
        f"{math.floor(1000 * distance.same / distance.values) / 10:.1f} %",
        "yes" if distance.within else "NO",
    )


def print_sameness(sameness: Sameness, console: Console) -> None:
    """The measure on a terminal, fitting 80 columns."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    batches = sameness.batches
    never, longest = batches.idle()
    console.print(Text(sameness_title(sameness), style="bold"))
    setting = (
        f"table {batches.rows:,} x {batches.columns:,}, {_count(batches.steps, 'step')} of "
        f"{_count(batches.ids, 'id')}, seed {batches.seed}; "
        f"{_count(never, 'row')} never touched, others idle for up to {_count(longest, 'step')}"
    )
    console.print(Padding(Text(setting), (0, 0, 1, 2), expand=False))

    found = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
    headers = "gradients", "hotrow", "ulp", "torch", "ulp", "same bits", "within"
    for header in headers:
        found.add_column(header, justify="right", overflow="fold")
    for distance in sameness.distances:
        style = "" if distance.within else "bold red"
        found.add_row(*sameness_row(distance), style=style)
    console.print(Padding(found, (0, 0, 1, 2), expand=False))
    meaning = (
        "hotrow, torch: the largest distance in float32 from torch in float64, and in ulp of the "
        f"largest weight; within: hotrow's is at most torch's plus {SLACK} ulp"
    )
    console.print(Padding(Text(meaning, style="dim"), (0, 0, 1, 2), expand=False))
    style = "bold green" if sameness else "bold red"
    console.print(Padding(Text(sameness_verdict(sameness), style=style), (0, 0, 0, 2)))


def sameness_verdict(sameness: Sameness) -> str:
    """The one line to remember."""
    if sameness:
        return "the same step: as near to float64 as torch's own float32"
    return "NOT the same step: further from float64 than torch's own float32"
