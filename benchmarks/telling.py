"""A record for people: its title, a table of it, and what else is to be said."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from benchmarks.peers import PARTS
from benchmarks.workload import Record

TASKS = {"forward": "forward alone", "gradient": "forward and backward", "step": "a training step"}


class Told(NamedTuple):
    """A record in words."""

    title: str
    setting: str
    head: list[str]
    rows: list[list[str]]
    remarks: list[str]


def tell(record: Record, brief: bool = False) -> Told:
    """Any record; `brief` without the columns that a terminal has no room for."""
    if "peers" in record:
        return _tables(record, brief)
    return _startup(record) if "later_use" in record else _model(record)


def _tables(record: Record, brief: bool) -> Told:
    """One table: a row for each peer that took part."""
    parts = PARTS[record.get("task", "step")] if not brief else ()
    parts = parts if len(parts) > 1 else ()
    took = {name: peer for name, peer in record["peers"].items() if "failed" not in peer}
    measured = any("memory" in peer for peer in took.values())
    floored = any("floor_ratio" in peer for peer in took.values())
    goals = {goal["against"]: goal for goal in record["goals"] if "against" in goal}
    head = ["", "step, ms", *(part.removesuffix("_step") for part in parts)]
    wide = "memory, MB", "x floor", "ratio"
    wide = wide if brief else ("extra memory, MB", "of the floor", "hotrow's ratio")
    head += [wide[0]] * measured + [wide[1]] * floored + [wide[2]] + ["goal"] * (not brief)
    rows = []
    for name, peer in took.items():
        memory, ratio, goal = peer.get("memory"), peer.get("hotrow_ratio"), goals.get(name)
        floor = peer.get("floor_ratio")
        row = [label(record, name), between(peer["step"], "median_ms", "p20_ms", "p80_ms")]
        row += [number(peer[part]["median_ms"]) if part in peer else "" for part in parts]
        if measured:
            row.append(number(memory["peak_extra_bytes"] / 1e6) if memory else "")
        if floored:
            row.append(number(floor["median"]) + " x" * (not brief) if floor else "")
        if brief:
            row.append(number(ratio["median"]) if ratio else "")
        else:
            row.append(between(ratio, "median", "p20", "p80") if ratio else "")
            row.append(f"at most {goal['at_most_ratio']:.3g}: {met(goal)}" if goal else "")
        rows.append(row)
    remarks = [*_remarks(record), *_goals(record, beside_peers=brief)]
    return Told(title(record), _setting(record), head, rows, remarks)


def title(record: Record) -> str:
    """The optimizer or the task, and the sizes."""
    what = record["rule"] or TASKS[record["task"]].capitalize()
    ids = f"{record['ids']:,} {'' if record.get('zipf', True) else 'uniform '}ids"
    dtype = record.get("dtype", "float32")
    sizes = f"{record['rows']:,} x {record['columns']}, {ids}"
    return f"{what}, {sizes}" + ("" if dtype == "float32" else f", {dtype}")


def _setting(record: Record) -> str:
    about = record.get("about")
    text = f"{about[0].upper()}{about[1:]}. " if about else ""
    text += f"{record['distinct_ids_per_step']:,} of the ids are distinct. "
    if record.get("task", "step") == "step":
        text += (
            f"Before the timing come {record['steps_before']:,} steps; "
            f"{record['steps_before_dense']} for dense peers, whose time does not depend on the "
            "past. "
        )
    if "copy_bytes_per_s" in record:
        ours = record["peers"]["hotrow"]
        text += (
            f"The floor is {number(ours['floor_ms'])} ms: {number(ours['floor_bytes'] / 1e6)} MB "
            f"at {number(record['copy_bytes_per_s'] / 1e9)} GB/s."
        )
    return text.strip()


def _remarks(record: Record) -> Iterator[str]:
    """Who is equal, by how much the others are not, and who could not take part."""
    for name, peer in record["peers"].items():
        if "failed" in peer:
            remedy = f" To have it: `{peer['remedy']}`." if "remedy" in peer else ""
            yield f"{label(record, name)} took no part: {peer['failed']}.{remedy}"
        elif "equal" in peer.get("equality", {}):
            yield f"{label(record, name)}: {_equality(record, peer['equality'])}"


def _goals(record: Record, beside_peers: bool) -> Iterator[str]:
    """What was asked for, and whether it was met; beside a peer only where a row has no room."""
    for goal in record["goals"]:
        if "at_most_extra_bytes" in goal:
            most = goal["at_most_extra_bytes"] / 1e6
            yield f"Goal for hotrow's extra memory: at most {most:.0f} MB: {met(goal)}."
            continue
        if goal["against"] in record["peers"]:
            if not beside_peers:
                continue
            beside = label(record, goal["against"])
        elif goal["against"] == "best peer":
            best = goal.get("best_peer")
            beside = "the quickest peer" + (f", {label(record, best)}" if best else "")
        else:
            beside = f"the {goal['against']}"
        ratio = "" if goal["ratio"] is None else f"{number(goal['ratio'])} x, "
        yield f"Goal beside {beside}: at most {goal['at_most_ratio']:.3g} x: {ratio}{met(goal)}."


def _equality(record: Record, seen: Record) -> str:
    verdict = "equal" if seen["equal"] else "**not equal**"
    task = record.get("task", "step")
    if task == "forward":
        bits = "bit for bit" if seen["equal"] else f"largest error {seen['max_error']:.2g}"
        return f"{verdict} to the table's rows on {seen['rows_compared']} rows, {bits}."
    dtype, errors = next(
        (key.removeprefix("max_error_of_dense_"), value)
        for key, value in seen.items()
        if key.startswith("max_error_of_dense_")
    )
    with_ = "torch's gradient" if task == "gradient" else seen["with"]
    text = (
        f"{verdict} to dense {with_} on {seen['rows_compared']} rows. Largest error "
        f"{seen['max_error']:.2g} (torch's dense {dtype}: {errors:.2g})"
    )
    if task == "step":
        text += f", where weights moved by up to {seen['max_move_of_dense']:.2g}"
        if errors > seen["max_move_of_dense"] / 2:
            text += f"; so far does {dtype} itself lead astray that this tells little"
    return text + "."


def _model(record: Record) -> Told:
    """A model before and after `convert`."""
    peak = record.get("peak_extra_bytes", {})
    rows = []
    for side in ("before", "after"):
        row = [side, between(record[side], "median_ms", "p20_ms", "p80_ms")]
        row += [number(peak[side] / 1e6)] if peak else []
        rows.append([*row, f"{number(record['floor_ratio'][side])} x"])
    ratio = between(record["ratio"], "median", "p20", "p80")
    remarks = [f"After takes {ratio} of before's time; equal: output and gradients."]
    goals = model_goals(record)
    remarks += [f"Goals: {goals}."] if goals else []
    about = str(record.get("about", record["workload"]))
    setting = (
        "A step: forward, backward and Adam, before hotrow.convert and after. The floor is "
        f"{number(record['floor_ms'])} ms: {number(record['floor_bytes'] / 1e6)} MB at "
        f"{number(record['copy_bytes_per_s'] / 1e9)} GB/s."
    )
    head = ["", "step, ms", *["extra memory, MB"] * bool(peak), "of the floor"]
    return Told(about, setting, head, rows, remarks)


def model_goals(record: Record) -> str:
    """What was asked of it, and whether it was met."""
    return "; ".join(
        f"{goal['what']} at most {goal['at_most_ratio']:.3g}: {met(goal)}"
        for goal in record["goals"]
    )


def _startup(record: Record) -> Told:
    """First and later starts."""
    seconds = "median_ms", "p20_ms", "p80_ms"
    rows = [
        ["first use, empty cache of compiled kernels", number(record["first_use_median_s"])],
        ["later uses", number(record["later_use"]["median_ms"] / 1e3)],
        ["torch alone", number(record["torch_alone"]["median_ms"] / 1e3)],
        ["added by hotrow to later uses", between(record["added"], *seconds, scale=1e-3)],
    ]
    head, peaks = ["", "s"], record["peak_bytes"]
    if peaks:
        head.append("peak memory, MB")
        ours, alone = peaks["later_use"], peaks["torch_alone"]
        for row, peak in zip(rows, (None, ours, alone, ours - alone), strict=True):
            row.append("" if peak is None else number(peak / 1e6))
    goal = record["goals"][0]
    remark = f"Goal for the added time: at most {goal['at_most_added_s']} s: {met(goal)}."
    setting = "A whole program: import, a table of 1,000 x 64, three steps of AdamW, exit."
    return Told("Start-up", setting, head, rows, [remark])


def label(record: Record, name: str) -> str:
    """How a peer is called, with the sizes that only it has."""
    peer = record["peers"][name]
    text = str(peer.get("label", name.partition(",")[0]))
    text += "" if peer["rows"] == record["rows"] else f", {peer['rows']:,} rows"
    text += f", {peer['ids']:,} ids" if "ids" in peer else ""
    if "threads" in peer:
        text += f", {peer['threads']} thread" + ("s" if peer["threads"] > 1 else "")
    return text


def between(found: Record, middle: str, low: str, high: str, scale: float = 1) -> str:
    """A median and its percentiles."""
    a, b, c = (number(found[key] * scale) for key in (middle, low, high))
    return f"{a} [{b}, {c}]"


def number(value: float) -> str:
    """Three digits, more before the point if need be."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def met(goal: Record) -> str:
    """In words."""
    return {True: "met", False: "**not met**", None: "not measured"}[goal["met"]]
