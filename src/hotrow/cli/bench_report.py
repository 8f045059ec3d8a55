"""What `hotrow bench` prints of a record, fitting 80 columns."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from hotrow.bench.report import equality, number, number_range, title
from hotrow.bench.workload import Record
from hotrow.inputs.text import escape_unprintable, format_milliseconds, format_size

if TYPE_CHECKING:
    from rich.console import Console

DENSE = ("torch fused", "torch foreach", "torch default")
_PARTS = ("forward", "backward", "optimizer_step")


def print_record(record: Record, console: Console) -> None:
    """Times, memory, the bandwidth floor, equality and the verdict."""
    from rich import box
    from rich.padding import Padding
    from rich.table import Table
    from rich.text import Text

    def print_lines(lines: list[str]) -> None:
        for line in lines:
            text = Text(escape_unprintable(line.replace("**", "")))
            console.print(Padding(text, (0, 0, 0, 2), expand=False))

    def print_table(head: list[str], rows: list[list[str]]) -> None:
        table = Table(box=box.SIMPLE_HEAD, padding=(0, 1), pad_edge=False, show_edge=False)
        for place, column in enumerate(head):
            table.add_column(column, overflow="fold", justify="right" if place else "left")
        for row in rows:
            table.add_row(*map(escape_unprintable, row))
        console.print(Padding(table, (1, 0, 1, 2), expand=False))

    console.print(Text(title(record), style="bold"))
    print_lines([setting(record)])
    print_table(
        ["milliseconds", "forward", "backward", "step", "all three", "x hotrow"], times(record)
    )
    if any("memory" in peer for peer in record["peers"].values()):
        head = ["memory", "table and state", "peak of a step above them"]
        print_table(head, memory(record))
    print_lines([*remarks(record), ""])
    for line in verdicts(record):
        style = "bold green" if "faster" in line else "bold"
        console.print(Padding(Text(line, style=style), (0, 0, 0, 2), expand=False))


def setting(record: Record) -> str:
    """The ids, the threads and the steps."""
    exponent = record["zipf_exponent"]
    law = "uniform" if exponent is None else f"Zipf {exponent:g}"
    threads = record["environment"]["threads"]
    return (
        f"{law} ids, {record['distinct_ids_per_step']:,} of them distinct; {threads} "
        f"thread{'s' * (threads != 1)}; {record['warmup_steps']} steps before the timing"
    )


def times(record: Record) -> list[list[str]]:
    """Medians of the parts and of all of a step, and the ratio to hotrow's, for each peer."""
    rows = []
    for name, peer in measured_peers(record):
        parts = [number(peer[part]["median_ms"]) for part in _PARTS]
        ratio = peer.get("hotrow_ratio")
        rows.append(
            [
                display_name(record, name),
                *parts,
                number_range(peer["step"], "median_ms", "p20_ms", "p80_ms"),
                number(1 / ratio["median"]) if ratio else "",
            ]
        )
    return rows


def memory(record: Record) -> list[list[str]]:
    """The size of table and state, and the peak of a step, for each peer."""
    return [
        [
            display_name(record, name),
            format_size(peer["memory"]["table_and_state_bytes"]),
            format_size(peer["memory"]["peak_extra_bytes"]),
        ]
        for name, peer in measured_peers(record)
        if "memory" in peer
    ]


def remarks(record: Record) -> Iterator[str]:
    """The floor, who is equal, what SparseAdam is, and which peers were left out."""
    hotrow = record["peers"]["hotrow"]
    yield (
        f"Bandwidth floor: a step must move {format_size(hotrow['floor_bytes'])}; this machine "
        f"copies {number(record['copy_bytes_per_s'] / 1e9)} GB/s: "
        f"{format_milliseconds(hotrow['floor_ms'])}. hotrow takes "
        f"{number(hotrow['floor_ratio']['median'])} x as long."
    )
    for name, peer in measured_peers(record):
        if "equality" in peer:
            yield f"{display_name(record, name)}: {equality(record, peer['equality'])}"
    if trains_other_model(record):
        yield (
            "* SparseAdam trains a different model: it skips rows without a gradient, which "
            f"{record['optimizer']} moves as well."
        )
    for name, peer in record["peers"].items():
        if "error" in peer:
            yield f"{name} is left out: {peer['error']}"


def verdicts(record: Record) -> Iterator[str]:
    """How many times faster hotrow is than the fastest dense and the sparse optimizer."""
    peers = dict(measured_peers(record))
    ratios = {name: 1 / p["hotrow_ratio"]["median"] for name, p in peers.items() if name in DENSE}
    if ratios:
        fastest = min(ratios, key=lambda name: ratios[name])
        yield _verdict(
            ratios[fastest], f"torch's fastest dense {record['optimizer']} ({fastest[6:]})"
        )
    if "torch sparse" in peers and not trains_other_model(record):
        ratio = 1 / peers["torch sparse"]["hotrow_ratio"]["median"]
        yield _verdict(ratio, "torch's sparse optimizer")


def _verdict(ratio: float, peer: str) -> str:
    if ratio >= 1:
        return f"hotrow's step is {number(ratio)} x faster than {peer}"
    return f"hotrow's step is {number(1 / ratio)} x slower than {peer}"


def trains_other_model(record: Record) -> bool:
    """Whether torch's sparse optimizer is SparseAdam, and took part."""
    label: str = record["peers"].get("torch sparse", {}).get("label", "")
    return "SparseAdam" in label


def measured_peers(record: Record) -> list[tuple[str, Record]]:
    """The peers that were measured, fastest first."""
    peers = [(name, peer) for name, peer in record["peers"].items() if "error" not in peer]
    return sorted(peers, key=lambda item: item[1]["step"]["median_ms"])


def display_name(record: Record, name: str) -> str:
    """What a peer is called; a mark leads to the remark on SparseAdam."""
    is_marked = name == "torch sparse" and trains_other_model(record)
    return "torch SparseAdam *" if is_marked else name
