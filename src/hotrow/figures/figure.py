"""Drawings of a look-up as SVG, from real tensors: any table, any ids, two languages.

A kind of figure is a file of `hotrow.figures` that lays out cells and arrows; `svg.py` writes them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.figures import svg
from hotrow.figures.cost import draw_cost
from hotrow.figures.excerpt import MAX_IDS
from hotrow.figures.gradient import check_gradient, draw_gradient
from hotrow.figures.lookup import draw_lookup
from hotrow.figures.product import draw_product
from hotrow.figures.words import WORDS, Translate, translator
from hotrow.ids import as_ids, check_ids
from hotrow.inputs.tables import check_table
from hotrow.inputs.text import elide, escape_unprintable

TOKEN_COLUMNS = 14


@dataclass(frozen=True, repr=False)
class Figure:
    """A drawing. Jupyter shows it; `svg`, and `str` of it, is the SVG text."""

    svg: str

    def __repr__(self) -> str:
        return f"<Figure: SVG of {len(self.svg):,} characters>"

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.svg


def figure(
    kind: str,
    table: Tensor | None = None,
    ids: Any = None,
    *,
    column: int | None = None,
    tokens: Sequence[str] | None = None,
    gradient: Tensor | None = None,
    D: int | None = None,
    N: int | None = None,
    measured: Sequence[tuple[int, float, float]] | None = None,
    lang: str = "en",
) -> Figure:
    """Draw a look-up in a table, the product that it stands for, its gradient, or what they cost.

    ========== ======================================= ===========================================
    kind       arguments                               drawing
    ========== ======================================= ===========================================
    "lookup"   table, ids, tokens=                     the ids in order, an arrow from each to its
                                                       row, and from there to the output
    "product"  table, ids, column=0, tokens=           one id's one-hot row times one column of
                                                       the table: every product, and their sum
    "gradient" table, ids, gradient=, tokens=          the rows of the output's gradient, added to
                                                       rows of the table's; untouched ones are 0
    "cost"     D=, N=, measured=                       operations and bytes of both ways against
                                                       V, by `hotrow.cost`; and measured times
    ========== ======================================= ===========================================

    Large tables are shortened, and the drawing says by how much: all rows up to 8, else the
    first, the selected and the last; all columns up to 6, else the first 4 and the last; the
    first 6 ids. A sum in a "gradient" has all ids in it, drawn or not.

    Args:
        kind: "lookup", "product", "gradient" or "cost"; each takes its own arguments only.
        table: (V, D), float64, float32, float16 or bfloat16; only read.
        ids: int64 or int32 of any shape, a list, or an int; taken in order. "product" takes one.
        column: 0..D-1, the column of the table.
        tokens: the text of each id; what cannot be printed is shown as its escape.
        gradient: the gradient of the output, ids.shape + (D,) or (N, D), of the table's dtype.
        D: columns of the tables in a chart of cost, 1 or more.
        N: ids looked up there, 1 or more.
        measured: (V, milliseconds by one-hot matmul, milliseconds by look-up) of tables that were
            timed; the formulas' axis of V, 10 to 10 million, is lengthened to hold them.
        lang: "en" or "zh-CN", the language of the words.

    Returns:
        A `Figure`. Its SVG stands alone, follows a light or dark screen, and has its content in
        words as well. The same arguments give the same text.

    Raises:
        HotrowError: an unknown kind or language; an argument that the kind needs, or does not
            take; a table that is not 2-D and floating; ids that are not ids, or not as many as
            `tokens` or the kind needs; a gradient that is not the output's; no count, no time.
        HotrowIndexError: an id or the column lies outside the table.

    Cost: the ids and the drawn entries are read; "product" also looks through its column for
    inf and nan, since 0 times either is nan; "gradient" adds up the drawn rows and columns.

    >>> import torch
    >>> _ = torch.manual_seed(123)
    >>> table = torch.nn.Embedding(4, 5).weight
    >>> fig = figure("lookup", table, [2, 3, 1], tokens=["fox", "jumps", "over"])
    >>> "<svg" in str(fig), "-2.8400" in fig.svg
    (True, True)
    >>> fig = figure("gradient", table, [2, 3, 2], gradient=torch.ones(3, 5))
    >>> "2.0000" in fig.svg, "2 of 4 rows are untouched" in fig.svg
    (True, True)
    >>> "20.5 GB" in figure("cost", D=256, N=256, lang="zh-CN").svg
    True

    The lesson's tables and ids come from Sebastian Raschka, "Build a Large Language Model (From
    Scratch)", chapter 2.
    """
    _check_choice("kind", kind, KINDS)
    _check_choice("lang", lang, WORDS)
    arguments = {
        "table": table, "ids": ids, "column": column, "tokens": tokens, "gradient": gradient,
        "D": D, "N": N, "measured": measured,
    }  # fmt: skip
    arguments = {name: value for name, value in arguments.items() if value is not None}
    draw, required, optional = KINDS[kind]
    for name in arguments:
        if name not in required + optional:
            raise HotrowError(
                f"{name} was given, but a {kind!r} takes none",
                fix=f"it takes {_list_arguments(kind)}",
            )
    for name in required:
        if name not in arguments:
            raise HotrowError(f"a {kind!r} needs {name}", fix=f"it takes {_list_arguments(kind)}")
    return Figure(svg.write(draw(arguments, translator(lang)), lang))


def _list_arguments(kind: str) -> str:
    _, required, optional = KINDS[kind]
    return ", ".join([*required, *(f"{name} (or not)" for name in optional)])


def _check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    valid = list(choices)
    if not isinstance(value, str) or value not in valid:
        raise HotrowError(
            f"{name} is {value!r:.60}, but must be one of {', '.join(map(repr, valid))}"
        )


def _quote_tokens(tokens: Sequence[str] | None, count: int) -> list[str]:
    """The tokens to draw: escaped, shortened, in quotes that show their spaces; or empty."""
    if tokens is None:
        return [""] * min(count, MAX_IDS)
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not listed or not all(isinstance(token, str) for token in tokens):
        raise HotrowError(f"tokens is {tokens!r:.60}, but must be a list of str, one for each id")
    if len(tokens) != count:
        raise HotrowError(f"tokens has length {len(tokens)}, but ids has {count}: one for each id")
    return [f'"{elide(escape_unprintable(token), TOKEN_COLUMNS)}"' for token in tokens[:MAX_IDS]]


def _read_table(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, list[str]]:
    """The table, the ids in their shape, and the tokens to draw."""
    table = check_table(arguments["table"], "table")
    ids = check_ids(as_ids(arguments["ids"]), len(table))
    return table.detach(), ids, _quote_tokens(arguments.get("tokens"), ids.numel())


def _draw_lookup(arguments: dict[str, Any], translate: Translate) -> svg.Drawing:
    table, ids, tokens = _read_table(arguments)
    return draw_lookup(table, ids.flatten(), tokens, translate)


def _draw_product(arguments: dict[str, Any], translate: Translate) -> svg.Drawing:
    table, ids, tokens = _read_table(arguments)
    return draw_product(table, ids.flatten(), tokens, arguments.get("column", 0), translate)


def _draw_gradient(arguments: dict[str, Any], translate: Translate) -> svg.Drawing:
    table, ids, tokens = _read_table(arguments)
    gradient = check_gradient(arguments["gradient"], ids, table)
    return draw_gradient(table, ids.flatten(), tokens, gradient, translate)


def _draw_cost(arguments: dict[str, Any], translate: Translate) -> svg.Drawing:
    return draw_cost(arguments["D"], arguments["N"], arguments.get("measured"), translate)


# For each kind: its function, its required arguments, and its optional ones.
KINDS: dict[
    str, tuple[Callable[[dict[str, Any], Translate], svg.Drawing], list[str], list[str]]
] = {
    "lookup": (_draw_lookup, ["table", "ids"], ["tokens"]),
    "product": (_draw_product, ["table", "ids"], ["column", "tokens"]),
    "gradient": (_draw_gradient, ["table", "ids", "gradient"], ["tokens"]),
    "cost": (_draw_cost, ["D", "N"], ["measured"]),
}
