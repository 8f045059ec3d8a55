"""A record as a figure: what a step takes, as bars beside the floor, or as it grows."""

from __future__ import annotations

import math
from collections.abc import Callable

from hotrow.bench.report import peer_label, title
from hotrow.bench.workload import Record
from hotrow.figures import svg
from hotrow.inputs.text import format_milliseconds

WIDTH, BAR, PITCH, HEIGHT = 420, 22, 32, 220  # pixels


def plot(record: Record) -> str | None:
    """The SVG of a record of times; None if the record has nothing to compare."""
    if "peers" in record:
        growth = _growth(record)
        return svg.write(_bars(record) if growth is None else growth, "en")
    if "ratio" in record:
        sides = {side: record[side]["median_ms"] for side in ("before", "after")}
        what = str(record.get("about", record["workload"]))
        return svg.write(_chart(what, "before convert and after", list(sides.items())), "en")
    return None


def _bars(record: Record) -> svg.Drawing:
    """A bar for each peer, quickest first, and a line where the floor is."""
    peers = {name: peer for name, peer in record["peers"].items() if "step" in peer}
    times = [(peer_label(record, name), peer["step"]["median_ms"]) for name, peer in peers.items()]
    times.sort(key=lambda each: each[1])
    floor = next((peer["floor_ms"] for peer in peers.values() if "floor_ms" in peer), None)
    return _chart(title(record), "median time of a step", times, floor)


def _decades(values: list[float]) -> range:
    """Whole powers of ten around all values, at least one apart."""
    low, high = math.floor(math.log10(min(values))), math.ceil(math.log10(max(values)))
    return range(low, max(high, low + 1) + 1)


def _scale(decades: range, begin: float, end: float) -> Callable[[float], float]:
    """Where a value is between two places."""

    def place(value: float) -> float:
        share = (math.log10(value) - decades[0]) / (decades[-1] - decades[0])
        return begin + (end - begin) * share

    return place


def _chart(
    heading: str, what: str, times: list[tuple[str, float]], floor: float | None = None
) -> svg.Drawing:
    """Horizontal bars on a logarithmic axis."""
    decades = _decades([time for _, time in times] + ([floor] if floor else []))
    cells = [svg.label(svg.MARGIN, svg.MARGIN, heading, "bold", svg.TITLE)]
    note = f"{what}, milliseconds on a logarithmic axis"
    cells.append(svg.label(svg.MARGIN, svg.MARGIN + 28, note, "muted", svg.SMALL))
    left = svg.MARGIN + max(svg.pixel_width(name) for name, _ in times) + 2 * svg.GAP
    top = svg.MARGIN + 72.0
    across = _scale(decades, left, left + WIDTH)
    bottom = top + PITCH * len(times)
    curves = _grid(decades, across, top, bottom, cells)
    descriptions = []
    for number, (name, time) in enumerate(times):
        y = top + PITCH * number + (PITCH - BAR) / 2
        is_hotrow = name.startswith(("hotrow", "after"))
        cells.append(svg.label(svg.MARGIN, y - 5, name, "bold" if is_hotrow else ""))
        end = max(across(time), left + 2)
        cells.append(svg.Cell(left, y, end - left, BAR, box=f"pill {'h0' if is_hotrow else 'h1'}"))
        cells.append(svg.label(end + svg.GAP, y - 5, format_milliseconds(time), "mono", svg.SMALL))
        descriptions.append(f"{name}: {format_milliseconds(time)}.")
    if floor:
        x = across(floor)
        curves.append(svg.Curve([(x, top - 4), (x, bottom + 4)], "dashed h2"))
        text = f"dashed: the floor, {format_milliseconds(floor)}"
        cells.append(svg.label(left, bottom + 24, text, "muted", svg.SMALL))
        descriptions.append(f"The floor: {format_milliseconds(floor)}.")
    return svg.Drawing(heading, f"{note}. {' '.join(descriptions)}", cells, [], curves)


def _grid(
    decades: range,
    across: Callable[[float], float],
    top: float,
    bottom: float,
    cells: list[svg.Cell],
) -> list[svg.Curve]:
    """A line at each power of ten, and its label below."""
    curves = []
    for decade in decades:
        x = across(10.0**decade)
        curves.append(svg.Curve([(x, top), (x, bottom)], "grid"))
        text = format_milliseconds(10.0**decade)
        cells.append(_tick(x, bottom, text))
    return curves


def _tick(x: float, y: float, text: str) -> svg.Cell:
    """The label of a place on the axis at the bottom."""
    wide = svg.pixel_width(text, svg.SMALL)
    return svg.Cell(x - wide / 2, y + 2, wide, 20, text, "muted", "", "middle", svg.SMALL)


def _growth(record: Record) -> svg.Drawing | None:
    """A line over the one size in which the peers of a label differ; None if there is none."""
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
    """A curve with its points for each name."""
    points = [point for line in lines.values() for point in line]
    sizes = sorted({size for size, _ in points})
    heights = _decades([time for _, time in points])
    cells = [svg.label(svg.MARGIN, svg.MARGIN, heading, "bold", svg.TITLE)]
    note = f"median time of a step over {axis}, both logarithmic"
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
