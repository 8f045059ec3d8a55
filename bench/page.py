"""docs/performance.md, made from the records."""

from __future__ import annotations

from typing import Any

from bench.workloads import WORKLOADS

Record = dict[str, Any]
PARTS = ("zero_grad", "forward", "backward", "optimizer_step")

HEAD = """\
# What a training step costs

<!-- Made by `python -m bench.train --page-only` from bench/records: change those, not this. -->

A step is what a user writes: `zero_grad()`, the look-up, `backward()` with a given gradient of the
output, which nobody else holds, and `step()`, for a model that is one table. The ids are Zipf(1.1),
new at each step, drawn before it is timed, the same for everybody. The peers take turns in one
process, each with its quickest settings; an optimizer's options are torch's defaults. Times are
medians, with the 20th and 80th percentile in brackets. A ratio is hotrow's time over the peer's,
turn by turn.

**Equal** means: on rows sampled from the measured table, after the steps that come before the
timing, the largest error to dense training in float64 is no more than that of torch's dense
training in float32, plus 2 ulp. For hotrow it is asserted; a run in which it does not hold leaves
no record.

**Extra memory** is the peak resident memory of a process during a step, less what was resident
before the table was made, less the table and the optimizer's state. The step's output and gradient
are part of it. There the allocator has its own settings, not those below.
"""

# Measured by hand on 2026-11-21, on the machine of the records.
WHY = """\
## Where AdamW's time goes, and what is left

One step of 1M x 256 touches 5,600 rows of weight, m and v (17 MB), writes an output of 17 MB and
reads a gradient of 17 MB. Done alone, without any arithmetic, on the same two threads:

- reading the rows: 1.05 ms; with the output written as well: 2.2 to 2.7 ms;
- reading rows and gradient and writing the rows back: 2.5 to 2.8 ms.

So forward and step cannot take less than about 4.7 ms with weight and state in three tensors, and
their kernels take 5.7 to 6. The other 2 to 3 ms are Python and torch (the modules, autograd, the
optimizer's wrapper, finding the distinct ids), run each time with caches that the rows have
emptied. A thirtieth of torch's fused step, 5.3 ms where that takes 160, would need the state beside
its row in one stream, and fewer layers in Python. At 50,257 x 768 a fifth of SparseAdam is 1.8 ms:
torch's own zero_grad, look-up and backward take 1.4 of it, and the 39 MB that a step has to move
1.1 more at this machine's copy speed (36 GB/s, read and written).

What paid: torch's own threads for the kernels instead of Python's, which had to share a core with
them (reading the rows on two threads 2.3 to 1.05 ms); a look-up that does not write back the rows
that the step will write; the gradient added up in the step where nobody else holds it; asking for
an output's place before it is written (a quarter of the look-up). What did not: asking for more
rows ahead; larger parts for each thread.
"""


def page(records: dict[str, Record]) -> str:
    """The whole page, in Markdown."""
    parts = [HEAD]
    parts += [workload(records[name]) for name in WORKLOADS if name in records]
    if "startup" in records:
        parts.append(startup(records["startup"]))
    parts += [WHY, onehots(records), machines(records)]
    return "\n".join(parts)


def workload(record: Record) -> str:
    """One workload: a row for each peer, then what was compared and what failed."""
    goals = {goal["against"]: goal for goal in record["goals"] if "against" in goal}
    rows = []
    for name, peer in record["peers"].items():
        if "failed" in peer:
            continue
        memory, ratio, goal = peer.get("memory"), peer.get("hotrow_ratio"), goals.get(name)
        rows.append(
            [
                label(record, name),
                between(peer["step"], "median_ms", "p20_ms", "p80_ms"),
                *(number(peer[part]["median_ms"]) for part in PARTS),
                number(memory["peak_extra_bytes"] / 1e6) if memory else "",
                between(ratio, "median", "p20", "p80") if ratio else "",
                f"at most {goal['at_most_ratio']:.3g}: {met(goal)}" if goal else "",
            ]
        )
    columns = "|step, ms|zero_grad|forward|backward|optimizer|extra memory, MB|hotrow's ratio|goal"
    text = [
        f"## {record['rule']}, {record['rows']:,} x {record['columns']}, {record['ids']:,} ids",
        f"{record['distinct_ids_per_step']:,} of the ids are distinct. Before the timing come "
        f"{record['steps_before']:,} steps; {record['steps_before_dense']} for torch's dense "
        "optimizers, whose time does not depend on the past.",
        table(columns.split("|"), rows),
        "\n".join(f"- {line}" for line in remarks(record)),
    ]
    return "\n\n".join(text) + "\n"


def remarks(record: Record) -> list[str]:
    """Who is equal, by how much the others are not, who could not take part; the memory's goal."""
    found = []
    for name, peer in record["peers"].items():
        if "failed" in peer:
            remedy = f" To have it: `{peer['remedy']}`." if "remedy" in peer else ""
            found.append(f"{label(record, name)} took no part: {peer['failed']}.{remedy}")
        elif "equal" in peer.get("equality", {}):
            seen = peer["equality"]
            verdict = "equal" if seen["equal"] else "**not equal**"
            found.append(
                f"{label(record, name)}: {verdict} to dense {seen['with']} on "
                f"{seen['rows_compared']} rows. Largest error {seen['max_error']:.2g} (torch's "
                f"dense float32: {seen['max_error_of_dense_float32']:.2g}), where weights moved "
                f"by up to {seen['max_move_of_dense']:.2g}."
            )
    for goal in record["goals"]:
        if "at_most_extra_bytes" in goal:
            most = goal["at_most_extra_bytes"] / 1e6
            found.append(f"Goal for hotrow's extra memory: at most {most:.0f} MB: {met(goal)}.")
    return found


def startup(record: Record) -> str:
    """First and later starts."""
    rows = [
        ["first use, empty cache of compiled kernels", number(record["first_use_median_s"])],
        ["later uses", number(record["later_use"]["median_ms"] / 1e3)],
        ["torch alone", number(record["torch_alone"]["median_ms"] / 1e3)],
        ["added by hotrow to later uses", between(record["added"], *AS_SECONDS, scale=1e-3)],
    ]
    goal = record["goals"][0]
    text = [
        "## Start-up",
        "A whole program: import, a table of 1,000 x 64, three steps of AdamW, exit.",
        table(["", "s"], rows),
        f"Goal for the added time: at most {goal['at_most_added_s']} s: {met(goal)}.",
    ]
    return "\n\n".join(text) + "\n"


ONEHOTS = {
    "tabular": "26 fields of 100,000 columns, 13 dense columns, batch 4,096, first layer 256",
    "policy": "500 states, batch 64, two layers of 64",
    "plain": "nothing to convert: four layers of 512, batch 256",
    "policy-64": "the policy with `least=0`",
    "policy-256": "the policy with `least=0`, batch 256",
    "policy-2000": "the policy with `least=0`, 2,000 states",
}


def onehots(records: dict[str, Record]) -> str:
    """Models that multiply by one-hots, before and after `convert`."""
    rows = []
    for name, what in ONEHOTS.items():
        record = records.get(f"onehot-{name}")
        if record is None:
            continue
        peak = record.get("peak_extra_bytes", {})
        goals = "; ".join(
            f"{goal['what']} at most {goal['at_most_ratio']:.3g}: {met(goal)}"
            for goal in record["goals"]
        )
        times = [between(record[side], *AS_SECONDS) for side in ("before", "after")]
        memory = [number(peak[side] / 1e6) if peak else "" for side in ("before", "after")]
        ratio = between(record["ratio"], "median", "p20", "p80")
        rows.append([what, *times, ratio, *memory, goals])
    if not rows:
        return ""
    head = [
        "model",
        "before, ms",
        "after, ms",
        "ratio",
        "extra memory before, MB",
        "after, MB",
        "goals",
    ]
    text = [
        "## Models that multiply by one-hots",
        "A step is forward, backward and Adam, by `torch.optim` before and `hotrow.optim` after "
        "`convert`, both `fused` for what is dense, in turns in one process. Output and gradients "
        "are held to float64 first.",
        table(head, rows),
        "What is not faster: a model whose one-hots are small. Each operation on one that is not "
        "written out is Python, 3 to 15 us, and so is each other call of torch's in the model's "
        "own classes, 1 to 1.5 us; a product with 64 x 500 ones and zeros takes hardly longer. So "
        "one-hots of fewer than 100,000 entries are left to torch, and a model that has no larger "
        "ones runs as it was, as the policy here does, unless `least=0` has all looked up.",
    ]
    return "\n\n".join(text) + "\n"


AS_SECONDS = ("median_ms", "p20_ms", "p80_ms")


def machines(records: dict[str, Record]) -> str:
    """Where the records were made: each place once, with its records."""
    places: dict[str, list[str]] = {}
    for name, record in records.items():
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


def label(record: Record, name: str) -> str:
    """How a peer is called on the page."""
    peer = record["peers"][name]
    text = peer.get("label", name)
    return text if peer["rows"] == record["rows"] else f"{text}, {peer['rows']:,} rows"


def between(found: dict[str, float], middle: str, low: str, high: str, scale: float = 1) -> str:
    """A median and its percentiles."""
    a, b, c = (number(found[key] * scale) for key in (middle, low, high))
    return f"{a} [{b}, {c}]"


def number(value: float) -> str:
    """Three digits, more before the point if need be."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def met(goal: Record) -> str:
    """In words."""
    return {True: "met", False: "**not met**", None: "not measured"}[goal["met"]]


def table(head: list[str], rows: list[list[str]]) -> str:
    """A Markdown table, numbers to the right."""
    lines = [head, ["---"] + ["---:"] * (len(head) - 1), *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)
