"""The "lookup" figure: ids, the rows that they select, and the output."""

from __future__ import annotations

from torch import Tensor

from hotrow.figures import svg
from hotrow.figures.excerpt import (
    MAX_IDS,
    ColumnExcerpt,
    arrow_offset,
    format_entries,
    row_hues,
    row_spans,
)
from hotrow.figures.words import Translate, in_parentheses


def draw_lookup(table: Tensor, ids: Tensor, tokens: list[str], translate: Translate) -> svg.Drawing:
    """Draw an arrow from each id to the row that it selects, and one from the row to the output."""
    rows, columns = table.shape
    shown: list[int] = ids[:MAX_IDS].tolist()
    hues, spans, excerpt = row_hues(shown), row_spans(rows, shown), ColumnExcerpt(columns)
    entries = format_entries(table, spans, excerpt.drawn)
    texts = {row: excerpt.shorten(values) for row, values in entries.items()}
    gaps = {span.start: [translate("rows", len(span))] for span in spans if len(span) > 1}
    head = svg.Line(
        translate("row"), excerpt.shorten(list(map(str, excerpt.drawn))), "mono muted", ""
    )
    lines = [head, *svg.row_lines(spans, texts | gaps, hues)]
    outputs = [svg.selected_line(row, texts[row], hues[row]) for row in shown]
    label, fitted = svg.fit(lines, ["end"] * len(head.texts))

    across = translate("columns", columns)
    table_heading = translate("table", rows=translate("rows", rows), columns=across)
    output_heading = translate("output", rows=translate("rows", len(ids)), columns=across)
    omitted = len(ids) - len(shown)
    note = translate("more", omitted) if omitted else "" if shown else translate("none")
    # From left to right: tokens, ids, arrows, table, arrows, output.
    id_x = svg.MARGIN + (max(map(svg.pixel_width, tokens)) + svg.GAP if any(tokens) else 0)
    id_width = max([svg.pixel_width(str(row)) for row in shown], default=0) + 2 * svg.PAD
    id_end = id_x + id_width
    table_x = max(id_end + svg.ARROW, svg.MARGIN + svg.pixel_width(note, svg.SMALL) + svg.PAD)
    table_end = table_x + label + svg.GAP + sum(column.width for column in fitted)
    output_x = max(table_end, table_x + svg.pixel_width(table_heading)) + svg.ARROW
    heading_y = svg.MARGIN + 44
    top = heading_y + 58
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, translate("lookup"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, heading_y, translate("ids"), "bold"),
        svg.label(table_x, heading_y, table_heading, "bold"),
        svg.label(output_x, heading_y, output_heading, "bold"),
        *svg.grid(table_x, top - svg.ROW, lines, label, fitted),
        *svg.grid(output_x, top - svg.ROW, [head], label, fitted),
        *svg.grid(output_x, top, outputs, label, fitted, svg.PITCH),
    ]
    arrows = []
    description = [translate("sentence", text=table_heading)]
    row_y = {span.start: top + svg.ROW * (place + 0.5) for place, span in enumerate(spans)}
    for place, (row, token) in enumerate(zip(shown, tokens, strict=True)):
        y = top + place * svg.PITCH
        middle = y + svg.ROW / 2
        cells += [
            svg.label(svg.MARGIN, y, token, "mono"),
            svg.pill(id_x, y, id_width, str(row), hues[row]),
        ]
        values = ", ".join(texts[row])
        description.append(translate("picks", id=row, token=in_parentheses(token), values=values))
        via = row_y[row] + arrow_offset(shown, place)
        arrows.append((id_end, middle, table_x, via, hues[row]))
        arrows.append((table_end, via, output_x, middle, hues[row]))
    if note:
        description.append(translate("sentence", text=note))
        y = top + len(shown) * svg.PITCH
        cells += [svg.label(x, y, note, "muted", svg.SMALL) for x in (svg.MARGIN, output_x)]
    if shown:
        y = top + max((len(shown) + (omitted > 0)) * svg.PITCH, len(spans) * svg.ROW) + svg.GAP
        counting = translate("counting", shown[0] + 1, row=shown[0])
        cells.append(svg.label(svg.MARGIN, y, counting, "muted", svg.SMALL))
    return svg.Drawing(translate("lookup"), translate("space").join(description), cells, arrows)
