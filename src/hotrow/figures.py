"""Drawings of a look-up as SVG, from real tensors: any table, any ids, two languages.

A kind of figure is a function that lays out cells and arrows; `_svg` writes them out and knows
nothing else. Places are in pixels, reckoned from the columns that text takes in a monospace
font, so that nothing overflows whatever the numbers and tokens are.
"""

from __future__ import annotations

import hashlib
import operator
import xml.etree.ElementTree as ET
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.ids import as_ids, checked
from hotrow.text import elide, number, printable, width

WHOLE_ROWS, WHOLE_COLUMNS = 8, 6  # a table up to this size is drawn whole
LEADING_COLUMNS = 4  # of a wider one, these and the last
POSITIONS = 6  # ids drawn; each row they pick has a colour of its own
TOKEN_COLUMNS = 14

MARGIN, ROW, PITCH, PAD, GAP, ARROW = 24, 32, 42, 10, 8, 84  # pixels
SMALL, NUMBER, TITLE = 12, 14, 17  # font sizes
EM = 0.61  # a column, in font sizes: no monospace font named below is wider

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

# Class names carry a prefix, so that neither this style nor the page's reaches the other.
RULES = """
.hotrow .hr-page { fill: %(page)s }
.hotrow text { fill: %(ink)s; stroke: none; font-family: system-ui, -apple-system, "Segoe UI",
  Roboto, "Liberation Sans", "PingFang SC", "Microsoft YaHei", "Noto Sans CJK SC",
  "WenQuanYi Micro Hei", sans-serif }
.hotrow .hr-mono { font-family: ui-monospace, SFMono-Regular, Menlo, Consolas, "DejaVu Sans Mono",
  "Liberation Mono", "Noto Sans Mono CJK SC", "PingFang SC", "Microsoft YaHei",
  "WenQuanYi Micro Hei Mono", monospace }
.hotrow .hr-bold { font-weight: 700 }
.hotrow .hr-muted { fill: %(muted)s }
.hotrow .hr-on { fill: %(page)s }
.hotrow .hr-row { fill: %(row)s; stroke: %(line)s }
.hotrow .hr-gap { fill: none; stroke: %(line)s; stroke-dasharray: 2 4 }
.hotrow .hr-picked { fill: currentColor; fill-opacity: .12; stroke: currentColor; stroke-width: 2 }
.hotrow .hr-frame, .hotrow .hr-arrow { fill: none; stroke: currentColor; stroke-width: 2 }
.hotrow .hr-pill, .hotrow .hr-point { fill: currentColor; stroke: none }
.hotrow .hr-h0 { color: %(h0)s } .hotrow .hr-h1 { color: %(h1)s } .hotrow .hr-h2 { color: %(h2)s }
.hotrow .hr-h3 { color: %(h3)s } .hotrow .hr-h4 { color: %(h4)s } .hotrow .hr-h5 { color: %(h5)s }
"""
COLOURS = {  # in light and in dark; a row's are 4.5:1 on the page, and so is the page on them
    "page": ("#fff", "#14181f"),
    "ink": ("#1f2530", "#e7ebf2"),
    "muted": ("#626b7b", "#9ba5b5"),
    "row": ("#fff", "#1a1f28"),
    "line": ("#d5dae3", "#465064"),
    "h0": ("#2563ab", "#86b9f4"),
    "h1": ("#b4480f", "#f3a878"),
    "h2": ("#2b7a4b", "#83d3a5"),
    "h3": ("#8142a0", "#d2a6ea"),
    "h4": ("#84660a", "#e2c465"),
    "h5": ("#0e7482", "#72d3de"),
}
FLOATS = (torch.float64, torch.float32, torch.float16, torch.bfloat16)


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
    _check_table(table)
    flat = checked(as_ids(ids), len(table)).flatten()
    quoted = _quoted(tokens, len(flat))
    return _svg(KINDS[kind](table.detach(), flat, quoted, column, partial(_say, lang)), lang)


def _choose(name: str, value: object, choices: Iterable[str]) -> None:
    valid = list(choices)
    if value not in valid:
        raise HotrowError(f"{name} is {value!r}, but must be one of {', '.join(map(repr, valid))}")


def _check_table(table: object) -> None:
    what = f"of type {type(table).__name__}"
    if isinstance(table, Tensor):
        dense = table.layout == torch.strided and not table.is_meta
        if table.ndim == 2 and table.dtype in FLOATS and dense:
            return
        what = f"{table.dtype} of shape {tuple(table.shape)}, {table.layout} on {table.device}"
    must = f"a dense 2-D tensor of {', '.join(map(str, FLOATS))}"
    raise HotrowError(
        f"table is {what}, but must be {must}".replace("torch.", ""),
        fix="of a layer, give its weight",
    )


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


def _lookup(table: Tensor, ids: Tensor, tokens: list[str], column: int, say: _Say) -> _Drawing:
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
    head = _Line(say("row"), dotted([str(place) for place in drawn]), "mono muted", "")
    lines = [head, *_lines(spans, texts | gaps, hues)]
    outputs = [_picked(row, texts[row], hues[row]) for row in shown]
    label, fitted = _fit(lines, ["end"] * len(head.texts))

    across = say("columns", columns)
    table_heading = say("table", rows=say("rows", rows), columns=across)
    output_heading = say("output", rows=say("rows", len(ids)), columns=across)
    # From left to right: tokens, ids, arrows, table, arrows, output.
    id_x = MARGIN + (max(map(_px, tokens)) + GAP if any(tokens) else 0)
    id_width = max([_px(str(row)) for row in shown], default=0) + 2 * PAD
    id_end = id_x + id_width
    table_x = max(id_end, MARGIN + max(_px(say("ids")), _px(say("none")))) + ARROW
    table_end = table_x + label + GAP + sum(column.width for column in fitted)
    output_x = max(table_end, table_x + _px(table_heading)) + ARROW
    heading_y = MARGIN + 44
    top = heading_y + 58
    cells = [
        _label(MARGIN, MARGIN, say("lookup"), "bold", TITLE),
        _label(MARGIN, heading_y, say("ids"), "bold"),
        _label(table_x, heading_y, table_heading, "bold"),
        _label(output_x, heading_y, output_heading, "bold"),
        *_grid(table_x, top - ROW, lines, label, fitted),
        *_grid(output_x, top - ROW, [head], label, fitted),
        *_grid(output_x, top, outputs, label, fitted, PITCH),
    ]
    arrows = []
    told = [f"{table_heading}."]
    row_y = {span.start: top + ROW * (place + 0.5) for place, span in enumerate(spans)}
    for place, (row, token) in enumerate(zip(shown, tokens, strict=True)):
        y = top + place * PITCH
        middle = y + ROW / 2
        cells += [_label(MARGIN, y, token, "mono"), _pill(id_x, y, id_width, str(row), hues[row])]
        values = ", ".join(texts[row])
        told.append(say("picks", id=row, token=_aside(token), values=values))
        # The arrows of an id that comes again part a little.
        times, before = shown.count(row), shown[:place].count(row)
        via = row_y[row] + (before - (times - 1) / 2) * min(8, 24 / times)
        arrows.append((id_end, middle, table_x, via, hues[row]))
        arrows.append((table_end, via, output_x, middle, hues[row]))
    more = len(ids) - len(shown)
    if more or not shown:
        told.append(say("more", more) if shown else say("none"))
        y = top + len(shown) * PITCH
        cells += [_label(x, y, told[-1], "muted", SMALL) for x in (MARGIN, output_x)]
    if shown:
        y = top + max((len(shown) + (more > 0)) * PITCH, len(spans) * ROW) + GAP
        counting = say("counting", shown[0] + 1, row=shown[0])
        cells.append(_label(MARGIN, y, counting, "muted", SMALL))
    return _Drawing(say("lookup"), " ".join(told), cells, arrows)


def _product(table: Tensor, ids: Tensor, tokens: list[str], column: int, say: _Say) -> _Drawing:
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
    head = _Line(say("row"), heads, "muted", "")
    lines = [head, *_lines(spans, texts, {picked: "h0"}, "mono muted")]
    # Zeros can change nothing but a sign: -0.0 + 0.0 is 0.0.
    total = "nan" if poisoned else number(table[picked, column].item() + 0.0)
    last = _Line("", ["", "", say("sum"), "=", total], "mono bold", "")
    label, fitted = _fit([*lines, last], ["middle", "middle", "end", "middle", "middle"])

    chosen = say("chosen", id=picked, token=_aside(tokens[0]), column=column)
    counted = say("counted", rows - 1, rows=f"{rows:,}")
    note = "poisoned" if poisoned else "read" if total == entry else "unsigned"
    explained = say(note, row=picked, entry=entry)
    top = MARGIN + 64
    sum_y = top + len(lines) * ROW + GAP
    sum_x = MARGIN + label + GAP + sum(column.width for column in fitted[:-1])
    cells = [
        _label(MARGIN, MARGIN, say("product"), "bold", TITLE),
        _label(MARGIN, MARGIN + 28, chosen, "mono"),
        *_grid(MARGIN, top, lines, label, fitted),
        *_grid(MARGIN, sum_y, [last], label, fitted),
        _Cell(sum_x, sum_y + 1, fitted[-1].width, ROW - 2, box="frame h0"),
        _label(MARGIN, sum_y + ROW + GAP, counted),
        _label(MARGIN, sum_y + ROW + GAP + 24, explained, "muted", SMALL),
    ]
    told = [f"{chosen}:", *(f"{' '.join(line.texts)};" for line in lines[1:])]
    told += [f"{say('sum')} = {total}.", counted, explained]
    return _Drawing(say("product"), " ".join(told), cells, [])


def _checked_column(column: Any, columns: int) -> int:
    try:
        place = operator.index(column)
    except TypeError:
        raise HotrowError(f"column is {column!r:.60}, but must be an int") from None
    if 0 <= place < columns:
        return place
    valid = f"valid 0..{columns - 1}" if columns else "no column is valid"
    raise HotrowIndexError(f"column = {place}, but the table has {columns} columns ({valid})")


KINDS: dict[str, Callable[[Tensor, Tensor, list[str], int, _Say], _Drawing]] = {
    "lookup": _lookup,
    "product": _product,
}


# Below, how any figure is put together and written out; above, what the figures are.


class _Cell(NamedTuple):
    """A rectangle, a text in it, or both; `box` and `ink` are their classes."""

    x: float
    y: float
    w: float
    h: float = ROW
    text: str = ""
    ink: str = ""
    box: str = ""
    anchor: str = "start"
    size: int = NUMBER


class _Drawing(NamedTuple):
    title: str
    description: str
    cells: list[_Cell]
    arrows: list[tuple[float, float, float, float, str]]  # from x, y to x, y, and the hue


class _Line(NamedTuple):
    """A line of a grid: a label, then texts in a box; with too few, the first spans columns."""

    label: str
    texts: list[str]
    ink: str = "mono"
    box: str = "row"
    hue: str = ""  # of a row that was picked


class _Column(NamedTuple):
    width: float
    anchor: str = "middle"


def _px(text: str, size: int = NUMBER) -> float:
    return width(text) * size * EM


def _label(x: float, y: float, text: str, ink: str = "", size: int = NUMBER) -> _Cell:
    return _Cell(x, y, _px(text, size), ROW, text, ink, size=size)


def _pill(x: float, y: float, w: float, text: str, hue: str) -> _Cell:
    return _Cell(x, y + 4, w, ROW - 8, text, "mono bold on", f"pill {hue}", "middle")


def _lines(
    spans: list[range], texts: dict[int, list[str]], hues: dict[int, str], ink: str = "mono"
) -> Iterator[_Line]:
    """A line for each span, with the texts that stand under its first row."""
    for span in spans:
        row = span.start
        if len(span) > 1:
            yield _Line("⋮", texts[row], "muted", "gap")
        elif row in hues:
            yield _picked(row, texts[row], hues[row])
        else:
            yield _Line(str(row), texts[row], ink)


def _picked(row: int, texts: list[str], hue: str) -> _Line:
    return _Line(str(row), texts, "mono bold", f"picked {hue}", hue)


def _merged(columns: list[_Column], count: int) -> list[_Column]:
    """The columns of a line of `count` texts; with too few, the first spans."""
    over = len(columns) - count
    if not over:
        return columns
    return [_Column(sum(column.width for column in columns[: over + 1])), *columns[over + 1 :]]


def _fit(lines: list[_Line], anchors: list[str]) -> tuple[float, list[_Column]]:
    """Just enough width for the labels, and columns just wide enough for the texts."""
    full = [line.texts for line in lines if len(line.texts) == len(anchors)]
    widths = [max(map(_px, texts)) + 2 * PAD for texts in zip(*full, strict=True)]
    columns = list(map(_Column, widths, anchors))
    for line in lines:
        lack = _px(line.texts[0]) + 2 * PAD - _merged(columns, len(line.texts))[0].width
        columns[0] = _Column(columns[0].width + max(0.0, lack), anchors[0])
    return max(_px(line.label) for line in lines) + 2 * PAD, columns


def _grid(
    x: float, y: float, lines: list[_Line], label: float, columns: list[_Column], pitch: int = ROW
) -> Iterator[_Cell]:
    """The lines one below the other."""
    start = x + label + GAP
    for line in lines:
        if line.hue:
            yield _pill(x, y, label, line.label, line.hue)
        else:
            yield _Cell(x, y, label, ROW, line.label, "muted", anchor="middle")
        whole = sum(column.width for column in columns)
        yield _Cell(start, y + 1, whole, ROW - 2, box=line.box)
        left = start
        for text, column in zip(line.texts, _merged(columns, len(line.texts)), strict=True):
            yield _Cell(left, y, column.width, ROW, text, line.ink, "", column.anchor)
            left += column.width
        y += pitch


def _svg(drawing: _Drawing, lang: str) -> Figure:
    """Write the drawing out; ElementTree does the escaping."""
    # Names for the page's other figures to stay clear of: the same only for the same drawing.
    name = "hotrow-" + hashlib.sha256(repr((lang, drawing)).encode()).hexdigest()[:12]
    right = _short(max(cell.x + cell.w for cell in drawing.cells) + MARGIN)
    bottom = _short(max(cell.y + cell.h for cell in drawing.cells) + MARGIN)
    root = ET.Element("svg", {"xmlns": "http://www.w3.org/2000/svg", "xml:space": "preserve"})
    root.attrib |= {"class": "hotrow", "lang": lang, "role": "img"}
    root.attrib |= {"aria-labelledby": f"{name}-title {name}-desc"}
    root.attrib |= {"width": right, "height": bottom, "viewBox": f"0 0 {right} {bottom}"}
    root.attrib |= {"style": "max-width:100%;height:auto"}
    ET.SubElement(root, "title", id=f"{name}-title").text = drawing.title
    ET.SubElement(root, "desc", id=f"{name}-desc").text = drawing.description
    ET.SubElement(root, "style").text = _style()
    page = _Cell(0, 0, float(right), float(bottom), box="page")
    for cell in [page, *drawing.cells]:
        if cell.box:
            places = {"x": cell.x, "y": cell.y, "width": cell.w, "height": cell.h, "rx": 4}
            _draw(root, "rect", cell.box, **places)
        if cell.text:
            inset = {"start": 0.0, "middle": cell.w / 2, "end": cell.w - PAD}[cell.anchor]
            baseline = cell.y + cell.h / 2 + 0.36 * cell.size
            text = _draw(root, "text", cell.ink, x=cell.x + inset, y=baseline)
            text.attrib |= {"font-size": str(cell.size), "text-anchor": cell.anchor}
            text.text = cell.text
            if "mono" in cell.ink and _strange(cell.text):
                text.attrib |= {"textLength": _short(_px(cell.text, cell.size))}
                text.attrib |= {"lengthAdjust": "spacingAndGlyphs"}
    for x1, y1, x2, y2, hue in drawing.arrows:
        bend = [(x1 + 2, y1), ((x1 + x2) / 2, y1), ((x1 + x2) / 2, y2), (x2 - 7, y2)]
        start, *curve = (f"{_short(x)} {_short(y)}" for x, y in bend)
        _draw(root, "path", f"arrow {hue}").set("d", f"M{start}C{' '.join(curve)}")
        _draw(root, "path", f"point {hue}").set("d", f"M{_short(x2)} {_short(y2)}l-9 -5v10z")
    return Figure(ET.tostring(root, encoding="unicode"))


def _draw(root: ET.Element, tag: str, classes: str, **places: float) -> ET.Element:
    prefixed = " ".join(f"hr-{name}" for name in classes.split())
    attributes = {name: _short(place) for name, place in places.items()}
    return ET.SubElement(root, tag, attributes | ({"class": prefixed} if prefixed else {}))


def _strange(text: str) -> bool:
    """Letters that no monospace font has come from another: such text is held to its width."""
    return any(char > "\u024f" and char != "…" and width(char) == 1 for char in text)


def _short(place: float) -> str:
    return f"{place:.1f}".removesuffix(".0")


def _style() -> str:
    light, dark = (
        RULES % {name: pair[place] for name, pair in COLOURS.items()} for place in (0, 1)
    )
    # Only a screen turns dark: paper stays white.
    return f"{light}@media screen and (prefers-color-scheme: dark) {{{dark}}}\n"
