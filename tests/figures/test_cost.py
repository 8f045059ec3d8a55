"""Test that figure 7's curves, legend and description match the formulas of hotrow.cost."""

import math
import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hotrow import HotrowError, cost
from hotrow.figures.figure import figure
from hotrow.figures.words import WORDS
from hotrow.inputs.text import format_size
from tests.support.parsed_figure import SVG, ParsedFigure, assert_no_overlap

POWERS = str.maketrans("⁻⁰¹²³⁴⁵⁶⁷⁸⁹", "-0123456789")
UNITS = {"B": 1, "kB": 1e3, "MB": 1e6, "GB": 1e9, "TB": 1e12, "ms": 1}
DECADES = [10**power for power in range(1, 8)]


def value(text):
    """Parse the number in a label."""
    if text.startswith("10") and (power := text[2:].translate(POWERS)) != text[2:]:
        return 10.0 ** int(power)
    digits, _, unit = text.partition(" ")
    return float(digits.replace(",", "")) * UNITS[unit or "B"]


class Chart(ParsedFigure):
    """A parsed "cost" figure, with its curves in the units of the axis labels."""

    def paths(self, css):
        found = []
        for path in self.root.iter(f"{SVG}path"):
            if css in path.get("class").split():
                places = [float(x) for x in re.findall(r"-?[\d.]+", path.get("d"))]
                found.append(list(zip(places[::2], places[1::2], strict=True)))
        return found

    def panels(self):
        """Return the matmul curve and the lookup curve of each panel."""
        boxes = [box for box in self.boxes if "hr-row" in box.css]
        return [[self._curve(box, css) for css in ("hr-curve", "hr-dashed")] for box in boxes]

    def _curve(self, box, css):
        def inside(path):
            return all(
                box.left - 0.1 <= x <= box.right + 0.1 and box.top - 0.1 <= y <= box.bottom + 0.1
                for x, y in path
            )

        [path] = filter(inside, self.paths(css))
        grid = list(filter(inside, self.paths("hr-grid")))
        across = sorted({a[0] for a, b in grid if a[0] == b[0]})
        up = sorted({a[1] for a, b in grid if a[1] == b[1]})
        at_x = [self._label(x, box.bottom + 12, "middle") for x in across]
        at_y = [self._label(box.left, y, "end") for y in up]
        return [(_read(x, across, at_x), _read(y, up, at_y)) for x, y in path]

    def _label(self, x, y, anchor):
        def far(text):
            place = (text.left + text.right) / 2 if anchor == "middle" else text.right
            return math.hypot(place - x, text.y - 0.36 * text.size - y)

        nearest = min((text for text in self.texts if text.size == 12), key=far)
        assert far(nearest) < 12, nearest
        return value(nearest.text)


def _read(place, places, values):
    """Convert a coordinate to a value, given the labeled values of a logarithmic axis."""
    first, last = math.log10(values[0]), math.log10(values[-1])
    share = (place - places[0]) / (places[-1] - places[0])
    return 10 ** (first + share * (last - first))


COUNTS = st.integers(1, 10**9) | st.sampled_from([1, 2**63 - 1])


@given(COUNTS, COUNTS, st.sampled_from(sorted(WORDS)))
def test_curves_match_the_formulas(D, N, lang):
    chart = Chart(figure("cost", D=D, N=N, lang=lang))
    assert_no_overlap(chart)
    operations, written = chart.panels()

    def counted(V):
        found = cost(V, D, N)
        matmul = found.matmul.multiplications + found.matmul.additions
        return (matmul, found.lookup.additions), (
            found.matmul.bytes_written,
            found.lookup.bytes_written,
        )

    for panel, curves in enumerate((operations, written)):
        for way, curve in enumerate(curves):
            for V, (x, y) in zip(DECADES, curve[::8], strict=True):
                expected = counted(V)[panel][way]
                assert math.log10(x) == pytest.approx(math.log10(V), abs=0.01)
                assert math.log10(y) == pytest.approx(math.log10(expected), abs=0.03)
    description = chart.words("desc")[0]
    for V in DECADES:
        pair = [format_size(x) for x in counted(V)[1]]
        says = WORDS[lang]["at"].format(V=f"{V:,}", matmul=pair[0], lookup=pair[1])
        assert says in description
    assert f"{D:,}" in chart.words()[1]
    assert f"{N:,}" in chart.words()[1]


def test_numbers_of_the_readme_are_in_the_figure():
    chart = Chart(figure("cost", D=768, N=300))
    found = cost(10_000_000, 768, 300)
    words = chart.words()
    assert f"one-hot matmul: {format_size(found.matmul.bytes_written)}" in words
    assert f"lookup: {format_size(found.lookup.bytes_written)}" in words
    assert "lookup: 230,400" in words
    assert "ids: 300, columns: 768; both axes are logarithmic" in words


TIMES = st.floats(1e-6, 1e6)


@given(st.lists(st.tuples(st.integers(1, 10**12), TIMES, TIMES), min_size=1, max_size=5))
def test_measured_points_are_drawn_at_their_values(points):
    chart = Chart(figure("cost", D=256, N=100, measured=points))
    assert_no_overlap(chart)
    curves = chart.panels()[-1]
    description = chart.words("desc")[0]
    for way, curve in enumerate(curves):
        for shown, point in zip(curve, sorted(points), strict=True):
            expected = [math.log10(point[0]), math.log10(point[way + 1])]
            assert [math.log10(x) for x in shown] == pytest.approx(expected, abs=0.15)
    for V, _, _ in points:
        assert f"V = {V:,}:" in description
    assert len(chart.paths("hr-dot")) == 2 * (len(points) + 1)  # with the legend


def test_svg_needs_no_other_file_and_contains_a_description():
    fig = figure("cost", D=256, N=100, measured=[(10, 1, 2)])
    chart = Chart(fig)
    assert chart.root.get("role") == "img"
    named = [chart.root.find(f"{SVG}{tag}") for tag in ("title", "desc")]
    assert chart.root.get("aria-labelledby") == " ".join(part.get("id") for part in named)
    assert all(part.text for part in named)
    references = re.findall(r"https?:[^\"]*|url\(|href|<script|@import|\son\w+=", fig.svg)
    assert references == ["http://www.w3.org/2000/svg"]
    # Even without the style, the curves of the two methods differ in more than color.
    dashed = [path.get("stroke-dasharray") for path in chart.root.iter(f"{SVG}path")]
    assert dashed.count("7 4") == 2 * 3


def test_without_measured_points_there_is_no_time_panel():
    plain = figure("cost", D=256, N=100)
    assert figure("cost", D=256, N=100, measured=[]) == plain
    assert len(Chart(plain).panels()) == 2
    assert len(Chart(figure("cost", D=256, N=100, measured=[(10, 1, 2)])).panels()) == 3


def test_chinese_charts_are_in_chinese():
    chart = Chart(figure("cost", D=256, N=100, measured=[(10, 1, 2)], lang="zh-CN"))
    words = " ".join(chart.words() + chart.words("title") + chart.words("desc"))
    assert set(re.findall("[A-Za-z]+", words)) <= {"token", "ID", "V", "ms", "e", *UNITS}
    assert "词元（token）" in words


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"D": 0}, "D = 0, but it must be in 1.."),
        ({"N": 0}, "N = 0, but it must be in 1.."),
        ({"N": 2**63}, "N = 9223372036854775808, but it must be in 1.."),
        ({"D": -1}, "D = -1, but it must be a non-negative int"),
        ({"N": 2.0}, "N = 2.0, but it must be a non-negative int"),
        (
            {"measured": 7},
            "measured is 7, but it must be a list of (V, matmul milliseconds, lookup",
        ),
        ({"measured": [(1, 2)]}, "measured is [(1, 2)], but it must be a list of (V, "),
        ({"measured": [(1, "fast", 2)]}, "measured is [(1, 'fast', 2)], but it must be a list"),
        ({"measured": [(1, 1, 1), (0, 1, 1)]}, "measured[1] = (0, 1, 1), but V must be a positive"),
        ({"measured": [(1.5, 1, 1)]}, "measured[0] = (1.5, 1, 1), but V must be a positive int"),
        ({"measured": [(5, 0, 1)]}, "measured[0] = (5, 0, 1), but V must be a positive int"),
        ({"measured": [(5, 1, math.nan)]}, "measured[0] = (5, 1, nan), but V"),
        ({"measured": [(1, 5e-324, 1e308)]}, "times must be in 1e-09..1e+12 ms"),
        ({"measured": [(5, math.inf, 1)]}, "measured[0] = (5, inf, 1), but V"),
    ],
    ids=str,
)
def test_errors_name_the_argument_and_the_value(change, message):
    with pytest.raises(HotrowError) as caught:
        figure("cost", **{"D": 2, "N": 3} | change)
    assert message in str(caught.value)
