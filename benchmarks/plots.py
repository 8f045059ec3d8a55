"""Charts of step times, speedups, errors and bytes sent."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import NamedTuple

from hotrow.bench.report import peer_label, title, trains_other_model
from hotrow.bench.workload import Record
from hotrow.figures import svg
from hotrow.inputs.text import format_milliseconds, format_size

OTHER_MODEL = " *"  # marks a peer that trains a different model

WIDTH, BAR, PITCH, HEIGHT = 420, 22, 32, 220  # pixels


class Bar(NamedTuple):
    """One bar of a chart: its label on the left, its value, and the text at its end."""

    name: str
    value: float
    text: str
    is_hotrow: bool = False


def plot(record: Record) -> str | None:
    """Return an SVG chart of a record's times; return None if there is nothing to compare."""
    if "peers" in record:
        growth = _growth(record)
        return svg.write(_bars(record) if growth is None else growth, "en")
    if "ratio" in record:
        sides = {side: record[side]["median_ms"] for side in ("before", "after")}
        what = str(record.get("about", record["workload"]))
        return svg.write(_chart(what, "before and after convert", list(sides.items())), "en")
    return None


def plot_speedups(speedups: list[tuple[str, float]]) -> str:
    """Return an SVG chart of hotrow's speedups over torch's fastest dense step, by workload."""
    heading = "hotrow's speedup over torch's fastest dense step"
    note = "logarithmic axis; torch's step is the fastest of fused, foreach and default"
    bars = [Bar(name, value, f"{value:.3g}x", is_hotrow=True) for name, value in speedups]
    return svg.write(_bar_chart(heading, note, bars, lambda value: f"{value:,g}x"), "en")


def plot_errors(errors: list[tuple[str, float, float]], steps: int) -> str:
    """Return an SVG chart of hotrow's and torch's errors in ulp, by optimizer."""
    heading = f"Distance from float64 training after {steps:,} steps"
    note = "largest error of any weight, in ulp of the largest weight, logarithmic axis"
    bars = []
    for name, hotrow, torch in errors:
        bars.append(Bar(f"{name}, hotrow", hotrow, f"{hotrow:.1f}", is_hotrow=True))
        bars.append(Bar(f"{name}, torch float32", torch, f"{torch:.1f}"))
    return svg.write(_bar_chart(heading, note, bars, lambda value: f"{value:,g}"), "en")


def plot_bytes(sent: list[tuple[str, float]]) -> str:
    """Return an SVG bar chart of the bytes that all ranks send in a step."""
    heading = "Bytes sent per step, all ranks together"
    note = "1,000,000 x 64 float32, 8,192 ids per rank, logarithmic axis"
    bars = [Bar(name, value, format_size(value), name.startswith("hotrow")) for name, value in sent]
    return svg.write(_bar_chart(heading, note, bars, format_size), "en")


def _bars(record: Record) -> svg.Drawing:
    """Draw a bar for each peer, fastest first, and a line at the bandwidth floor."""
    peers = {name: peer for name, peer in record["peers"].items() if "step" in peer}
    mark = {name: OTHER_MODEL * trains_other_model(record, name) for name in peers}
    times = [
        (peer_label(record, name) + mark[name], peer["step"]["median_ms"])
        for name, peer in peers.items()
    ]
    times.sort(key=lambda each: each[1])
    floor = next((peer["floor_ms"] for peer in peers.values() if "floor_ms" in peer), None)
    return _chart(title(record), "median time of a step", times, floor)


def _decades(values: list[float]) -> range:
    """Return the exponents of the powers of ten that enclose all values (at least two)."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return range(low, max(high, low + 1) + 1)


def _scale(decades: range, begin: float, end: float) -> Callable[[float], float]:
    """Return a function that maps a value to a position on a logarithmic axis."""

    def place(value: float) -> float:
        share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
        return begin + (end - begin) * share

    return place


def _chart(
    heading: str, what: str, times: list[tuple[str, float]], floor: float | None = None
) -> svg.Drawing:
    """Draw times as horizontal bars."""
    bars = [
        Bar(name, time, format_milliseconds(time), name.startswith(("hotrow", "after")))
        for name, time in times
    ]
    note = f"{what}, milliseconds, logarithmic axis"
    return _bar_chart(heading, note, bars, format_milliseconds, floor)


def _bar_chart(
    heading: str,
    note: str,
    bars: list[Bar],
    show_tick: Callable[[float], str],
    floor: float | None = None,
) -> svg.Drawing:
    """Draw horizontal bars on a logarithmic axis."""
    decades = _decades([bar.value for bar in bars] + ([floor] if floor else []))
    cells = [svg.label(svg.MARGIN, svg.MARGIN, heading, "bold", svg.TITLE)]
    cells.append(svg.label(svg.MARGIN, svg.MARGIN + 28, note, "muted", svg.SMALL))
    left = svg.MARGIN + max(svg.pixel_width(bar.name) for bar in bars) + 2 * svg.GAP
    top = svg.MARGIN + 72.0
    across = _scale(decades, left, left + WIDTH)
    bottom = top + PITCH * len(bars)
    curves = _grid(decades, across, top, bottom, cells, show_tick)
    descriptions = []
    for number, (name, value, text, is_hotrow) in enumerate(bars):
        y = top + PITCH * number + (PITCH - BAR) / 2
        cells.append(svg.label(svg.MARGIN, y - 5, name, "bold" if is_hotrow else ""))
        end = max(across(value), left + 2)
        cells.append(svg.Cell(left, y, end - left, BAR, box=f"pill {'h0' if is_hotrow else 'h1'}"))
        cells.append(svg.label(end + svg.GAP, y - 5, text, "mono", svg.SMALL))
        descriptions.append(f"{name}: {text}.")
    if floor:
        x = across(floor)
        curves.append(svg.Curve([(x, top - 4), (x, bottom + 4)], "dashed h2"))
        text = f"dashed line: bandwidth floor, {format_milliseconds(floor)}"
        cells.append(svg.label(left, bottom + 24, text, "muted", svg.SMALL))
        descriptions.append(f"Bandwidth floor: {format_milliseconds(floor)}.")
    if any(bar.name.endswith(OTHER_MODEL) for bar in bars):
        text = "* trains a different model"
        cells.append(svg.label(svg.MARGIN, bottom + 24, text, "muted", svg.SMALL))
        descriptions.append(f"{text}.")
    return svg.Drawing(heading, f"{note}. {' '.join(descriptions)}", cells, [], curves)


def _grid(
    decades: range,
    across: Callable[[float], float],
    top: float,
    bottom: float,
    cells: list[svg.Cell],
    show_tick: Callable[[float], str],
) -> list[svg.Curve]:
    """Draw a line at each power of ten, with its label below."""
    curves = []
    for decade in decades:
        x = across(10.0**decade)
        curves.append(svg.Curve([(x, top), (x, bottom)], "grid"))
        text = show_tick(10.0**decade)
        cells.append(_tick(x, bottom, text))
    return curves


def _tick(x: float, y: float, text: str) -> svg.Cell:
    """Return a label for the bottom axis."""
    wide = svg.pixel_width(text, svg.SMALL)
    return svg.Cell(x - wide / 2, y + 2, wide, 20, text, "muted", "", "middle", svg.SMALL)


def _growth(record: Record) -> svg.Drawing | None:
    """Draw times as lines if the peers differ in exactly one size; otherwise return None."""
    peers = [peer for peer in record["peers"].values() if "step" in peer]
    usual = {"rows": record["rows"], "ids": record["ids"]}
    usual["threads"] = record["environment"]["threads"]
    differing = [
        size for size in usual if any(peer.get(size, usual[size]) != usual[size] for peer in peers)
    ]
    if len(differing) != 1:
        return None
    axis = differing[0]
    lines: dict[str, list[tuple[int, float]]] = {}
    for peer in peers:
        point = peer.get(axis, usual[axis]), peer["step"]["median_ms"]
        lines.setdefault(peer["label"], []).append(point)
    return _lines(title(record), axis, {name: sorted(line) for name, line in lines.items()})


def _lines(heading: str, axis: str, lines: dict[str, list[tuple[int, float]]]) -> svg.Drawing:
    """Draw a line with points for each name."""
    points = [point for line in lines.values() for point in line]
    sizes = sorted({size for size, _ in points})
    heights = _decades([time for _, time in points])
    cells = [svg.label(svg.MARGIN, svg.MARGIN, heading, "bold", svg.TITLE)]
    note = f"median time of a step by number of {axis}, both axes logarithmic"
    cells.append(svg.label(svg.MARGIN, svg.MARGIN + 28, note, "muted", svg.SMALL))
    ticks = [(10.0**decade, format_milliseconds(10.0**decade)) for decade in heights]
    left = svg.MARGIN + max(svg.pixel_width(text, svg.SMALL) for _, text in ticks) + svg.GAP
    top = svg.MARGIN + 76.0
    bottom, right = top + HEIGHT, left + WIDTH
    up = _scale(heights, bottom, top)
    low, high = math.log10(sizes[0]), math.log10(max(sizes[-1], sizes[0] + 1))

    def across(size: float) -> float:
        return left + 12 + (WIDTH - 24) * (math.log10(size) - low) / (high - low)

    cells.append(svg.Cell(left, top, WIDTH, HEIGHT, box="row"))
    curves = []
    for value, text in ticks:
        curves.append(svg.Curve([(left, up(value)), (right, up(value))], "grid"))
        tick = svg.Cell(svg.MARGIN, up(value) - 9, left - svg.MARGIN + 2, 18, text)
        cells.append(tick._replace(ink="muted", anchor="end", size=svg.SMALL))
    for size in sizes:
        cells.append(_tick(across(size), bottom, f"{size:,}"))
    descriptions = []
    y = bottom + 26.0
    for number, (name, line) in enumerate(lines.items()):
        hue = f"h{number % 6}"
        path = [(across(size), up(time)) for size, time in line]
        curves.append(svg.Curve(path, f"curve {hue}"))
        curves += [svg.Curve([place, place], f"dot {hue}") for place in path]
        curves.append(
            svg.Curve([(left, y + svg.ROW / 2), (left + 34, y + svg.ROW / 2)], f"curve {hue}")
        )
        ends = " to ".join(dict.fromkeys(format_milliseconds(line[end][1]) for end in (0, -1)))
        cells.append(svg.label(left + 44, y, f"{name}: {ends}"))
        descriptions += [
            f"{name}, {size:,} {axis}: {format_milliseconds(time)}." for size, time in line
        ]
        y += 24
    return svg.Drawing(heading, f"{note}. {' '.join(descriptions)}", cells, [], curves)
