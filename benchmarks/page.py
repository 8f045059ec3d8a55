"""Write docs/performance.md, its figures and the READMEs' numbers from benchmarks/records.

    python -m benchmarks.page

The text of the page comes from benchmarks/performance.md. The script replaces placeholders
such as `<!-- tables -->` with tables made from the records. It replaces placeholders such as
`{{speedup adamw-1m-256: torch fused}}` with a single number: hotrow's `speedup` over a peer, the
peer's step time in `ms`, or its extra memory in `MB`. A placeholder such as
`{{slowdown tables-26: tables-1}}` becomes the ratio of the times of two converted models.
`{{us adamw-1k-16: forward}}` becomes the time of one part of hotrow's step.
`make bench` measures the workloads and then runs this script.
"""

from __future__ import annotations

import argparse
import html
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from benchmarks import plots, readme, record_files
from benchmarks.onehots import DENSE_USES
from benchmarks.report import describe, model_goals, speedup
from benchmarks.workloads import SUITES, WORKLOADS
from hotrow.bench.report import number, number_range, title, trains_other_model
from hotrow.bench.workload import Record
from hotrow.inputs import files
from hotrow.inputs.text import format_size

ROOT = record_files.ROOT
TEXT, RECORDS = ROOT / "benchmarks" / "performance.md", ROOT / "benchmarks" / "records"
DOCS, FIGURES = ROOT / "docs", "performance"
READMES = ("README.md", "README.zh-CN.md")


def make_page(records: dict[str, Record]) -> str:
    """Return the whole page as Markdown."""
    ordered = {name: records[name] for name in WORKLOADS if name in records}
    tables = [section(name, record) for name, record in ordered.items() if "peers" in record]
    others = [section(name, record) for name, record in ordered.items() if "later_use" in record]
    parts = {
        "summary": summary_table(ordered, SUMMARY),
        "optimizers": summary_table(ordered, OPTIMIZERS),
        "narrow": summary_table(ordered, NARROW),
        "tables": "\n\n".join(tables),
        "startup": "\n\n".join(others),
        "models": models_table(ordered),
        "onehots": onehots_table(records["onehots"]["uses"], dense=False),
        "onehots-dense": onehots_table(records["onehots"]["uses"], dense=True),
        "machines": machines_list(records),
    }
    text = TEXT.read_text(encoding="utf-8")
    for name, part in parts.items():
        mark = f"<!-- {name} -->"
        assert text.count(mark) == 1, f"{TEXT.name} must contain {mark} exactly once"
        text = text.replace(mark, part)
    return re.sub(
        r"\{\{(\w+) ([\w-]+): ([^}]+)\}\}", lambda mark: _figure(ordered, *mark.groups()), text
    )


def _figure(records: dict[str, Record], kind: str, workload: str, name: str) -> str:
    """Return the number that a placeholder stands for; see the top of this file."""
    if kind == "slowdown":
        after, baseline = (records[each]["after"]["median_ms"] for each in (workload, name))
        return f"{after / baseline:.3g}"
    if kind == "us":
        return f"{1e3 * records[workload]['peers']['hotrow'][name]['median_ms']:.0f} us"
    peer = records[workload]["peers"][name]
    if kind == "speedup":
        return speedup(peer["hotrow_ratio"]["median"])
    if kind == "ms":
        return f"{number(peer['step']['median_ms'])} ms"
    assert kind == "MB", f"unknown kind of number: {kind}"
    return f"{number(peer['memory']['peak_extra_bytes'] / 1e6)} MB"


# Workloads in the summary table, and in the table with one row per optimizer.
SUMMARY = (
    "adamw-1m-256",
    "adamw-50k-768",
    "adamw-10m-64",
    "adagrad-1m-256",
    "sgd-1m-256",
)
OPTIMIZERS = tuple(name for name in WORKLOADS if name.endswith("-1m-64"))
NARROW = ("sgd-1m-64", "sgd-10m-64", *SUITES["narrow"])
DENSE_PEERS = ("torch fused", "torch foreach", "torch default")
LIBRARY_PEERS = ("fbgemm", "jax lazy", "jax dense")


def summary_table(records: dict[str, Record], names: Iterable[str]) -> str:
    """Return a table of hotrow's times, the baselines' times and hotrow's speedups."""
    chosen = [records[name] for name in names]
    has_libraries = any(name in LIBRARY_PEERS for record in chosen for name in record["peers"])
    head = ["table and ids per step", "hotrow", "torch fused", "torch foreach", "torch default"]
    head += ["torch `sparse=True`", *["fastest other library"] * has_libraries]
    rows = []
    for record in chosen:
        peers = {name: peer for name, peer in record["peers"].items() if "step" in peer}
        others = [name for name in peers if name in LIBRARY_PEERS]
        fastest = min(others, key=lambda name: peers[name]["step"]["median_ms"], default="")
        columns = [*DENSE_PEERS, "torch sparse", *[fastest] * has_libraries]
        cells = [_summary_cell(record, name) for name in columns]
        if has_libraries and fastest:
            cells[-1] += f" {peers[fastest]['label']}"
        time = f"**{number(peers['hotrow']['step']['median_ms'])} ms**"
        rows.append([title(record), time, *cells])
    return markdown_table(head, rows)


def _summary_cell(record: Record, name: str) -> str:
    """Return a peer's time and hotrow's speedup; mark peers that differ from dense training."""
    peer = record["peers"].get(name, {})
    if "step" not in peer:
        return "—"
    mark = ""
    if trains_other_model(record, name):
        mark = " †"
    elif not peer.get("equality", {"equal": True})["equal"]:
        mark = " ‡"
    ratio = peer["hotrow_ratio"]["median"]
    return f"{number(peer['step']['median_ms'])} ms ({speedup(ratio)}){mark}"


def speedup_plot(records: dict[str, Record]) -> str:
    """Return the chart of hotrow's speedups over torch's fastest dense step."""
    bars = []
    for name in (*SUMMARY, *OPTIMIZERS):
        record = records[name]
        peers = {n: p for n, p in record["peers"].items() if n in DENSE_PEERS and "step" in p}
        if peers:
            fastest = min(peers.values(), key=lambda peer: peer["step"]["median_ms"])
            bars.append((title(record), 1 / fastest["hotrow_ratio"]["median"]))
    return plots.plot_speedups(bars)


def section(name: str, record: Record) -> str:
    """Return a collapsible section with a record's figure, table and remarks."""
    report = describe(record)
    figure = [f"![Bar chart: {report.title}]({FIGURES}/{name}.svg)"] * ("peers" in record)
    remarks = "\n".join(f"- {line}" for line in report.remarks)
    parts = [
        report.setting,
        *figure,
        markdown_table(report.head, report.rows),
        remarks,
    ]
    return folded(_summary(record, report.title), "\n\n".join(part for part in parts if part))


def _summary(record: Record, heading: str) -> str:
    """Return the visible line of a collapsed section: the sizes and hotrow's time."""
    if "peers" not in record:
        return heading
    about = record["about"]
    is_plain = record["task"] != "step" or about.startswith("a training step")
    time = number(record["peers"]["hotrow"]["step"]["median_ms"])
    return f"{heading}{'' if is_plain else f' ({about})'}: {time} ms"


def folded(summary: str, text: str) -> str:
    """Return a collapsible section in HTML that GitHub and Sphinx both render."""
    return (
        f"<details>\n<summary>{html.escape(summary, quote=False)}</summary>\n\n{text}\n\n</details>"
    )


def models_table(records: dict[str, Record]) -> str:
    """Return the table of whole models, before and after `convert`."""
    as_ms = "median_ms", "p20_ms", "p80_ms"
    rows = []
    for record in records.values():
        if "before" not in record:
            continue
        peak = record.get("peak_extra_bytes", {})
        times = [number_range(record[side], *as_ms) for side in ("before", "after")]
        memory = [number(peak[side] / 1e6) if peak else "" for side in ("before", "after")]
        ratio = speedup(record["ratio"]["median"])
        rows.append([record["about"], *times, ratio, *memory, model_goals(record)])
    head = ["model", "before, ms", "after, ms", "speedup"]
    head += ["extra memory before, MB", "after, MB", "time and memory goals"]
    return markdown_table(head, rows)


def onehots_table(uses: list[dict[str, Any]], dense: bool) -> str:
    """Return a table with a row per use of a one-hot, and the speedup and memory per size.

    The table contains the uses that are in `DENSE_USES`, or the others if `dense` is false.
    """
    uses = [each for each in uses if (each["use"] in DENSE_USES) == dense]
    sizes = list(dict.fromkeys((each["rows"], each["classes"]) for each in uses))
    rows: dict[str, list[str]] = {}
    for each in uses:
        row = rows.setdefault(each["use"], [f"`{each['use']}`"])
        row.append(speedup(each["hotrow"]["median_ms"] / each["torch"]["median_ms"]))
        if (each["rows"], each["classes"]) != sizes[-1]:
            row.append(speedup(each["by_hand"]["median_ms"] / each["torch"]["median_ms"]))
            peaks = (number(each[side]["peak_bytes"] / 1e6) for side in ("torch", "hotrow"))
            row.append(" → ".join(peaks))
    head = ["use"]
    for i, (count, classes) in enumerate(sizes):
        head.append(f"{count:,} x {classes:,}")
        head += ["by hand", "peak, MB"] if i < len(sizes) - 1 else []
    return markdown_table(head, list(rows.values()))


def machines_list(records: dict[str, Record]) -> str:
    """List the machines that produced the records, with the commits measured on each."""
    machines: dict[str, dict[str, list[Record]]] = {}
    for record in records.values():
        environment = record["environment"]
        threads = environment["threads"]
        versions = ", ".join(f"{k} {v}" for k, v in environment["versions"].items() if v)
        settings = ", ".join(f"{k}={v}" for k, v in environment["settings"].items())
        text = (
            f"{environment['cpu']} (family and model {environment['cpu_family_and_model']}), "
            f"{environment['cores']} cores, {format_size(environment['memory_bytes'])}; "
            f"{threads} thread{'s' * (threads != 1)}; {environment['system']}; {versions}; "
            f"transparent huge pages {environment['transparent_hugepage']}, {settings}"
        )
        machines.setdefault(text, {}).setdefault(environment["commit"], []).append(record)
    lines = [
        f"- {text}. " + "; ".join(_describe_commit(*item) for item in commits.items()) + "."
        for text, commits in machines.items()
    ]
    return "\n".join(lines)


def _describe_commit(commit: str, records: list[Record]) -> str:
    """Describe a commit: its workloads, their dates and the load average before the runs."""
    names = [record["workload"] for record in records]
    many = names[0] if len(names) == 1 else f"{len(names)} workloads"
    environments = [record["environment"] for record in records]
    dates = sorted({environment["date"] for environment in environments})
    loads = [e["load_average_before"] for e in environments if e["load_average_before"] is not None]
    load = f", load average {_span(sorted(loads))} before the runs" if loads else ""
    return f"commit {commit}: {many}, {_span(dates)}{load}"


def _span(values: list[Any]) -> str:
    """Format the range from the first to the last value, or a single value if both are equal."""
    return " to ".join(dict.fromkeys((str(values[0]), str(values[-1]))))


def markdown_table(head: list[str], rows: list[list[str]]) -> str:
    """Return a Markdown table with right-aligned numbers."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def main(arguments: list[str] | None = None) -> None:
    """Write the page and its figures, and update the numbers in the READMEs."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--records", type=Path, default=RECORDS, help="the folder with the records")
    parser.add_argument(
        "--docs", type=Path, help="write to this folder, and leave the READMEs unchanged"
    )
    options = parser.parse_args(arguments)
    records = record_files.read(options.records)
    docs = options.docs or DOCS
    (docs / FIGURES).mkdir(parents=True, exist_ok=True)
    for name, record in records.items():
        if "peers" in record:
            files.write_text(docs / FIGURES / f"{name}.svg", plots.plot(record) + "\n")
    files.write_text(docs / FIGURES / "speedups.svg", speedup_plot(records) + "\n")
    files.write_text(docs / "performance.md", make_page(records))
    if options.docs is None:
        for name in READMES:
            text = (ROOT / name).read_text(encoding="utf-8")
            files.write_text(ROOT / name, readme.update(text, records))


if __name__ == "__main__":
    main()
