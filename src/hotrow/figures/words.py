"""The text of the figures, in English and Chinese."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

Translate = Callable[..., str]  # maps a key and values to text

WORDS: dict[str, dict[str, str | tuple[str, str]]] = {
    "en": {
        "lookup": "Lookup: each id selects its row of the table",
        "ids": "ids",
        "row": "row",
        "rows": ("{n} row", "{n} rows"),
        "columns": ("{n} column", "{n} columns"),
        "table": "table: {rows} × {columns}",
        "output": "output: {rows} × {columns}",
        "more": "… and {n} more",
        "none": "no ids",
        "counting": "Row numbers start at 0. If you count from 1, row {row} is number {n}.",
        "picks": "Id {id}{token} selects row {id}: {values}.",
        "product": "One row of the one-hot matrix times one column of the table",
        "chosen": "id {id}{token}, column {column}",
        "one-hot": "one-hot",
        "column": "column {column}",
        "by": "product",
        "by zero": ("{n} multiplication by zero", "{n} multiplications by zero"),
        "counted": (
            "{n} of {rows} multiplications is by zero.",
            "{n} of {rows} multiplications are by zero.",
        ),
        "sum": "sum",
        "read": "The sum equals the entry in row {row}. A lookup just reads that entry.",
        "poisoned": "0 × inf and 0 × nan are nan. A lookup reads only row {row}: {entry}.",
        "unsigned": "Adding zeros loses the sign. A lookup keeps it: {entry}.",
        "gradient": "Gradient: each id's gradient is added to the row that the id selects",
        "upstream": "gradient of the output: {rows} × {columns}",
        "scattered": "gradient of the table: {rows} × {columns}",
        "added": "uses",
        "adds": "Id {id}{token} adds to row {id}: {values}.",
        "holds": "Row {row} is {values} (uses: {uses}).",
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
        "by lookup": "lookup",
        "axis": "V, rows of the table",
        "last": "At V = {V}:",
        "at": "V = {V}: {matmul} with the one-hot matmul, {lookup} with the lookup.",
        "constant": (
            "Forward pass and gradient. A lookup needs no multiplications, and its cost does not "
            "depend on V."
        ),
        "idle": "Idle rows of the vocabulary",
        "batches since admit saw a row": "rows by the number of batches since admit last used them",
        "steps that rows have missed": "rows by the number of steps that they have missed",
        "touched": "{n} ever touched",
        "frozen": "{n} frozen",
        "comma": ", ",
        "sentence": "{text}.",
        "heading": "{text}:",
        "item": "{text};",
        "space": " ",
        "idle rows": ("{range}: {n} row.", "{range}: {n} rows."),
    },
    "zh-CN": {
        "lookup": "查找（查表）：每个词元（token）ID 取出嵌入矩阵的一行",
        "ids": "词元 ID",
        "row": "行",
        "rows": "{n} 行",
        "columns": "{n} 列",
        "table": "嵌入矩阵（查找表）：{rows} × {columns}",
        "output": "输出：{rows} × {columns}",
        "more": "… 另有 {n} 个",
        "none": "没有 ID",
        "counting": "行号从 0 开始；如果从 1 开始数，行号 {row} 就是第 {n} 行。",
        "picks": "ID {id}{token} 取出第 {id} 行：{values}。",
        "product": "独热编码的一行乘以嵌入矩阵（查找表）的一列",
        "chosen": "词元（token）ID {id}{token}，第 {column} 列",
        "one-hot": "独热向量",
        "column": "第 {column} 列",
        "by": "乘积",
        "by zero": "{n} 个乘以 0 的乘积",
        "counted": "{rows} 个乘积中有 {n} 个乘以 0。",
        "sum": "和",
        "read": "和等于第 {row} 行的值：查找（查表）直接读取它。",
        "poisoned": "0 × inf 与 0 × nan 都是 nan；查找（查表）只读取第 {row} 行：{entry}。",
        "unsigned": "加上 0 会丢掉负号，查找（查表）则会保留：{entry}。",
        "gradient": "梯度：每个词元（token）ID 的梯度累加到它选中的行",
        "upstream": "输出的梯度：{rows} × {columns}",
        "scattered": "嵌入矩阵的梯度：{rows} × {columns}",
        "added": "累加次数",
        "adds": "ID {id}{token} 加到第 {id} 行：{values}。",
        "holds": "第 {row} 行是 {values}，累加次数：{uses}。",
        "zeros": "{n} 行全为 0",
        "mixed": "{n} 行，其中 {touched} 行被选中",
        "untouched": "{rows} 行中有 {n} 行未被选中：梯度为 0。",
        "cost": "开销随嵌入矩阵大小的变化",
        "sizes": "词元（token）ID：{ids} 个，列数：{columns}；两个坐标轴均为对数刻度",
        "operations": "乘法与加法次数",
        "bytes": "写入的字节数",
        "time": "时间（在一台机器上实测）",
        "matmul": "独热矩阵乘法",
        "by lookup": "查找（查表）",
        "axis": "V：嵌入矩阵的行数",
        "last": "V = {V} 时：",
        "at": "V = {V}：独热矩阵乘法 {matmul}，查找（查表）{lookup}。",
        "constant": "前向与梯度合计。查找（查表）不做乘法，开销与 V 无关。",
        "idle": "词表中闲置的行",
        "batches since admit saw a row": "各行距 admit 上次用到它的批次数",
        "steps that rows have missed": "各行尚未补上的步数",
        "touched": "训练中用到过 {n} 行",
        "frozen": "已冻结 {n} 行",
        "comma": "，",
        "sentence": "{text}。",
        "heading": "{text}：",
        "item": "{text}；",
        "space": "",
        "idle rows": "{range}：{n} 行。",
    },
}


def translator(lang: str) -> Translate:
    """Return a function that looks up text in a language."""
    return partial(_translate, lang)


def _translate(lang: str, key: str, n: int = 0, **values: object) -> str:
    """Return the text for a key. If the text has singular and plural forms, `n` selects one."""
    text = WORDS[lang][key]
    if isinstance(text, tuple):
        text = text[n != 1]
    return text.format(n=f"{n:,}", **values)


def in_parentheses(token: str) -> str:
    """Return the token in parentheses, or "" if there is none."""
    return f" ({token})" if token else ""
