"""The `hotrow bench` report, at most 80 columns wide."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hotrow.bench.report import equality, number, title, trains_other_model
from hotrow.bench.workload import Record
from hotrow.inputs.text import escape_unprintable, format_milliseconds, format_size

if TYPE_CHECKING:
    from rich.console import Console

DENSE = ("torch fused", "torch foreach", "torch default")
_PARTS = ("forward", "backward", "optimizer_step")
_MIN_MEASURED = 1_000_000  # bytes


def print_record(record: Record, console: Console) -> None:
    """Print the times, memory, bandwidth floor, equality checks and verdict."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def print_lines(lines: list[str]) -> None:
        for line in lines:
            text = Text(escape_unprintable(line.replace("**", "")))
            console.print(Padding(text, (0, 0, 0, 2), expand=False))

    def print_table(head: list[str], rows: list[list[str]]) -> None:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, show_edge=False)
        for place, column in enumerate(head):
            table.add_column(column, overflow="fold", justify="right" if place else "left")
        for row in rows:
            table.add_row(*map(escape_unprintable, row))
        console.print(Padding(table, (1, 0, 1, 2), expand=False))

    console.print(Text(title(record), style="bold"))
    print_lines([setting(record)])
    print_table(
        ["milliseconds", "forward", "backward", "optimizer", "total", "range", "ratio"],
        times(record),
    )
    if any("memory" in peer for peer in record["peers"].values()):
        head = ["memory", "table and state", "extra during a step"]
        print_table(head, memory(record))
    print_lines([*remarks(record), ""])
    for line in verdicts(record):
        style = "bold green" if "faster" in line else "bold"
        console.print(Padding(Text(line, style=style), (0, 0, 0, 2), expand=False))


def setting(record: Record) -> str:
    """Describe the ids, the threads and the warm-up."""
    exponent = record["zipf_exponent"]
    law = "uniform" if exponent is None else f"Zipf {exponent:g}"
    threads = record["environment"]["threads"]
    return (
        f"{law} ids, {record['distinct_ids_per_step']:,} distinct per batch; {threads} "
        f"thread{'s' * (threads != 1)}; {record['warmup_steps']} warm-up steps"
    )


def times(record: Record) -> list[list[str]]:
    """Return one row per peer, with its median times and its step time relative to hotrow's."""
    rows = []
    for name, peer in measured_peers(record):
        parts = [number(peer[part]["median_ms"]) for part in _PARTS]
        ratio = peer.get("hotrow_ratio")
        rows.append(
            [
                display_name(record, name),
                *parts,
                number(peer["step"]["median_ms"]),
                f"{number(peer['step']['p20_ms'])}-{number(peer['step']['p80_ms'])}",
                f"{number(1 / ratio['median'])}x" if ratio else "",
            ]
        )
    return rows


def memory(record: Record) -> list[list[str]]:
    """Return one row per peer: memory for the table and state, and extra memory during a step."""
    return [
        [
            display_name(record, name),
            format_size(peer["memory"]["table_and_state_bytes"]),
            _format_extra(peer["memory"]["peak_extra_bytes"]),
        ]
        for name, peer in measured_peers(record)
        if "memory" in peer
    ]


def _format_extra(size: float) -> str:
    """Format extra memory; small amounts can't be measured, because freed memory is used again."""
    return format_size(size) if size >= _MIN_MEASURED else f"under {format_size(_MIN_MEASURED)}"


def remarks(record: Record) -> Iterator[str]:
    """Yield remarks on the bandwidth floor, equality, SparseAdam and any unmeasured peers."""
    hotrow = record["peers"]["hotrow"]
    yield (
        f"Bandwidth floor: {format_milliseconds(hotrow['floor_ms'])} to move "
        f"{format_size(hotrow['floor_bytes'])} at "
        f"{number(record['copy_bytes_per_s'] / 1e9)} GB/s; hotrow takes "
        f"{number(hotrow['floor_ratio']['median'])}x that."
    )
    for name, peer in measured_peers(record):
        if "equality" in peer:
            yield f"{display_name(record, name)}: {equality(record, peer['equality'])}"
    if trains_other_model(record, "torch sparse"):
        yield (
            "* SparseAdam trains a different model: it skips rows without a gradient, which dense "
            f"{record['optimizer']} still updates."
        )
    for name, peer in record["peers"].items():
        if "error" in peer:
            yield f"{name} was not measured: {peer['error']}"


def verdicts(record: Record) -> Iterator[str]:
    """Yield hotrow's speedups over torch's fastest dense optimizer and its sparse optimizer."""
    peers = dict(measured_peers(record))
    ratios = {name: 1 / p["hotrow_ratio"]["median"] for name, p in peers.items() if name in DENSE}
    if ratios:
        fastest = min(ratios, key=lambda name: ratios[name])
        yield _verdict(
            ratios[fastest], f"torch's fastest dense {record['optimizer']} ({fastest[6:]})"
        )
    if "torch sparse" in peers and not trains_other_model(record, "torch sparse"):
        ratio = 1 / peers["torch sparse"]["hotrow_ratio"]["median"]
        yield _verdict(ratio, "torch's sparse optimizer")


def _verdict(ratio: float, peer: str) -> str:
    if ratio >= 1:
        return f"hotrow's step is {number(ratio)}x faster than {peer}"
    return f"hotrow's step is {number(1 / ratio)}x slower than {peer}"


def measured_peers(record: Record) -> list[tuple[str, Record]]:
    """Return the measured peers, fastest first."""
    peers = [(name, peer) for name, peer in record["peers"].items() if "error" not in peer]
    return sorted(peers, key=lambda item: item[1]["step"]["median_ms"])


def display_name(record: Record, name: str) -> str:
    """Return a peer's name; the asterisk after SparseAdam refers to a remark below the tables."""
    return "SparseAdam*" if trains_other_model(record, name) else name
