"""Choose which rows, columns and ids a figure shows if it can't show them all."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.inputs.text import format_number

MAX_WHOLE_ROWS, MAX_WHOLE_COLUMNS = 8, 6  # tables up to this size are drawn in full
LEADING_COLUMNS = 4  # in a wider table, only the first 4 columns and the last are drawn
MAX_IDS = 6  # the maximum number of ids drawn; each selected row has its own color


class ColumnExcerpt(NamedTuple):
    """The columns that a figure shows if the table has `total` columns."""

    total: int

    @property
    def drawn(self) -> list[int]:
        """The columns to draw: all of them, or the first few and the last."""
        if self.total <= MAX_WHOLE_COLUMNS:
            return list(range(self.total))
        return [*range(LEADING_COLUMNS), self.total - 1]

    def shorten(self, texts: list[str]) -> list[str]:
        """Return the texts of the drawn columns, with an ellipsis where columns are omitted."""
        if self.total > MAX_WHOLE_COLUMNS:
            return [*texts[:LEADING_COLUMNS], "…", *texts[LEADING_COLUMNS:]]
        return texts or [""]  # draw an empty column for a table without columns


def row_spans(rows: int, picked: Iterable[int]) -> list[range]:
    """Split 0..rows-1 into ranges: single rows to draw, and longer ranges to omit."""
    if rows <= MAX_WHOLE_ROWS:
        return [range(row, row + 1) for row in range(rows)]
    spans, start = [], 0
    for row in sorted({0, *picked, rows - 1}):
        if row > start:
            spans.append(range(start, row))
        spans.append(range(row, row + 1))
        start = row + 1
    return spans


def format_entries(table: Tensor, spans: list[range], columns: list[int]) -> dict[int, list[str]]:
    """Return the formatted entries of the drawn rows and columns, without reading any others."""
    rows = [span.start for span in spans if len(span) == 1]
    down, across = (torch.tensor(places).long().to(table.device) for places in (rows, columns))
    values = table[down.unsqueeze(-1), across].tolist()
    return {row: [format_number(x) for x in line] for row, line in zip(rows, values, strict=True)}


def row_hues(shown: Iterable[int]) -> dict[int, str]:
    """Assign a color to each row by its number, or the next free color if that color is taken."""
    hues: dict[int, str] = {}
    for row in dict.fromkeys(shown):
        colors = (f"h{(row + step) % MAX_IDS}" for step in range(MAX_IDS))
        hues[row] = next(color for color in colors if color not in hues.values())
    return hues


def arrow_offset(shown: list[int], place: int) -> float:
    """Return the vertical offset of an arrow's end, to separate arrows to the same row."""
    row = shown[place]
    times, before = shown.count(row), shown[:place].count(row)
    return (before - (times - 1) / 2) * min(8, 24 / times)
