"""The "idle" figure: a bar for each range of idle times."""

from __future__ import annotations

from typing import Any

from hotrow.errors import HotrowError
from hotrow.figures import svg
from hotrow.figures.words import Translate

BAR_WIDTH = 320  # width of the longest bar, in pixels


def draw_idle(statistics: Any, translate: Translate) -> svg.Drawing:
    """Draw a bar for the number of rows in each range of idle times.

    Raises:
        HotrowError: `statistics` is not a `Statistics` object, or contains no idle times.
    """
    from hotrow.vocabulary import Statistics  # imported here, because only this figure needs it

    if not isinstance(statistics, Statistics):
        raise HotrowError(
            f"statistics is a {type(statistics).__name__}, but it must be a Statistics object",
            fix="pass the result of hotrow.vocabulary.stats",
        )
    if not statistics.idle:
        raise HotrowError(
            "the statistics contain no idle times",
            fix="pass the statistics of a Vocabulary, or of a table that an optimizer trains",
        )
    title, name = translate("idle"), translate(statistics.idle_name)
    summary = [translate("rows", statistics.rows)]
    if statistics.touched_rows is not None:
        summary.append(translate("touched", statistics.touched_rows))
    if statistics.frozen_rows:
        summary.append(translate("frozen", statistics.frozen_rows))
    totals = translate("comma").join(summary)
    ranges = [
        f"{least:,}" if least == most else f"{least:,}–{most:,}"
        for least, most, _ in statistics.idle
    ]
    left = svg.MARGIN + max(map(svg.pixel_width, ranges)) + svg.PAD
    largest = max(1, *(rows for *_, rows in statistics.idle))
    y = float(svg.MARGIN)
    cells = [
        svg.label(svg.MARGIN, y, title, "bold", svg.TITLE),
        svg.label(svg.MARGIN, y + 28, totals),
        svg.label(svg.MARGIN, y + 60, name, "muted", svg.SMALL),
    ]
    y += 60 + svg.ROW
    description = [translate("sentence", text=totals), translate("heading", text=name)]
    for text, (*_, rows) in zip(ranges, statistics.idle, strict=True):
        width = BAR_WIDTH * rows / largest
        number = svg.Cell(svg.MARGIN, y, left - svg.MARGIN, svg.ROW, text, "mono", anchor="end")
        bar = [svg.Cell(left, y + 4, width, svg.ROW - 8, box="picked h0")] if rows else []
        cells += [number, *bar, svg.label(left + width + svg.GAP, y, f"{rows:,}", "mono")]
        description.append(translate("idle rows", rows, range=text))
        y += svg.ROW
    return svg.Drawing(title, translate("space").join(description), cells, [])
