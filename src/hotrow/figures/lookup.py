"""Figures 1 to 3: ids, the rows that they pick, and the output."""

from __future__ import annotations

from torch import Tensor

from hotrow.figures import svg
from hotrow.figures.excerpt import POSITIONS, Columns, hues_of, numbers, parted, spans_of
from hotrow.figures.words import Say, aside


def draw_lookup(table: Tensor, ids: Tensor, tokens: list[str], say: Say) -> svg.Drawing:
    """An arrow from each id to its row, and from there to its place in the output."""
    rows, columns = table.shape
    shown: list[int] = ids[:POSITIONS].tolist()
    hues, spans, short = hues_of(shown), spans_of(rows, shown), Columns(columns)
    read = numbers(table, spans, short.drawn)
    texts = {row: short.dotted(values) for row, values in read.items()}
    gaps = {span.start: [say("rows", len(span))] for span in spans if len(span) > 1}
    head = svg.Line(say("row"), short.dotted(list(map(str, short.drawn))), "mono muted", "")
    lines = [head, *svg.lines(spans, texts | gaps, hues)]
    outputs = [svg.picked(row, texts[row], hues[row]) for row in shown]
    label, fitted = svg.fit(lines, ["end"] * len(head.texts))

    across = say("columns", columns)
    table_heading = say("table", rows=say("rows", rows), columns=across)
    output_heading = say("output", rows=say("rows", len(ids)), columns=across)
    more = len(ids) - len(shown)
    note = say("more", more) if more else "" if shown else say("none")
    # From left to right: tokens, ids, arrows, table, arrows, output.
    id_x = svg.MARGIN + (max(map(svg.px, tokens)) + svg.GAP if any(tokens) else 0)
    id_width = max([svg.px(str(row)) for row in shown], default=0) + 2 * svg.PAD
    id_end = id_x + id_width
    table_x = max(id_end + svg.ARROW, svg.MARGIN + svg.px(note, svg.SMALL) + svg.PAD)
    table_end = table_x + label + svg.GAP + sum(column.width for column in fitted)
    output_x = max(table_end, table_x + svg.px(table_heading)) + svg.ARROW
    heading_y = svg.MARGIN + 44
    top = heading_y + 58
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, say("lookup"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, heading_y, say("ids"), "bold"),
        svg.label(table_x, heading_y, table_heading, "bold"),
        svg.label(output_x, heading_y, output_heading, "bold"),
        *svg.grid(table_x, top - svg.ROW, lines, label, fitted),
        *svg.grid(output_x, top - svg.ROW, [head], label, fitted),
        *svg.grid(output_x, top, outputs, label, fitted, svg.PITCH),
    ]
    arrows = []
    told = [f"{table_heading}."]
    row_y = {span.start: top + svg.ROW * (place + 0.5) for place, span in enumerate(spans)}
    for place, (row, token) in enumerate(zip(shown, tokens, strict=True)):
        y = top + place * svg.PITCH
        middle = y + svg.ROW / 2
        cells += [
            svg.label(svg.MARGIN, y, token, "mono"),
            svg.pill(id_x, y, id_width, str(row), hues[row]),
        ]
        values = ", ".join(texts[row])
        told.append(say("picks", id=row, token=aside(token), values=values))
        via = row_y[row] + parted(shown, place)
        arrows.append((id_end, middle, table_x, via, hues[row]))
        arrows.append((table_end, via, output_x, middle, hues[row]))
    if note:
        told.append(note)
        y = top + len(shown) * svg.PITCH
        cells += [svg.label(x, y, note, "muted", svg.SMALL) for x in (svg.MARGIN, output_x)]
    if shown:
        y = top + max((len(shown) + (more > 0)) * svg.PITCH, len(spans) * svg.ROW) + svg.GAP
        counting = say("counting", shown[0] + 1, row=shown[0])
        cells.append(svg.label(svg.MARGIN, y, counting, "muted", svg.SMALL))
    return svg.Drawing(say("lookup"), " ".join(told), cells, arrows)
