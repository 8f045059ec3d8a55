"""What converting a model saves, for people: lines that fit 80 columns."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from hotrow.inputs.text import milliseconds, printable, relative, size
from hotrow.verify.agreement import Agreement

if TYPE_CHECKING:
    from hotrow.verify.models.compare import Saved, Spent

_WIDTH = 80
_TABLES = 3  # named
_NAME = 28  # columns for the name of a result


def lines(found: Saved) -> Iterator[str]:
    """The report."""
    yield from _wrapped(f"{found.title}, plain and converted", "", "  ")
    mode = "training" if found.training else "evaluation"
    yield from _wrapped(f"inputs {found.inputs}; {mode} mode, seed {found.seed}", "  ", "  ")
    for head, converted in (("converted", True), ("left", False)):
        chosen = [each for each in found.findings if each.converted == converted]
        if chosen or converted:
            yield ""
            yield f"  {head}" if chosen else "  nothing was converted: no one-hots were multiplied"
        for each in chosen:
            path = each.path or "(the model)"
            yield from _wrapped(f"{path}  {_as_seen(each.what)}", "    ", "      ")
            fate = ": ".join(filter(None, (each.how, each.why)))
            yield from _wrapped(fate, "      ", "      ")
    if found.tables:
        yield ""
        few = ", ".join(found.tables[:_TABLES])
        more = len(found.tables) - _TABLES
        few += f" and {more} more" if more > 0 else ""
        text = f"run with {few} as {'a table' if len(found.tables) == 1 else 'tables'}"
        yield from _wrapped(f"{text}, as hotrow.optim's first step makes it", "  ", "  ")
    yield ""
    yield from _agreements(found.agreements)
    for note in found.notes:
        yield from _wrapped(note, "  ", "  ")
    for spent in found.spent:
        yield ""
        yield f"  {spent.what:<28}{'plain':>16}{'converted':>16}{'ratio':>12}"
        yield f"  {'─' * 72}"
        yield from _costs(spent)
    yield ""
    yield f"  {found.verdict}"


def _wrapped(text: str, first: str, rest: str) -> list[str]:
    return textwrap.wrap(
        printable(text),
        _WIDTH,
        initial_indent=first,
        subsequent_indent=rest,
        break_on_hyphens=False,
    )


def _as_seen(text: str) -> str:
    """A finding's words, their last one a file as seen from here."""
    head, comma, last = text.rpartition(", ")
    return f"{head}{comma}{relative(last)}"


def _agreements(agreements: tuple[Agreement, ...]) -> Iterator[str]:
    """A line for each output and for what differs, and one for all other gradients and buffers."""
    rows, alike = [], dict[str, list[Agreement]]()
    for each in sorted(agreements, key=lambda each: not each.what.startswith("output")):
        kind = each.what.partition(" ")[0]
        if each.verdict == "bitwise" and kind in ("gradient", "buffer"):
            alike.setdefault(kind, []).append(each)
        else:
            rows.append((each.what, _said(each)))
    for kind, several in alike.items():
        values = sum(each.values for each in several)
        name = several[0].what if len(several) == 1 else f"{len(several)} {kind}s"
        rows.append((name, f"equal, {values:,} of {values:,} values bit for bit"))
    width = min(max((len(name) for name, _ in rows), default=0), _NAME)
    for name, text in rows:
        if len(name) > width:
            yield from _wrapped(name, "  ", "    ")
            name = ""
        yield from _wrapped(text, f"  {printable(name):<{width}}  ", " " * (width + 4))


def _said(found: Agreement) -> str:
    if found.verdict != "unsure":
        return str(found)
    return (
        f"CANNOT TELL, {found.bitwise:,} of {found.values:,} values bit for bit; max error "
        f"{found.max_error:.3g}; perhaps rounding, but no bound shows it"
    )


def _costs(spent: Spent) -> Iterator[str]:
    def row(what: str, a: float, b: float, show: Any) -> str:
        ratio = "" if not b else f"{a / b:,.1f} x" if a >= b else f"{a / b:.2g} x"
        return f"  {what:<28}{show(a):>16}{show(b):>16}{ratio:>12}"

    before, after = spent.plain_multiplications, spent.converted_multiplications
    yield row("products with one-hots", before, after, "{:,}".format)
    yield row("peak extra memory", spent.plain.bytes_peak, spent.converted.bytes_peak, size)
    runs = len(spent.plain.milliseconds)
    label = f"time (median of {runs} run{'' if runs == 1 else 's'})"
    yield row(label, spent.plain.median_ms, spent.converted.median_ms, milliseconds)
