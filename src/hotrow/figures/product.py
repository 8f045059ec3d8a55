"""The "product" figure: a one-hot row times a table column, with all products and the sum."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.figures import svg
from hotrow.figures.excerpt import format_entries, row_hues, row_spans
from hotrow.figures.words import Translate, in_parentheses
from hotrow.inputs.text import format_number


def draw_product(
    table: Tensor, ids: Tensor, tokens: list[str], column: Any, translate: Translate
) -> svg.Drawing:
    """Draw the elementwise product of an id's one-hot vector and a table column, and its sum."""
    if len(ids) != 1:
        raise HotrowError(
            f"there are {len(ids)} ids, but a 'product' figure needs exactly one", fix="pass one id"
        )
    rows, columns = table.shape
    column = _check_column(column, columns)
    selected = int(ids[0])
    spans = row_spans(rows, [selected])
    entries = format_entries(table, spans, [column])
    [entry] = entries[selected]
    heads = [translate("one-hot"), "×", translate("column", column=column), "=", translate("by")]
    texts = {selected: ["1", "×", entry, "=", entry]}
    has_non_finite = False
    for span in spans:
        if selected in span:
            continue
        finite = bool(torch.isfinite(table[span.start : span.stop, column]).all())
        has_non_finite |= not finite
        zero = "0" if finite else "nan"
        row = span.start
        shown = (
            ["0", "×", *entries[row], "="] if row in entries else [translate("by zero", len(span))]
        )
        texts[row] = [*shown, zero]
    head = svg.Line(translate("row"), heads, "muted", "")
    hues = row_hues([selected])
    lines = [head, *svg.row_lines(spans, texts, hues, "mono muted")]
    # Adding zeros changes nothing except the sign of a negative zero: -0.0 + 0.0 is 0.0.
    total = "nan" if has_non_finite else format_number(table[selected, column].item() + 0.0)
    last = svg.Line("", ["", "", translate("sum"), "=", total], "mono bold", "")
    label, fitted = svg.fit([*lines, last], ["middle", "middle", "end", "middle", "middle"])

    chosen = translate("chosen", id=selected, token=in_parentheses(tokens[0]), column=column)
    zero_count_text = translate("counted", rows - 1, rows=f"{rows:,}")
    note = "poisoned" if has_non_finite else "read" if total == entry else "unsigned"
    explanation = translate(note, row=selected, entry=entry)
    top = svg.MARGIN + 64
    sum_y = top + len(lines) * svg.ROW + svg.GAP
    sum_x = svg.MARGIN + label + svg.GAP + sum(column.width for column in fitted[:-1])
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, translate("product"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, svg.MARGIN + 28, chosen, "mono"),
        *svg.grid(svg.MARGIN, top, lines, label, fitted),
        *svg.grid(svg.MARGIN, sum_y, [last], label, fitted),
        svg.Cell(sum_x, sum_y + 1, fitted[-1].width, svg.ROW - 2, box=f"frame {hues[selected]}"),
        svg.label(svg.MARGIN, sum_y + svg.ROW + svg.GAP, zero_count_text),
        svg.label(svg.MARGIN, sum_y + svg.ROW + svg.GAP + 24, explanation, "muted", svg.SMALL),
    ]
    sum_text = f"{translate('sum')} = {total}"
    description = [
        translate("heading", text=chosen),
        *(translate("item", text=" ".join(line.texts)) for line in lines[1:]),
        translate("sentence", text=sum_text),
        zero_count_text,
        explanation,
    ]
    return svg.Drawing(translate("product"), translate("space").join(description), cells, [])


def _check_column(column: Any, columns: int) -> int:
    try:
        place = operator.index(column)
    except TypeError:
        raise HotrowError(f"column is {column!r:.60}, but it must be an int") from None
    if 0 <= place < columns:
        return place
    valid = f"valid columns: 0..{columns - 1}" if columns else "no column is valid"
    raise HotrowIndexError(f"column = {place}, but the table has {columns} columns ({valid})")
