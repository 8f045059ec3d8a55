"""The part of a table that the page holds: a few rows and columns, and the sizes of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, checked
from hotrow.inputs import examples
from hotrow.inputs.files import Tokens
from hotrow.inputs.tables import check_table
from hotrow.inputs.text import elide, printable

MOST_IDS, MOST_ROWS, MOST_COLUMNS = 12, 16, 5
_TOKEN_COLUMNS = 20
_AT_ONCE = 2**24  # values of a table looked at in one go
C_ROWS, C_COLUMNS, C_BATCH = 50_257, 256, (8, 4)
# What the ids of the small examples stand for: "fox jumps over" and "fox jumps over dog".
WORDS = {
    "A": ("the", "over", "fox", "jumps"),
    "B": ("brown", "dog", "fox", "jumps", "lazy", "over"),
}


@dataclass(frozen=True)
class Excerpt:
    """Rows of a table, by id, and the ids that the page starts with.

    Attributes:
        name: of the view, for its address and its button: "A", "B", "C" or "own".
        V: rows of the whole table.
        D: columns of the whole table.
        labels: the id of each row that is held, ascending.
        rows: (held rows, held columns) float32.
        ids: to start with; each is among the labels.
        tokens: the text of each label, or None.
        title: where the table comes from, or "" for an example.
        left: ids of the reader's text that the page leaves out.
        linear: (held columns, held rows), what `torch.nn.Linear` starts with, or None.
        positions: a position table of one row for each id, or None.
        random: whether the rows are random numbers that stand for a table not given.
        spoiled: how many rows of the whole table have an inf or nan that is not held.
        first_spoiled: the id of the first of them, or None.
        rounded: whether the table has more precision than float32, in which the page calculates.
    """

    name: str
    V: int
    D: int
    labels: tuple[int, ...]
    rows: Tensor
    ids: tuple[int, ...]
    tokens: tuple[str, ...] | None = None
    title: str = ""
    left: int = 0
    linear: Tensor | None = None
    positions: Tensor | None = None
    random: bool = False
    spoiled: int = 0
    first_spoiled: int | None = None
    rounded: bool = False

    def to_dict(self) -> dict[str, Any]:
        """For JSON. Numbers are the hexadecimal digits of their bits: exact, and NaN has some."""
        return {
            "name": self.name,
            "V": self.V,
            "D": self.D,
            "labels": self.labels,
            "columns": self.rows.shape[1],
            "rows": _bits(self.rows),
            "ids": self.ids,
            "tokens": self.tokens,
            "title": self.title,
            "left": self.left,
            "linear": None if self.linear is None else _bits(self.linear),
            "positions": None if self.positions is None else _bits(self.positions),
            "random": self.random,
            "spoiled": self.spoiled,
            "firstSpoiled": self.first_spoiled,
            "rounded": self.rounded,
        }


def _bits(values: Tensor) -> str:
    numbers: str = values.detach().float().numpy().astype(">f4").tobytes().hex()
    return numbers


def example_excerpts() -> tuple[Excerpt, ...]:
    """Examples A and B whole, with the linear layer of their seed, and an excerpt of C."""
    small = (("A", examples.A), ("B", examples.B))
    return *(_whole(name, example) for name, example in small), _token_and_position()


def _whole(name: str, example: examples.Example) -> Excerpt:
    table = example.table()
    V, D = table.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        linear = torch.nn.Linear(V, D, bias=False).weight.detach()
    labels = tuple(range(V))
    return Excerpt(name, V, D, labels, table, example.ids, WORDS[name], linear=linear)


def _token_and_position() -> Excerpt:
    """Example C: GPT-2's vocabulary, a batch of 8 x 4 ids, a position table of 4 rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        tokens = torch.nn.Embedding(C_ROWS, C_COLUMNS).weight.detach()
        positions = torch.nn.Embedding(C_BATCH[1], C_COLUMNS).weight.detach()
        batch = torch.randint(C_ROWS, C_BATCH)
    ids = tuple(batch[0].tolist())
    labels = tuple(sorted({0, *ids, C_ROWS - 1}))
    held = tokens[list(labels), :MOST_COLUMNS].clone()
    return Excerpt(
        "C", C_ROWS, C_COLUMNS, labels, held, ids, positions=positions[:, :MOST_COLUMNS].clone()
    )


def own_excerpt(
    tokens: Tokens | None,
    table: Tensor | None = None,
    *,
    vocabulary: Sequence[str] | None = None,
    title: str = "",
) -> Excerpt:
    """The reader's own ids and rows, cut to what a page can show.

    Args:
        tokens: the ids of the reader's text, and their texts; None for the first rows.
        table: (V, D), the reader's own; without it the rows are random numbers, and say so.
        vocabulary: the text of each id, for the rows beside the selected ones.
        title: where the table comes from.

    Raises:
        HotrowError: no id, no row, or no column; ids outside the table; a held value that is
            finite in float64 and not in float32.

    Cost: every value of the table is read once, for an inf or nan outside what is held.
    """
    if table is not None:
        check_table(table, "table")
    V = len(table) if table is not None else len(vocabulary or ())
    D = table.shape[1] if table is not None else MOST_COLUMNS
    if V == 0 or D == 0:
        raise HotrowError(f"the table is {V} x {D}, and the page needs a row and a column")
    given = list(range(min(V, 3))) if tokens is None else tokens.ids
    if not given:
        raise HotrowError("the text has no tokens", fix="give a text with a word in it")
    checked(as_ids(given), V)
    ids = given[:MOST_IDS]
    labels = _with_neighbours(ids, V)
    spoiled = [] if table is None else _spoiled(table.detach(), labels)
    if table is None:
        generator = torch.Generator().manual_seed(123)
        rows = torch.randn(len(labels), MOST_COLUMNS, generator=generator)
    else:
        rows = _held(table.detach(), labels)
    texts = None
    if tokens is not None or vocabulary is not None:
        known = dict(zip(given, tokens.texts, strict=True)) if tokens is not None else {}
        named = (known.get(id) or (vocabulary[id] if vocabulary else "") for id in labels)
        texts = tuple(elide(printable(text), _TOKEN_COLUMNS) for text in named)
    return Excerpt(
        "own",
        V,
        D,
        tuple(labels),
        rows,
        tuple(ids),
        texts,
        title=printable(title),
        left=len(given) - len(ids),
        random=table is None,
        spoiled=len(spoiled),
        first_spoiled=next(iter(spoiled), None),
        rounded=table is not None and table.dtype == torch.float64,
    )


def _held(table: Tensor, labels: list[int]) -> Tensor:
    """The rows and columns to hold, in float32."""
    exact = table[labels, :MOST_COLUMNS].cpu()
    rows = exact.float()
    lost = (exact.isfinite() & ~rows.isfinite()).nonzero()
    if len(lost):
        place, column = lost[0].tolist()
        raise HotrowError(
            f"the table has {exact[place, column].item():.3g} in row {labels[place]}, column "
            f"{column}, beyond float32, in which the page calculates",
            fix="scale the table down",
        )
    return rows


def _spoiled(table: Tensor, labels: list[int]) -> list[int]:
    """The ids of rows with an inf or nan that is not held; the table is read in parts."""
    found: list[int] = []
    held = set(labels)
    height = max(1, _AT_ONCE // table.shape[1])
    for start in range(0, len(table), height):
        part = table[start : start + height]
        for place in (~part.isfinite()).any(1).nonzero().flatten().tolist():
            outside = 0 if start + place not in held else MOST_COLUMNS
            if not part[place, outside:].isfinite().all():
                found.append(start + place)
    return found


def _with_neighbours(ids: list[int], V: int) -> list[int]:
    """The ids and, as far as there is room, rows that nobody selected: their neighbours."""
    held = set(ids)
    for id in dict.fromkeys(ids):
        for near in (id + 1, id - 1):
            if 0 <= near < V and len(held) < min(MOST_ROWS, len(set(ids)) + 4):
                held.add(near)
    return sorted(held)
