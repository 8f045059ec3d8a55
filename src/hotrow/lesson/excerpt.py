"""The excerpt of a table that the page shows: a few rows and columns, and the table's full size."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, check_ids
from hotrow.inputs import examples
from hotrow.inputs.tables import check_table
from hotrow.inputs.text import elide, escape_unprintable
from hotrow.inputs.tokenizer import Tokens

MAX_IDS, MAX_ROWS, MAX_COLUMNS = 12, 16, 5
_TOKEN_COLUMNS = 20
_CHUNK = 2**24  # the number of table values to check at a time
C_ROWS, C_COLUMNS, C_BATCH = 50_257, 256, (8, 4)


@dataclass(frozen=True)
class Excerpt:
    """Some rows of a table, and the ids that the page initially shows.

    Attributes:
        name: the view's name in the page's address and on its button: "A", "B", "C" or "own".
        V: the number of rows of the whole table.
        D: the number of columns of the whole table.
        labels: the id of each row of the excerpt, in ascending order.
        rows: the values of the excerpt, (rows, columns), float32.
        ids: the initial ids; each is one of the labels.
        tokens: the text of each label, or None. The texts of the examples are in words/*.json.
        title: where the table comes from, or "" for an example.
        omitted_count: the number of ids in the user's text that the page omits.
        linear: the initial weight of `torch.nn.Linear`, (columns, rows), or None.
        positions: a position table with one row for each id, or None.
        random: whether the rows are random because the user passed no table.
        non_finite_count: the number of rows that contain an inf or nan outside the excerpt.
        first_non_finite: the id of the first such row, or None.
        rounded: whether the table is float64, so that the page rounds it to float32.
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
        """Return the excerpt as a dict for JSON, with floats as the hex digits of their bits."""
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
    """Return examples A and B, each with a linear layer's weight, and an excerpt of example C."""
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
    """Return part of example C: GPT-2's vocabulary, an 8 x 4 batch of ids, and 4 positions."""
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
    row_count: int = 0,
    token_texts: Callable[[Sequence[int]], Sequence[str]] | None = None,
    title: str = "",
) -> Excerpt:
    """Return the part of the user's ids and rows that fits on a page.

    Args:
        tokens: the ids and texts of the user's tokens; None to show the first rows.
        table: the user's (V, D) table. If it is None, the rows are random, and the page says so.
        row_count: the number of rows if there is no table.
        token_texts: a function that returns the texts of ids; used for ids not in `tokens`.
        title: where the table comes from.

    Raises:
        HotrowError: there are no ids, rows or columns; an id is out of range; a value in the
            excerpt overflows float32.

    Cost: one pass over all values of the table, to find any inf or nan outside the excerpt. The
    memory use doesn't depend on the number of rows.
    """
    if table is not None:
        check_table(table, "table")
    V = len(table) if table is not None else row_count
    D = table.shape[1] if table is not None else MAX_COLUMNS
    if V == 0 or D == 0:
        raise HotrowError(f"the table is {V} x {D}, but the page needs both rows and columns")
    all_ids = list(range(min(V, 3))) if tokens is None else tokens.ids
    if not all_ids:
        raise HotrowError("the text has no tokens", fix="pass a text with at least one word")
    check_ids(as_ids(all_ids), V)
    ids = all_ids[:MAX_IDS]
    labels = _add_neighbours(ids, V)
    non_finite_count, first_non_finite = (
        (0, None) if table is None else _find_non_finite_rows(table.detach(), labels)
    )
    if table is None:
        generator = torch.Generator().manual_seed(123)
        rows = torch.randn(len(labels), MAX_COLUMNS, generator=generator)
    else:
        rows = _float32_excerpt(table.detach(), labels)
    texts = None
    if tokens is not None or token_texts is not None:
        text_by_id = dict(zip(all_ids, tokens.texts, strict=True)) if tokens is not None else {}
        others = token_texts(labels) if token_texts is not None else [""] * len(labels)
        texts = tuple(
            elide(escape_unprintable(text_by_id.get(id) or other), _TOKEN_COLUMNS)
            for id, other in zip(labels, others, strict=True)
        )
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
        non_finite_count=non_finite_count,
        first_non_finite=first_non_finite,
        rounded=table is not None and table.dtype == torch.float64,
    )


def _float32_excerpt(table: Tensor, labels: list[int]) -> Tensor:
    """Return the rows and columns of the excerpt in float32."""
    exact = table[labels, :MAX_COLUMNS].cpu()
    rows = exact.float()
    lost = (exact.isfinite() & ~rows.isfinite()).nonzero()
    if len(lost):
        place, column = lost[0].tolist()
        raise HotrowError(
            f"row {labels[place]}, column {column} of the table is "
            f"{exact[place, column].item():.3g}, which overflows float32, the page's precision",
            fix="scale the table down",
        )
    return rows


def _find_non_finite_rows(table: Tensor, labels: list[int]) -> tuple[int, int | None]:
    """Read the table in blocks to find rows that contain an inf or nan outside the excerpt.

    Return their number, and the id of the first one.
    """
    count, first = 0, None
    V, D = table.shape
    width = min(D, _CHUNK)
    height = max(1, _CHUNK // width)
    for start in range(0, V, height):
        rows = table[start : start + height]
        found = torch.zeros(len(rows), dtype=torch.bool, device=table.device)
        inside = [label - start for label in labels if start <= label < start + len(rows)]
        for left in range(0, D, width):
            bad = ~rows[:, left : left + width].isfinite()
            bad[inside, : max(MAX_COLUMNS - left, 0)] = False
            found |= bad.any(1)
        places = found.nonzero().flatten()
        count += len(places)
        if first is None and len(places):
            first = start + int(places[0])
    return count, first


def _add_neighbours(ids: list[int], V: int) -> list[int]:
    """Return the ids and, if there is room, some neighboring ids, in ascending order."""
    stored = set(ids)
    for id in dict.fromkeys(ids):
        for neighbour in (id + 1, id - 1):
            if 0 <= neighbour < V and len(stored) < min(MAX_ROWS, len(set(ids)) + 4):
                stored.add(neighbour)
    return sorted(stored)
