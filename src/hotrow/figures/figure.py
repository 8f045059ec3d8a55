"""Draw SVG figures of lookups from any table and ids, in English or Chinese.

Each kind of figure has a module in `hotrow.figures` that lays out its elements. `svg.py` writes the
elements as SVG.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.figures import svg
from hotrow.figures.cost import draw_cost
from hotrow.figures.excerpt import MAX_IDS
from hotrow.figures.gradient import check_gradient, draw_gradient
from hotrow.figures.idle import draw_idle
from hotrow.figures.lookup import draw_lookup
from hotrow.figures.product import draw_product
from hotrow.figures.words import WORDS, Translate, translator
from hotrow.ids import as_ids, check_ids
from hotrow.inputs.tables import check_table
from hotrow.inputs.text import elide, escape_unprintable

if TYPE_CHECKING:
    from hotrow.vocabulary import Statistics

TOKEN_COLUMNS = 14


@dataclass(frozen=True, repr=False)
class Figure:
    """A drawing that Jupyter displays. Its `svg` attribute and `str()` both return the SVG text."""

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
    statistics: Statistics | None = None,
    lang: str = "en",
) -> Figure:
    """Draw a lookup, its product, its gradient, a cost comparison, or idle rows as SVG.

    ========== ======================================= ===========================================
    kind       arguments                               drawing
    ========== ======================================= ===========================================
    "lookup"   table, ids, tokens=                     the ids in order, with an arrow from each
                                                       id to its row, and from there to the output
    "product"  table, ids, column=0, tokens=           the one-hot row of one id times one column
                                                       of the table: all products and their sum
    "gradient" table, ids, gradient=, tokens=          the rows of the output's gradient, added to
                                                       the selected rows of the table's gradient;
                                                       all other rows are 0
    "cost"     D=, N=, measured=                       the operations and bytes that `hotrow.cost`
                                                       counts for matmul and lookup, against V,
                                                       and any measured times
    "idle"     statistics=                             how many rows of a vocabulary were idle, and
                                                       for how long
    ========== ======================================= ===========================================

    A figure states the table's size, but shows only an excerpt of a large table. If the table has
    more than 8 rows, the excerpt has the first row, the selected rows and the last row. If the
    table has more than 6 columns, the excerpt has the first 4 columns and the last one. A figure
    shows at most 6 ids, but the sums in a "gradient" figure include all ids.

    Args:
        kind: "lookup", "product", "gradient", "cost" or "idle". Each kind accepts only its own
            arguments.
        table: a (V, D) tensor of float64, float32, float16 or bfloat16. It is not modified.
        ids: an int64 or int32 tensor of any shape, a list, or an int. The figure shows the ids in
            order. A "product" figure needs exactly one id.
        column: the table column in a "product" figure, in 0..D-1.
        tokens: the text of each id; unprintable characters are escaped.
        gradient: the gradient of the output. Its shape is ids.shape + (D,) or (N, D), where N is
            the number of ids, and its dtype is the table's.
        D: the number of table columns in a "cost" figure, 1 or more.
        N: the number of ids in a "cost" figure, 1 or more.
        measured: a list of (V, matmul milliseconds, lookup milliseconds). The V axis runs from 10
            to 10 million, or further if a point lies outside this range.
        statistics: the result of `hotrow.vocabulary.stats`.
        lang: "en" or "zh-CN", the language of the figure's text.

    Returns:
        A `Figure`. Its SVG is self-contained, adapts to light and dark mode, and contains a text
        description. The same arguments always produce the same SVG.

    Raises:
        HotrowError: an unknown kind or language; a missing or extra argument; a table that is not
            2-D and floating point; invalid ids, or a wrong number of ids or tokens; a gradient that
            doesn't match the output; an invalid count or time; statistics without idle times.
        HotrowIndexError: an id or the column is out of range.

    Cost: `figure` reads the ids and the drawn entries. A "product" figure also checks its whole
    column for inf and nan, because 0 times inf or nan is nan. A "gradient" figure computes sums
    only for the drawn rows and columns.

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
        "D": D, "N": N, "measured": measured, "statistics": statistics,
    }  # fmt: skip
    arguments = {name: value for name, value in arguments.items() if value is not None}
    draw, required, optional = KINDS[kind]
    for name in arguments:
        if name not in required + optional:
            raise HotrowError(
                f"{name} was passed, but a {kind!r} figure does not accept it",
                fix=f"pass {_list_arguments(kind)}",
            )
    for name in required:
        if name not in arguments:
            raise HotrowError(
                f"a {kind!r} figure needs {name}", fix=f"pass {_list_arguments(kind)}"
            )
    return Figure(svg.write(draw(arguments, translator(lang)), lang))


def _list_arguments(kind: str) -> str:
    _, required, optional = KINDS[kind]
    return ", ".join([*required, *(f"{name} (optional)" for name in optional)])


def _check_choice(name: str, value: object, choices: Iterable[str]) -> None:
    valid = list(choices)
    if not isinstance(value, str) or value not in valid:
        raise HotrowError(
            f"{name} is {value!r:.60}, but it must be one of {', '.join(map(repr, valid))}"
        )


def _quote_tokens(tokens: Sequence[str] | None, count: int) -> list[str]:
    """Return the tokens to draw, escaped, shortened and quoted; without tokens, "" for each id."""
    if tokens is None:
        return [""] * min(count, MAX_IDS)
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not listed or not all(isinstance(token, str) for token in tokens):
        raise HotrowError(
            f"tokens is {tokens!r:.60}, but it must be a list of str, one for each id"
        )
    if len(tokens) != count:
        raise HotrowError(
            f"tokens has length {len(tokens)}, but the number of ids is {count}",
            fix="pass one token for each id",
        )
    return [f'"{elide(escape_unprintable(token), TOKEN_COLUMNS)}"' for token in tokens[:MAX_IDS]]


def _read_table(arguments: dict[str, Any]) -> tuple[Tensor, Tensor, list[str]]:
    """Return the checked table, the ids in their original shape, and the tokens to draw."""
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


def _draw_idle(arguments: dict[str, Any], translate: Translate) -> svg.Drawing:
    return draw_idle(arguments["statistics"], translate)


# The drawing function, required arguments and optional arguments of each kind.
KINDS: dict[
    str, tuple[Callable[[dict[str, Any], Translate], svg.Drawing], list[str], list[str]]
] = {
    "lookup": (_draw_lookup, ["table", "ids"], ["tokens"]),
    "product": (_draw_product, ["table", "ids"], ["column", "tokens"]),
    "gradient": (_draw_gradient, ["table", "ids", "gradient"], ["tokens"]),
    "cost": (_draw_cost, ["D", "N"], ["measured"]),
    "idle": (_draw_idle, ["statistics"], []),
}
