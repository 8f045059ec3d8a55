"""Bytes on the wire against the formula, and tables in files against their size; docs/scale.json.

    python -m benchmarks.scale

The bytes are what Linux counts on the loopback interface, in a network namespace of their own
(root only), with all that gloo and TCP add. Times are of forward, backward and step on Zipf ids
that were drawn before; memory is the most that was resident, torch and kernels included.
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
from benchmarks.record_files import ROOT, describe_environment
from hotrow import disk
from hotrow.bench.batches import Batches, clear_cache
from hotrow.bench.memory import CLEAR, resident_bytes
from hotrow.distributed import replicate, shard

RECORD = ROOT / "docs" / "scale.json"
ROWS, COLUMNS, IDS, STEPS = 1_000_000, 64, 8192, 20
SIZES = 1_000_000, 10_000_000, 80_000_000
DISK_IDS, DISK_STEPS, SAVE_EVERY = 4096, 60, 20


def loopback_bytes() -> int:
    """Bytes that have left by the loopback interface."""
    for line in Path("/proc/net/dev").read_text().splitlines():
        if line.strip().startswith("lo:"):
            return int(line.split(":")[1].split()[8])
    raise RuntimeError("/proc/net/dev has no lo")


def formula_bytes(way: str, distinct: int, foreign: int, count: int) -> int:
    """Bytes of a step of one rank, as docs/scale.md has them."""
    row = 4 * COLUMNS
    if way == "shard":
        return 33 * (count - 1) + foreign * (4 + 2 * row)
    return (count - 1) * (32 + distinct * (4 + row)) + 16


def run_rank(rank: int, count: int, port: int, way: str, path: str) -> None:
    """Steps of one rank; the first writes what was sent."""
    torch.set_num_threads(1)
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    dist.init_process_group("gloo", rank=rank, world_size=count)
    mesh = dist.init_device_mesh("cpu", (count,))
    model = hotrow.convert(nn.Sequential(nn.Embedding(ROWS, COLUMNS)))
    {"shard": shard, "replicate": replicate}[way](model, mesh)
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
        if t:  # in the first step connections are made
            sent += loopback_bytes() - before
            expected += formula_bytes(way, len(distinct), foreign, count)
        dist.barrier()
    total = torch.tensor(expected)
    dist.all_reduce(total)
    if not rank:
        Path(path).write_text(json.dumps({"sent": sent, "formula": int(total)}))
    dist.destroy_process_group()


def measure_wire(way: str, count: int) -> dict[str, Any]:
    """What `count` ranks send in a step, counted and by the formula."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = os.path.join(folder, "sent")
        processes.spawn(run_rank, (count, port, way, path), count)
        found = json.loads(Path(path).read_text())
    return {
        "way": way,
        "ranks": count,
        "formula_bytes_a_step": found["formula"] // STEPS,
        "counted_bytes_a_step": found["sent"] // STEPS,
    }


def measure_disk(rows: int, folder: str) -> dict[str, Any]:
    """Time and memory of a table in files."""
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
        "distinct_ids_a_step": round(statistics.mean(len(ids.unique()) for ids in all_ids)),
        "step_median_ms": round(1e3 * statistics.median(seconds[DISK_STEPS // 2 :]), 2),
        "save_median_s": round(statistics.median(saves), 2),
        "peak_resident_bytes": resident_bytes("VmHWM"),
    }


def markdown_tables(record: dict[str, Any]) -> str:
    """What docs/scale.md shows of the record."""
    lines = ["| way | ranks | bytes a step, by the formula | counted | ratio |"]
    lines += ["| --- | ---: | ---: | ---: | ---: |"]
    for each in record["wire"]:
        a, b = each["formula_bytes_a_step"], each["counted_bytes_a_step"]
        way = {"shard": "sharded", "replicate": "replicated"}[each["way"]]
        lines.append(f"| {way} | {each['ranks']} | {a:,} | {b:,} | {b / a:.3f} |")
    lines += ["", "| table | in files | distinct ids a step | step | save | most resident |"]
    lines += ["| --- | ---: | ---: | ---: | ---: | ---: |"]
    for each in record["disk"]:
        lines.append(
            f"| {each['rows']:,} x {COLUMNS} | {each['table_bytes'] / 1e9:.1f} GB "
            f"| {each['distinct_ids_a_step']:,} | {each['step_median_ms']:.0f} ms "
            f"| {each['save_median_s']:.1f} s | {each['peak_resident_bytes'] / 1e9:.2f} GB |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    """Measure, each thing in a process of its own, and write the record."""
    if len(sys.argv) > 1:
        what, *rest = sys.argv[1:]
        found = (
            measure_wire(rest[0], int(rest[1]))
            if what == "wire"
            else measure_disk(int(rest[0]), rest[1])
        )
        print(json.dumps(found))
        return
    command = [sys.executable, "-m", "benchmarks.scale"]
    record: dict[str, Any] = {"environment": describe_environment(1), "wire": [], "disk": []}
    for way in ("shard", "replicate"):
        for count in (2, 3):
            inner = " ".join([*command, "wire", way, str(count)])
            record["wire"].append(
                _run(["unshare", "-n", "sh", "-c", f"ip link set lo up; {inner}"])
            )
    for rows in SIZES:
        with tempfile.TemporaryDirectory(dir=ROOT) as folder:
            record["disk"].append(_run([*command, "disk", str(rows), folder]))
    RECORD.write_text(json.dumps(record, indent=1) + "\n")


def _run(command: list[str]) -> dict[str, Any]:
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, cwd=ROOT)
    found: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    print(found, flush=True)
    return found


if __name__ == "__main__":
    main()
