"""Test that figures show the tensors' numbers with signs, and say how many rows they omit."""

import html
import math
import re
from dataclasses import FrozenInstanceError
from fractions import Fraction

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.figures.figure import KINDS, figure
from hotrow.figures.svg import COLOURS
from hotrow.figures.words import WORDS
from hotrow.inputs.tables import TABLE_DTYPES
from hotrow.inputs.text import display_width, elide, escape_unprintable, format_number
from hotrow.vocabulary import Statistics
from tests.support.parsed_figure import (
    SVG,
    TABLE_KINDS,
    ParsedFigure,
    arrow_ends,
    assert_no_overlap,
    column_ids,
    draw_kind,
    example_a,
    expected_texts,
    tables,
)

EXAMPLE_A = """
 0.3374 -0.1778 -0.3035 -0.5880  1.5810
 1.3010  1.2753 -0.2010 -0.1606 -0.4015
 0.6957 -1.8061 -1.1589  0.3255 -0.6315
-2.8400 -0.7849 -1.4096 -0.4076  0.7953
"""
HOSTILE = [
    "<script>alert(1)</script>",
    '"&<>\'"/></text></svg>',
    "]]><!--{0} %s {n}",
    "\x1b[31mred\x00\n\r\t",
    "\u202eabc\u200b\ufeff\u2028",
    "a" * 500,
    "e" + "\u0301" * 500,
    "嵌入矩阵查找表独热编码",
    "🙂👩\u200d👩\u200d👧",
    "\ud800 \udfff",
    "नमस्ते ﷽",
    "",
    " ",
]


# Lookup


def test_example_a_shows_the_table_of_the_lesson():
    drawn = ParsedFigure(figure("lookup", example_a(), [2, 3, 1]))
    inside, output = drawn.selected_rows()
    expected = [line.split() for line in EXAMPLE_A.strip().splitlines()]
    plain = [(label, texts) for _, label, texts in drawn.lines("hr-row")]
    assert plain == [("0", expected[0])]
    assert inside == [(str(row), expected[row]) for row in (1, 2, 3)]
    assert output == [(str(row), expected[row]) for row in (2, 3, 1)]


@pytest.mark.parametrize("row", range(4))
def test_one_id_selects_one_row(row):
    drawn = ParsedFigure(figure("lookup", example_a(), row))
    expected = EXAMPLE_A.strip().splitlines()[row].split()
    assert drawn.selected_rows() == ([(str(row), expected)], [(str(row), expected)])
    assert f"If you count from 1, row {row} is number {row + 1}." in " ".join(drawn.words())


def test_repeated_id_is_one_row_of_the_table_and_two_of_the_output():
    drawn = ParsedFigure(figure("lookup", example_a(), [2, 3, 2], tokens=["fox", "jumps", "fox"]))
    inside, output = drawn.selected_rows()
    assert [label for label, _ in inside] == ["2", "3"]
    assert [label for label, _ in output] == ["2", "3", "2"]
    assert output[0] == output[2]


@pytest.mark.parametrize("ids", [[2, 3, 1], [2, 3, 2], [1, 1, 1, 1, 1, 1], [7, 0, 5, 3, 1, 2]])
def test_arrows_lead_from_the_id_through_its_row_to_its_output(ids):
    drawn = ParsedFigure(figure("lookup", torch.zeros(8, 3), ids))
    boxes = [box for box in drawn.boxes if re.search("hr-(picked|pill|row)", box.css)]

    def label_at(y, left, right):
        [box] = [b for b in boxes if b.top <= y <= b.bottom and left <= b.left <= right]
        [text] = [t.text for t in drawn.texts if box.contains(t)]
        return text

    arrows = arrow_ends(drawn)
    assert len(arrows) == 2 * len(ids)
    for place, row in enumerate(ids):
        (start, into), (out, end) = arrows[2 * place : 2 * place + 2]
        assert label_at(start[1], 0, start[0] - 5) == str(row)
        assert label_at(into[1], into[0], into[0] + 10) == str(row)
        assert out[1] == into[1]
        assert label_at(end[1], end[0], end[0] + 10) == str(row)
    starts = [start[1] for start, _ in arrows[::2]]
    assert starts == sorted(starts)


@given(st.data(), st.sampled_from(sorted(WORDS)))
def test_every_number_of_the_output_comes_from_the_table(data, lang):
    table = data.draw(tables())
    ids = data.draw(st.lists(st.integers(0, len(table) - 1), max_size=9))
    tokens = data.draw(st.none() | st.just([HOSTILE[i % len(HOSTILE)] for i in range(len(ids))]))
    drawn = ParsedFigure(figure("lookup", table, column_ids(ids), tokens=tokens, lang=lang))
    assert_no_overlap(drawn)
    inside, output = drawn.selected_rows()
    assert output == [(str(row), expected_texts(table, row)) for row in ids[:6]]
    assert inside == [(str(row), expected_texts(table, row)) for row in sorted(set(ids[:6]))]
    for _, label, texts in drawn.lines("hr-row"):
        assert texts == expected_texts(table, int(label))
    # Together, the drawn and omitted rows make up the whole table, in order.
    gaps = [int(texts[0].split()[0]) for _, _, texts in drawn.lines("hr-gap")]
    assert len(inside) + len(drawn.lines("hr-row")) + sum(gaps) == len(table)
    assert min(gaps, default=2) >= 2
    more = [text for text in drawn.words() if text.startswith("… ")]
    assert [re.findall(r"\d+", text) for text in more] == [[str(len(ids) - 6)]] * 2 * (len(ids) > 6)


def hues_of(*args, **kwargs):
    """Return the color of each selected row, keyed by the row's label."""
    drawn = ParsedFigure(figure(*args, **kwargs))
    pills = [box for box in drawn.boxes if "hr-pill" in box.css]
    inside = [(box, text) for box in pills for text in drawn.texts if box.contains(text)]
    assert inside
    return {int(text.text): box.css.split()[-1] for box, text in inside}


def test_a_row_keeps_its_color_in_every_figure_of_a_table():
    table = example_a()
    hues = hues_of("lookup", table, [0, 1, 2, 3])
    assert len(set(hues.values())) == 4
    assert hues_of("lookup", table, [3, 1]) == {row: hues[row] for row in (1, 3)}
    assert hues_of("gradient", table, [2, 3, 2], gradient=torch.ones(3, 5)) == {
        row: hues[row] for row in (2, 3)
    }
    for row, hue in hues.items():
        assert hues_of("product", table, [row]) == {row: hue}
        frame = [box.css for box in ParsedFigure(figure("product", table, [row])).boxes]
        assert f"hr-frame hr-{hue.removeprefix('hr-')}" in frame


def test_six_selected_rows_have_six_colors():
    assert len(set(hues_of("lookup", torch.rand(100, 2), [0, 6, 12, 18, 24, 99]).values())) == 6


def test_gaps_stand_in_place_of_the_omitted_rows():
    drawn = ParsedFigure(figure("lookup", torch.zeros(50257, 768), [500, 3]))
    gaps = [(label, texts) for _, label, texts in drawn.lines("hr-gap")]
    assert gaps == [("⋮", ["2 rows"]), ("⋮", ["496 rows"]), ("⋮", ["49,755 rows"])]
    boxes = [box for box in drawn.boxes if re.search("hr-(row|gap|picked)", box.css)]
    inside = sorted((box for box in boxes if box.right < drawn.output_x), key=lambda box: box.top)
    kinds = [re.search("row|gap|picked", box.css).group() for box in inside]
    assert kinds == ["row", "gap", "picked", "gap", "picked", "gap", "row"]
    assert "table: 50,257 rows × 768 columns" in drawn.words()
    assert "output: 2 rows × 768 columns" in drawn.words()


@pytest.mark.parametrize("lang", WORDS)
def test_long_counts_fit(lang):
    table = torch.full((1, 1), math.nan).expand(1_000_000, 2)  # narrow and long
    for columns, ids in ((2, [500_000]), (1, [3]), (0, [3]), (2, range(500_000))):
        tall = column_ids([2 * i % 10 for i in ids] if len(ids) > 1 else ids)
        assert_no_overlap(ParsedFigure(figure("lookup", table[:, :columns], tall, lang=lang)))
    assert_no_overlap(ParsedFigure(figure("product", table, 500_000, lang=lang)))


def test_tables_without_ids_columns_or_rows():
    empty = ParsedFigure(figure("lookup", example_a(), []))
    assert "no ids" in empty.words()
    assert empty.selected_rows() == ([], [])
    assert len(empty.lines("hr-row")) == 4
    assert not arrow_ends(empty)
    for shape, ids in (((4, 0), [1]), ((0, 3), []), ((0, 0), []), ((9, 0), [4, 4])):
        assert_no_overlap(ParsedFigure(figure("lookup", torch.zeros(shape), ids)))


# Product


def test_product_of_example_a_keeps_its_minus_sign():
    drawn = ParsedFigure(figure("product", example_a(), 3, column=0))
    assert drawn.lines("hr-picked")[0][1:] == ("3", ["1", "×", "-2.8400", "=", "-2.8400"])
    assert [texts for _, _, texts in drawn.lines("hr-frame")] == [["-2.8400"]]
    zeros = [texts for _, _, texts in drawn.lines("hr-row")]
    assert zeros == [["0", "×", x, "=", "0"] for x in ("0.3374", "1.3010", "0.6957")]
    assert drawn.words().count("-2.8400") == 3
    assert "3 of 4 multiplications are by zero." in drawn.words()
    assert "The sum equals the entry in row 3. A lookup just reads that entry." in drawn.words()
    everything = html.unescape("".join(drawn.root.itertext()))
    assert not re.search(r"(?<!-)2\.8400", everything)


@given(st.data(), st.sampled_from(sorted(WORDS)))
def test_products_and_sum_match_the_one_hot(data, lang):
    table = data.draw(tables(min_columns=1))
    rows, columns = table.shape
    picked = data.draw(st.integers(0, rows - 1))
    column = data.draw(st.integers(0, columns - 1))
    ids = data.draw(st.sampled_from([picked, [picked], torch.tensor([[picked]])]))
    drawn = ParsedFigure(figure("product", table, ids, column=column, tokens=["fox"], lang=lang))
    assert_no_overlap(drawn)
    entries = table[:, column].tolist()
    one_hot = [float(row == picked) for row in range(rows)]
    products = [a * b for a, b in zip(one_hot, entries, strict=True)]

    def shown(row):
        if row == picked or math.isnan(products[row]):
            return format_number(products[row])
        return "0"

    for _, label, texts in [*drawn.lines("hr-picked"), *drawn.lines("hr-row")]:
        row = int(label)
        assert texts == [str(int(one_hot[row])), "×", format_number(entries[row]), "=", shown(row)]
    assert [label for _, label, _ in drawn.lines("hr-picked")] == [str(picked)]
    [[_, _, [total]]] = drawn.lines("hr-frame")
    assert total == format_number(sum(products))
    left = [(int(t[0].split()[0]), t[1]) for _, _, t in drawn.lines("hr-gap")]
    drawn_rows = [int(label) for _, label, _ in drawn.lines("hr-row")]
    assert sum(count for count, _ in left) + len(drawn_rows) + 1 == rows
    hidden = [row for row in range(rows) if row not in [*drawn_rows, picked]]
    poisoned = any(math.isnan(products[row]) for row in hidden)
    assert any(product == "nan" for _, product in left) == poisoned


@pytest.mark.parametrize("dtype", TABLE_DTYPES, ids=str)
@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_omitted_inf_or_nan_spreads_in_the_product_but_not_in_the_lookup(bad, dtype):
    table = torch.ones(1000, 3, dtype=dtype)
    table[700, 1] = bad
    drawn = ParsedFigure(figure("product", table, 400, column=1))
    gaps = [texts for _, _, texts in drawn.lines("hr-gap")]
    assert gaps == [["399 multiplications by zero", "0"], ["598 multiplications by zero", "nan"]]
    assert [texts for _, _, texts in drawn.lines("hr-frame")] == [["nan"]]
    note = "0 × inf and 0 × nan are nan. A lookup reads only row 400: 1.0000."
    assert note in drawn.words()
    assert "nan" not in "".join(figure("lookup", table, 400).svg.split("<text")[1:])
    clean = ParsedFigure(figure("product", table, 400, column=0))
    assert [texts for _, _, texts in clean.lines("hr-frame")] == [["1.0000"]]


def test_figure_says_that_the_sum_loses_a_negative_zero():
    drawn = ParsedFigure(figure("product", torch.tensor([[1.0], [-0.0]]), 1))
    assert drawn.lines("hr-picked")[0][2] == ["1", "×", "-0.0000", "=", "-0.0000"]
    assert [texts for _, _, texts in drawn.lines("hr-frame")] == [["0.0000"]]
    assert "Adding zeros loses the sign. A lookup keeps it: -0.0000." in drawn.words()
    assert "1 of 2 multiplications is by zero." in drawn.words()


# Unusual tables and tokens, and embedding in web pages


@pytest.mark.parametrize("kind", TABLE_KINDS)
@pytest.mark.parametrize("dtype", TABLE_DTYPES, ids=str)
def test_dtype_strides_and_requires_grad_do_not_change_the_figure(kind, dtype):
    values = torch.arange(60).reshape(12, 5).to(dtype) / 8
    plain = draw_kind(kind, values, [7], column=2).svg
    strided = torch.zeros(24, 10, dtype=dtype)[::2, ::2].copy_(values)
    transposed = values.t().contiguous().t()
    parameter = torch.nn.Parameter(values.clone())
    for table in (strided, transposed, parameter, values.clone().requires_grad_() * 1):
        assert draw_kind(kind, table, torch.tensor([7], dtype=torch.int32), column=2).svg == plain
    assert parameter.grad is None
    assert torch.equal(strided, values)


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_large_table_is_neither_copied_nor_scanned(kind):
    # The table spans 4 TB of addresses but stores one column. Reading all 4 TB would take too long.
    table = torch.zeros(1_000_000, 1).expand(1_000_000, 1_000_000)
    drawn = ParsedFigure(draw_kind(kind, table, [31_337], column=999_999))
    assert_no_overlap(drawn)


@pytest.mark.parametrize("kind", TABLE_KINDS)
@pytest.mark.parametrize("lang", WORDS)
@pytest.mark.parametrize("token", HOSTILE, ids=lambda token: ascii(token)[:20])
def test_hostile_token_is_escaped(kind, lang, token):
    fig = draw_kind(kind, example_a(), [3], tokens=[token], lang=lang)
    fig.svg.encode()
    drawn = ParsedFigure(fig)
    assert_no_overlap(drawn)
    tags = {element.tag.removeprefix(SVG) for element in drawn.root.iter()}
    assert tags <= {"svg", "title", "desc", "style", "rect", "text", "path"}
    harmless = ParsedFigure(draw_kind(kind, example_a(), [3], tokens=["fox"], lang=lang))
    assert len(list(drawn.root.iter())) == len(list(harmless.root.iter()))
    shown = f'"{elide(escape_unprintable(token), 14)}"'
    assert any(shown in text for text in drawn.words())
    assert shown in drawn.words("desc")[0]
    assert all(char.isprintable() or char == "\n" for char in fig.svg)


@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_svg_needs_no_other_file_and_contains_a_description(kind):
    fig = draw_kind(kind, example_a(), [3], tokens=["jumps"])
    assert fig._repr_svg_() == str(fig) == fig.svg
    assert repr(fig) == f"<Figure: SVG of {len(fig.svg):,} characters>"
    with pytest.raises(FrozenInstanceError):
        fig.svg = ""
    drawn = ParsedFigure(fig)
    assert drawn.root.get("role") == "img"
    named = [drawn.root.find(f"{SVG}{tag}") for tag in ("title", "desc")]
    assert drawn.root.get("aria-labelledby") == " ".join(part.get("id") for part in named)
    assert all(part.text for part in named)
    assert "-2.8400" in named[1].text
    assert '"jumps"' in named[1].text
    assert drawn.root.get("style") == "max-width:100%;height:auto"
    references = re.findall(r"https?:[^\"]*|url\(|href|<script|@import|\son\w+=", fig.svg)
    assert references == ["http://www.w3.org/2000/svg"]
    selectors = re.findall(r"([^{}\n]+) {", drawn.words("style")[0])
    rules = [rule for rule in selectors if not rule.strip().startswith("@media")]
    assert all(part.strip().startswith(".hotrow ") for r in rules for part in r.split(","))
    assert "@media screen and (prefers-color-scheme: dark)" in fig.svg
    # Some sites remove the style; the figure is then black on white.
    page, *boxes = drawn.root.iter(f"{SVG}rect")
    assert page.get("fill") == "#fff"
    assert {box.get("fill") for box in boxes} == {"none"}
    assert {line.get("fill") for line in drawn.root.iter(f"{SVG}path")} <= {"none"}
    assert not any(text.get("fill") for text in drawn.root.iter(f"{SVG}text"))


def test_same_arguments_give_the_same_svg_and_others_other_element_ids():
    def named(*args, **kwargs):
        return ParsedFigure(figure(*args, **kwargs)).root.get("aria-labelledby")

    table = example_a()
    assert figure("lookup", table, [1, 2]).svg == figure("lookup", table, (1, 2)).svg
    names = [
        named("lookup", table, [1, 2]),
        named("lookup", table, [2, 1]),
        named("lookup", table + 1, [1, 2]),
        named("lookup", table, [1, 2], lang="zh-CN"),
        named("product", table, [1]),
    ]
    assert len(set(names)) == len(names)


def luminance(colour):
    digits = colour.removeprefix("#")
    digits = digits if len(digits) == 6 else "".join(2 * digit for digit in digits)
    parts = [int(digits[place : place + 2], 16) / 255 for place in (0, 2, 4)]
    linear = [x / 12.92 if x <= 0.04045 else ((x + 0.055) / 1.055) ** 2.4 for x in parts]
    return sum(a * b for a, b in zip((0.2126, 0.7152, 0.0722), linear, strict=True))


@pytest.mark.parametrize("name", ["ink", "muted", "h0", "h1", "h2", "h3", "h4", "h5"])
@pytest.mark.parametrize("scheme", [0, 1])
@pytest.mark.parametrize("ground", ["page", "row"])
def test_text_and_rows_have_enough_contrast_in_light_and_dark_mode(name, scheme, ground):
    light, dark = sorted((luminance(COLOURS[key][scheme]) for key in (name, ground)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) >= 4.5


@pytest.mark.parametrize("ids", [[], [3], [3, 1, 3], [9, 8, 7, 6, 5, 4, 3, 2]])
@pytest.mark.parametrize("kind", TABLE_KINDS)
def test_chinese_figures_are_in_chinese(kind, ids):
    if kind == "product":
        ids = ids[:1] or [0]
    for table in (torch.ones(4, 2), torch.ones(100, 20), torch.full((30, 3), math.inf)):
        inside = [i % len(table) for i in ids]
        fig = draw_kind(kind, table, column_ids(inside), tokens=["词"] * len(ids), lang="zh-CN")
        drawn = ParsedFigure(fig)
        assert drawn.root.get("lang") == "zh-CN"
        words = " ".join(drawn.words() + drawn.words("title") + drawn.words("desc"))
        assert set(re.findall("[A-Za-z]+", words)) <= {"token", "ID", "inf", "nan"}
        assert "嵌入矩阵" in words
        assert "词元（token）" in words


def chinese_descriptions():
    """Yield the descriptions of Chinese figures of every kind."""
    for kind in TABLE_KINDS:
        for ids in ([3], [3, 1, 3], [9, 8, 7, 6, 5, 4, 3, 2], []):
            if kind == "product" and len(ids) != 1:
                continue
            tokens = ["词"] * len(ids)
            table = torch.ones(40, 2)
            yield kind, draw_kind(kind, table, column_ids(ids), tokens=tokens, lang="zh-CN")
    yield "cost", figure("cost", D=256, N=100, measured=[(10, 1, 2)], lang="zh-CN")
    name = "steps that rows have missed"
    statistics = Statistics(12, 10, 2, 0, 0, 0, name, ((0, 0, 3), (1, 3, 9)))
    yield "idle", figure("idle", statistics=statistics, lang="zh-CN")


def test_chinese_descriptions_have_chinese_punctuation_and_full_sentences():
    kinds = set()
    for kind, drawn in chinese_descriptions():
        kinds.add(kind)
        [description] = ParsedFigure(drawn).words("desc")
        mixed = "[\u4e00-\u9fff）。，：；][.,:;]|[.,:;][\u4e00-\u9fff]|[。，：；] |个[0-9]"
        assert re.findall(f".{{0,9}}(?:{mixed}).{{0,9}}", description) == [], kind
        assert description.endswith("。"), kind
    assert kinds == {*TABLE_KINDS, "cost", "idle"}


def test_both_languages_have_the_same_keys_and_placeholders():
    assert sorted(WORDS) == ["en", "zh-CN"]
    assert WORDS["en"].keys() == WORDS["zh-CN"].keys()
    for key, english in WORDS["en"].items():
        places = [
            {frozenset(re.findall(r"{\w+}", text)) for text in ((t,) if isinstance(t, str) else t)}
            for t in (english, WORDS["zh-CN"][key])
        ]
        assert places[0] == places[1], key


# Errors

DTYPES = (
    "but the dtype of a table must be one of float64, float32, bfloat16, float16: "
    "convert it with .float()"
)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"kind": "picture"},
            "kind is 'picture', but it must be one of 'lookup', 'product', 'gradient', 'cost'",
        ),
        ({"kind": np.array(["lookup", "cost"])}, "kind is array(['lookup', 'cost']"),
        (
            {"kind": ["lookup"]},
            "kind is ['lookup'], but it must be one of 'lookup', 'product', 'gradient', 'cost'",
        ),
        ({"lang": "fr"}, "lang is 'fr', but it must be one of 'en', 'zh-CN'"),
        ({"table": [[1.0]]}, "table is of type list, but a table must be a tensor"),
        ({"table": torch.nn.Embedding(2, 2)}, "for example the weight of a layer"),
        ({"table": torch.ones(3)}, "table has shape (3,), but a table must be 2-D (rows, columns)"),
        ({"table": torch.ones(3, 2, 1)}, "table has shape (3, 2, 1), but a table must be 2-D"),
        ({"table": torch.ones(3, 2).int()}, f"table is int32, {DTYPES}"),
        ({"table": torch.ones(3, 2).to(torch.complex64)}, f"table is complex64, {DTYPES}"),
        ({"table": torch.ones(3, 2, device="meta")}, "a strided tensor on meta"),
        ({"table": torch.ones(3, 2).to_sparse()}, "a sparse_coo tensor on cpu"),
        ({"ids": [1.5]}, "ids is float32 of shape (1,), but ids must be int64 or int32"),
        ({"ids": "fox"}, "ids cannot be converted"),
        ({"tokens": ["a", "b"]}, "tokens has length 2, but the number of ids is 1: pass one token"),
        ({"tokens": []}, "tokens has length 0, but the number of ids is 1: pass one token"),
        ({"tokens": "a"}, "tokens is 'a', but it must be a list of str, one for each id"),
        ({"tokens": [b"a"]}, "tokens is [b'a'], but it must be a list of str"),
        ({"tokens": 7}, "tokens is 7, but it must be a list of str"),
        ({"kind": "product", "ids": [1, 2]}, "there are 2 ids, but a 'product' figure needs"),
        ({"kind": "product", "ids": []}, "there are 0 ids, but a 'product' figure needs"),
        ({"kind": "product", "column": 1.0}, "column is 1.0, but it must be an int"),
        ({"kind": "product", "column": "a"}, "column is 'a', but it must be an int"),
    ],
    ids=str,
)
def test_errors_name_the_argument_the_value_and_the_choices(change, message):
    arguments = {"kind": "lookup", "table": torch.ones(3, 2), "ids": [1]} | change
    with pytest.raises(HotrowError) as caught:
        figure(**arguments)
    assert message in str(caught.value)
    assert not isinstance(caught.value, IndexError)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"ids": [0, 3]}, "ids[1] = 3, but the table has 3 rows (valid ids: 0..2)"),
        ({"ids": -1}, "ids = -1, but the table has 3 rows (valid ids: 0..2)"),
        ({"ids": [0] * 50 + [9]}, "ids[50] = 9"),  # not among the drawn ids
        ({"column": 2}, "column = 2, but the table has 2 columns (valid columns: 0..1)"),
        ({"column": -1}, "column = -1, but the table has 2 columns (valid columns: 0..1)"),
        ({"table": torch.ones(3, 0)}, "column = 0, but the table has 0 columns (no column is"),
    ],
    ids=str,
)
def test_out_of_range_is_an_index_error(change, message):
    arguments = {"kind": "product", "table": torch.ones(3, 2), "ids": [1]} | change
    with pytest.raises(HotrowIndexError) as caught:
        figure(**arguments)
    assert message in str(caught.value)


# Text


@given(st.text())
def test_escaped_text_is_printable_and_keeps_printable_characters(text):
    shown = escape_unprintable(text)
    assert shown.isprintable()
    assert escape_unprintable(shown) == shown
    if text.isprintable():
        assert shown == text


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("\x1b[2J", r"\x1b[2J"),
        ("a\r\nb\t", r"a\r\nb\t"),
        ("\u202e\u200b\u2066\ufeff", r"\u202e\u200b\u2066\ufeff"),
        ("\ud83d", r"\ud83d"),
        ("\U000e0041\u00ad\xa0", r"\U000e0041\xad\xa0"),
        ("词元 token 🙂", "词元 token 🙂"),
    ],
)
def test_unprintable_characters_are_escaped(text, shown):
    assert escape_unprintable(text) == shown


@given(st.text().map(escape_unprintable), st.integers(1, 20))
def test_elided_text_fits_and_ends_in_an_ellipsis(text, columns):
    cut = elide(text, columns)
    assert display_width(cut) <= columns
    assert cut == text or (cut.endswith("…") and text.startswith(cut[:-1]))


def test_excess_combining_marks_are_cut():
    assert elide("e" + "\u0301" * 500, 14) == "e" + "\u0301" * 4 + "…"
    assert elide("a" * 14, 14) == "a" * 14
    assert elide("a" * 15, 14) == "a" * 13 + "…"
    assert elide("嵌入矩阵查找表", 14) == "嵌入矩阵查找表"
    assert elide("a嵌入矩阵查找表", 14) == "a嵌入矩阵查找…"


@given(st.floats())
def test_formatted_number_is_close_to_the_number(x):
    shown = format_number(x)
    if math.isnan(x) or math.isinf(x):
        assert shown == str(x)
        return
    assert shown.startswith("-") == (math.copysign(1, x) < 0)
    # Compare fractions: near the largest float, the rounded text can overflow a float.
    exact = Fraction(x)
    assert abs(Fraction(shown) - exact) <= Fraction(51, 10_000) * abs(exact) or x == 0
    assert len(shown) <= 10 or "e" in shown


# Arguments of each kind

ARGUMENTS = {
    "table": torch.ones(3, 2),
    "ids": [1],
    "column": 0,
    "tokens": ["fox"],
    "gradient": torch.ones(1, 2),
    "D": 2,
    "N": 1,
    "measured": [(10, 1.0, 1.0)],
    "statistics": Statistics(1, 1, 0, 0, 0, 0, "steps that rows have missed", ((0, 0, 1),)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_kind_accepts_all_of_its_arguments_and_no_others(kind):
    _, needs, takes = KINDS[kind]
    own = {name: ARGUMENTS[name] for name in [*needs, *takes]}
    everything = figure(kind, **own).svg
    assert everything
    for name in ARGUMENTS.keys() - own.keys():
        with pytest.raises(HotrowError, match=f"^{name} was passed, but a '{kind}' fig"):
            figure(kind, **own, **{name: ARGUMENTS[name]})
    for name in own:
        fewer = {key: value for key, value in own.items() if key != name}
        if name in needs:
            with pytest.raises(HotrowError, match=f"^a '{kind}' figure needs {name}: pass"):
                figure(kind, **fewer)
        else:
            assert (figure(kind, **fewer).svg == everything) == (name == "column")
