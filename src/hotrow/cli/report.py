"""The report of a table comparison, as terminal output, JSON or an HTML page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from hotrow import __version__
from hotrow.figures.figure import figure
from hotrow.inputs.text import (
    elide,
    escape_unprintable,
    format_count,
    format_milliseconds,
    format_size,
)
from hotrow.verify.compare import Comparison

if TYPE_CHECKING:
    from rich.console import Console

_IDS_SHOWN = 18
_IDS_DRAWN = 6
_TOKEN_COLUMNS = 24


@dataclass(frozen=True)
class CaptionedFigure:
    """A figure on the page, with its caption."""

    svg: str
    caption: str


def to_json(comparisons: Sequence[Comparison]) -> str:
    """Return all comparisons as one JSON object; key names include the units."""
    content = {
        "hotrow": __version__,
        "equal": all(comparisons),
        "comparisons": [comparison.to_dict() for comparison in comparisons],
    }
    return json.dumps(content, indent=2, allow_nan=False)


def summarize(comparison: Comparison) -> str:
    """Describe the table and the ids, and state how many ids were compared."""
    rows, columns = comparison.table.shape
    dtype = str(comparison.table.dtype).removeprefix("torch.")
    id_count = len(comparison.ids)
    text = f"table {rows:,} x {columns:,} {dtype}, {format_count(id_count, 'id')}"
    if comparison.compared_count < id_count:
        text += (
            f"; compared only the first {comparison.compared_count:,}, because the one-hot "
            f"{_LITERAL_NOUNS[comparison.operation]} for all ids would need about "
            f"{format_size(comparison.needed_bytes)}, more than the budget of "
            f"{format_size(comparison.budget)}"
        )
    return text


def id_token_pairs(comparison: Comparison, limit: int = _IDS_SHOWN) -> list[tuple[str, str]]:
    """Return (id, token) for each of the first `limit` ids; an unknown token is ""."""
    ids = comparison.ids[:limit].tolist()
    texts = comparison.tokens or ("",) * len(ids)
    return [
        (str(id), elide(escape_unprintable(text), _TOKEN_COLUMNS))
        for id, text in zip(ids, texts, strict=False)
    ]


def cost_rows(comparison: Comparison) -> Iterator[tuple[str, str, str, str]]:
    """Yield (name, literal arithmetic, operation, ratio) for each row of the cost table."""

    def row(what: str, a: float, b: float, show: Any) -> tuple[str, str, str, str]:
        return what, show(a), show(b), f"{a / b:,.1f}x" if b else ""

    if comparison.cost is not None:
        matmul, lookup = comparison.cost.matmul, comparison.cost.lookup
        yield row("multiplications", matmul.multiplications, lookup.multiplications, "{:,}".format)
        yield row("  of them by zero", matmul.by_zero, lookup.by_zero, "{:,}".format)
        yield row("bytes written", matmul.bytes_written, lookup.bytes_written, format_size)
    yield row(
        "peak extra memory", comparison.matmul.bytes_peak, comparison.lookup.bytes_peak, format_size
    )
    runs = format_count(len(comparison.matmul.milliseconds), "run")
    yield row(
        f"time (median of {runs})",
        comparison.matmul.median_ms,
        comparison.lookup.median_ms,
        format_milliseconds,
    )


_LITERAL_NOUNS = {"lookup": "matmul", "gather": "product", "scatter": "product", "count": "sum"}


def verdict(comparison: Comparison) -> str:
    """Return the result in one line."""
    if not comparison.equal:
        return (
            f"NOT equal: {comparison.operation} and {comparison.literal_name} give different "
            "numbers"
        )
    if any(agreement.verdict == "rounding" for agreement in comparison.check.agreements):
        return "equal within rounding: the same sums, none of the zeros"
    return "equal: the same numbers, none of the zeros"


def print_report(comparison: Comparison, console: Console) -> None:
    """Print the comparison on a terminal, in at most 80 columns."""
    from rich import box
    from rich.columns import Columns
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    console.print(Text(escape_unprintable(comparison.title), style="bold"))
    console.print(Padding(Text(summarize(comparison)), (0, 0, 0, 2), expand=False))
    shown = [Text.assemble((id, "cyan"), " ", token) for id, token in id_token_pairs(comparison)]
    if shown:
        console.print(Padding(Columns(shown, padding=(0, 2)), (0, 0, 0, 2)))
    omitted = len(comparison.ids) - len(shown)
    if omitted:
        console.print(Padding(Text(f"and {omitted:,} more", style="dim"), (0, 0, 0, 2)))

    agreement_table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    agreement_table.add_column(no_wrap=True)
    agreement_table.add_column()
    for agreement in comparison.check.agreements:
        style = "green" if agreement.equal else "bold red"
        agreement_table.add_row(agreement.name, Text(str(agreement), style=style))
    console.print(Padding(agreement_table, (1, 0, 0, 2), expand=False))
    for note in comparison.check.notes:
        console.print(Padding(Text(note), (0, 0, 0, 2), expand=False))

    cost_table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False)
    cost_table.add_column(_measured_passes(comparison), overflow="fold")
    for header in (comparison.literal_name, comparison.operation, "ratio"):
        cost_table.add_column(header, justify="right", overflow="fold")
    for row in cost_rows(comparison):
        cost_table.add_row(*row)
    console.print(Padding(cost_table, (0, 0, 0, 1), expand=False))
    console.print(
        Padding(
            Text(verdict(comparison), style="bold green" if comparison.equal else "bold red"),
            (0, 0, 1, 2),
            expand=False,
        )
    )


def _measured_passes(comparison: Comparison) -> str:
    return "forward" if comparison.operation == "count" else "forward and gradient"


def draw_figures(comparison: Comparison) -> list[CaptionedFigure]:
    """Draw the "lookup" and "product" figures of a compared lookup; other operations have none."""
    if comparison.operation != "lookup":
        return []
    ids = comparison.ids.tolist()
    tokens = comparison.tokens

    def draw(kind: str, places: list[int]) -> str:
        chosen = None if tokens is None else [tokens[place] for place in places]
        return figure(kind, comparison.table, [ids[p] for p in places], tokens=chosen).svg

    other = next((place for place, id in enumerate(ids) if id != ids[0]), None)
    single_positions = [
        (0, "One id"),
        *([] if other is None else [(other, "Another id")]),
    ]
    captioned = [
        CaptionedFigure(
            draw("lookup", [place]), f"{text}: id {ids[place]} selects row {ids[place]}."
        )
        for place, text in single_positions
    ]
    if len(ids) > 1:
        positions = list(range(min(len(ids), _IDS_DRAWN)))
        which = "The ids" if len(positions) == len(ids) else f"The first {len(positions)} ids"
        captioned.append(
            CaptionedFigure(draw("lookup", positions), f"{which} select their rows, in order.")
        )
    for place, _ in single_positions:
        captioned.append(
            CaptionedFigure(
                draw("product", [place]),
                f"The matmul multiplies the one-hot row of id {ids[place]} by column 0 of the "
                "table. The figure shows every product.",
            )
        )
    return captioned


def to_html(comparisons: Sequence[Comparison]) -> str:
    """Return a self-contained HTML page that has no scripts and makes no network requests."""
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
            "title": escape_unprintable(comparison.title),
            "equal": comparison.equal,
            "verdict": verdict(comparison),
            "summary": summarize(comparison),
            "pairs": id_token_pairs(comparison),
            "left": max(len(comparison.ids) - _IDS_SHOWN, 0),
            "agreements": comparison.check.agreements,
            "notes": comparison.check.notes,
            "passes": _measured_passes(comparison),
            "literal": comparison.literal_name,
            "operation": comparison.operation,
            "costs": list(cost_rows(comparison)),
            # The SVG is already escaped.
            "figures": [(Markup(each.svg), each.caption) for each in draw_figures(comparison)],
        }
        for comparison in comparisons
    ]
    headline, explanation = _SENTENCES[comparisons[0].operation]
    return environment.get_template("report.html").render(
        sections=sections,
        version=__version__,
        equal=all(comparisons),
        headline=headline,
        explanation=explanation,
    )


_SENTENCES = {
    "lookup": (
        "A linear layer over one-hot input is a row lookup",
        "Multiplying a one-hot by the table gives the same numbers as reading the row.",
    ),
    "gather": (
        "A masked sum over a one-hot is a gather",
        "Multiplying a one-hot by scores of the same shape and adding up each row gives the same "
        "numbers as reading one score from each row.",
    ),
    "scatter": (
        "A product with a transposed one-hot is a scatter",
        "Multiplying a transposed one-hot by rows gives the same numbers as adding up the rows for "
        "each id.",
    ),
    "count": (
        "The sum of a one-hot over the batch is a count",
        "Adding up the rows of a one-hot gives the same numbers as counting how often each id "
        "occurs.",
    ),
}
