"""Parse figures from their SVG, and generate tables to draw."""

import math
import re
import xml.etree.ElementTree as ET
from dataclasses import dataclass

import torch
from hypothesis import strategies as st

from hotrow.figures.figure import figure
from hotrow.figures.svg import EM
from hotrow.inputs.text import display_width, format_number

SVG = "{http://www.w3.org/2000/svg}"


@dataclass(frozen=True)
class Text:
    left: float
    right: float
    y: float
    size: float
    css: str
    text: str


@dataclass(frozen=True)
class Box:
    left: float
    top: float
    right: float
    bottom: float
    css: str

    def contains(self, text):
        return self.left <= text.left and text.right <= self.right and self.on_line(text)

    def on_line(self, text):
        return self.top < text.y < self.bottom


class ParsedFigure:
    """The texts and boxes of a figure, parsed from its SVG."""

    def __init__(self, fig):
        self.root = ET.fromstring(fig.svg)
        assert self.root.tag == f"{SVG}svg"
        self.texts = [self._text(element) for element in self.root.iter(f"{SVG}text")]
        self.boxes = [self._box(element) for element in self.root.iter(f"{SVG}rect")]

    @staticmethod
    def _text(element):
        size, x = float(element.get("font-size")), float(element.get("x"))
        wide = display_width(element.text) * size * EM
        left = x - {"start": 0, "middle": wide / 2, "end": wide}[element.get("text-anchor")]
        y, css = float(element.get("y")), element.get("class", "")
        return Text(left, left + wide, y, size, css, element.text)

    @staticmethod
    def _box(element):
        x, y, w, h = (float(element.get(key)) for key in ("x", "y", "width", "height"))
        return Box(x, y, x + w, y + h, element.get("class"))

    def words(self, kind="text"):
        return [element.text for element in self.root.iter(f"{SVG}{kind}")]

    @property
    def output_x(self):
        """The left edge of the output, taken from its heading."""
        bold = [text for text in self.texts if text.css == "hr-bold"]
        return bold[3].left

    def lines(self, css):
        """Return (left edge, label, texts) of each box with this CSS class, from top to bottom."""
        found = []
        for box in sorted(self.boxes, key=lambda box: box.top):
            if css in box.css.split():
                inside = [text for text in self.texts if box.contains(text)]
                before = [t for t in self.texts if box.on_line(t) and t.right <= box.left]
                label = max(before, key=lambda text: text.right).text if before else None
                found.append((box.left, label, [t.text for t in inside]))
        return found

    def selected_rows(self):
        """Return (label, texts) of the highlighted rows in the table, and in the output."""
        lines = self.lines("hr-picked")
        inside = [(label, texts) for left, label, texts in lines if left < self.output_x]
        return inside, [(label, texts) for left, label, texts in lines if left > self.output_x]


def example_a():
    torch.manual_seed(123)
    return torch.nn.Embedding(4, 5).weight


def column_ids(ids):
    """Return the ids as an (N, 1) tensor, which is never mistaken for an integer one-hot."""
    return torch.tensor(ids, dtype=torch.long).unsqueeze(-1)


TABLE_KINDS = ["lookup", "product", "gradient"]


def draw_kind(kind, table, ids, *, column=0, **options):
    """Draw a figure of any kind; for "gradient", pass the output as its own gradient."""
    if kind == "product":
        options["column"] = column
    if kind == "gradient":
        options["gradient"] = table.detach()[torch.as_tensor(ids).long()]
    return figure(kind, table, ids, **options)


def arrow_ends(drawn):
    """Return the start and end points of every arrow, in drawing order."""
    paths = [p.get("d") for p in drawn.root.iter(f"{SVG}path") if "hr-arrow" in p.get("class")]
    numbers = [[float(x) for x in re.findall(r"-?[\d.]+", path)] for path in paths]
    return [((p[0], p[1]), (p[-2], p[-1])) for p in numbers]


VALUES = st.floats(width=32) | st.sampled_from([0.0, -0.0, 1e-5, -1e5, math.inf, -math.inf])


@st.composite
def tables(draw, min_columns=0):
    rows, columns = draw(st.integers(1, 14)), draw(st.integers(min_columns, 9))
    values = draw(st.lists(VALUES, min_size=rows * columns, max_size=rows * columns))
    return torch.tensor(values, dtype=torch.float32).reshape(rows, columns)


def shown_columns(table):
    columns = table.shape[1]
    return list(range(columns)) if columns <= 6 else [0, 1, 2, 3, columns - 1]


def expected_texts(table, row):
    texts = [format_number(float(table[row, c])) for c in shown_columns(table)]
    return texts if table.shape[1] <= 6 else [*texts[:4], "…", texts[4]]


def assert_no_overlap(drawn):
    """Assert that no text overflows the drawing or its row's box, or touches other text."""
    _, _, right, bottom = (float(x) for x in drawn.root.get("viewBox").split())
    assert (drawn.root.get("width"), drawn.root.get("height")) == tuple(
        drawn.root.get("viewBox").split()[2:]
    )
    for text in drawn.texts:
        assert text.left >= 0, text
        assert text.right <= right, text
        assert text.size < text.y < bottom - text.size / 2, text
        for box in drawn.boxes:
            if "hr-page" not in box.css and box.on_line(text):
                outside = text.right <= box.left or text.left >= box.right
                assert outside or box.contains(text), (text, box)
    for first in drawn.texts:
        for second in drawn.texts:
            if first is not second and abs(first.y - second.y) < 0.8 * first.size:
                assert first.right <= second.left or second.right <= first.left, (first, second)
