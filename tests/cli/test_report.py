"""Test the comparison report: its costs, its wording, and its HTML page with five figures."""

import dataclasses
import io
import math
import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch
from rich.console import Console

from hotrow import compare
from hotrow.cli import report
from hotrow.inputs import examples
from hotrow.verify.compare import Comparison

HOSTILE = [
    "<script>alert(1)</script>",
    '"><img src=x onerror=alert(1)>',
    "a & b &lt; c",
    "it's {{ 7 * 7 }} {% raw %}",
    "\u202e\x1b[31m\x00\n",
    "]]></svg><iframe src=//x>",
]


def compared(rows: int, columns: int, ids: list[int], **options: object) -> Comparison:
    table = torch.randn(rows, columns, generator=torch.Generator().manual_seed(5))
    return compare(table, ids, seconds=0, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def example_a() -> Comparison:
    return compare(examples.A.table(), examples.A.ids, title=examples.A.title, seconds=0)


def on_terminal(comparison: Comparison, width: int = 80) -> str:
    screen = io.StringIO()
    report.print_report(comparison, Console(file=screen, width=width, highlight=False))
    return screen.getvalue()


class Page(HTMLParser):
    """The tags, attributes and visible text of an HTML page."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.open: list[str] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs
        if tag not in ("meta", "link", "br"):
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] != "style":
            self.texts.append(data)


# --- numbers ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("count", "text"),
    [
        (0, "0 B"),
        (1, "1 B"),
        (999, "999 B"),
        (1000, "1 kB"),
        (1846, "1.85 kB"),
        (50_090, "50.1 kB"),
        (99_949, "99.9 kB"),
        (99_951, "100 kB"),
        (999_499, "999 kB"),
        (999_500, "1 MB"),
        (215_619_504, "216 MB"),
        (3_072_000_080, "3.07 GB"),
        (10**12, "1 TB"),
        (5 * 10**16, "50,000 TB"),
    ],
)
def test_a_size_has_three_digits_and_a_unit(count: int, text: str) -> None:
    assert report.format_size(count) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0.0412, "0.0412 ms"),
        (1.0, "1 ms"),
        (99.94, "99.9 ms"),
        (99.96, "100 ms"),
        (100.4, "100 ms"),
        (999.7, "1,000 ms"),
        (1234.5, "1,234 ms"),
        (86_400_000.0, "86,400,000 ms"),
    ],
)
def test_a_time_has_three_digits(value: float, text: str) -> None:
    assert report.format_milliseconds(value) == text


# --- the terminal -----------------------------------------------------------------------------


def test_example_a_on_a_terminal(example_a: Comparison) -> None:
    lines = [line.rstrip() for line in on_terminal(example_a).splitlines()]
    assert lines[0] == "Example A: ids 2, 3, 1 in a 4 x 5 table"
    assert lines[1] == "  table 4 x 5 float32, 3 ids"
    assert lines[2].split() == ["2", "3", "1"]
    assert "  output    equal, 15 of 15 values bit for bit" in lines
    assert "  gradient  equal, 20 of 20 values bit for bit" in lines
    cells = [re.split(r"\s{2,}", line.strip()) for line in lines]
    assert ["multiplications", "120", "0"] in cells
    assert ["of them by zero", "90", "0"] in cells
    assert ["bytes written", "188 B", "144 B", "1.3x"] in cells
    assert any(row[0] == "time (median of 1 run)" for row in cells)
    assert lines[-2] == "  equal: the same numbers, none of the zeros"


@pytest.mark.parametrize(
    ("verdict", "line"),
    [
        ("bitwise", "equal: the same numbers, none of the zeros"),
        ("zeros", "equal: the same numbers, none of the zeros"),
        ("rounding", "equal within rounding: the same sums, none of the zeros"),
        ("different", "NOT equal: lookup and one-hot matmul give different numbers"),
    ],
)
def test_the_verdict_matches_the_agreements(example_a: Comparison, verdict: str, line: str) -> None:
    output, gradient = example_a.check.agreements
    changed = dataclasses.replace(gradient, verdict=verdict)
    check = dataclasses.replace(example_a.check, agreements=(output, changed))
    comparison = dataclasses.replace(example_a, check=check)
    assert report.verdict(comparison) == line
    assert line in on_terminal(comparison)
    assert line in report.to_html([comparison])


def test_a_long_list_of_ids_is_cut_and_counted() -> None:
    comparison = compared(50, 3, list(range(50)))
    text = on_terminal(comparison)
    assert re.search(r" 17 *\n  and 32 more *\n", text)
    assert "and 32 more" in report.to_html([comparison])


@pytest.mark.parametrize("width", [30, 80, 200])
def test_lines_fit_the_terminal_and_numbers_are_complete(width: int) -> None:
    tokens = ["word " * 20, "词元" * 30, *HOSTILE, "x"]
    comparison = compared(3000, 8, list(range(9)), tokens=tokens, title="title " * 30)
    text = on_terminal(comparison, width)
    assert max(Console().measure(line).maximum for line in text.splitlines()) <= width
    _, _, numbers = text.partition("output")
    assert "…" not in numbers
    assert width < 80 or "432,000" in numbers


def test_a_partial_comparison_is_reported() -> None:
    comparison = compared(100, 4, [1, 2, 3, 4, 5, 6], budget=32_000)
    assert 0 < comparison.compared_count < 6
    expected = f"6 ids; compared only the first {comparison.compared_count}, because the one-hot"
    assert expected in " ".join(on_terminal(comparison).split())
    assert expected in report.to_html([comparison])


@pytest.mark.parametrize(
    ("operation", "formula", "headline"),
    [
        ("gather", "(one-hot * scores).sum(1)", "A masked sum over a one-hot is a gather"),
        ("scatter", "one-hot.T @ rows", "A product with a transposed one-hot is a scatter"),
        ("count", "one-hot.sum(0)", "The sum of a one-hot over the batch is a count"),
    ],
)
def test_other_operations_are_reported(operation: str, formula: str, headline: str) -> None:
    comparison = compared(30, 4, [1, 2, 3, 2], operation=operation)
    text = on_terminal(comparison)
    assert max(map(len, text.splitlines())) <= 80
    passes = "forward" if operation == "count" else "forward and gradient"
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines()]
    assert [passes, formula, operation, "ratio"] in rows
    assert rows[-2] == ["equal: the same numbers, none of the zeros"]
    assert "multiplications" not in text
    page = report.to_html([comparison])
    assert f"<h1>{headline}</h1>" in page
    assert f"hotrow: {formula} and {operation}, equal" in page
    assert "<svg" not in page
    different = dataclasses.replace(comparison.check.agreements[0], verdict="different")
    check = dataclasses.replace(comparison.check, agreements=(different,))
    wrong = dataclasses.replace(comparison, check=check)
    assert report.verdict(wrong) == f"NOT equal: {operation} and {formula} give different numbers"


# --- the page ---------------------------------------------------------------------------------

ROWS = {
    1: ["1.3010", "1.2753", "-0.2010", "-0.1606", "-0.4015"],
    2: ["0.6957", "-1.8061", "-1.1589", "0.3255", "-0.6315"],
    3: ["-2.8400", "-0.7849", "-1.4096", "-0.4076", "0.7953"],
}


def drawings(page: str) -> list[tuple[list[str], str]]:
    """Return the texts and the caption of each figure."""
    found = []
    for figure in re.findall(r"<figure>.*?</figure>", page, re.DOTALL):
        svg = re.search(r"<svg.*</svg>", figure, re.DOTALL)
        caption = re.search(r"<figcaption>(.*)</figcaption>", figure, re.DOTALL)
        assert svg
        assert caption
        texts = [
            "".join(element.itertext())
            for element in ET.fromstring(svg[0]).iter()
            if element.tag.endswith("}text")
        ]
        found.append((texts, caption[1]))
    return found


def count(texts: list[str], run: list[str]) -> int:
    """Count how often `run` occurs as consecutive elements of `texts`."""
    return sum(texts[start : start + len(run)] == run for start in range(len(texts)))


def test_the_page_of_example_a_has_figures_1_to_5_with_its_numbers(example_a: Comparison) -> None:
    one, another, several, product, second = drawings(report.to_html([example_a]))
    for (texts, caption), number, id in ((one, 1, 2), (another, 2, 3)):
        assert caption.startswith(f"Figure {number}. ")
        assert f"id {id} selects row {id}" in caption
        assert {row: count(texts, ROWS[row]) for row in ROWS} == {
            row: 2 if row == id else 1 for row in ROWS
        }  # each row appears in the table; the selected row also appears in the output
    texts, caption = several
    assert caption == "Figure 3. The ids select their rows, in order."
    assert all(count(texts, ROWS[row]) == 2 for row in ROWS)
    outputs = [text for text in texts if text in ("0.7953", "-0.6315", "-0.4015")][-3:]
    assert outputs == ["-0.6315", "0.7953", "-0.4015"]  # rows 2, 3, 1
    for (texts, caption), number, id in ((product, 4, 2), (second, 5, 3)):
        assert caption.startswith(f"Figure {number}. ")
        assert f"the one-hot row of id {id} by column 0" in caption
        entry = ROWS[id][0]
        assert count(texts, ["1", "×", entry, "=", entry]) == 1
        assert texts.count("0") >= 6  # the 3 other rows each show a zero factor and a zero product
        assert texts[texts.index("sum") + 1 :][:2] == ["=", entry]
        assert "3 of 4 multiplications are by zero." in texts


def test_the_page_of_example_a_has_the_results(example_a: Comparison) -> None:
    page = Page(report.to_html([example_a]))
    assert page.open == []
    for text in (
        "Example A: ids 2, 3, 1 in a 4 x 5 table",
        "equal: the same numbers, none of the zeros",
        "table 4 x 5 float32, 3 ids",
        "equal, 15 of 15 values bit for bit",
        "equal, 20 of 20 values bit for bit",
        "multiplications",
        "120",
        "90",
        "188 B",
    ):
        assert text in page.texts
    assert any("Sebastian Raschka" in text for text in page.texts)


@pytest.mark.parametrize(
    ("different", "title"), [(False, "lookup, equal"), (True, "lookup, NOT equal")]
)
def test_the_title_of_the_page_has_the_verdict(
    example_a: Comparison, different: bool, title: str
) -> None:
    poisoned = torch.ones(4, 5)
    poisoned[3] = math.inf
    other = compare(poisoned, [1], seconds=0)
    page = report.to_html([example_a, *([other] if different else [])])
    assert f"{title}</title>" in page
    assert ("0 x inf is NaN" in page) == different
    assert page.count("<section>") == 1 + different


def test_hostile_texts_are_escaped() -> None:
    comparison = compared(9, 3, list(range(6)), tokens=HOSTILE, title=f"<b>{HOSTILE[1]} &amp;")
    text = report.to_html([comparison])
    page = Page(text)
    assert not {"script", "img", "iframe", "b"} & set(page.tags)
    assert not [name for name, _ in page.attributes if name.startswith("on")]
    assert page.open == []
    assert f"<b>{HOSTILE[1]} &amp;" in page.texts
    for token in [*HOSTILE[:2], HOSTILE[2]]:
        shown = token if len(token) <= 24 else token[:23] + "…"
        assert shown in page.texts
    assert "\\u202e\\x1b[31m\\x00\\n" in page.texts
    assert all(char == "\n" or char.isprintable() for char in text)


def test_the_page_has_no_scripts_and_no_links(example_a: Comparison) -> None:
    page = Page(report.to_html([example_a]))
    assert "script" not in page.tags
    policy = "default-src 'none'; style-src 'unsafe-inline'; img-src data:"
    assert ("content", policy) in page.attributes
    links = [value for name, value in page.attributes if name in ("href", "src", "xlink:href")]
    assert links == ["data:,"]
    assert "url(" not in report.to_html([example_a])
    assert "@import" not in report.to_html([example_a])


@pytest.mark.parametrize(
    ("rows", "columns", "ids", "figures"),
    [
        (4, 5, [2], 2),
        (4, 5, [2, 2], 3),
        (1, 1, [0, 0, 0], 3),
        (4, 5, [2, 3], 5),
        (300, 40, list(range(200)), 5),
    ],
    ids=[
        "one id",
        "a duplicate id",
        "one row",
        "two ids",
        "many ids",
    ],
)
def test_tables_of_every_size_have_a_report_and_figures(
    rows: int, columns: int, ids: list[int], figures: int
) -> None:
    comparison = compared(rows, columns, ids, tokens=[f"w{id}" for id in ids])
    assert "equal" in on_terminal(comparison)
    page = report.to_html([comparison])
    assert Page(page).open == []
    captions = [caption for _, caption in drawings(page)]
    assert [caption.split(".")[0] for caption in captions] == [
        f"Figure {number}" for number in range(1, figures + 1)
    ]
    assert "How it works" in page
