"""The excerpt of a table that the page shows: a few rows and columns, and the whole sizes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, check_ids
from hotrow.inputs import examples
from hotrow.inputs.files import Tokens
from hotrow.inputs.tables import check_table
from hotrow.inputs.text import elide, escape_unprintable

MAX_IDS, MAX_ROWS, MAX_COLUMNS = 12, 16, 5
_TOKEN_COLUMNS = 20
_CHUNK = 2**24  # values of a table looked at in one go
C_ROWS, C_COLUMNS, C_BATCH = 50_257, 256, (8, 4)


@dataclass(frozen=True)
class Excerpt:
    """Rows of a table, by id, and the ids that the page starts with.

    Attributes:
        name: of the view, for its address and its button: "A", "B", "C" or "own".
        V: rows of the whole table.
        D: columns of the whole table.
        labels: the id of each row of the excerpt, ascending.
        rows: (rows, columns) of the excerpt, float32.
        ids: to start with; each is among the labels.
        tokens: the text of each label, or None. The examples have theirs in words/*.json.
        title: where the table comes from, or "" for an example.
        omitted_count: how many ids of the user's text the page leaves out.
        linear: (columns, rows), what `torch.nn.Linear` starts with, or None.
        positions: a position table of one row for each id, or None.
        random: whether the rows are random, because no table was given.
        non_finite_count: how many rows of the whole table have an inf or nan outside the excerpt.
        first_non_finite: the id of the first of them, or None.
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
    omitted_count: int = 0
    linear: Tensor | None = None
    positions: Tensor | None = None
    random: bool = False
    non_finite_count: int = 0
    first_non_finite: int | None = None
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
            "left": self.omitted_count,
            "linear": None if self.linear is None else _bits(self.linear),
            "positions": None if self.positions is None else _bits(self.positions),
            "random": self.random,
            "spoiled": self.non_finite_count,
            "firstSpoiled": self.first_non_finite,
            "rounded": self.rounded,
        }


def _bits(values: Tensor) -> str:
    numbers: str = values.detach().float().numpy().astype(">f4").tobytes().hex()
    return numbers


def example_excerpts() -> tuple[Excerpt, ...]:
    """Examples A and B whole, with the linear layer of their seed, and an excerpt of C."""
    small = (("A", examples.A), ("B", examples.B))
    return *(
        _whole_excerpt(name, example) for name, example in small
    ), _token_and_position_excerpt()


def _whole_excerpt(name: str, example: examples.Example) -> Excerpt:
    table = example.table()
    V, D = table.shape
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        linear = torch.nn.Linear(V, D, bias=False).weight.detach()
    labels = tuple(range(V))
    return Excerpt(name, V, D, labels, table, example.ids, linear=linear)


def _token_and_position_excerpt() -> Excerpt:
    """Example C: GPT-2's vocabulary, a batch of 8 x 4 ids, a position table of 4 rows."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(123)
        tokens = torch.nn.Embedding(C_ROWS, C_COLUMNS).weight.detach()
        positions = torch.nn.Embedding(C_BATCH[1], C_COLUMNS).weight.detach()
        batch = torch.randint(C_ROWS, C_BATCH)
    ids = tuple(batch[0].tolist())
    labels = tuple(sorted({0, *ids, C_ROWS - 1}))
    stored = tokens[list(labels), :MAX_COLUMNS].clone()
    return Excerpt(
        "C", C_ROWS, C_COLUMNS, labels, stored, ids, positions=positions[:, :MAX_COLUMNS].clone()
    )


def user_excerpt(
    tokens: Tokens | None,
    table: Tensor | None = None,
    *,
    vocabulary: Sequence[str] | None = None,
    title: str = "",
) -> Excerpt:
    """The user's ids and rows, cut to what a page can show.

    Args:
        tokens: the ids of the user's text, and their texts; None for the first rows.
        table: (V, D), the user's table; without it the rows are random, and the page says so.
        vocabulary: the text of each id, for the rows beside the selected ones.
        title: where the table comes from.

    Raises:
        HotrowError: no id, no row, or no column; ids outside the table; a value of the excerpt
            that is finite in float64 and not in float32.

    Cost: every value of the table is read once, for an inf or nan outside the excerpt.
    """
    if table is not None:
        check_table(table, "table")
    V = len(table) if table is not None else len(vocabulary or ())
    D = table.shape[1] if table is not None else MAX_COLUMNS
    if V == 0 or D == 0:
        raise HotrowError(f"the table is {V} x {D}, and the page needs a row and a column")
    all_ids = list(range(min(V, 3))) if tokens is None else tokens.ids
    if not all_ids:
        raise HotrowError("the text has no tokens", fix="give a text with a word in it")
    check_ids(as_ids(all_ids), V)
    ids = all_ids[:MAX_IDS]
    labels = _add_neighbours(ids, V)
    non_finite_rows = [] if table is None else _find_non_finite_rows(table.detach(), labels)
    if table is None:
        generator = torch.Generator().manual_seed(123)
        rows = torch.randn(len(labels), MAX_COLUMNS, generator=generator)
    else:
        rows = _float32_excerpt(table.detach(), labels)
    texts = None
    if tokens is not None or vocabulary is not None:
        text_by_id = dict(zip(all_ids, tokens.texts, strict=True)) if tokens is not None else {}
        token_texts = (
            text_by_id.get(id) or (vocabulary[id] if vocabulary else "") for id in labels
        )
        texts = tuple(elide(escape_unprintable(text), _TOKEN_COLUMNS) for text in token_texts)
    return Excerpt(
        "own",
        V,
        D,
        tuple(labels),
        rows,
        tuple(ids),
        texts,
        title=escape_unprintable(title),
        omitted_count=len(all_ids) - len(ids),
        random=table is None,
        non_finite_count=len(non_finite_rows),
        first_non_finite=next(iter(non_finite_rows), None),
        rounded=table is not None and table.dtype == torch.float64,
    )


def _float32_excerpt(table: Tensor, labels: list[int]) -> Tensor:
    """The rows and columns of the excerpt, in float32."""
    exact = table[labels, :MAX_COLUMNS].cpu()
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


def _find_non_finite_rows(table: Tensor, labels: list[int]) -> list[int]:
    """The ids of rows with an inf or nan outside the excerpt; the table is read in parts."""
    found: list[int] = []
    stored = set(labels)
    height = max(1, _CHUNK // table.shape[1])
    for start in range(0, len(table), height):
        part = table[start : start + height]
        for place in (~part.isfinite()).any(1).nonzero().flatten().tolist():
            outside = 0 if start + place not in stored else MAX_COLUMNS
            if not part[place, outside:].isfinite().all():
                found.append(start + place)
    return found


def _add_neighbours(ids: list[int], V: int) -> list[int]:
    """The ids and, as far as there is room, unselected neighbouring rows."""
    stored = set(ids)
    for id in dict.fromkeys(ids):
        for neighbour in (id + 1, id - 1):
            if 0 <= neighbour < V and len(stored) < min(MAX_ROWS, len(set(ids)) + 4):
                stored.add(neighbour)
    return sorted(stored)
