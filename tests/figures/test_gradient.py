"""Test that figure 6 shows the gradient that torch computes, and counts every use of a row."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow.errors import HotrowError
from hotrow.figures.figure import figure
from hotrow.figures.words import WORDS
from hotrow.inputs.tables import TABLE_DTYPES
from hotrow.inputs.text import format_number
from tests.support.parsed_figure import (
    VALUES,
    ParsedFigure,
    arrow_ends,
    assert_no_overlap,
    column_ids,
    draw_kind,
    tables,
)


class Scattered(ParsedFigure):
    """A parsed "gradient" figure."""

    @property
    def output_x(self):
        """The x coordinate of the table's gradient, drawn below the second heading."""
        return [text for text in self.texts if text.css == "hr-bold"][2].left

    def rows(self):
        """Return (label, texts) of every drawn row of the table's gradient."""
        lines = [*self.lines("hr-picked"), *self.lines("hr-row")]
        return [(int(label), texts) for left, label, texts in lines if left > self.output_x]

    def gaps(self):
        return [texts for _, _, texts in self.lines("hr-gap")]


def shortened(values):
    texts = [format_number(x) for x in values]
    return texts if len(texts) <= 6 else [*texts[:4], "…", texts[-1]]


@given(st.data(), st.sampled_from(sorted(WORDS)))
def test_sums_match_torch_and_every_row_is_counted(data, lang):
    table = data.draw(tables())
    rows, columns = table.shape
    ids = data.draw(st.lists(st.integers(0, rows - 1), max_size=9))
    count = len(ids) * columns
    values = data.draw(st.lists(VALUES, min_size=count, max_size=count))
    upstream = torch.tensor(values, dtype=torch.float32).reshape(len(ids), columns)
    layer = torch.nn.Embedding(rows, columns)
    layer(torch.tensor(ids, dtype=torch.long)).backward(upstream)

    drawn = Scattered(figure("gradient", table, column_ids(ids), gradient=upstream, lang=lang))
    assert_no_overlap(drawn)
    sent, _ = drawn.selected_rows()
    shown = zip(ids[:6], upstream[:6].tolist(), strict=True)
    assert sent == [(str(row), shortened(line)) for row, line in shown]
    for row, (*texts, uses) in drawn.rows():
        shown_row = shortened(layer.weight.grad[row].tolist())
        zeros = ["…" if text == "…" else "0" for text in shown_row]
        assert texts == (shown_row if row in ids else zeros)
        assert uses == str(ids.count(row))
    # Drawn and omitted rows make up the whole table; their uses add up to the number of ids.
    hidden = [int(text.split()[0]) for text, _ in drawn.gaps()]
    assert len(drawn.rows()) + sum(hidden) == rows
    uses = [int(texts[-1]) for _, texts in drawn.rows()] + [int(n) for _, n in drawn.gaps()]
    assert sum(uses) == len(ids)
    forms = WORDS[lang]["untouched"]
    forms = forms if isinstance(forms, str) else forms[rows - len(set(ids)) != 1]
    assert forms.format(n=rows - len(set(ids)), rows=rows) in drawn.words()
    assert len(arrow_ends(drawn)) == min(len(ids), 6)


@pytest.mark.parametrize("ids", [[2, 3, 2], [1] * 6, [7, 0, 5, 3, 1, 2]])
def test_each_arrow_leads_from_the_row_of_the_id_to_the_row_of_that_number(ids):
    drawn = Scattered(draw_kind("gradient", torch.ones(8, 3), ids))
    boxes = [box for box in drawn.boxes if "hr-pill" in box.css]
    for row, (start, end) in zip(ids, arrow_ends(drawn), strict=True):
        for x, y in (start, end):
            near = [box for box in boxes if box.top <= y <= box.bottom]
            near = [
                box for box in near if (box.left >= drawn.output_x) == (x > drawn.output_x - 10)
            ]
            [label] = [text.text for box in near for text in drawn.texts if box.contains(text)]
            assert label == str(row)


def test_repeated_id_adds_up_and_the_description_says_so():
    upstream = torch.tensor([[1.0, -2.0], [0.5, 0.0], [0.25, -1.0]])
    drawn = Scattered(figure("gradient", torch.zeros(4, 2), [2, 3, 2], gradient=upstream))
    assert drawn.rows() == [
        (2, ["1.2500", "-3.0000", "2"]),
        (3, ["0.5000", "0.0000", "1"]),
        (0, ["0", "0", "0"]),
        (1, ["0", "0", "0"]),
    ]
    assert "2 of 4 rows are untouched: their gradient is zero." in drawn.words()
    assert "Row 2 is 1.2500, -3.0000 (uses: 2)." in drawn.words("desc")[0]
    gray = [text.css for text in drawn.texts if text.text == "0" and text.left > drawn.output_x]
    assert set(gray) <= {"hr-mono hr-muted", "hr-muted"}


def test_omitted_ids_are_in_the_sums_and_in_the_gaps():
    ids = [50, 60, 50, 60, 50, 60, 50, 10, 10, 90, 99]
    drawn = Scattered(figure("gradient", torch.zeros(100, 1), ids, gradient=torch.ones(11, 1)))
    assert dict(drawn.rows()) == {
        50: ["4.0000", "4"],
        60: ["3.0000", "3"],
        0: ["0", "0"],
        99: ["1.0000", "1"],
    }
    assert drawn.gaps() == [
        ["49 rows, 1 of them touched", "2"],
        ["9 rows of zeros", "0"],
        ["38 rows, 1 of them touched", "1"],
    ]
    assert "… and 5 more" in drawn.words()


@pytest.mark.parametrize("bad", [math.inf, -math.inf, math.nan])
def test_inf_and_nan_reach_only_their_own_row(bad):
    upstream = torch.tensor([[bad], [1.0], [-bad]])
    drawn = Scattered(figure("gradient", torch.zeros(4, 1), [1, 2, 1], gradient=upstream))
    assert dict(drawn.rows()) == {1: ["nan", "2"], 2: ["1.0000", "1"], 0: ["0"] * 2, 3: ["0"] * 2}


@pytest.mark.parametrize("dtype", TABLE_DTYPES, ids=str)
def test_batched_ids_are_drawn_in_order(dtype):
    ids = torch.tensor([[2, 0], [2, 2]])
    upstream = torch.arange(12.0).reshape(2, 2, 3).to(dtype)
    table = torch.zeros(4, 3, dtype=dtype)
    drawn = figure("gradient", table, ids, gradient=upstream).svg
    assert drawn == figure("gradient", table, ids, gradient=upstream.reshape(4, 3)).svg
    assert drawn == figure("gradient", table, [2, 0, 2, 2], gradient=upstream.flatten(0, 1)).svg
    assert dict(Scattered(figure("gradient", table, ids, gradient=upstream)).rows())[2] == [
        *("15.0000", "18.0000", "21.0000"),
        "3",
    ]


@pytest.mark.parametrize("shape", [(4, 0), (0, 3), (0, 0), (9, 0)])
def test_empty_tables_and_no_ids(shape):
    drawn = Scattered(figure("gradient", torch.zeros(shape), [], gradient=torch.zeros(0, shape[1])))
    assert_no_overlap(drawn)
    assert "no ids" in drawn.words()
    assert f"{shape[0]} of {shape[0]} rows are untouched: their gradient is zero." in drawn.words()


@pytest.mark.parametrize(
    ("gradient", "message"),
    [
        ([[1.0, 1.0]], "gradient is of type list, but it must be a tensor"),
        (torch.ones(2, 2), "gradient has shape (2, 2), but the output has shape (1, 2)"),
        (torch.ones(2), "gradient has shape (2,), but the output has shape (1, 2)"),
        (torch.ones(1, 2).double(), "gradient is torch.float64 on cpu, but the table is torch.fl"),
        (torch.ones(1, 2).long(), "gradient is torch.int64 on cpu, but the table is torch.float3"),
        (torch.ones(1, 2, device="meta"), "on meta, but the table is torch.float32 on cpu: use"),
        (torch.ones(1, 2).to_sparse(), "gradient is sparse or has no values: use"),
    ],
    ids=str,
)
def test_errors_name_the_gradient(gradient, message):
    with pytest.raises(HotrowError) as caught:
        figure("gradient", torch.ones(3, 2), [1], gradient=gradient)
    assert message in str(caught.value)
