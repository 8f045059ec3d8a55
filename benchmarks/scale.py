"""Measure network traffic and tables on disk; write docs/scale.json and docs/scale.md.

    python -m benchmarks.scale
    python -m benchmarks.scale --page

`--page` rewrites the page from docs/scale.json and benchmarks/scale.md, without measuring. Linux
counts the bytes on the loopback interface of a separate network namespace. To create the namespace,
the script must run as root. The bytes include the overhead of gloo and TCP. Times include forward,
backward and step, but not the time to draw the Zipf ids. Memory is the process's peak resident
memory, including torch and the kernels.
"""

from __future__ import annotations

import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.multiprocessing as processes
from torch import nn

import hotrow
from benchmarks import plots
from benchmarks.record_files import ROOT, describe_environment
from hotrow import disk
from hotrow.bench.batches import Batches, clear_cache
from hotrow.bench.memory import CLEAR, resident_bytes
from hotrow.distributed import replicate, shard
from hotrow.inputs import files

RECORD, TEXT = ROOT / "docs" / "scale.json", ROOT / "benchmarks" / "scale.md"
MODES = {"shard": "sharded", "replicate": "replicated"}
ROWS, COLUMNS, IDS, STEPS = 1_000_000, 64, 8192, 20
SIZES = 1_000_000, 10_000_000, 80_000_000
DISK_IDS, DISK_STEPS, SAVE_EVERY = 4096, 60, 20


def loopback_bytes() -> int:
    """Return the bytes sent through the loopback interface so far."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("/proc/net/dev has no interface lo")


def formula_bytes(mode: str, distinct: int, foreign: int, count: int) -> int:
    """Return the bytes that one rank sends in a step, according to the formula in docs/scale.md."""
    row = 4 * COLUMNS
    if mode == "shard":
        return 49 * (count - 1) + foreign * (4 + 2 * row)
    return (count - 1) * (48 + distinct * (4 + row))


def run_rank(rank: int, count: int, port: int, mode: str, path: str) -> None:
    """Train on one rank; rank 0 writes the counted and the calculated bytes to `path`."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=count)
    mesh = dist.init_device_mesh("cpu", (count,))
    model = hotrow.convert(nn.Sequential(nn.Embedding(ROWS, COLUMNS)))
    {"shard": shard, "replicate": replicate}[mode](model, mesh)
    optimizer = hotrow.optim.Adam(model.parameters())
    batches = Batches(ROWS, IDS)
    sent = expected = 0
    for t in range(STEPS + 1):
        ids = batches[t * count + rank]
        distinct = ids.unique()
        foreign = int((distinct // -(-ROWS // count) != rank).sum())
        dist.barrier()
        before = loopback_bytes()
        dist.barrier()
        optimizer.zero_grad()
        model(ids).sum().backward()
        optimizer.step()
        dist.barrier()
        if t:  # the first step opens the connections
            sent += loopback_bytes() - before
            expected += formula_bytes(mode, len(distinct), foreign, count)
        dist.barrier()
    total = torch.tensor(expected)
    dist.all_reduce(total)
    if not rank:
        Path(path).write_text(json.dumps({"sent": sent, "formula": int(total)}))
    dist.destroy_process_group()


def measure_network(mode: str, count: int) -> dict[str, Any]:
    """Measure the bytes that `count` ranks send per step, and calculate them with the formula."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "sent")
        processes.spawn(run_rank, (count, port, mode, path), count)
        found = json.loads(Path(path).read_text())
    return {
        "mode": mode,
        "ranks": count,
        "formula_bytes_per_step": found["formula"] // STEPS,
        "counted_bytes_per_step": found["sent"] // STEPS,
    }


def measure_disk(rows: int, folder: str) -> dict[str, Any]:
    """Measure the step time and memory of a table on disk."""
    torch.set_num_threads(1)
    batches = Batches(rows, DISK_IDS)
    all_ids = [batches[t] for t in range(DISK_STEPS)]
    clear_cache()
    CLEAR.write_text("5")
    seconds, saves = [], []
    with disk.create(os.path.join(folder, str(rows)), rows, COLUMNS) as store:
        optimizer = hotrow.optim.Adam(store.layer.parameters())
        for t, ids in enumerate(all_ids):
            begin = time.perf_counter()
            optimizer.zero_grad()
            store.layer(ids).square().sum().backward()
            optimizer.step()
            seconds.append(time.perf_counter() - begin)
            if (t + 1) % SAVE_EVERY == 0:
                begin = time.perf_counter()
                store.save(t)
                saves.append(time.perf_counter() - begin)
    return {
        "rows": rows,
        "table_bytes": rows * COLUMNS * 4,
        "distinct_ids_per_step": round(statistics.mean(len(ids.unique()) for ids in all_ids)),
        "step_median_ms": round(1e3 * statistics.median(seconds[DISK_STEPS // 2 :]), 2),
        "save_median_s": round(statistics.median(saves), 2),
        "peak_resident_bytes": resident_bytes("VmHWM"),
    }


def dense_bytes(count: int) -> int:
    """Return the bytes that all ranks send in a ring all-reduce of a dense gradient."""
    return 2 * (count - 1) * 4 * ROWS * COLUMNS


def network_table(record: dict[str, Any]) -> str:
    """Return the table of bytes sent over the network."""
    lines = [
        "| | ranks | bytes per step, formula | counted | counted / formula "
        "| dense all-reduce, formula | fewer bytes |",
        "| --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in record["network"]:
        formula, counted = each["formula_bytes_per_step"], each["counted_bytes_per_step"]
        dense = dense_bytes(each["ranks"])
        lines.append(
            f"| {MODES[each['mode']]} | {each['ranks']} | {formula:,} | {counted:,} "
            f"| {counted / formula:.3f} | {dense:,} | {dense / counted:.0f}x |"
        )
    return "\n".join(lines)


def disk_table(record: dict[str, Any]) -> str:
    """Return a table with the step times and memory use of tables on disk."""
    lines = [
        "| table on disk | table file | distinct ids per step | step | save | peak memory |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    for each in record["disk"]:
        lines.append(
            f"| {each['rows']:,} x {COLUMNS} | {each['table_bytes'] / 1e9:.1f} GB "
            f"| {each['distinct_ids_per_step']:,} | {each['step_median_ms']:.0f} ms "
            f"| {each['save_median_s']:.1f} s | {each['peak_resident_bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines)


def page(record: dict[str, Any]) -> str:
    """Return docs/scale.md."""
    ratios = [
        dense_bytes(each["ranks"]) / each["counted_bytes_per_step"] for each in record["network"]
    ]
    first, last = record["disk"][0], record["disk"][-1]
    parts = {
        "<!-- network -->": network_table(record),
        "<!-- disk -->": disk_table(record),
        "{{network}}": (
            f"a step sends {min(ratios):.0f} to {max(ratios):.0f} times fewer bytes than an "
            "all-reduce of dense gradients."
        ),
        "{{attacks}}": (
            "`python -m benchmarks.durability` simulates failures and counts what is lost: "
            + "; ".join(_describe_attack(each) for each in record["attacks"])
            + "."
        ),
        "{{checks}}": (
            "a step that uses pages for the first time takes "
            f"{record['checks']['first_use_ratio']:.2f} times as long with checksums as without. "
            f"Later steps take {record['checks']['later_use_ratio']:.2f} times as long. "
            "`hotrow disk verify` "
            f"checks {record['checks']['verify_gigabytes_per_second']:.1f} GB per second if the "
            "files are in the page cache."
        ),
        "{{disk}}": (
            f"training a {last['table_bytes'] / 1e9:.1f} GB table, whose Adam state is twice as "
            f"large, needs {last['peak_resident_bytes'] / 1e9:.1f} GB of memory and "
            f"{last['step_median_ms']:.0f} ms per step. A {first['table_bytes'] / 1e9:.1f} GB "
            f"table takes {first['step_median_ms']:.0f} ms per step."
        ),
    }
    text = TEXT.read_text(encoding="utf-8")
    for mark, part in parts.items():
        assert text.count(mark) == 1, f"{TEXT.name} must contain {mark} exactly once"
        text = text.replace(mark, part)
    return text


def _describe_attack(result: dict[str, Any]) -> str:
    names = {
        "kills": "{:,} killed processes lost {:,} saves",
        "flips": "{:,} flipped bits changed {:,} values without an error",
        "full": "{:,} full disks lost {:,} saves",
        "ranks": "{:,} killed ranks left {:,} other ranks waiting",
    }
    return names[result["attack"]].format(result["tried"], result["lost"])


def write_page(record: dict[str, Any], folder: Path) -> None:
    """Write the page and its chart."""
    sent = []
    for count in sorted({each["ranks"] for each in record["network"]}):
        for each in record["network"]:
            if each["ranks"] == count:
                name = f"hotrow, {MODES[each['mode']]}, {count} ranks"
                sent.append((name, float(each["counted_bytes_per_step"])))
        sent.append((f"dense all-reduce (formula), {count} ranks", float(dense_bytes(count))))
    files.write_text(folder / "scale.svg", plots.plot_bytes(sent) + "\n")
    files.write_text(folder / "scale.md", page(record))


def main() -> None:
    """Run each measurement in its own process; write the record and the page."""
    if sys.argv[1:] == ["--page"]:
        write_page(json.loads(RECORD.read_text()), RECORD.parent)
        return
    if len(sys.argv) > 1:
        what, *rest = sys.argv[1:]
        found = (
            measure_network(rest[0], int(rest[1]))
            if what == "network"
            else measure_disk(int(rest[0]), rest[1])
        )
        print(json.dumps(found))
        return
    command = [sys.executable, "-m", "benchmarks.scale"]
    record: dict[str, Any] = {"environment": describe_environment(1), "network": [], "disk": []}
    previous = json.loads(RECORD.read_text())
    record |= {key: previous[key] for key in ("attacks", "checks")}  # from benchmarks.durability
    for mode in ("shard", "replicate"):
        for count in (2, 3):
            inner = " ".join([*command, "network", mode, str(count)])
            record["network"].append(
                _run(["unshare", "-n", "sh", "-c", f"ip link set lo up; {inner}"])
            )
    for rows in SIZES:
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            record["disk"].append(_run([*command, "disk", str(rows), folder]))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")
    write_page(record, RECORD.parent)


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
