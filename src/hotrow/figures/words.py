"""The texts of the figures, in two languages."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Translate = Callable[..., str]  # from a key and its values to the text in one language

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
        "gradient": "The gradient: each id sends its row back to the row it picked",
        "upstream": "gradient of the output: {rows} × {columns}",
        "scattered": "gradient of the table: {rows} × {columns}",
        "added": "added",
        "adds": "Id {id}{token} adds to row {id}: {values}.",
        "holds": "Row {row} holds {values}, added: {uses}.",
        "zeros": ("{n} row of zeros", "{n} rows of zeros"),
        "mixed": "{n} rows, {touched} of them touched",
        "untouched": (
            "{n} of {rows} rows is untouched: its gradient is zero.",
            "{n} of {rows} rows are untouched: their gradient is zero.",
        ),
        "cost": "Cost as the table grows",
        "sizes": "ids: {ids}, columns: {columns}; both axes are logarithmic",
        "operations": "multiplications and additions",
        "bytes": "bytes written",
        "time": "time, measured on one machine",
        "matmul": "one-hot matmul",
        "by lookup": "look-up",
        "axis": "V, rows of the table",
        "last": "At V = {V}:",
        "at": "V = {V}: {matmul} by one-hot matmul, {lookup} by look-up.",
        "constant": (
            "Forward and gradient together. A look-up multiplies nothing, and costs the same "
            "whatever V is."
        ),
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
        "gradient": "梯度：每个词元（token）ID 把自己的一行送回它所选的行",
        "upstream": "输出的梯度：{rows} × {columns}",
        "scattered": "嵌入矩阵的梯度：{rows} × {columns}",
        "added": "累加次数",
        "adds": "ID {id}{token} 加到行 {id}：{values}。",
        "holds": "行 {row} 为 {values}，累加次数：{uses}。",
        "zeros": "{n} 行全为 0",
        "mixed": "{n} 行，其中 {touched} 行被选中",
        "untouched": "{rows} 行中有 {n} 行未被选中：梯度为 0。",
        "cost": "嵌入矩阵变大时的代价",
        "sizes": "词元（token）ID：{ids} 个，列：{columns}；两轴均为对数刻度",
        "operations": "乘法与加法次数",
        "bytes": "写入的字节数",
        "time": "时间（在一台机器上实测）",
        "matmul": "独热矩阵乘法",
        "by lookup": "查找（查表）",
        "axis": "V：嵌入矩阵的行数",
        "last": "V = {V} 时：",
        "at": "V = {V}：独热矩阵乘法 {matmul}，查找（查表）{lookup}。",
        "constant": "前向与梯度合计。查找（查表）的代价与 V 无关，并且不做任何乘法。",
    },
}


def translator(lang: str) -> Translate:
    """The function that translates keys into a language."""
    return partial(_translate, lang)


def _translate(lang: str, key: str, n: int = 0, **values: object) -> str:
    """The text of a key, in the singular or plural where it has both."""
    text = WORDS[lang][key]
    if isinstance(text, tuple):
        text = text[n != 1]
    return text.format(n=f"{n:,}", **values)


def in_parentheses(token: str) -> str:
    """The token in parentheses, or nothing where there is none."""
    return f" ({token})" if token else ""
