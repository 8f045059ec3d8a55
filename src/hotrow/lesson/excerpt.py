"""The part of a table that the page holds: a few rows and columns, and the sizes of the whole."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow import _examples
from hotrow.errors import HotrowError
from hotrow.files import Tokens
from hotrow.ids import as_ids, checked
from hotrow.tables import check_table
from hotrow.text import elide, printable

MOST_IDS, MOST_ROWS, MOST_COLUMNS = 12, 16, 5
_TOKEN_COLUMNS = 20
C_ROWS, C_COLUMNS, C_BATCH = 50_257, 256, (8, 4)


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
        }


def _bits(values: Tensor) -> str:
    numbers: str = values.detach().float().numpy().astype(">f4").tobytes().hex()
    return numbers


def examples() -> tuple[Excerpt, ...]:
    """Examples A and B whole, with the linear layer of their seed, and an excerpt of C."""
    small = (("A", _examples.A), ("B", _examples.B))
    return *(_whole(name, example) for name, example in small), _token_and_position()


def _whole(name: str, example: _examples.Example) -> Excerpt:
    table = example.table()
    V, D = table.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        linear = torch.nn.Linear(V, D, bias=False).weight.detach()
    return Excerpt(name, V, D, tuple(range(V)), table, example.ids, linear=linear)


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
        HotrowError: no id, no row, or no column; ids outside the table.
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
    if table is None:
        generator = torch.Generator().manual_seed(123)
        rows = torch.randn(len(labels), MOST_COLUMNS, generator=generator)
    else:
        rows = table.detach()[labels, :MOST_COLUMNS].float().cpu()
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
    )


def _with_neighbours(ids: list[int], V: int) -> list[int]:
    """The ids and, as far as there is room, rows that nobody selected: their neighbours."""
    held = set(ids)
    for id in dict.fromkeys(ids):
        for near in (id + 1, id - 1):
            if 0 <= near < V and len(held) < min(MOST_ROWS, len(set(ids)) + 4):
                held.add(near)
    return sorted(held)
