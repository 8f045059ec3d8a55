"""Figures 4 and 5: a one-hot row times a column of the table, every product written out."""

from __future__ import annotations

import operator
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.figures import svg
from hotrow.figures.excerpt import numbers, spans_of
from hotrow.figures.words import Say, aside
from hotrow.inputs.text import number


def draw_product(
    table: Tensor, ids: Tensor, tokens: list[str], column: Any, say: Say
) -> svg.Drawing:
    """For one id, the products of its one-hot with one column, and their sum."""
    if len(ids) != 1:
        raise HotrowError(
            f"ids has {len(ids)} ids, but a 'product' is of one", fix="give one of them"
        )
    rows, columns = table.shape
    column = _checked_column(column, columns)
    picked = int(ids[0])
    spans = spans_of(rows, [picked])
    entries = numbers(table, spans, [column])
    [entry] = entries[picked]
    heads = [say("one-hot"), "×", say("column", column=column), "=", say("by")]
    texts = {picked: ["1", "×", entry, "=", entry]}
    poisoned = False
    for span in spans:
        if picked in span:
            continue
        finite = bool(torch.isfinite(table[span.start : span.stop, column]).all())
        poisoned |= not finite
        zero = "0" if finite else "nan"
        row = span.start
        drawn = ["0", "×", *entries[row], "="] if row in entries else [say("by zero", len(span))]
        texts[row] = [*drawn, zero]
    head = svg.Line(say("row"), heads, "muted", "")
    lines = [head, *svg.lines(spans, texts, {picked: "h0"}, "mono muted")]
    # Zeros can change nothing but a sign: -0.0 + 0.0 is 0.0.
    total = "nan" if poisoned else number(table[picked, column].item() + 0.0)
    last = svg.Line("", ["", "", say("sum"), "=", total], "mono bold", "")
    label, fitted = svg.fit([*lines, last], ["middle", "middle", "end", "middle", "middle"])

    chosen = say("chosen", id=picked, token=aside(tokens[0]), column=column)
    counted = say("counted", rows - 1, rows=f"{rows:,}")
    note = "poisoned" if poisoned else "read" if total == entry else "unsigned"
    explained = say(note, row=picked, entry=entry)
    top = svg.MARGIN + 64
    sum_y = top + len(lines) * svg.ROW + svg.GAP
    sum_x = svg.MARGIN + label + svg.GAP + sum(column.width for column in fitted[:-1])
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, say("product"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, svg.MARGIN + 28, chosen, "mono"),
        *svg.grid(svg.MARGIN, top, lines, label, fitted),
        *svg.grid(svg.MARGIN, sum_y, [last], label, fitted),
        svg.Cell(sum_x, sum_y + 1, fitted[-1].width, svg.ROW - 2, box="frame h0"),
        svg.label(svg.MARGIN, sum_y + svg.ROW + svg.GAP, counted),
        svg.label(svg.MARGIN, sum_y + svg.ROW + svg.GAP + 24, explained, "muted", svg.SMALL),
    ]
    told = [f"{chosen}:", *(f"{' '.join(line.texts)};" for line in lines[1:])]
    told += [f"{say('sum')} = {total}.", counted, explained]
    return svg.Drawing(say("product"), " ".join(told), cells, [])


def _checked_column(column: Any, columns: int) -> int:
    try:
        place = operator.index(column)
    except TypeError:
        raise HotrowError(f"column is {column!r:.60}, but must be an int") from None
    if 0 <= place < columns:
        return place
    valid = f"valid 0..{columns - 1}" if columns else "no column is valid"
    raise HotrowIndexError(f"column = {place}, but the table has {columns} columns ({valid})")
