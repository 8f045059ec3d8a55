"""Write docs/sameness.md: every configuration of every optimizer, compared by the three-way rule.

    python -m benchmarks.sameness [--steps 2500] [--jobs 2] [--folder docs]

The configurations are those of the tests. Beside the document, sameness.json has every figure. The
exit code is 1 if one is not within.
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

from hotrow.inputs.files import write_text
from hotrow.verify.sameness import SCALES, SLACK, Batches, measure_sameness
from tests.support.training import configurations

# A row in every batch walks at random, by its roundings. In one draw of it, either side may be the
# luckier; the columns of a row are as many draws.
ROWS, COLUMNS, SEED = 300, 152, 0
Record = dict[str, Any]


def measure_configuration(index: int, steps: int, seed: int) -> Record:
    """Measure one configuration, by its place in the list."""
    name, options = configurations()[index]
    begin = time.perf_counter()
    found = measure_sameness(
        name, options, Batches(steps=steps, rows=ROWS, columns=COLUMNS, seed=seed)
    )
    return {"index": index, "seconds": round(time.perf_counter() - begin, 1), **found.to_dict()}


def run(pool: ProcessPoolExecutor, indices: list[int], steps: int) -> list[Record]:
    """The configurations' records in their order, with progress and the time left."""
    names = configurations()
    console = Console(stderr=True)
    bar = Progress(
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left:"),
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
                    f"{len(done)} of {len(indices)} ({name}), {spent:.0f} s gone, "
                    f"about {left:.0f} s left",
                    file=sys.stderr,
                )
    return [done[i] for i in indices]


def describe_run(command: str, steps: int, jobs: int, seconds: float) -> Record:
    """How the numbers were measured."""
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
    """The options as they are written in Python; the defaults are left out."""
    pairs = record["options"].items()
    values = [(name, tuple(v) if isinstance(v, list) else v) for name, v in pairs]
    return ", ".join(f"{name}={value}" for name, value in values) or "defaults"


def hotrow_error(scale: Record) -> float:
    """The error of hotrow; JSON has null for inf."""
    error = scale["hotrow_error"]
    return math.inf if error is None else float(error)


def ulps(error: float, scale: Record) -> str:
    """An error in ulp of the largest weight."""
    value = error / scale["ulp"]
    return f"{value:.1f}" if value < 1000 else f"{value:.2g}"


def cell(scale: Record) -> str:
    """Hotrow's error, torch's, and the share of equal bits."""
    hotrow, torch_error = hotrow_error(scale), scale["torch_float32_error"]
    share = math.floor(100 * scale["bitwise"] / scale["values"])
    text = f"{ulps(hotrow, scale)} / {ulps(torch_error, scale)}, {share} %"
    return text if scale["within"] else f"**{text}**"


def document(content: Record) -> str:
    """The page."""
    records, how = content["configurations"], content["run"]
    scales = [scale for record in records for scale in record["scales"]]
    within, missed = sum(s["within"] for s in scales), [r for r in records if not r["within"]]
    no_further = sum(hotrow_error(s) <= s["torch_float32_error"] for s in scales)
    bits = sum(s["bitwise"] for s in scales) / sum(s["values"] for s in scales)
    first = records[0]
    lines = [
        "# The same step",
        "",
        f"**{within} of {len(scales)} within the rule** ({len(records)} configurations of "
        f"{len({r['optimizer'] for r in records})} optimizers, {len(SCALES)} scales of the "
        f"gradients each).",
        "",
    ]
    if missed:
        lines += ["**NOT within it at one scale or more:**", ""]
        for record in missed:
            at = ", ".join(f"{s['scale']:g}" for s in record["scales"] if not s["within"])
            lines.append(f"- {record['optimizer']}: {label(record)} (at {at})")
        lines.append("")
    lines += [
        f"In {no_further} of the {len(scales)}, hotrow is no further from float64 than torch in "
        f"float32 is, without the {SLACK} ulp. {math.floor(1000 * bits) / 10:.1f} % of all "
        "weights have torch's bits.",
        "",
        "## What was measured",
        "",
        f"A table of {first['rows']} x {first['columns']} was trained for {how['steps']:,} steps "
        "three times, on the same ids and the same gradients:",
        "",
        "- by `torch.optim` in float64: the truth;",
        "- by `torch.optim` in float32;",
        "- by `hotrow.optim` in float32, after `hotrow.convert`, on touched rows only.",
        "",
        f"The {first['ids_a_step']} ids of a step follow Zipf's law; {first['rows_never_touched']} "
        f"rows are in no batch, and others are idle for up to {first['longest_idle_steps']:,} "
        "steps. The learning rate warms up for a tenth of the steps and falls along a cosine to a "
        "tenth. The gradients are standard normal numbers times the scale, given and not computed "
        "from the table, so that what differs is the optimizer's rounding and nothing else.",
        "",
        "**The rule.** hotrow's error is at most the error of torch in float32 plus "
        f"{SLACK} ulp. An error is max |w - w64| over the table, and an ulp is the spacing of "
        "float32 at the largest |w64|.",
        "",
        "**A cell** reads: hotrow's error / torch float32's error, both in ulp, then the share of "
        "weights that have the same bits in the two. **Bold** is not within the rule. "
        "The absolute errors are in [sameness.json](sameness.json).",
        "",
    ]
    headers = [f"{scale:g}" for scale in SCALES]
    for name in dict.fromkeys(record["optimizer"] for record in records):
        lines += [f"## {name}", "", f"| options | {' | '.join(headers)} | within |"]
        lines.append(f"| --- |{' ---: |' * len(headers)} --- |")
        for record in records:
            if record["optimizer"] == name:
                cells = " | ".join(map(cell, record["scales"]))
                verdict = "yes" if record["within"] else "**NOT**"
                lines.append(f"| {label(record)} | {cells} | {verdict} |")
        lines.append("")
    lines += ["## How it was made", "", "```text"]
    lines += [f"{name}: {value}" for name, value in how.items()]
    lines += ["```", "", "One configuration alone: `hotrow check --optimizer AdamW`.", ""]
    return "\n".join(lines)


def main() -> int:
    """Measure all, write both files, and say whether all are within the rule."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--folder", type=Path, default=Path("docs"))
    parser.add_argument("--only", help="an optimizer; every one unless given")
    options = parser.parse_args()
    indices = [i for i, (name, _) in enumerate(configurations()) if options.only in (None, name)]
    if not indices:
        parser.error(f"--only {options.only}: no such optimizer")
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
    write_text(options.folder / "sameness.md", document(content))
    for record in missed:
        print(f"NOT within the rule: {record['optimizer']}: {label(record)}")
    print(f"{len(records) - len(missed)} of {len(records)} configurations are within the rule")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
