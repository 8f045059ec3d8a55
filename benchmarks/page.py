"""Make docs/performance.md, its figures and the READMEs' table of times from benchmarks/records.

    python -m benchmarks.page.py

The page's text is benchmarks/performance.md; its marks `<!-- tables -->`, `<!-- models -->` and
`<!-- machines -->` give way to what the records say. The records are made by `make bench`, which
then calls this.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks import plots, records
from benchmarks.telling import between, model_goals, number, tell
from benchmarks.workloads import WORKLOADS
from hotrow.inputs import files

Record = dict[str, Any]
ROOT = Path(__file__).parents[1]
TEXT, RECORDS = ROOT / "bench" / "performance.md", ROOT / "bench" / "records"
DOCS, FIGURES = ROOT / "docs", "performance"
READMES = ("README.md", "README.zh-CN.md")


def page(found: dict[str, Record]) -> str:
    """The whole page, in Markdown."""
    ordered = {name: found[name] for name in WORKLOADS if name in found}
    tables = [section(name, record) for name, record in ordered.items() if "peers" in record]
    others = [section(name, record) for name, record in ordered.items() if "later_use" in record]
    parts = {
        "tables": "\n\n".join(tables + others),
        "models": models(ordered),
        "machines": machines(found),
    }
    text = TEXT.read_text(encoding="utf-8")
    for name, made in parts.items():
        mark = f"<!-- {name} -->"
        assert text.count(mark) == 1, f"{TEXT.name} has one {mark}"
        text = text.replace(mark, made)
    return text


def section(name: str, record: Record) -> str:
    """A table of one record, its figure, and what else is to be said."""
    told = tell(record)
    figure = [f"![{told.title}: the times below]({FIGURES}/{name}.svg)"] * ("peers" in record)
    remarks = "\n".join(f"- {line}" for line in told.remarks)
    text = [f"## {told.title}", told.setting, *figure, table(told.head, told.rows), remarks]
    return "\n\n".join(part for part in text if part)


def models(found: dict[str, Record]) -> str:
    """Whole models, before and after `convert`."""
    as_ms = "median_ms", "p20_ms", "p80_ms"
    rows = []
    for name, record in found.items():
        if "before" not in record:
            continue
        peak = record.get("peak_extra_bytes", {})
        times = [between(record[side], *as_ms) for side in ("before", "after")]
        memory = [number(peak[side] / 1e6) if peak else "" for side in ("before", "after")]
        ratio = between(record["ratio"], "median", "p20", "p80")
        floor = f"{number(record['floor_ratio']['after'])} x"
        row = [WORKLOADS[name].about, *times, ratio, floor, *memory, model_goals(record)]
        rows.append(row)
    head = ["model", "before, ms", "after, ms", "ratio", "after, of the floor"]
    head += ["extra memory before, MB", "after, MB", "goals"]
    return table(head, rows)


def machines(found: dict[str, Record]) -> str:
    """Where the records were made: each place once, with its records."""
    places: dict[str, list[str]] = {}
    for name, record in found.items():
        seen = record["environment"]
        versions = ", ".join(f"{key} {value}" for key, value in seen["versions"].items() if value)
        settings = ", ".join(f"{key}={value}" for key, value in seen["settings"].items())
        text = (
            f"commit {seen['commit']}; {versions}; {seen['cpu']} (family and model "
            f"{seen['cpu_family_and_model']}), {seen['cores']} cores, {seen['memory']}; "
            f"{seen['threads']} threads; transparent huge pages {seen['transparent_hugepage']}, "
            f"{settings}; {seen['system']}"
        )
        load = f"{name} (load before: {seen['load_before']}; {seen['date']})"
        places.setdefault(text, []).append(load)
    lines = [f"- {', '.join(names)}: {text}." for text, names in places.items()]
    return "\n".join(lines)


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# What the READMEs show: a workload each, in the words of both.
SHOWN = {
    "adamw-1m-256": "1M x 256, 16,384, AdamW",
    "adamw-50k-768": "50,257 x 768, 4,096, AdamW",
    "adamw-10m-64": "10M x 64, 16,384, AdamW",
    "adagrad-1m-256": "1M x 256, 16,384, Adagrad",
    "sgd-1m-256": "1M x 256, 16,384, SGD",
}
BESIDE = ("torch fused", "torch default", "torch sparse")


def readme_rows(found: dict[str, Record]) -> str:
    """The lines of the READMEs' table of times, below its head."""
    lines = []
    for name, what in SHOWN.items():
        peers = found[name]["peers"]
        cells = [f"{peers['hotrow']['step']['median_ms']:.1f} ms"]
        for kind in BESIDE:
            peer = peers.get(kind, {})
            if "step" not in peer:
                cells.append("—")
                continue
            time, ratio = peer["step"]["median_ms"], peer["hotrow_ratio"]["median"]
            shown = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
            star = " *" if "SparseAdam" in peer["label"] else ""
            cells.append(f"{shown} ms ({1 / ratio:.1f} x){star}")
        lines.append("| " + " | ".join([what, *cells]) + " |")
    return "\n".join(lines) + "\n"


def put_rows(readme: str, rows: str) -> str:
    """The README with these lines in place of those below the head of its table of times."""
    pattern = r"(^\|[^\n]*\| hotrow \|[^\n]*\n\|[-| :]+\n)(?:\|[^\n]*\n)+"
    changed, count = re.subn(pattern, lambda m: m[1] + rows, readme, flags=re.MULTILINE)
    assert count == 1, "a README has one table of times"
    return changed


def main(arguments: list[str] | None = None) -> None:
    """Write the page and its figures, and the READMEs' tables."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS, help="their folder")
    parser.add_argument("--docs", type=Path, help="a folder to write into, READMEs left alone")
    asked = parser.parse_args(arguments)
    found = records.read(asked.records)
    docs = asked.docs or DOCS
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, record in found.items():
        if "peers" in record:
            files.write_text(docs / FIGURES / f"{name}.svg", plots.plot(record) + "\n")
    files.write_text(docs / "performance.md", page(found))
    if asked.docs is None:
        for name in READMES:
            text = (ROOT / name).read_text(encoding="utf-8")
            files.write_text(ROOT / name, put_rows(text, readme_rows(found)))


if __name__ == "__main__":
    main()
