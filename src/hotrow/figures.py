"""Drawings of a look-up as SVG, from real tensors: any table, any ids, two languages.

A kind of figure is a function that lays out cells and arrows; `_svg` writes them out.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from hotrow import _svg as svg
from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.ids import as_ids, checked
from hotrow.tables import check_table
from hotrow.text import elide, number, printable

WHOLE_ROWS, WHOLE_COLUMNS = 8, 6  # a table up to this size is drawn whole
LEADING_COLUMNS = 4  # of a wider one, these and the last
POSITIONS = 6  # ids drawn; each row they pick has a colour of its own
TOKEN_COLUMNS = 14

WORDS: dict[str, dict[str, str | tuple[str, str]]] = {
    "en": {
        "lookup": "Look-up: each id picks its row of the table",
        "ids": "ids",
        "row": "row",
        "rows": ("{n} row", "{n} rows"),
        "columns": ("{n} column", "{n} columns"),
        "table": "table: {rows} × {columns}",
        "output": "output: {rows} × {columns}",
        "more": "… and {n} more",
        "none": "no ids",
        "counting": "Rows are counted from 0: counted from 1, row {row} is number {n}.",
        "picks": "Id {id}{token} picks row {id}: {values}.",
        "product": "One row of the one-hot times one column of the table",
        "chosen": "id {id}{token}, column {column}",
        "one-hot": "one-hot",
        "column": "column {column}",
        "by": "product",
        "by zero": ("{n} product by zero", "{n} products by zero"),
        "counted": ("{n} of {rows} products is by zero.", "{n} of {rows} products are by zero."),
        "sum": "sum",
        "read": "The sum is row {row}'s own entry: a look-up just reads it.",
        "poisoned": "0 × inf and 0 × nan are nan; a look-up reads row {row} alone: {entry}.",
        "unsigned": "Adding zeros loses the sign that a look-up keeps: {entry}.",
    },
    "zh-CN": {
        "lookup": "查找（查表）：每个词元（token）ID 取出嵌入矩阵中的一行",
        "ids": "词元 ID",
        "row": "行",
        "rows": "{n} 行",
        "columns": "{n} 列",
        "table": "嵌入矩阵（查找表）：{rows} × {columns}",
        "output": "输出：{rows} × {columns}",
        "more": "… 另有 {n} 个",
        "none": "没有 ID",
        "counting": "行号从 0 数起；若从 1 数起，行 {row} 是第 {n} 行。",
        "picks": "ID {id}{token} 取出行 {id}：{values}。",
        "product": "独热编码的一行乘以嵌入矩阵（查找表）的一列",
        "chosen": "词元（token）ID {id}{token}，列 {column}",
        "one-hot": "独热向量",
        "column": "列 {column}",
        "by": "乘积",
        "by zero": "{n} 个乘以 0 的乘积",
        "counted": "{rows} 个乘积中有 {n} 个是乘以 0。",
        "sum": "和",
        "read": "和就是行 {row} 自己的值：查找（查表）直接读取它。",
        "poisoned": "0 × inf 与 0 × nan 都是 nan；查找（查表）只读取行 {row}：{entry}。",
        "unsigned": "加上 0 会丢掉负号，查找（查表）则保留它：{entry}。",
    },
}


@dataclass(frozen=True)
class Figure:
    """A drawing. Jupyter shows it; `svg`, and `str` of it, is the SVG text."""

    svg: str

    def _repr_svg_(self) -> str:
        return self.svg

    def __str__(self) -> str:
        return self.svg


def figure(
    kind: str,
    table: Tensor,
    ids: Any,
    *,
    column: int = 0,
    tokens: Sequence[str] | None = None,
    lang: str = "en",
) -> Figure:
    """Draw a look-up in a table, or the one-hot product that it stands for.

    Kind "lookup": the ids in order, an arrow from each to its row of the table, and from there
    to its place in the output. Kind "product": for one id, its one-hot row times one column of
    the table, every product written out, and their sum.

    Large tables are shortened, and the drawing says by how much: all rows up to 8, else the
    first, the selected and the last; all columns up to 6, else the first 4 and the last; the
    first 6 ids.

    Args:
        kind: "lookup" or "product".
        table: (V, D), float64, float32, float16 or bfloat16; only read.
        ids: int64 or int32 of any shape, a list, or an int; taken in order. "product" takes one.
        column: 0..D-1, the column of the table in a "product"; a "lookup" ignores it.
        tokens: the text of each id; what cannot be printed is shown as its escape.
        lang: "en" or "zh-CN", the language of the words.

    Returns:
        A `Figure`. Its SVG stands alone, follows a light or dark screen, and has its content in
        words as well. The same arguments give the same text.

    Raises:
        HotrowError: an unknown kind or language; a table that is not 2-D and floating; ids that
            are not ids, or not as many as `tokens` or the kind needs.
        HotrowIndexError: an id or the column lies outside the table.

    Cost: the ids and the drawn entries are read; "product" also looks through its column for
    inf and nan, since 0 times either is nan.

    >>> _ = torch.manual_seed(123)
    >>> table = torch.nn.Embedding(4, 5).weight
    >>> fig = figure("lookup", table, [2, 3, 1], tokens=["fox", "jumps", "over"])
    >>> "<svg" in str(fig), "-2.8400" in fig.svg
    (True, True)

    The lesson's tables and ids come from Sebastian Raschka, "Build a Large Language Model (From
    Scratch)", chapter 2.
    """
    _choose("kind", kind, KINDS)
    _choose("lang", lang, WORDS)
    check_table(table, "table")
    flat = checked(as_ids(ids), len(table)).flatten()
    quoted = _quoted(tokens, len(flat))
    drawing = KINDS[kind](table.detach(), flat, quoted, column, partial(_say, lang))
    return Figure(svg.write(drawing, lang))


def _choose(name: str, value: object, choices: Iterable[str]) -> None:
    valid = list(choices)
    if value not in valid:
        raise HotrowError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, valid))}")


def _quoted(tokens: Sequence[str] | None, count: int) -> list[str]:
    """The tokens that are drawn: safe, short, in quotes that show their spaces; or empty."""
    if tokens is None:
        return [""] * min(count, POSITIONS)
    listed = isinstance(tokens, Sequence) and not isinstance(tokens, str)
    if not listed or not all(isinstance(token, str) for token in tokens):
        raise HotrowError(f"tokens is {tokens!r:.60}, but must be a list of str, one for each id")
    if len(tokens) != count:
        raise HotrowError(f"tokens has length {len(tokens)}, but ids has {count}: one for each id")
    return [f'"{elide(printable(token), TOKEN_COLUMNS)}"' for token in tokens[:POSITIONS]]


def _say(lang: str, key: str, n: int = 0, **values: object) -> str:
    """Words of a language; where there are two, for one and for many."""
    text = WORDS[lang][key]
    if isinstance(text, tuple):
        text = text[n != 1]
    return text.format(n=f"{n:,}", **values)


_Say = Callable[..., str]  # `_say` in one language


def _aside(token: str) -> str:
    return f" ({token})" if token else ""


def _spans(rows: int, picked: Iterable[int]) -> list[range]:
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


def _numbers(table: Tensor, spans: list[range], columns: list[int]) -> dict[int, list[str]]:
    """The texts of the drawn rows and columns, by row; nothing else is read."""
    rows = [span.start for span in spans if len(span) == 1]
    down, across = (torch.tensor(places).long().to(table.device) for places in (rows, columns))
    values = table[down.unsqueeze(-1), across].tolist()
    return {row: [number(x) for x in line] for row, line in zip(rows, values, strict=True)}


def _lookup(table: Tensor, ids: Tensor, tokens: list[str], column: int, say: _Say) -> svg.Drawing:
    rows, columns = table.shape
    shown: list[int] = ids[:POSITIONS].tolist()
    hues = {row: f"h{place}" for place, row in enumerate(dict.fromkeys(shown))}
    spans = _spans(rows, shown)
    whole = columns <= WHOLE_COLUMNS
    drawn = list(range(columns)) if whole else [*range(LEADING_COLUMNS), columns - 1]

    def dotted(texts: list[str]) -> list[str]:
        if not whole:
            texts.insert(LEADING_COLUMNS, "…")
        return texts or [""]  # a table without columns is drawn with an empty one

    texts = {row: dotted(values) for row, values in _numbers(table, spans, drawn).items()}
    gaps = {span.start: [say("rows", len(span))] for span in spans if len(span) > 1}
    head = svg.Line(say("row"), dotted([str(place) for place in drawn]), "mono muted", "")
    lines = [head, *svg.lines(spans, texts | gaps, hues)]
    outputs = [svg.picked(row, texts[row], hues[row]) for row in shown]
    label, fitted = svg.fit(lines, ["end"] * len(head.texts))

    across = say("columns", columns)
    table_heading = say("table", rows=say("rows", rows), columns=across)
    output_heading = say("output", rows=say("rows", len(ids)), columns=across)
    more = len(ids) - len(shown)
    note = say("more", more) if more else "" if shown else say("none")
    # From left to right: tokens, ids, arrows, table, arrows, output.
    id_x = svg.MARGIN + (max(map(svg.px, tokens)) + svg.GAP if any(tokens) else 0)
    id_width = max([svg.px(str(row)) for row in shown], default=0) + 2 * svg.PAD
    id_end = id_x + id_width
    table_x = max(id_end + svg.ARROW, svg.MARGIN + svg.px(note, svg.SMALL) + svg.PAD)
    table_end = table_x + label + svg.GAP + sum(column.width for column in fitted)
    output_x = max(table_end, table_x + svg.px(table_heading)) + svg.ARROW
    heading_y = svg.MARGIN + 44
    top = heading_y + 58
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, say("lookup"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, heading_y, say("ids"), "bold"),
        svg.label(table_x, heading_y, table_heading, "bold"),
        svg.label(output_x, heading_y, output_heading, "bold"),
        *svg.grid(table_x, top - svg.ROW, lines, label, fitted),
        *svg.grid(output_x, top - svg.ROW, [head], label, fitted),
        *svg.grid(output_x, top, outputs, label, fitted, svg.PITCH),
    ]
    arrows = []
    told = [f"{table_heading}."]
    row_y = {span.start: top + svg.ROW * (place + 0.5) for place, span in enumerate(spans)}
    for place, (row, token) in enumerate(zip(shown, tokens, strict=True)):
        y = top + place * svg.PITCH
        middle = y + svg.ROW / 2
        cells += [
            svg.label(svg.MARGIN, y, token, "mono"),
            svg.pill(id_x, y, id_width, str(row), hues[row]),
        ]
        values = ", ".join(texts[row])
        told.append(say("picks", id=row, token=_aside(token), values=values))
        # The arrows of an id that comes again part a little.
        times, before = shown.count(row), shown[:place].count(row)
        via = row_y[row] + (before - (times - 1) / 2) * min(8, 24 / times)
        arrows.append((id_end, middle, table_x, via, hues[row]))
        arrows.append((table_end, via, output_x, middle, hues[row]))
    if note:
        told.append(note)
        y = top + len(shown) * svg.PITCH
        cells += [svg.label(x, y, note, "muted", svg.SMALL) for x in (svg.MARGIN, output_x)]
    if shown:
        y = top + max((len(shown) + (more > 0)) * svg.PITCH, len(spans) * svg.ROW) + svg.GAP
        counting = say("counting", shown[0] + 1, row=shown[0])
        cells.append(svg.label(svg.MARGIN, y, counting, "muted", svg.SMALL))
    return svg.Drawing(say("lookup"), " ".join(told), cells, arrows)


def _product(table: Tensor, ids: Tensor, tokens: list[str], column: int, say: _Say) -> svg.Drawing:
    if len(ids) != 1:
        raise HotrowError(
            f"ids has {len(ids)} ids, but a 'product' is of one", fix="give one of them"
        )
    rows, columns = table.shape
    column = _checked_column(column, columns)
    picked = int(ids[0])
    spans = _spans(rows, [picked])
    numbers = _numbers(table, spans, [column])
    [entry] = numbers[picked]
    heads = [say("one-hot"), "×", say("column", column=column), "=", say("by")]
    texts = {picked: ["1", "×", entry, "=", entry]}
    poisoned = False
    for span in spans:
        if picked in span:
            continue
        finite = bool(torch.isfinite(table[span.start : span.stop, column]).all())
        poisoned |= not finite
        zero = "0" if finite else "nan"
        row = span.start
        drawn = ["0", "×", *numbers[row], "="] if row in numbers else [say("by zero", len(span))]
        texts[row] = [*drawn, zero]
    head = svg.Line(say("row"), heads, "muted", "")
    lines = [head, *svg.lines(spans, texts, {picked: "h0"}, "mono muted")]
    # Zeros can change nothing but a sign: -0.0 + 0.0 is 0.0.
    total = "nan" if poisoned else number(table[picked, column].item() + 0.0)
    last = svg.Line("", ["", "", say("sum"), "=", total], "mono bold", "")
    label, fitted = svg.fit([*lines, last], ["middle", "middle", "end", "middle", "middle"])

    chosen = say("chosen", id=picked, token=_aside(tokens[0]), column=column)
    counted = say("counted", rows - 1, rows=f"{rows:,}")
    note = "poisoned" if poisoned else "read" if total == entry else "unsigned"
    explained = say(note, row=picked, entry=entry)
    top = svg.MARGIN + 64
    sum_y = top + len(lines) * svg.ROW + svg.GAP
    sum_x = svg.MARGIN + label + svg.GAP + sum(column.width for column in fitted[:-1])
    cells = [
        svg.label(svg.MARGIN, svg.MARGIN, say("product"), "bold", svg.TITLE),
        svg.label(svg.MARGIN, svg.MARGIN + 28, chosen, "mono"),
        *svg.grid(svg.MARGIN, top, lines, label, fitted),
        *svg.grid(svg.MARGIN, sum_y, [last], label, fitted),
        svg.Cell(sum_x, sum_y + 1, fitted[-1].width, svg.ROW - 2, box="frame h0"),
        svg.label(svg.MARGIN, sum_y + svg.ROW + svg.GAP, counted),
        svg.label(svg.MARGIN, sum_y + svg.ROW + svg.GAP + 24, explained, "muted", svg.SMALL),
    ]
    told = [f"{chosen}:", *(f"{' '.join(line.texts)};" for line in lines[1:])]
    told += [f"{say('sum')} = {total}.", counted, explained]
    return svg.Drawing(say("product"), " ".join(told), cells, [])


def _checked_column(column: Any, columns: int) -> int:
    try:
        place = operator.index(column)
    except TypeError:
        raise HotrowError(f"column is {column!r:.60}, but must be an int") from None
    if 0 <= place < columns:
        return place
    valid = f"valid 0..{columns - 1}" if columns else "no column is valid"
    raise HotrowIndexError(f"column = {place}, but the table has {columns} columns ({valid})")


KINDS: dict[str, Callable[[Tensor, Tensor, list[str], int, _Say], svg.Drawing]] = {
    "lookup": _lookup,
    "product": _product,
}
