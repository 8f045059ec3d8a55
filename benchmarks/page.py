"""Make docs/performance.md, its figures and the READMEs' table of times from benchmarks/records.

    python -m benchmarks.page

The page's text is benchmarks/performance.md; its marks `<!-- tables -->`, `<!-- models -->` and
`<!-- machines -->` give way to what the records say. The records are made by `make bench`, which
then calls this.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from benchmarks import plots, record_files
from benchmarks.report import describe, model_goals
from benchmarks.workloads import WORKLOADS
from hotrow.bench.report import number, number_range
from hotrow.bench.workload import Record
from hotrow.inputs import files
from hotrow.inputs.text import format_size

ROOT = record_files.ROOT
TEXT, RECORDS = ROOT / "benchmarks" / "performance.md", ROOT / "benchmarks" / "records"
DOCS, FIGURES = ROOT / "docs", "performance"
READMES = ("README.md", "README.zh-CN.md")


def make_page(records: dict[str, Record]) -> str:
    """The whole page, in Markdown."""
    ordered = {name: records[name] for name in WORKLOADS if name in records}
    tables = [section(name, record) for name, record in ordered.items() if "peers" in record]
    others = [section(name, record) for name, record in ordered.items() if "later_use" in record]
    parts = {
        "tables": "\n\n".join(tables + others),
        "models": models_table(ordered),
        "machines": machines_list(records),
    }
    text = TEXT.read_text(encoding="utf-8")
    for name, part in parts.items():
        mark = f"<!-- {name} -->"
        assert text.count(mark) == 1, f"{TEXT.name} has one {mark}"
        text = text.replace(mark, part)
    return text


def section(name: str, record: Record) -> str:
    """One record: its figure, its table and the remarks."""
    report = describe(record)
    figure = [f"![{report.title}: the times below]({FIGURES}/{name}.svg)"] * ("peers" in record)
    remarks = "\n".join(f"- {line}" for line in report.remarks)
    text = [
        f"## {report.title}",
        report.setting,
        *figure,
        markdown_table(report.head, report.rows),
        remarks,
    ]
    return "\n\n".join(part for part in text if part)


def models_table(records: dict[str, Record]) -> str:
    """Whole models, before and after `convert`."""
    as_ms = "median_ms", "p20_ms", "p80_ms"
    rows = []
    for name, record in records.items():
        if "before" not in record:
            continue
        peak = record.get("peak_extra_bytes", {})
        times = [number_range(record[side], *as_ms) for side in ("before", "after")]
        memory = [number(peak[side] / 1e6) if peak else "" for side in ("before", "after")]
        ratio = number_range(record["ratio"], "median", "p20", "p80")
        floor = f"{number(record['floor_ratio']['after'])} x"
        row = [WORKLOADS[name].about, *times, ratio, floor, *memory, model_goals(record)]
        rows.append(row)
    head = ["model", "before, ms", "after, ms", "ratio", "after, of the floor"]
    head += ["extra memory before, MB", "after, MB", "goals"]
    return markdown_table(head, rows)


def machines_list(records: dict[str, Record]) -> str:
    """The machines that the records were made on, a line each, with the commits."""
    machines: dict[str, dict[str, list[Record]]] = {}
    for record in records.values():
        environment = record["environment"]
        versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v)
        settings = ", ".join(f"{k}={v}" for k, v in environment["settings"].items())
        text = (
            f"{environment['cpu']} (family and model {environment['cpu_family_and_model']}), "
            f"{environment['cores']} cores, {format_size(environment['memory_bytes'])}; "
            f"{environment['threads']} threads; {environment['system']}; {versions}; "
            f"transparent huge pages {environment['transparent_hugepage']}, {settings}"
        )
        machines.setdefault(text, {}).setdefault(environment["commit"], []).append(record)
    lines = [
        f"- {text}. " + "; ".join(_describe_commit(*item) for item in commits.items()) + "."
        for text, commits in machines.items()
    ]
    return "\n".join(lines)


def _describe_commit(commit: str, records: list[Record]) -> str:
    """A commit, its workloads, when they were measured and the load of the machine before."""
    names = [record["workload"] for record in records]
    many = names[0] if len(names) == 1 else f"{len(names)} workloads"
    environments = [record["environment"] for record in records]
    dates = sorted({environment["date"] for environment in environments})
    loads = [e["load_average_before"] for e in environments if e["load_average_before"] is not None]
    load = f", load average before {_span(sorted(loads))}" if loads else ""
    return f"commit {commit}: {many}, {_span(dates)}{load}"


def _span(values: list[Any]) -> str:
    """The first and the last, once if they are the same."""
    return " to ".join(dict.fromkeys((str(values[0]), str(values[-1]))))


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


# The workloads that the READMEs show, in the words of both.
README_WORKLOADS = {
    "adamw-1m-256": "1M x 256, 16,384, AdamW",
    "adamw-50k-768": "50,257 x 768, 4,096, AdamW",
    "adamw-10m-64": "10M x 64, 16,384, AdamW",
    "adagrad-1m-256": "1M x 256, 16,384, Adagrad",
    "sgd-1m-256": "1M x 256, 16,384, SGD",
}
README_PEERS = ("torch fused", "torch default", "torch sparse")


def readme_rows(records: dict[str, Record]) -> str:
    """The lines of the READMEs' table of times, below its head."""
    lines = []
    for name, label in README_WORKLOADS.items():
        peers = records[name]["peers"]
        cells = [f"{peers['hotrow']['step']['median_ms']:.1f} ms"]
        for peer_name in README_PEERS:
            peer = peers.get(peer_name, {})
            if "step" not in peer:
                cells.append("—")
                continue
            time, ratio = peer["step"]["median_ms"], peer["hotrow_ratio"]["median"]
            shown = f"{time:,.0f}" if time >= 100 else f"{time:.1f}"
            star = " *" if "SparseAdam" in peer["label"] else ""
            cells.append(f"{shown} ms ({1 / ratio:.1f} x){star}")
        lines.append("| " + " | ".join([label, *cells]) + " |")
    return "\n".join(lines) + "\n"


def replace_rows(readme: str, rows: str) -> str:
    """The README with these lines below the head of its table of times."""
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
    parser.add_argument(
        "--docs", type=Path, help="a folder to write into, without changing the READMEs"
    )
    options = parser.parse_args(arguments)
    records = record_files.read(options.records)
    docs = options.docs or DOCS
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, record in records.items():
        if "peers" in record:
            files.write_text(docs / FIGURES / f"{name}.svg", plots.plot(record) + "\n")
    files.write_text(docs / "performance.md", make_page(records))
    if options.docs is None:
        for name in READMES:
            text = (ROOT / name).read_text(encoding="utf-8")
            files.write_text(ROOT / name, replace_rows(text, readme_rows(records)))


if __name__ == "__main__":
    main()
