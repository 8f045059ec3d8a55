"""Which rows, columns and ids of a large table are drawn, and how it shows what is not."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

import torch
from torch import Tensor

from hotrow.inputs.text import number

WHOLE_ROWS, WHOLE_COLUMNS = 8, 6  # a table up to this size is drawn whole
LEADING_COLUMNS = 4  # of a wider one, these and the last
POSITIONS = 6  # ids drawn; each row they pick has a colour of its own


class Columns(NamedTuple):
    """The columns of a table, `total` of them."""

    total: int

    @property
    def drawn(self) -> list[int]:
        """All of them, or the first and the last."""
        if self.total <= WHOLE_COLUMNS:
            return list(range(self.total))
        return [*range(LEADING_COLUMNS), self.total - 1]

    def dotted(self, texts: list[str]) -> list[str]:
        """The texts of the drawn columns, with a sign for the others."""
        if self.total > WHOLE_COLUMNS:
            return [*texts[:LEADING_COLUMNS], "…", *texts[LEADING_COLUMNS:]]
        return texts or [""]  # a table without columns is drawn with an empty one


def spans_of(rows: int, picked: Iterable[int]) -> list[range]:
    """0..rows-1 in order: a row that is drawn is a range of one, longer ones are left out."""
    if rows <= WHOLE_ROWS:
        return [range(row, row + 1) for row in range(rows)]
    spans, start = [], 0
    for row in sorted({0, *picked, rows - 1}):
        if row > start:
            spans.append(range(start, row))
        spans.append(range(row, row + 1))
        start = row + 1
    return spans


def numbers(table: Tensor, spans: list[range], columns: list[int]) -> dict[int, list[str]]:
    """The texts of the drawn rows and columns, by row; nothing else is read."""
    rows = [span.start for span in spans if len(span) == 1]
    down, across = (torch.tensor(places).long().to(table.device) for places in (rows, columns))
    values = table[down.unsqueeze(-1), across].tolist()
    return {row: [number(x) for x in line] for row, line in zip(rows, values, strict=True)}


def hues_of(shown: list[int]) -> dict[int, str]:
    """A colour for each row."""
    return {row: f"h{place}" for place, row in enumerate(dict.fromkeys(shown))}


def parted(shown: list[int], place: int) -> float:
    """How far below the middle of its row an arrow ends: those of an id that comes again part."""
    row = shown[place]
    times, before = shown.count(row), shown[:place].count(row)
    return (before - (times - 1) / 2) * min(8, 24 / times)
