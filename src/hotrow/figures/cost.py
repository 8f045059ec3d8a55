"""The "cost" figure: the costs of matmul and lookup as the table grows, and measured times."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any, NamedTuple

from hotrow.errors import HotrowError
from hotrow.figures import svg
from hotrow.figures.words import Translate
from hotrow.inputs.text import format_milliseconds, format_size
from hotrow.verify.cost import cost

WIDTH, HEIGHT, PANEL_GAP = 260, 220, 36  # panel size and gap, in pixels
DECADES = range(1, 8)  # V from 10 to 10 million
POINTS_PER_DECADE = 8
MAX_TICKS = 6  # the maximum number of labels on an axis
LARGEST = 2**63 - 1
MIN_MS, MAX_MS = 1e-9, 1e12  # the valid range of a measured time
METHODS = ("matmul", "by lookup")

Point = tuple[int, float, float]  # V, the matmul's value, the lookup's value


class Panel(NamedTuple):
    """A quantity plotted against V, with one curve for each method."""

    key: str
    points: list[Point]
    format_value: Callable[[float], str]
    format_tick: Callable[[int], str]  # formats the label at a power of ten
    marked: bool = False


def draw_cost(D: Any, N: Any, measured: Any, translate: Translate) -> svg.Drawing:
    """Draw one panel each for operations, bytes written and, if there are any, measured times."""
    cost(1, D, N)  # raises an error if D or N is negative or not an int
    for name, value in (("D", D), ("N", N)):
        if not 1 <= value <= LARGEST:
            raise HotrowError(f"{name} = {value}, but it must be in 1..{LARGEST}")
    times = _check_measured(measured)
    sizes = [V for V, _, _ in times]
    first = min([DECADES[0], *(math.floor(math.log10(V)) for V in sizes)])
    last = max([DECADES[-1], *(math.ceil(math.log10(V)) for V in sizes)])
    steps = range(first * POINTS_PER_DECADE, last * POINTS_PER_DECADE + 1)
    costs = [cost(round(10 ** (step / POINTS_PER_DECADE)), D, N) for step in steps]
    operations: list[Point] = [
        (each.rows, each.matmul.multiplications + each.matmul.additions, each.lookup.additions)
        for each in costs
    ]
    bytes_written: list[Point] = [
        (each.rows, each.matmul.bytes_written, each.lookup.bytes_written) for each in costs
    ]
    panels = [
        Panel("operations", operations, _format_count, _format_decade),
        Panel("bytes", bytes_written, format_size, lambda decade: format_size(10**decade)),
    ]
    if times:
        panels.append(
            Panel(
                "time",
                times,
                format_milliseconds,
                lambda decade: format_milliseconds(10.0**decade),
                True,
            )
        )

    sizes_text = translate("sizes", ids=f"{N:,}", columns=f"{D:,}")
    description = [translate("sentence", text=sizes_text)]
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, translate("cost"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, svg.MARGIN + 28, sizes_text),
    ]
    curves: list[svg.Curve] = []
    x, top = float(svg.MARGIN), svg.MARGIN + 102.0
    for panel in panels:
        x = _panel(panel, x, top, range(first, last + 1), translate, cells, curves) + PANEL_GAP
        description.append(translate("heading", text=translate(panel.key)))
        for V, *values in panel.points if panel.marked else panel.points[::POINTS_PER_DECADE]:
            matmul, lookup = map(panel.format_value, values)
            description.append(translate("at", V=f"{V:,}", matmul=matmul, lookup=lookup))
    bottom = max(cell.y + cell.h for cell in cells)
    constant = translate("constant")
    cells.append(svg.label(svg.MARGIN, bottom + svg.GAP, constant, "muted", svg.SMALL))
    description.append(constant)
    return svg.Drawing(translate("cost"), translate("space").join(description), cells, [], curves)


def _check_measured(measured: Any) -> list[Point]:
    """Check that each point fits on logarithmic axes, and return the points sorted by V."""
    expected = "it must be a list of (V, matmul milliseconds, lookup milliseconds)"
    try:
        points = [(V, float(matmul), float(lookup)) for V, matmul, lookup in measured or []]
    except (TypeError, ValueError):
        raise HotrowError(f"measured is {measured!r:.60}, but {expected}") from None
    for place, (V, *times) in enumerate(points):
        counted = isinstance(V, int) and 1 <= V <= LARGEST
        if not counted or not all(map(is_time, times)):
            raise HotrowError(
                f"measured[{place}] = {measured[place]!r:.60}, but V must be a positive int, "
                f"and times must be in {MIN_MS:g}..{MAX_MS:g} ms"
            )
    return sorted(points)


def is_time(value: Any) -> bool:
    """Return whether the value is a valid number of milliseconds."""
    return type(value) in (int, float) and MIN_MS <= value <= MAX_MS


def _panel(
    panel: Panel,
    x: float,
    top: float,
    decades: range,
    translate: Translate,
    cells: list[svg.Cell],
    curves: list[svg.Curve],
) -> float:
    """Append a panel's cells and curves, and return the x coordinate of its right edge."""
    values = [value for _, *pair in panel.points for value in pair]
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    heights = range(low, max(high, low + 1) + 1)
    ticks = [(decade, panel.format_tick(decade)) for decade in _label_decades(heights)]
    left = x + max(svg.pixel_width(text, svg.SMALL) for _, text in ticks) + svg.GAP
    right, bottom = left + WIDTH, top + HEIGHT

    def x_of(V: float) -> float:
        return left + WIDTH * (math.log10(V) - decades[0]) / (decades[-1] - decades[0])

    def y_of(value: float) -> float:
        return bottom - HEIGHT * (math.log10(value) - heights[0]) / (heights[-1] - heights[0])

    heading = translate(panel.key)
    cells.append(svg.label(x, top - svg.ROW - 4, heading, "bold"))
    cells.append(svg.Cell(left, top, WIDTH, HEIGHT, box="row"))
    for decade, text in ticks:
        y = y_of(10.0**decade)
        curves.append(svg.Curve([(left, y), (right, y)], "grid"))
        tick = svg.Cell(x, y - 9, left - x + 2, 18, text, "muted", "", "end", svg.SMALL)
        cells.append(tick)
    for decade in _label_decades(decades):
        middle = x_of(10.0**decade)
        curves.append(svg.Curve([(middle, top), (middle, bottom)], "grid"))
        cells.append(
            svg.Cell(
                middle, bottom + 2, 0, 20, _format_decade(decade), "muted", "", "middle", svg.SMALL
            )
        )
    cells.append(
        svg.Cell(left, bottom + 20, WIDTH, 22, translate("axis"), "muted", "", "middle", svg.SMALL)
    )
    y = bottom + 46
    final = translate("last", V=f"{panel.points[-1][0]:,}")
    cells.append(svg.label(left, y, final, "muted", svg.SMALL))
    end = max(right, x + svg.pixel_width(heading), left + svg.pixel_width(final, svg.SMALL))
    for place, method in enumerate(METHODS):
        line, dots = (("curve h1", ["dot h1"]), ("dashed h0", ["dot h0", "hole"]))[place]
        path = [(x_of(point[0]), y_of(point[place + 1])) for point in panel.points]
        curves.append(svg.Curve(path, line))
        y += 24
        legend = f"{translate(method)}: {panel.format_value(panel.points[-1][place + 1])}"
        cells.append(svg.label(left + 44, y, legend))
        curves.append(svg.Curve([(left, y + svg.ROW / 2), (left + 34, y + svg.ROW / 2)], line))
        end = max(end, left + 44 + svg.pixel_width(legend))
        marks = [*path, (left + 17, y + svg.ROW / 2)] if panel.marked else []
        curves += [svg.Curve([mark, mark], dot) for mark in marks for dot in dots]
    return end


def _label_decades(decades: range) -> range:
    """Return the decades to label, far enough apart that the labels don't touch."""
    return decades[:: math.ceil(len(decades) / MAX_TICKS)]


def _format_decade(decade: int) -> str:
    return "10" + str(decade).translate(str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹"))


def _format_count(value: float) -> str:
    """Format a count, with three significant digits from 10**12 on."""
    return f"{value:,.0f}" if value < 10**12 else f"{value:.3g}"
