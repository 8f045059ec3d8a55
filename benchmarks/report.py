"""Format a record of the suite as text: a title, a table and remarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hotrow.bench.peers import TASK_PARTS
from hotrow.bench.report import (
    equality,
    number,
    number_range,
    peer_label,
    title,
    trains_other_model,
)
from hotrow.bench.workload import Record


class Report(NamedTuple):
    """A record as text."""

    title: str
    setting: str
    head: list[str]
    rows: list[list[str]]
    remarks: list[str]


def describe(record: Record, brief: bool = False) -> Report:
    """Format any record as text; `brief` omits columns so that the table fits a terminal."""
    if "peers" in record:
        return _describe_table(record, brief)
    return _describe_startup(record) if "later_use" in record else _describe_model(record)


def speedup(ratio: float) -> str:
    """Format hotrow's speedup over a peer, given the ratio of hotrow's time to the peer's.

    >>> speedup(0.25), speedup(1.6)
    ('4x', '0.625x')
    """
    return f"{number(1 / ratio)}x"


def _speedup_range(ratio: Record) -> str:
    middle, low, high = (number(1 / ratio[key]) for key in ("median", "p80", "p20"))
    return f"{middle}x [{low}, {high}]"


def _describe_table(record: Record, brief: bool) -> Report:
    """Format the record of a table workload, with a row for each measured peer."""
    parts = TASK_PARTS[record["task"]] if not brief else ()
    parts = parts if len(parts) > 1 else ()
    peers = {name: peer for name, peer in record["peers"].items() if "error" not in peer}
    has_memory = any("memory" in peer for peer in peers.values())
    has_floor = any("floor_ratio" in peer for peer in peers.values())
    head = ["", "step, ms", *(part.removesuffix("_step") for part in parts)]
    names = "memory, MB", "floor", "speedup"
    names = names if brief else ("extra memory, MB", "time / floor", "hotrow's speedup")
    head += [names[0]] * has_memory + [names[1]] * has_floor + [names[2]]
    rows = []
    for name, peer in peers.items():
        memory, ratio = peer.get("memory"), peer.get("hotrow_ratio")
        floor = peer.get("floor_ratio")
        mark = ", trains a different model" * trains_other_model(record, name)
        row = [
            peer_label(record, name) + mark,
            number_range(peer["step"], "median_ms", "p20_ms", "p80_ms"),
        ]
        row += [number(peer[part]["median_ms"]) if part in peer else "" for part in parts]
        if has_memory:
            row.append(number(memory["peak_extra_bytes"] / 1e6) if memory else "")
        if has_floor:
            row.append(f"{number(floor['median'])}x" if floor else "")
        if not ratio:
            row.append("")
        else:
            row.append(speedup(ratio["median"]) if brief else _speedup_range(ratio))
        rows.append(row)
    remarks = [*_peer_remarks(record), *_goal_remarks(record)]
    return Report(title(record), _setting(record), head, rows, remarks)


def _setting(record: Record) -> str:
    about = record.get("about")
    text = f"This workload measures {about}. " if about else ""
    text += f"Each step has {record['distinct_ids_per_step']:,} distinct ids. "
    if record["task"] == "step":
        text += (
            f"The warm-up takes {record['warmup_steps']:,} steps "
            f"({record['dense_warmup_steps']} for dense peers). "
        )
    if "copy_bytes_per_s" in record:
        hotrow = record["peers"]["hotrow"]
        text += (
            f"The bandwidth floor is {number(hotrow['floor_ms'])} ms "
            f"({number(hotrow['floor_bytes'] / 1e6)} MB "
            f"at {number(record['copy_bytes_per_s'] / 1e9)} GB/s)."
        )
    return text.strip()


def _peer_remarks(record: Record) -> Iterator[str]:
    """For each peer, yield whether its rows match dense training, or why it was not measured."""
    for name, peer in record["peers"].items():
        if "error" in peer:
            command = peer.get("install_command")
            remedy = f" Install it with `{command}`." if command else ""
            yield f"{peer_label(record, name)} was not measured: {peer['error']}.{remedy}"
        elif "equal" in peer.get("equality", {}):
            yield f"{peer_label(record, name)}: {equality(record, peer['equality'])}"


def _goal_remarks(record: Record) -> Iterator[str]:
    """For each goal, yield a line that says whether the goal was met."""
    for goal in record["goals"]:
        verdict = f"Goal {goal_verdict(goal)}"
        if "max_extra_bytes" in goal:
            yield f"{verdict}: at most {goal['max_extra_bytes'] / 1e6:.0f} MB of extra memory."
            continue
        max_ratio, ratio = goal["max_ratio"], goal["ratio"]
        is_speedup = goal["against"] != "floor" and max_ratio < 1
        if is_speedup:
            limit = f"at least {1 / max_ratio:.3g}x faster than {_goal_peer(record, goal)}"
        elif goal["against"] == "floor":
            limit = f"at most {max_ratio:.3g}x the bandwidth floor"
        else:
            limit = f"at most {max_ratio:.3g}x the time of {_goal_peer(record, goal)}"
        if ratio is not None:
            limit += f"; measured: {speedup(ratio) if is_speedup else f'{number(ratio)}x'}"
        yield f"{verdict}: {limit}."


def _goal_peer(record: Record, goal: Record) -> str:
    """Return the label of the peer that a goal compares hotrow with."""
    if goal["against"] in record["peers"]:
        return peer_label(record, goal["against"])
    if goal["against"] == "best peer":
        best = goal.get("best_peer")
        return "the fastest peer" + (f", {peer_label(record, best)}" if best else "")
    return f"the {goal['against']}"


def _describe_model(record: Record) -> Report:
    """Format the record of a model before and after `convert`."""
    peak = record.get("peak_extra_bytes", {})
    rows = []
    for side in ("before", "after"):
        row = [side, number_range(record[side], "median_ms", "p20_ms", "p80_ms")]
        row += [number(peak[side] / 1e6)] if peak else []
        rows.append([*row, f"{number(record['floor_ratio'][side])}x"])
    remarks = [f"Speedup: {_speedup_range(record['ratio'])}. Output and gradients are equal."]
    goals = model_goals(record)
    remarks += [f"Goals: {goals}."] if goals else []
    setting = (
        "A step consists of forward, backward and an Adam update, before and after "
        f"hotrow.convert. The bandwidth floor is {number(record['floor_ms'])} ms "
        f"({number(record['floor_bytes'] / 1e6)} MB at "
        f"{number(record['copy_bytes_per_s'] / 1e9)} GB/s)."
    )
    head = ["", "step, ms", *["extra memory, MB"] * bool(peak), "time / floor"]
    return Report(record["about"], setting, head, rows, remarks)


def model_goals(record: Record) -> str:
    """Describe a model's goals and whether they were met."""
    return "; ".join(
        f"{goal['what']} at most {goal['max_ratio']:.3g}x: {goal_verdict(goal)}"
        for goal in record["goals"]
    )


def _describe_startup(record: Record) -> Report:
    """Format the record of a program's first and later starts."""
    seconds = "median_ms", "p20_ms", "p80_ms"
    rows = [
        ["first run, kernels not compiled yet", number(record["first_use_median_s"])],
        ["later runs", number(record["later_use"]["median_ms"] / 1e3)],
        ["the same program with torch alone", number(record["torch_alone"]["median_ms"] / 1e3)],
        ["added by hotrow to later runs", number_range(record["added"], *seconds, scale=1e-3)],
    ]
    head, peaks = ["", "s"], record["peak_bytes"]
    if peaks:
        head.append("peak memory, MB")
        hotrow, torch = peaks["later_use"], peaks["torch_alone"]
        for row, peak in zip(rows, (None, hotrow, torch, hotrow - torch), strict=True):
            row.append("" if peak is None else number(peak / 1e6))
    goal = record["goals"][0]
    remark = f"Goal {goal_verdict(goal)}: hotrow adds at most {goal['max_added_s']} s."
    setting = (
        "The program imports torch and hotrow, takes three AdamW steps on a 1,000 x 64 table, and "
        "exits."
    )
    return Report("Startup", setting, head, rows, [remark])


def goal_verdict(goal: Record) -> str:
    """Return whether a goal was met, as text."""
    return {True: "met", False: "**not met**", None: "not measured"}[goal["met"]]
