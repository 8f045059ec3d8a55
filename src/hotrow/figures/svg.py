"""The elements of a figure (cells, arrows and curves) and their output as SVG.

Coordinates are in pixels. They are computed from the width of each text in a monospace font, so no
number or token overflows its box.
"""

from __future__ import annotations

import hashlib
import xml.etree.ElementTree as ET
from collections.abc import Iterator
from typing import NamedTuple

from hotrow.inputs.text import display_width

MARGIN, ROW, PITCH, PAD, GAP, ARROW = 24, 32, 42, 10, 8, 84  # pixels
SMALL, NUMBER, TITLE = 12, 14, 17  # font sizes
EM = 0.61  # character width / font size; no monospace font named below has wider characters

# All class names have a prefix, which prevents conflicts with the styles of the page.
STYLE_RULES = """
.hotrow .hr-page { fill: %(page)s; stroke: none }
.hotrow text { fill: %(ink)s; stroke: none; font-family: system-ui, -apple-system, "Segoe UI",
  Roboto, "Liberation Sans", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC",
  "WenQuanYi Micro Hei", sans-serif }
.hotrow .hr-mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  "Liberation Mono", "Noto Sans Mono CJK SC", "PingFang SC", "Microsoft YaHei",
  "WenQuanYi Micro Hei Mono", monospace }
.hotrow .hr-bold { font-weight: 700 }
.hotrow .hr-muted { fill: %(muted)s }
.hotrow .hr-on { fill: %(page)s }
.hotrow .hr-row { fill: %(row)s; stroke: %(line)s }
.hotrow .hr-gap { fill: none; stroke: %(line)s; stroke-dasharray: 2 4 }
.hotrow .hr-picked { fill: currentColor; fill-opacity: .12; stroke: currentColor; stroke-width: 2 }
.hotrow .hr-frame, .hotrow .hr-arrow, .hotrow .hr-curve, .hotrow .hr-dashed { fill: none;
  stroke: currentColor; stroke-width: 2 }
.hotrow .hr-grid { fill: none; stroke: %(line)s }
.hotrow .hr-dot { stroke: currentColor; stroke-width: 9; stroke-linecap: round }
.hotrow .hr-hole { stroke: %(row)s; stroke-width: 5; stroke-linecap: round }
.hotrow .hr-pill, .hotrow .hr-point { fill: currentColor; stroke: none }
.hotrow .hr-h0 { color: %(h0)s } .hotrow .hr-h1 { color: %(h1)s } .hotrow .hr-h2 { color: %(h2)s }
.hotrow .hr-h3 { color: %(h3)s } .hotrow .hr-h4 { color: %(h4)s } .hotrow .hr-h5 { color: %(h5)s }
"""
# Some sites strip the style. Without it, a figure has black text and gray lines on white.
UNSTYLED = {
    "rect": {"fill": "none", "stroke": "#626b7b"},
    "path": {"fill": "none", "stroke": "#626b7b"},
}
COLOURS = {  # (light, dark); text has a contrast of at least 4.5:1 with the page and the rows
    "page": ("#fff", "#14181f"),
    "ink": ("#1f2530", "#e7ebf2"),
    "muted": ("#626b7b", "#9ba5b5"),
    "row": ("#fff", "#1a1f28"),
    "line": ("#d5dae3", "#465064"),
    "h0": ("#2563ab", "#86b9f4"),
    "h1": ("#b4480f", "#f3a878"),
    "h2": ("#2b7a4b", "#83d3a5"),
    "h3": ("#8142a0", "#d2a6ea"),
    "h4": ("#84660a", "#e2c465"),
    "h5": ("#0e7482", "#72d3de"),
}


class Cell(NamedTuple):
    """A rectangle with CSS classes `box`, a text with CSS classes `ink`, or both."""

    x: float
    y: float
    w: float
    h: float = ROW
    text: str = ""
    ink: str = ""
    box: str = ""
    anchor: str = "start"
    size: int = NUMBER


class Curve(NamedTuple):
    """Straight lines through the points. A line from a point to itself is drawn as a dot."""

    points: list[tuple[float, float]]
    line: str


class Drawing(NamedTuple):
    """A figure: its title, its description and its elements."""

    title: str
    description: str
    cells: list[Cell]
    arrows: list[tuple[float, float, float, float, str]]  # start x and y, end x and y, hue
    curves: list[Curve] | None = None


class Line(NamedTuple):
    """A line of a grid: a label, and a box with one text for each column.

    If there are fewer texts than columns, the first text spans the extra columns.
    """

    label: str
    texts: list[str]
    ink: str = "mono"
    box: str = "row"
    hue: str = ""  # set only for a selected row


class Column(NamedTuple):
    """A column of cells: its width and its text anchor."""

    width: float
    anchor: str = "middle"


def pixel_width(text: str, size: int = NUMBER) -> float:
    """Return the width of a text in pixels."""
    return display_width(text) * size * EM


def label(x: float, y: float, text: str, ink: str = "", size: int = NUMBER) -> Cell:
    """Return a cell of text without a box."""
    return Cell(x, y, pixel_width(text, size), ROW, text, ink, size=size)


def pill(x: float, y: float, w: float, text: str, hue: str) -> Cell:
    """Return a cell of text in a rounded box of the given hue."""
    return Cell(x, y + 4, w, ROW - 8, text, "mono bold on", f"pill {hue}", "middle")


def row_lines(
    spans: list[range], texts: dict[int, list[str]], hues: dict[int, str], ink: str = "mono"
) -> Iterator[Line]:
    """Yield a line for each span; `texts` maps each span's first row to the texts of its line."""
    for span in spans:
        row = span.start
        if len(span) > 1:
            yield Line("⋮", texts[row], "muted", "gap")
        elif row in hues:
            yield selected_line(row, texts[row], hues[row])
        else:
            yield Line(str(row), texts[row], ink)


def selected_line(row: int, texts: list[str], hue: str) -> Line:
    """Return the line for a selected row."""
    return Line(str(row), texts, "mono bold", f"picked {hue}", hue)


def _merged(columns: list[Column], count: int) -> list[Column]:
    """Return the columns for a line of `count` texts. The first column spans any extra columns."""
    spare = len(columns) - count
    if not spare:
        return columns
    return [Column(sum(column.width for column in columns[: spare + 1])), *columns[spare + 1 :]]


def fit(lines: list[Line], anchors: list[str]) -> tuple[float, list[Column]]:
    """Return the smallest label width and the narrowest columns that fit the texts."""
    full = [line.texts for line in lines if len(line.texts) == len(anchors)]
    widths = [max(map(pixel_width, texts)) + 2 * PAD for texts in zip(*full, strict=True)]
    columns = list(map(Column, widths, anchors))
    for line in lines:
        missing = pixel_width(line.texts[0]) + 2 * PAD - _merged(columns, len(line.texts))[0].width
        columns[0] = Column(columns[0].width + max(0.0, missing), anchors[0])
    return max(pixel_width(line.label) for line in lines) + 2 * PAD, columns


def grid(
    x: float, y: float, lines: list[Line], label: float, columns: list[Column], pitch: int = ROW
) -> Iterator[Cell]:
    """Yield the cells of the lines, each line below the previous one."""
    start = x + label + GAP
    for line in lines:
        if line.hue:
            yield pill(x, y, label, line.label, line.hue)
        else:
            yield Cell(x, y, label, ROW, line.label, "muted", anchor="middle")
        whole = sum(column.width for column in columns)
        yield Cell(start, y + 1, whole, ROW - 2, box=line.box)
        left = start
        for text, column in zip(line.texts, _merged(columns, len(line.texts)), strict=True):
            yield Cell(left, y, column.width, ROW, text, line.ink, "", column.anchor)
            left += column.width
        y += pitch


def write(drawing: Drawing, lang: str) -> str:
    """Return the drawing as SVG. ElementTree escapes all texts."""
    # Element ids are unique on a page unless the page contains the same drawing twice.
    name = "hotrow-" + hashlib.sha256(repr((lang, drawing)).encode()).hexdigest()[:12]
    right = _format_coordinate(max(cell.x + cell.w for cell in drawing.cells) + MARGIN)
    bottom = _format_coordinate(max(cell.y + cell.h for cell in drawing.cells) + MARGIN)
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "xml:space": "preserve"})
    root.attrib |= {"class": "hotrow", "lang": lang, "role": "img"}
    root.attrib |= {"aria-labelledby": f"{name}-title {name}-desc"}
    root.attrib |= {"width": right, "height": bottom, "viewBox": f"0 0 {right} {bottom}"}
    root.attrib |= {"style": "max-width:100%;height:auto"}
    ET.SubElement(root, "title", id=f"{name}-title").text = drawing.title
    ET.SubElement(root, "desc", id=f"{name}-desc").text = drawing.description
    ET.SubElement(root, "style").text = _style()
    page = Cell(0, 0, float(right), float(bottom), box="page")
    for cell in [page, *drawing.cells]:
        if cell.box:
            places = {"x": cell.x, "y": cell.y, "width": cell.w, "height": cell.h, "rx": 4}
            drawn = _draw(root, "rect", cell.box, **places)
            if cell is page:
                drawn.set("fill", "#fff")
        if cell.text:
            inset = {"start": 0.0, "middle": cell.w / 2, "end": cell.w - PAD}[cell.anchor]
            baseline = cell.y + cell.h / 2 + 0.36 * cell.size
            text = _draw(root, "text", cell.ink, x=cell.x + inset, y=baseline)
            text.attrib |= {"font-size": str(cell.size), "text-anchor": cell.anchor}
            text.text = cell.text
            if "mono" in cell.ink and _needs_fallback_font(cell.text):
                text.attrib |= {"textLength": _format_coordinate(pixel_width(cell.text, cell.size))}
                text.attrib |= {"lengthAdjust": "spacingAndGlyphs"}
    for curve in drawing.curves or []:
        corners = "L".join(
            f"{_format_coordinate(x)} {_format_coordinate(y)}" for x, y in curve.points
        )
        path = _draw(root, "path", curve.line)
        path.set("d", f"M{corners}")
        if "dashed" in curve.line:
            path.set("stroke-dasharray", "7 4")
    for x1, y1, x2, y2, hue in drawing.arrows:
        bend = [(x1 + 2, y1), ((x1 + x2) / 2, y1), ((x1 + x2) / 2, y2), (x2 - 7, y2)]
        start, *bends = (f"{_format_coordinate(x)} {_format_coordinate(y)}" for x, y in bend)
        _draw(root, "path", f"arrow {hue}").set("d", f"M{start}C{' '.join(bends)}")
        _draw(root, "path", f"point {hue}").set(
            "d", f"M{_format_coordinate(x2)} {_format_coordinate(y2)}l-9 -5v10z"
        )
    return ET.tostring(root, encoding="unicode")


def _draw(root: ET.Element, tag: str, classes: str, **places: float) -> ET.Element:
    attributes = {name: _format_coordinate(place) for name, place in places.items()} | UNSTYLED.get(
        tag, {}
    )
    if classes:
        attributes["class"] = " ".join(f"hr-{name}" for name in classes.split())
    return ET.SubElement(root, tag, attributes)


def _needs_fallback_font(text: str) -> bool:
    """Return whether a text needs a fixed width, because monospace fonts may lack a character."""
    return any(char > "\u024f" and char != "…" and display_width(char) == 1 for char in text)


def _format_coordinate(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")


def _style() -> str:
    light, dark = (
        STYLE_RULES % {name: pair[place] for name, pair in COLOURS.items()} for place in (0, 1)
    )
    # Dark mode applies only to screens; printed figures stay light.
    return f"{light}@media screen and (prefers-color-scheme: dark) {{{dark}}}\n"
