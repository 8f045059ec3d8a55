"""The "gradient" figure: rows of the output's gradient, added to rows of the table's gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.figures import svg
from hotrow.figures.excerpt import MAX_IDS, ColumnExcerpt, arrow_offset, row_hues, row_spans
from hotrow.figures.words import Translate, in_parentheses
from hotrow.inputs.text import format_number


def draw_gradient(
    table: Tensor, ids: Tensor, tokens: list[str], gradient: Tensor, translate: Translate
) -> svg.Drawing:
    """Draw an arrow from each row of the (N, D) `gradient` to its row in the table's gradient."""
    rows, columns = table.shape
    shown: list[int] = ids[:MAX_IDS].tolist()
    hues, spans, excerpt = row_hues(shown), row_spans(rows, shown), ColumnExcerpt(columns)
    upstream_texts = list(_format_rows(gradient[:MAX_IDS, excerpt.drawn], excerpt))
    gradient_texts = _format_gradient(spans, ids, gradient[:, excerpt.drawn], excerpt)
    touched = torch.unique(ids)
    texts, use_counts = {}, {}
    for span in spans:
        touched_count, count = _count_in(touched, span), _count_in(ids, span)
        gap = translate(
            "mixed" if touched_count else "zeros", len(span), touched=f"{touched_count:,}"
        )
        texts[span.start] = [
            *([gap] if len(span) > 1 else gradient_texts[span.start]),
            f"{count:,}",
        ]
        use_counts[span.start] = count

    places = excerpt.shorten(list(map(str, excerpt.drawn)))
    from_head = svg.Line("ID", places, "mono muted", "")
    from_lines = [
        svg.selected_line(row, line, hues[row])
        for row, line in zip(shown, upstream_texts, strict=True)
    ]
    into_head = svg.Line(translate("row"), [*places, translate("added")], "mono muted", "")
    into_lines = [
        line if len(span) > 1 or use_counts[span.start] else line._replace(ink="mono muted")
        for span, line in zip(spans, svg.row_lines(spans, texts, hues), strict=True)
    ]
    from_label, from_fitted = svg.fit([from_head, *from_lines], ["end"] * len(places))
    into_label, into_fitted = svg.fit([into_head, *into_lines], ["end"] * (len(places) + 1))

    across = translate("columns", columns)
    from_heading = translate("upstream", rows=translate("rows", len(ids)), columns=across)
    into_heading = translate("scattered", rows=translate("rows", rows), columns=across)
    omitted = len(ids) - len(shown)
    note = translate("more", omitted) if omitted else "" if shown else translate("none")
    # From left to right: tokens, ids with their rows, arrows, the table's gradient.
    upstream_x = svg.MARGIN + (max(map(svg.pixel_width, tokens)) + svg.GAP if any(tokens) else 0)
    from_end = upstream_x + from_label + svg.GAP + sum(column.width for column in from_fitted)
    headed = max(
        from_end,
        svg.MARGIN + svg.pixel_width(from_heading),
        svg.MARGIN + svg.pixel_width(note, svg.SMALL),
    )
    into_x = headed + svg.ARROW
    heading_y = svg.MARGIN + 44
    top = heading_y + 58
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, translate("gradient"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, heading_y, from_heading, "bold"),
        svg.label(into_x, heading_y, into_heading, "bold"),
        *svg.grid(upstream_x, top - svg.ROW, [from_head], from_label, from_fitted),
        *svg.grid(upstream_x, top, from_lines, from_label, from_fitted, svg.PITCH),
        *svg.grid(into_x, top - svg.ROW, [into_head, *into_lines], into_label, into_fitted),
    ]
    arrows = []
    description = [translate("sentence", text=text) for text in (from_heading, into_heading)]
    row_y = {span.start: top + svg.ROW * (place + 0.5) for place, span in enumerate(spans)}
    for place, (row, token) in enumerate(zip(shown, tokens, strict=True)):
        y = top + place * svg.PITCH
        cells.append(svg.label(svg.MARGIN, y, token, "mono"))
        description.append(
            translate(
                "adds", id=row, token=in_parentheses(token), values=", ".join(upstream_texts[place])
            )
        )
        into = row_y[row] + arrow_offset(shown, place)
        arrows.append((from_end, y + svg.ROW / 2, into_x, into, hues[row]))
    for row in hues:
        *values, added = texts[row]
        description.append(translate("holds", row=row, values=", ".join(values), uses=added))
    if note:
        description.append(translate("sentence", text=note))
        y = top + len(shown) * svg.PITCH
        cells.append(svg.label(svg.MARGIN, y, note, "muted", svg.SMALL))
    untouched = translate("untouched", rows - len(touched), rows=f"{rows:,}")
    description.append(untouched)
    lines = max((len(shown) + bool(note)) * svg.PITCH, len(spans) * svg.ROW)
    cells.append(svg.label(svg.MARGIN, top + lines + svg.GAP, untouched))
    return svg.Drawing(translate("gradient"), translate("space").join(description), cells, arrows)


def check_gradient(gradient: Any, ids: Tensor, table: Tensor) -> Tensor:
    """Check the output's gradient against the ids and the table, and reshape it to (N, D)."""
    if not isinstance(gradient, Tensor):
        raise HotrowError(
            f"gradient is of type {type(gradient).__name__}, but it must be a tensor",
            fix="pass the gradient of the output, with one row for each id",
        )
    wanted = (*ids.shape, table.shape[1])
    if tuple(gradient.shape) not in (wanted, (ids.numel(), table.shape[1])):
        raise HotrowError(
            f"gradient has shape {tuple(gradient.shape)}, but the output has shape {wanted}"
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


def _format_rows(values: Tensor, excerpt: ColumnExcerpt) -> Iterator[list[str]]:
    return (excerpt.shorten([format_number(x) for x in line]) for line in values.tolist())


def _count_in(ids: Tensor, span: range) -> int:
    return int(((ids >= span.start) & (ids < span.stop)).sum())


def _format_gradient(
    spans: list[range], ids: Tensor, gradient: Tensor, excerpt: ColumnExcerpt
) -> dict[int, list[str]]:
    """Compute the drawn rows of the table's gradient with torch, and format their entries."""
    rows = [span.start for span in spans if len(span) == 1]
    drawn_rows = torch.tensor(rows, dtype=ids.dtype, device=ids.device)
    used = torch.isin(ids, drawn_rows)
    places = torch.searchsorted(drawn_rows, ids[used])
    sums = torch.ops.aten.embedding_dense_backward(
        gradient[used].contiguous(), places, len(rows), -1, False
    )
    touched = set(ids[used].tolist())
    zeros = excerpt.shorten(["0"] * len(excerpt.drawn))
    texts = zip(rows, _format_rows(sums, excerpt), strict=True)
    return {row: line if row in touched else zeros for row, line in texts}
