"""The report that compares a model before and after conversion, as 80-column text or JSON."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Iterator
from typing import Any

from hotrow import __version__
from hotrow.inputs.text import escape_unprintable, format_milliseconds, format_size, relative_path
from hotrow.verify.agreement import Agreement
from hotrow.verify.models.comparison import ModelComparison, ModelCost

_WIDTH = 80
_MAX_TABLES = 3  # the maximum number of tables listed by name
_NAME_COLUMNS = 28  # width of the name column


def to_json(comparison: ModelComparison) -> str:
    """Return all values of the comparison as one JSON object."""
    content = {"hotrow": __version__, **comparison.to_dict()}
    return json.dumps(content, indent=2, allow_nan=False)


def to_text(comparison: ModelComparison) -> str:
    """Return the report as text, in lines of at most 80 columns."""
    return "\n".join(line.rstrip() for line in _lines(comparison))


def _lines(comparison: ModelComparison) -> Iterator[str]:
    yield from _wrap(f"{comparison.title}, before and after conversion", "", "  ")
    mode = "training" if comparison.training else "evaluation"
    yield from _wrap(f"inputs {comparison.inputs}; {mode} mode, seed {comparison.seed}", "  ", "  ")
    for head, converted in (("converted", True), ("not converted", False)):
        chosen = [each for each in comparison.findings if each.converted == converted]
        if chosen or converted:
            yield ""
            is_lookup = comparison.to == "lookup"
            reason = "doesn't multiply by one-hots" if is_lookup else "has no embedding layers"
            yield f"  {head}" if chosen else f"  nothing was converted: the model {reason}"
        for each in chosen:
            path = each.path or "(the model)"
            yield from _wrap(f"{path}  {_shorten_path(each.what)}", "    ", "      ")
            yield from _wrap(each.outcome, "      ", "      ")
    if comparison.tables:
        yield ""
        names = ", ".join(comparison.tables[:_MAX_TABLES])
        omitted = len(comparison.tables) - _MAX_TABLES
        names += f" and {omitted} more" if omitted > 0 else ""
        kind = "was stored as a table" if len(comparison.tables) == 1 else "were stored as tables"
        yield from _wrap(f"{names} {kind}, as in training with hotrow.optim", "  ", "  ")
    yield ""
    yield from _agreement_lines(comparison.agreements)
    for note in comparison.notes:
        yield from _wrap(note, "  ", "  ")
    for cost in comparison.costs:
        yield ""
        yield f"  {cost.name:<28}{'before':>16}{'after':>16}{'ratio':>12}"
        yield f"  {'─' * 72}"
        yield from _cost_lines(cost)
    yield ""
    yield f"  {comparison.verdict}"


def _wrap(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        escape_unprintable(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )


def _shorten_path(text: str) -> str:
    """Make the path at the end of a finding's text relative to the current directory."""
    head, comma, last = text.rpartition(", ")
    return f"{head}{comma}{relative_path(last)}"


def _agreement_lines(agreements: tuple[Agreement, ...]) -> Iterator[str]:
    """Yield a line per result, but combine equal results of each kind other than outputs."""
    rows, bitwise_by_kind = [], dict[str, list[Agreement]]()
    for each in sorted(agreements, key=lambda each: not each.name.startswith("output")):
        kind = each.name.partition(" ")[0]
        if each.verdict == "bitwise" and not each.name.startswith("output"):
            bitwise_by_kind.setdefault(kind, []).append(each)
        else:
            rows.append((each.name, _agreement_text(each)))
    for kind, members in bitwise_by_kind.items():
        values = sum(each.value_count for each in members)
        name = members[0].name if len(members) == 1 else f"{len(members)} {kind}s"
        rows.append((name, f"equal, {values:,} of {values:,} values bit for bit"))
    width = min(max((len(name) for name, _ in rows), default=0), _NAME_COLUMNS)
    for name, text in rows:
        if len(name) > width:
            yield from _wrap(name, "  ", "    ")
            name = ""
        yield from _wrap(text, f"  {escape_unprintable(name):<{width}}  ", " " * (width + 4))


def _agreement_text(agreement: Agreement) -> str:
    if agreement.verdict != "unsure":
        return str(agreement)
    return (
        f"inconclusive: {agreement.bitwise_count:,} of {agreement.value_count:,} values are equal "
        f"bit for bit, max error {agreement.max_error:.3g}; this may be due to rounding, but no "
        "error bound confirms it"
    )


def _cost_lines(cost: ModelCost) -> Iterator[str]:
    def row(what: str, a: float, b: float, show: Any) -> str:
        ratio = "" if not b else f"{a / b:,.1f}x" if a >= b else f"{a / b:.2g}x"
        return f"  {what:<28}{show(a):>16}{show(b):>16}{ratio:>12}"

    before, after = cost.plain_multiplications, cost.converted_multiplications
    if before is not None and after is not None:
        yield row("products with one-hots", before, after, "{:,}".format)
    yield row("peak extra memory", cost.plain.bytes_peak, cost.converted.bytes_peak, format_size)
    runs = len(cost.plain.milliseconds)
    label = f"time (median of {runs} run{'' if runs == 1 else 's'})"
    yield row(label, cost.plain.median_ms, cost.converted.median_ms, format_milliseconds)
