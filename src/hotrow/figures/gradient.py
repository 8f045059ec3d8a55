"""Figure 6: rows of the output's gradient, scattered back to the rows of the table's."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.figures import svg
from hotrow.figures.excerpt import POSITIONS, Columns, hues_of, parted, spans_of
from hotrow.figures.words import Say, aside
from hotrow.inputs.text import number


def draw_gradient(
    table: Tensor, ids: Tensor, tokens: list[str], gradient: Tensor, say: Say
) -> svg.Drawing:
    """An arrow from each id's row of `gradient`, (N, D), to its row of the table's gradient."""
    rows, columns = table.shape
    shown: list[int] = ids[:POSITIONS].tolist()
    hues, spans, short = hues_of(shown), spans_of(rows, shown), Columns(columns)
    sent = list(_texts(gradient[:POSITIONS, short.drawn], short))
    held = _held(spans, ids, gradient[:, short.drawn], short)
    touched = torch.unique(ids)
    texts, uses = {}, {}
    for span in spans:
        some, count = _within(touched, span), _within(ids, span)
        gap = say("mixed" if some else "zeros", len(span), touched=f"{some:,}")
        texts[span.start] = [*([gap] if len(span) > 1 else held[span.start]), f"{count:,}"]
        uses[span.start] = count

    places = short.dotted(list(map(str, short.drawn)))
    from_head = svg.Line("ID", places, "mono muted", "")
    from_lines = [svg.picked(row, line, hues[row]) for row, line in zip(shown, sent, strict=True)]
    into_head = svg.Line(say("row"), [*places, say("added")], "mono muted", "")
    into_lines = [
        line if len(span) > 1 or uses[span.start] else line._replace(ink="mono muted")
        for span, line in zip(spans, svg.lines(spans, texts, hues), strict=True)
    ]
    from_label, from_fitted = svg.fit([from_head, *from_lines], ["end"] * len(places))
    into_label, into_fitted = svg.fit([into_head, *into_lines], ["end"] * (len(places) + 1))

    across = say("columns", columns)
    from_heading = say("upstream", rows=say("rows", len(ids)), columns=across)
    into_heading = say("scattered", rows=say("rows", rows), columns=across)
    more = len(ids) - len(shown)
    note = say("more", more) if more else "" if shown else say("none")
    # From left to right: tokens, ids with their rows, arrows, the table's gradient.
    from_x = svg.MARGIN + (max(map(svg.px, tokens)) + svg.GAP if any(tokens) else 0)
    from_end = from_x + from_label + svg.GAP + sum(column.width for column in from_fitted)
    headed = max(from_end, svg.MARGIN + svg.px(from_heading), svg.MARGIN + svg.px(note, svg.SMALL))
    into_x = headed + svg.ARROW
    heading_y = svg.MARGIN + 44
    top = heading_y + 58
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, say("gradient"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, heading_y, from_heading, "bold"),
        svg.label(into_x, heading_y, into_heading, "bold"),
        *svg.grid(from_x, top - svg.ROW, [from_head], from_label, from_fitted),
        *svg.grid(from_x, top, from_lines, from_label, from_fitted, svg.PITCH),
        *svg.grid(into_x, top - svg.ROW, [into_head, *into_lines], into_label, into_fitted),
    ]
    arrows = []
    told = [f"{from_heading}. {into_heading}."]
    row_y = {span.start: top + svg.ROW * (place + 0.5) for place, span in enumerate(spans)}
    for place, (row, token) in enumerate(zip(shown, tokens, strict=True)):
        y = top + place * svg.PITCH
        cells.append(svg.label(svg.MARGIN, y, token, "mono"))
        told.append(say("adds", id=row, token=aside(token), values=", ".join(sent[place])))
        into = row_y[row] + parted(shown, place)
        arrows.append((from_end, y + svg.ROW / 2, into_x, into, hues[row]))
    for row in hues:
        *values, added = texts[row]
        told.append(say("holds", row=row, values=", ".join(values), uses=added))
    if note:
        told.append(note)
        y = top + len(shown) * svg.PITCH
        cells.append(svg.label(svg.MARGIN, y, note, "muted", svg.SMALL))
    untouched = say("untouched", rows - len(touched), rows=f"{rows:,}")
    told.append(untouched)
    lines = max((len(shown) + bool(note)) * svg.PITCH, len(spans) * svg.ROW)
    cells.append(svg.label(svg.MARGIN, top + lines + svg.GAP, untouched))
    return svg.Drawing(say("gradient"), " ".join(told), cells, arrows)


def checked_gradient(gradient: Any, ids: Tensor, table: Tensor) -> Tensor:
    """The gradient of the output as (N, D), known to fit the ids and the table."""
    if not isinstance(gradient, Tensor):
        raise HotrowError(
            f"gradient is of type {type(gradient).__name__}, but the gradient of the output is "
            "a tensor, a row for each id"
        )
    wanted = (*ids.shape, table.shape[1])
    if tuple(gradient.shape) not in (wanted, (ids.numel(), table.shape[1])):
        raise HotrowError(
            f"gradient has shape {tuple(gradient.shape)}, but the output of these ids has {wanted}"
        )
    if gradient.dtype != table.dtype or gradient.device != table.device:
        raise HotrowError(
            f"gradient is {gradient.dtype} on {gradient.device}, but the table is {table.dtype} "
            f"on {table.device}",
            fix="use gradient.to(table)",
        )
    if gradient.layout != torch.strided or gradient.is_meta:
        raise HotrowError("gradient is sparse or has no values", fix="use gradient.to_dense()")
    return gradient.detach().reshape(ids.numel(), table.shape[1])


def _texts(values: Tensor, short: Columns) -> Iterator[list[str]]:
    return (short.dotted([number(x) for x in line]) for line in values.tolist())


def _within(ids: Tensor, span: range) -> int:
    return int(((ids >= span.start) & (ids < span.stop)).sum())


def _held(
    spans: list[range], ids: Tensor, gradient: Tensor, short: Columns
) -> dict[int, list[str]]:
    """The texts of the table's gradient, by row, for the rows that are drawn; torch adds up."""
    rows = [span.start for span in spans if len(span) == 1]
    drawn = torch.tensor(rows, dtype=ids.dtype, device=ids.device)
    used = torch.isin(ids, drawn)
    places = torch.searchsorted(drawn, ids[used])
    sums = torch.ops.aten.embedding_dense_backward(
        gradient[used].contiguous(), places, len(rows), -1, False
    )
    touched = set(ids[used].tolist())
    zeros = short.dotted(["0"] * len(short.drawn))
    texts = zip(rows, _texts(sums, short), strict=True)
    return {row: line if row in touched else zeros for row, line in texts}
