"""A record of the suite as text: its title, a table, and remarks."""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from hotrow.bench.peers import TASK_PARTS
from hotrow.bench.report import equality, number, number_range, peer_label, title
from hotrow.bench.workload import Record


class Report(NamedTuple):
    """A record in words."""

    title: str
    setting: str
    head: list[str]
    rows: list[list[str]]
    remarks: list[str]


def describe(record: Record, brief: bool = False) -> Report:
    """Any record; `brief` leaves out the columns that a terminal has no room for."""
    if "peers" in record:
        return _describe_table(record, brief)
    return _describe_startup(record) if "later_use" in record else _describe_model(record)


def _describe_table(record: Record, brief: bool) -> Report:
    """One table: a row for each peer that took part."""
    parts = TASK_PARTS[record["task"]] if not brief else ()
    parts = parts if len(parts) > 1 else ()
    peers = {name: peer for name, peer in record["peers"].items() if "error" not in peer}
    has_memory = any("memory" in peer for peer in peers.values())
    has_floor = any("floor_ratio" in peer for peer in peers.values())
    goals = {goal["against"]: goal for goal in record["goals"] if "against" in goal}
    head = ["", "step, ms", *(part.removesuffix("_step") for part in parts)]
    names = "memory, MB", "x floor", "ratio"
    names = names if brief else ("extra memory, MB", "of the floor", "hotrow's ratio")
    head += [names[0]] * has_memory + [names[1]] * has_floor + [names[2]] + ["goal"] * (not brief)
    rows = []
    for name, peer in peers.items():
        memory, ratio, goal = peer.get("memory"), peer.get("hotrow_ratio"), goals.get(name)
        floor = peer.get("floor_ratio")
        row = [
            peer_label(record, name),
            number_range(peer["step"], "median_ms", "p20_ms", "p80_ms"),
        ]
        row += [number(peer[part]["median_ms"]) if part in peer else "" for part in parts]
        if has_memory:
            row.append(number(memory["peak_extra_bytes"] / 1e6) if memory else "")
        if has_floor:
            row.append(number(floor["median"]) + " x" * (not brief) if floor else "")
        if brief:
            row.append(number(ratio["median"]) if ratio else "")
        else:
            row.append(number_range(ratio, "median", "p20", "p80") if ratio else "")
            row.append(f"at most {goal['max_ratio']:.3g}: {goal_verdict(goal)}" if goal else "")
        rows.append(row)
    remarks = [*_peer_remarks(record), *_goal_remarks(record, with_peers=brief)]
    return Report(title(record), _setting(record), head, rows, remarks)


def _setting(record: Record) -> str:
    about = record.get("about")
    text = f"{about[0].upper()}{about[1:]}. " if about else ""
    text += f"{record['distinct_ids_per_step']:,} of the ids are distinct. "
    if record["task"] == "step":
        text += (
            f"Before the timing come {record['warmup_steps']:,} steps; "
            f"{record['dense_warmup_steps']} for dense peers, whose time does not depend on the "
            "past. "
        )
    if "copy_bytes_per_s" in record:
        hotrow = record["peers"]["hotrow"]
        text += (
            f"The floor is {number(hotrow['floor_ms'])} ms: "
            f"{number(hotrow['floor_bytes'] / 1e6)} MB "
            f"at {number(record['copy_bytes_per_s'] / 1e9)} GB/s."
        )
    return text.strip()


def _peer_remarks(record: Record) -> Iterator[str]:
    """Who is equal, by how much the others are not, and who could not take part."""
    for name, peer in record["peers"].items():
        if "error" in peer:
            command = peer.get("install_command")
            remedy = f" To have it: `{command}`." if command else ""
            yield f"{peer_label(record, name)} took no part: {peer['error']}.{remedy}"
        elif "equal" in peer.get("equality", {}):
            yield f"{peer_label(record, name)}: {equality(record, peer['equality'])}"


def _goal_remarks(record: Record, with_peers: bool) -> Iterator[str]:
    """Every goal and whether it was met; those against a peer only where a row has no room."""
    for goal in record["goals"]:
        if "max_extra_bytes" in goal:
            most = goal["max_extra_bytes"] / 1e6
            yield f"Goal for hotrow's extra memory: at most {most:.0f} MB: {goal_verdict(goal)}."
            continue
        if goal["against"] in record["peers"]:
            if not with_peers:
                continue
            against = peer_label(record, goal["against"])
        elif goal["against"] == "best peer":
            best = goal.get("best_peer")
            against = "the quickest peer" + (f", {peer_label(record, best)}" if best else "")
        else:
            against = f"the {goal['against']}"
        ratio = "" if goal["ratio"] is None else f"{number(goal['ratio'])} x, "
        most = f"at most {goal['max_ratio']:.3g} x"
        yield f"Goal beside {against}: {most}: {ratio}{goal_verdict(goal)}."


def _describe_model(record: Record) -> Report:
    """A model before and after `convert`."""
    peak = record.get("peak_extra_bytes", {})
    rows = []
    for side in ("before", "after"):
        row = [side, number_range(record[side], "median_ms", "p20_ms", "p80_ms")]
        row += [number(peak[side] / 1e6)] if peak else []
        rows.append([*row, f"{number(record['floor_ratio'][side])} x"])
    ratio = number_range(record["ratio"], "median", "p20", "p80")
    remarks = [f"After takes {ratio} of before's time; equal: output and gradients."]
    goals = model_goals(record)
    remarks += [f"Goals: {goals}."] if goals else []
    setting = (
        "A step: forward, backward and Adam, before hotrow.convert and after. The floor is "
        f"{number(record['floor_ms'])} ms: {number(record['floor_bytes'] / 1e6)} MB at "
        f"{number(record['copy_bytes_per_s'] / 1e9)} GB/s."
    )
    head = ["", "step, ms", *["extra memory, MB"] * bool(peak), "of the floor"]
    return Report(record["about"], setting, head, rows, remarks)


def model_goals(record: Record) -> str:
    """A model's goals, and whether they were met."""
    return "; ".join(
        f"{goal['what']} at most {goal['max_ratio']:.3g}: {goal_verdict(goal)}"
        for goal in record["goals"]
    )


def _describe_startup(record: Record) -> Report:
    """First and later starts."""
    seconds = "median_ms", "p20_ms", "p80_ms"
    rows = [
        ["first use, empty cache of compiled kernels", number(record["first_use_median_s"])],
        ["later uses", number(record["later_use"]["median_ms"] / 1e3)],
        ["torch alone", number(record["torch_alone"]["median_ms"] / 1e3)],
        ["added by hotrow to later uses", number_range(record["added"], *seconds, scale=1e-3)],
    ]
    head, peaks = ["", "s"], record["peak_bytes"]
    if peaks:
        head.append("peak memory, MB")
        hotrow, torch = peaks["later_use"], peaks["torch_alone"]
        for row, peak in zip(rows, (None, hotrow, torch, hotrow - torch), strict=True):
            row.append("" if peak is None else number(peak / 1e6))
    goal = record["goals"][0]
    remark = f"Goal for the added time: at most {goal['max_added_s']} s: {goal_verdict(goal)}."
    setting = "A whole program: import, a table of 1,000 x 64, three steps of AdamW, exit."
    return Report("Start-up", setting, head, rows, [remark])


def goal_verdict(goal: Record) -> str:
    """Whether a goal was met, in words."""
    return {True: "met", False: "**not met**", None: "not measured"}[goal["met"]]
