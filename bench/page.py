"""Make docs/performance.md, its figures and the READMEs' table of times from bench/records.

    python bench/page.py

The records are made by `make bench`, which then calls this.
"""

from __future__ import annotations

import argparse
import re
from pathlib import Path
from typing import Any

from hotrow import files
from hotrow.bench import plots, records
from hotrow.bench.telling import between, model_goals, number, tell
from hotrow.bench.workloads import WORKLOADS

Record = dict[str, Any]
ROOT = Path(__file__).parents[1]
RECORDS, DOCS, FIGURES = ROOT / "bench" / "records", ROOT / "docs", "performance"
READMES = ("README.md", "README.zh-CN.md")

HEAD = """\
# What a training step costs

<!-- Made by `python bench/page.py` from bench/records: change those, not this. -->

`hotrow bench` measures it on any machine, `hotrow bench --list` names the workloads, and `make
bench` makes this page anew.

A step is what a user writes: `zero_grad()`, the look-up, `backward()` with a given gradient of the
output, which nobody else holds, and `step()`, for a model that is one table. The ids are Zipf(1.1)
unless it says uniform, new at each step, drawn before it is timed, the same for everybody. The
peers take turns in one process, each with its quickest settings; an optimizer's options are torch's
defaults. Times are medians, with the 20th and 80th percentile in brackets. A ratio is hotrow's time
over the peer's, turn by turn.

**Equal** means: on rows sampled from the measured table, after the steps that come before the
timing, the largest error to dense training in float64 is no more than that of torch's dense
training in the table's dtype, plus 2 ulp. For hotrow it is asserted; a run in which it does not
hold leaves no record.

**The floor** is the time that the machine takes to copy as many bytes as a step must move, at the
speed of copying 128 MB, watched among the peers' turns. A step must read and write each touched
row's weight and state once, read each row of the output's gradient once, and write each row of the
output once. It is shown where the record has it.

**Extra memory** is the peak resident memory of a process during a step, less what was resident
before the table was made, less the table and the optimizer's state. The step's output and gradient
are part of it. There the allocator has its own settings, not those below.
"""

# Measured by hand on 2026-11-22, on the machine of the records.
WHY = """\
## Where a step's time goes, and what is left

One step of AdamW, 1M x 256, touches 5,600 rows of weight, m and v (17 MB), writes an output of 17 MB
and reads a gradient of 17 MB. Of 6.9 ms, with the peers away:

| part | ms |
| --- | ---: |
| look-up kernel: reads the rows, jumps over what they missed, writes the output | 2.3 |
| step kernel: reads rows and gradient, jumps again, steps, writes the rows back | 2.3 |
| distinct ids, their order | 0.5 |
| range of the ids; the sums of Adam's series | 0.14 |
| Python, autograd, the optimizer's wrapper, freeing output and gradient | 1.6 |

torch's own look-up of the same ids, 5.7 MB read and 17 written, takes 1.3 to 1.5 ms of the 2.3: fresh
output and scattered rows come at half of the speed of copying, which the floor goes by.

### What each goal lacks

- **Twice the floor** (AdamW), **1.7 x** (SGD, Adagrad). With weight and state in three tensors the
  two kernels are within 1.5 x of what the same reads and writes take without any arithmetic. What
  would remain: the state beside its row, one stream for three, which torch's format of a state (a
  tensor for each) rules out unless every read of it makes a copy; and the 1.6 ms of Python, for which
  a step of SGD with nothing else in it has 1.3 as well.
- **A thirtieth of fused, a 150th of default** (1M x 256), **a fifteenth, a fifth of SparseAdam**
  (50,257 x 768): torch's own zero_grad, look-up and backward take 1.4 ms of the 1.8 that the last
  leaves.
- **No peer ahead** (SGD, 1M x 64 and 1M x 256; AdamW, 10,000 x 64): torch's sparse SGD without
  momentum adds the rows into the table in C++ without finding the distinct ones; hotrow's step adds
  up each row's gradients first, in batch order, as a dense gradient does (the sparse one's sum is
  another in the last bits: see above), and its layers in Python take 0.2 ms, which at 4,096 ids is
  half of a step. SparseAdam is another rule.
- **A policy on small one-hots no slower**: 15 to 20 us of Python around the model's methods, of 0.4 ms.

### What was tried

| expected | found | kept |
| --- | --- | --- |
| numba counts references to the owner of each row, in one place for all threads; without, a second thread helps | 977 rows x 64: 223 to 110 us on one thread; 5,600 x 16: 866 to 330, and 529 to 220 on two | yes |
| the test whether a jump is exact, an early return, done several columns at a time | its loop vectorised; within the noise of the whole step | yes |
| little work on one thread, as waking another waits for Python's lock | 977 rows x 64: 185 to 110 us; even at 1,800 rows | yes |
| Adam's series compiled | 80 to 22 us a step | yes |
| bfloat16 compiled, its numbers rounded after each operation | 42 to 4 ms at 50,257 x 768; at first 13 ms: the update was not inlined into its loop, and so not vectorised | yes |
| an embedding of fewer than 100,000 entries left to torch | 1,000 x 16: 253 to 60 us, where torch's sparse SGD takes 59 | yes |
| the check of ids past torch's dispatcher, attributes past torch functions, torch's step only where it is needed | 1,000 x 16, as a table: 253 to 225 us; AdamW 414 to 359 | yes |
| torch's own threads for the kernels instead of Python's | reading the rows on two threads 2.3 to 1.05 ms | yes |
| a look-up that does not write back what the step will write | less than writing twice | yes |
| asking for an output's place before it is written | a quarter of the look-up | yes |
| asking for more rows ahead; larger parts for each thread | nothing | no |
| threads without Python in them, one stream for row and state | not tried | |
"""

NOT_FASTER = """\
## What is not faster

- An embedding of fewer than 100,000 entries: it is torch's, dense gradient and step. One a little
  larger costs about what a dense fused step does.
- SGD without momentum: torch's `sparse=True` leaves idle rows alone, which is right there, and is
  about as quick.
- A head over the vocabulary: its gradient is dense, whether it is tied to the table or not; only
  the table's part of a step shrinks.
- Adam-like rules with coupled decay: a row makes its missed steps one by one. RMSprop with decay
  takes torch's own dense step.
- A model whose one-hots are small, as above.
"""

# What looks small one-hots up all the same stands in the table too.
SMALL_ONEHOTS = """\
A model whose one-hots are small is not faster. Each operation on one that is not written out is
Python, 3 to 15 us, and so is each other call of torch's in the model's own classes, 1 to 1.5 us; a
product with 64 x 500 ones and zeros takes hardly longer. So one-hots of fewer than 100,000 entries
are left to torch, and a model that has no larger ones runs as it was, as the policy here does,
unless `least=0` has all looked up."""


def page(found: dict[str, Record]) -> str:
    """The whole page, in Markdown."""
    ordered = {name: found[name] for name in WORKLOADS if name in found}
    tables = [section(name, record) for name, record in ordered.items() if "peers" in record]
    others = [section(name, record) for name, record in ordered.items() if "later_use" in record]
    parts = [HEAD, *tables, *others, WHY, models(ordered), NOT_FASTER, machines(found)]
    return "\n".join(part for part in parts if part)


def section(name: str, record: Record) -> str:
    """A table of one record, its figure, and what else is to be said."""
    told = tell(record)
    figure = [f"![{told.title}: the times below]({FIGURES}/{name}.svg)"] * ("peers" in record)
    remarks = "\n".join(f"- {line}" for line in told.remarks)
    text = [f"## {told.title}", told.setting, *figure, table(told.head, told.rows), remarks]
    return "\n\n".join(text) + "\n"


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
        rows.append([WORKLOADS[name].about, *times, ratio, *memory, model_goals(record)])
    if not rows:
        return ""
    head = ["model", "before, ms", "after, ms", "ratio"]
    head += ["extra memory before, MB", "after, MB", "goals"]
    text = [
        "## Whole models",
        "A step is forward, backward and Adam, by `torch.optim` before and `hotrow.optim` after "
        "`convert`, both `fused` for what is dense, in turns in one process. Output and gradients "
        "are held to float64 first.",
        table(head, rows),
        SMALL_ONEHOTS,
    ]
    return "\n\n".join(text) + "\n"


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
    return "\n".join(["## Where", "", *lines, ""])


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
