"""Write docs/sameness.md: the errors of hotrow and torch in every optimizer configuration.

    python -m benchmarks.sameness [--steps 2500] [--jobs 2] [--folder docs]

The script measures the same configurations as the tests and writes all results to sameness.json.
`--page` rewrites the page from sameness.json, without measuring. The exit code is 1 if any
configuration is outside the bound.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import subprocess
import sys
import time
from concurrent.futures import ProcessPoolExecutor, as_completed
from importlib.metadata import version
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from benchmarks import plots
from hotrow.inputs.files import write_text
from hotrow.verify.sameness import SCALES, SLACK, Batches, measure_sameness
from tests.support.training import configurations

# The rounding errors of a row that is in every batch form a random walk. In a single column, chance
# decides whether hotrow or torch ends closer to float64. So the table has many columns.
ROWS, COLUMNS, SEED = 300, 152, 0
Record = dict[str, Any]


def measure_configuration(index: int, steps: int, seed: int) -> Record:
    """Measure the configuration with this index in `configurations()`."""
    name, options = configurations()[index]
    begin = time.perf_counter()
    found = measure_sameness(
        name, options, Batches(steps=steps, rows=ROWS, columns=COLUMNS, seed=seed)
    )
    return {"index": index, "seconds": round(time.perf_counter() - begin, 1), **found.to_dict()}


def run(pool: ProcessPoolExecutor, indices: list[int], steps: int) -> list[Record]:
    """Measure these configurations in parallel, show progress, and return records in order."""
    names = configurations()
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("remaining:"),
        TimeRemainingColumn(),
        console=console,
        disable=not console.is_terminal,
    )
    begin, done = time.monotonic(), {}
    waiting = {pool.submit(measure_configuration, i, steps, SEED): i for i in indices}
    with bar:
        task = bar.add_task("configurations", total=len(indices))
        for future in as_completed(waiting):
            done[waiting[future]] = future.result()
            bar.advance(task)
            if not console.is_terminal:
                spent = time.monotonic() - begin
                left = spent / len(done) * (len(indices) - len(done))
                name = names[waiting[future]][0]
                print(
                    f"{len(done)} of {len(indices)} ({name}), {spent:.0f} s elapsed, "
                    f"about {left:.0f} s remaining",
                    file=sys.stderr,
                )
    return [done[i] for i in indices]


def describe_run(command: str, steps: int, jobs: int, seconds: float) -> Record:
    """Describe the run: command, versions and machine."""
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty", "--exclude=*"],
        capture_output=True,
        text=True,
        check=False,
    ).stdout.strip()
    packages = ("hotrow", "torch", "numpy", "numba")
    return {
        "command": command,
        **{package: version(package) for package in packages},
        "python": platform.python_version(),
        "commit": commit or "unknown",
        "cpu": _cpu(),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "processes": jobs,
        "threads_each": 1,
        "steps": steps,
        "seed": SEED,
        "seconds": round(seconds),
    }


def _cpu() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        return next(line.split(":")[1].strip() for line in lines if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def label(record: Record) -> str:
    """Return the non-default options as Python keyword arguments."""
    pairs = record["options"].items()
    values = [(name, tuple(v) if isinstance(v, list) else v) for name, v in pairs]
    return ", ".join(f"{name}={value}" for name, value in values) or "defaults"


def hotrow_error(scale: Record) -> float:
    """Return hotrow's error; null in the JSON file means infinity."""
    error = scale["hotrow_error"]
    return math.inf if error is None else float(error)


def ulps(error: float, scale: Record) -> str:
    """Format an error in ulp of the largest weight."""
    value = error / scale["ulp"]
    return f"{value:.1f}" if value < 1000 else f"{value:.2g}"


def cell(scale: Record) -> str:
    """Format hotrow's error, torch's error and the share of identical weights."""
    hotrow, torch_error = hotrow_error(scale), scale["torch_float32_error"]
    share = math.floor(100 * scale["bitwise"] / scale["values"])
    text = f"{ulps(hotrow, scale)} / {ulps(torch_error, scale)}, {share}%"
    return text if scale["within"] else f"**{text}**"


def document(content: Record) -> str:
    """Return the page as Markdown."""
    records, how = content["configurations"], content["run"]
    scales = [scale for record in records for scale in record["scales"]]
    within = sum(s["within"] for s in scales)
    closer = sum(hotrow_error(s) <= s["torch_float32_error"] for s in scales)
    bits = sum(s["bitwise"] for s in scales) / sum(s["values"] for s in scales)
    names = list(dict.fromkeys(record["optimizer"] for record in records))
    lines = [
        "# Equality with torch.optim",
        "",
        "<!-- Generated by `make sameness` from the results in sameness.json. -->",
        "",
        "This page compares hotrow's error with that of torch's own float32 optimizers. Both "
        "errors are measured against float64 training. The bound for hotrow's error is torch's "
        f"error plus {SLACK} ulp. **{within} of {len(scales)} runs are within this bound.** The "
        f"runs cover {len(records)} configurations of {len(names)} optimizers, each with gradients "
        f"at {len(SCALES)} scales.",
        "",
        *summary_table(names, records),
        "",
        "The last column shows the errors with default options and gradients at scale 1. An ulp is "
        "the spacing of float32 numbers at the largest weight.",
        "",
    ]
    if all(defaults_at_one(name, records) for name in names):
        lines += ["![Errors of hotrow and of torch in float32, by optimizer](sameness.svg)", ""]
    lines += [
        "## Findings",
        "",
        f"- hotrow's error is at most torch's float32 error in {closer} of the {len(scales)} runs, "
        f"even without the allowance of {SLACK} ulp.",
        f"- {math.floor(1000 * bits) / 10:.1f}% of all weights are bit for bit identical to those "
        "of torch's float32 training.",
        "- To check a configuration yourself, run `hotrow check --optimizer AdamW`.",
        "",
        *outside_bound(records),
        "## What was measured",
        "",
        *description(records[0], how),
        "## All configurations",
        "",
        "Each cell shows hotrow's error and torch's float32 error in ulp, separated by a slash, "
        "and the share of weights that are bit for bit identical. **Bold** cells are outside the "
        "bound. Each column shows one scale of the gradients. [sameness.json](sameness.json) "
        "contains the absolute errors.",
        "",
    ]
    for name in names:
        chosen = [record for record in records if record["optimizer"] == name]
        good = sum(record["within"] for record in chosen)
        summary = f"{name}: {good} of {len(chosen)} configurations are within the bound"
        lines += ["<details>", f"<summary>{summary}</summary>", ""]
        lines += [*configuration_table(chosen), "", "</details>", ""]
    lines += ["<details>", "<summary>Versions and machine</summary>", "", "```text"]
    lines += [f"{name}: {value}" for name, value in how.items()]
    lines += ["```", "", "</details>", ""]
    return "\n".join(lines)


def defaults_at_one(name: str, records: list[Record]) -> Record | None:
    """Return an optimizer's result for default options and gradients at scale 1, if any."""
    for record in records:
        if record["optimizer"] == name and not record["options"]:
            return next((scale for scale in record["scales"] if scale["scale"] == 1), None)
    return None


def summary_table(names: list[str], records: list[Record]) -> list[str]:
    """Return the lines of a table with one row per optimizer."""
    lines = [
        "| optimizer | configurations | runs within the bound | runs with at most torch's error "
        "| identical weights | hotrow's error / torch's float32 error, ulp |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for name in names:
        chosen = [record for record in records if record["optimizer"] == name]
        scales = [scale for record in chosen for scale in record["scales"]]
        within = sum(scale["within"] for scale in scales)
        closer = sum(hotrow_error(scale) <= scale["torch_float32_error"] for scale in scales)
        bits = sum(s["bitwise"] for s in scales) / sum(s["values"] for s in scales)
        first, errors = defaults_at_one(name, records), "—"
        if first is not None:
            errors = f"{ulps(hotrow_error(first), first)} / "
            errors += ulps(first["torch_float32_error"], first)
        count = f"{within} of {len(scales)}"
        lines.append(
            f"| {name} | {len(chosen)} | {count if within == len(scales) else f'**{count}**'} "
            f"| {closer} of {len(scales)} | {math.floor(100 * bits)}% | {errors} |"
        )
    return lines


def outside_bound(records: list[Record]) -> list[str]:
    """Return the lines that list the configurations outside the bound, if there are any."""
    missed = [record for record in records if not record["within"]]
    if not missed:
        return []
    lines = ["**NOT within the bound for at least one scale of the gradients:**", ""]
    for record in missed:
        at = ", ".join(f"{s['scale']:g}" for s in record["scales"] if not s["within"])
        lines.append(f"- {record['optimizer']}: {label(record)} (at {at})")
    return [*lines, ""]


def description(first: Record, how: Record) -> list[str]:
    """Return the lines that describe the measurement."""
    return [
        f"Each run trains a {first['rows']} x {first['columns']} table three times for "
        f"{how['steps']:,} steps, with the same ids and gradients each time:",
        "",
        "1. with `torch.optim` in float64, as the reference;",
        "2. with `torch.optim` in float32;",
        "3. with `hotrow.convert` and `hotrow.optim` in float32, so that each step touches only "
        "the rows in the batch.",
        "",
        "**The bound:** hotrow's error is at most the error of torch in float32 plus "
        f"{SLACK} ulp. The error is max |w - w64| over the table, where w64 is the weight "
        "after float64 training. An ulp is the spacing of float32 numbers at the largest |w64|.",
        "",
        f"- Each step has {first['ids_a_step']} ids that follow Zipf's law. "
        f"{first['rows_never_touched']} rows are never in a batch, and others are idle for up to "
        f"{first['longest_idle_steps']:,} steps.",
        "- The learning rate warms up for a tenth of the steps, then decays along a cosine to "
        "a tenth of its peak.",
        "- The gradients are normally distributed random numbers multiplied by the scale. They "
        "don't depend on the table, so the runs differ only in how the optimizers round.",
        "",
    ]


def configuration_table(records: list[Record]) -> list[str]:
    """Return the lines of a table with one row per configuration of an optimizer."""
    headers = [f"{scale:g}" for scale in SCALES]
    lines = [f"| options | {' | '.join(headers)} | within |"]
    lines.append(f"| --- |{' ---: |' * len(headers)} --- |")
    for record in records:
        cells = " | ".join(map(cell, record["scales"]))
        verdict = "yes" if record["within"] else "**NOT**"
        lines.append(f"| {label(record)} | {cells} | {verdict} |")
    return lines


def write_page(content: Record, folder: Path) -> None:
    """Write the page and its chart."""
    records = content["configurations"]
    errors = []
    for name in dict.fromkeys(record["optimizer"] for record in records):
        scale = defaults_at_one(name, records)
        if scale is not None and math.isfinite(hotrow_error(scale)):
            pair = hotrow_error(scale), scale["torch_float32_error"]
            errors.append((name, pair[0] / scale["ulp"], pair[1] / scale["ulp"]))
    if errors:
        write_text(
            folder / "sameness.svg", plots.plot_errors(errors, content["run"]["steps"]) + "\n"
        )
    write_text(folder / "sameness.md", document(content))


def main() -> int:
    """Measure all configurations, write the files, and return the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--only", help="measure only this optimizer (default: all)")
    parser.add_argument(
        "--page", action="store_true", help="write the page from sameness.json, without measuring"
    )
    options = parser.parse_args()
    if options.page:
        write_page(json.loads((options.folder / "sameness.json").read_text()), options.folder)
        return 0
    indices = [i for i, (name, _) in enumerate(configurations()) if options.only in (None, name)]
    if not indices:
        parser.error(f"--only {options.only}: unknown optimizer")
    begin = time.monotonic()
    with ProcessPoolExecutor(options.jobs, mp_context=get_context("spawn")) as pool:
        records = run(pool, indices, options.steps)
    missed = [record for record in records if not record["within"]]
    command = (
        "make sameness"
        if len(sys.argv) == 1
        else " ".join(["python -m benchmarks.sameness", *sys.argv[1:]])
    )
    content = {
        "run": describe_run(command, options.steps, options.jobs, time.monotonic() - begin),
        "configurations": records,
    }
    options.folder.mkdir(exist_ok=True)
    write_text(options.folder / "sameness.json", json.dumps(content, indent=1, allow_nan=False))
    write_page(content, options.folder)
    for record in missed:
        print(f"NOT within the bound: {record['optimizer']}: {label(record)}")
    print(f"{len(records) - len(missed)} of {len(records)} configurations are within the bound")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
