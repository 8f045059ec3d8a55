"""Simulate many failures of tables on disk and of sharded tables, and count the losses.

    python -m benchmarks.durability kills 1000
    python -m benchmarks.durability checks
    python -m benchmarks.durability --record 1000

`checks` measures the cost of checksums: the time of a step with checksums, divided by the time
without. Each attack prints "N tried, M lost". What counts as lost depends on the attack:

- `kills` sends SIGKILL to a process that trains, saves, and changes the number of rows. Lost: an
  acknowledged save is missing, the folder doesn't open, a step or a save raises an error, or the
  values or the number of rows differ from those of the same training in memory.
- `flips` flips one bit of one file. Lost: hotrow reads different values without an error, or its
  error doesn't name the file.
- `full` fills the disk (a tmpfs, which requires root) during training. Lost: the same cases as for
  `kills`, or the process ends without a hotrow error.
- `ranks` sends SIGKILL to one of two or three ranks. Lost: another rank doesn't stop with an error
  within `RANK_TIMEOUT` seconds.

`--record` runs all attacks, and writes docs/scale.json and docs/scale.md. The processes are forked,
so an attempt takes only milliseconds.
"""

from __future__ import annotations

import contextlib
import functools
import json
import os
import random
import signal
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

import hotrow
from benchmarks.record_files import ROOT
from hotrow import HotrowError, disk, vocabulary
from hotrow.bench.batches import Batches
from hotrow.distributed import shard

ROWS, COLUMNS, IDS = 2000, 8, 16
NEW_ROWS = 300  # rows added each time the table grows
FRESH_EVERY = 25  # start again with a new table after this many attempts
RANK_TIMEOUT = 20  # seconds after which a rank that is still running counts as lost
MAX_SECONDS = 0.15  # kill each process within this many seconds


def first_values() -> torch.Tensor:
    """Return the values of a new table."""
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(1))


def rows_at(t: int) -> int:
    """Return the number of rows in step t. It grows every third step and sometimes shrinks."""
    return ROWS + NEW_ROWS * (t // 3 % 8)


def step(layer: nn.Module, optimizer: torch.optim.Optimizer, t: int) -> None:
    """Run step t. Its ids and gradients depend only on t."""
    generator = torch.Generator().manual_seed(t)
    ids = (torch.rand(IDS, generator=generator) ** 3 * ROWS).long()
    optimizer.zero_grad()
    (layer(ids) * torch.randn(IDS, COLUMNS, generator=generator)).sum().backward()
    optimizer.step()


def changing_step(layer: nn.Embedding, optimizer: torch.optim.Optimizer, t: int) -> None:
    """Resize the table to `rows_at(t)` rows, train its last row, and run step t."""
    rows = rows_at(t)
    if rows != layer.num_embeddings:
        generator = torch.Generator().manual_seed(t)
        new = torch.randn(max(0, rows - layer.num_embeddings), COLUMNS, generator=generator)
        vocabulary.resize(layer, rows, optimizer, init=new)
    optimizer.zero_grad()
    layer(torch.tensor([rows - 1])).sum().backward()
    optimizer.step()
    step(layer, optimizer, t)


def train_in_memory(steps: int) -> dict[str, torch.Tensor]:
    """Run `steps` steps on a table in memory; return its rows and optimizer state."""
    layer = nn.Sequential(nn.Embedding(ROWS, COLUMNS, _weight=first_values()))
    layer = hotrow.convert(layer, min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.05)
    for t in range(steps):
        changing_step(layer[0], optimizer, t)
    return read_state(layer[0].weight, optimizer)


def read_state(weight: torch.Tensor, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    """Return a table and its optimizer state."""
    states = optimizer.state_dict()["state"].values()
    return {"weight": weight.detach().clone()} | {
        key: torch.as_tensor(value).clone() for state in states for key, value in state.items()
    }


def create(folder: Path) -> None:
    """Create a table on disk."""
    disk.create(folder, ROWS, COLUMNS, fill=lambda block: block.copy_(first_values())).close()


def read_folder(folder: Path, *, verify: bool = True) -> tuple[int, dict[str, torch.Tensor]]:
    """Return the number of saved steps, and the rows with their optimizer state."""
    with disk.open(folder, verify=verify) as store:
        optimizer = hotrow.optim.AdamW(store.layer.parameters(), lr=0.05)
        return store.rest or 0, read_state(store.layer.weight, optimizer)


def differs(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    """Return whether any value differs in its bits."""
    return found.keys() != expected.keys() or not all(
        torch.equal(value, expected[key]) for key, value in found.items()
    )


def train(folder: Path, pipe: int, on_step: Callable[[int], None] = lambda t: None) -> None:
    """Train and save until the process is killed; write a byte for each acknowledged save."""
    with disk.open(folder) as store:
        optimizer = hotrow.optim.AdamW(store.layer.parameters(), lr=0.05)
        t = store.rest or 0
        while True:
            on_step(t)
            changing_step(store.layer, optimizer, t)
            t += 1
            store.save(t)
            os.write(pipe, b".")


@contextlib.contextmanager
def forked(run: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Run a function in a forked process; yield the process id and a pipe for its output."""
    reader, writer = os.pipe()
    child = os.fork()
    if not child:
        code = 1
        try:
            os.close(reader)
            run(writer)
            code = 0
        except HotrowError:
            code = 2
        except Exception:
            traceback.print_exc()
        finally:
            os._exit(code)
    os.close(writer)
    try:
        yield child, reader
    finally:
        os.close(reader)


def read_all(pipe: int) -> int:
    """Read a pipe until it is closed; return the number of bytes."""
    count = 0
    while data := os.read(pipe, 1 << 16):
        count += len(data)
    return count


def is_lost(folder: Path, acknowledged: int) -> bool:
    """Return whether a folder has lost an acknowledged save."""
    try:
        disk.verify(folder)
        steps, values = read_folder(folder)
    except HotrowError as error:
        print(error, file=sys.stderr)
        return True
    return steps < acknowledged or (bool(steps) and differs(values, train_in_memory(steps)))


def kills(count: int, chance: random.Random) -> Iterator[bool]:
    """Repeatedly kill a process that trains and saves, and check the folder each time."""
    train_in_memory(2)  # compiles the kernels before the first fork
    with tempfile.TemporaryDirectory() as parent:
        folder, loss = Path(parent), True
        for i in range(count):
            if i % FRESH_EVERY == 0 or loss:
                folder, saved = Path(parent, str(i)), 0
                create(folder)
            with forked(functools.partial(train, folder)) as (child, pipe):
                time.sleep(chance.random() * MAX_SECONDS)
                os.kill(child, signal.SIGKILL)
                saved += read_all(pipe)
                code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
            if code not in (-signal.SIGKILL, 2):
                raise RuntimeError(f"the process that saves failed, with exit code {code}")
            loss = code == 2 or is_lost(folder, saved)
            yield loss
            if not loss:
                saved = read_folder(folder)[0]


def flips(count: int, chance: random.Random, *, verify: bool = True) -> Iterator[bool]:
    """Repeatedly flip one bit of a file and read the folder."""
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent, "table")
        create(folder)
        with disk.open(folder) as store:
            optimizer = hotrow.optim.AdamW(store.layer.parameters(), lr=0.05)
            for t in range(5):
                step(store.layer, optimizer, t)
            store.save(5)
        expected = read_folder(folder)
        files = sorted(folder.iterdir())
        for _ in range(count):
            path = chance.choice(files)
            bit = chance.randrange(8 * path.stat().st_size)
            flip(path, bit)
            try:
                steps, values = read_folder(folder, verify=verify)
                yield steps != expected[0] or differs(values, expected[1])
            except HotrowError as error:
                yield path.name not in str(error)
            flip(path, bit)


def flip(path: Path, bit: int) -> None:
    """Flip a bit of a file in place."""
    with path.open("r+b") as file:
        file.seek(bit // 8)
        (value,) = file.read(1)
        file.seek(bit // 8)
        file.write(bytes([value ^ 1 << bit % 8]))


def full(count: int, chance: random.Random) -> Iterator[bool]:
    """Fill a tmpfs while a process trains and saves; then free space and check the folder."""
    train_in_memory(2)
    needed = 4 * ROWS * COLUMNS * 4
    with tempfile.TemporaryDirectory() as parent:
        for _ in range(count):
            size = chance.randrange(needed // 4, needed * 3) // 4096 * 4096
            subprocess.run(
                ["mount", "-t", "tmpfs", "-o", f"size={size}", "tmpfs", parent], check=True
            )
            try:
                yield _fill_disk(Path(parent), chance.randrange(4))
            finally:
                subprocess.run(["umount", "--lazy", parent], check=True)


def _fill_disk(parent: Path, fill_at: int) -> bool:
    folder, ballast = parent / "table", parent / "ballast"

    def fill(t: int) -> None:
        if t == fill_at:
            with contextlib.suppress(OSError), ballast.open("wb", buffering=0) as file:
                while file.write(bytes(4096)):
                    pass
        if t == 6:
            raise HotrowError("enough steps")

    try:
        create(folder)
    except HotrowError:
        return folder.exists()  # `create` must leave no folder after an error
    with forked(functools.partial(train, folder, on_step=fill)) as (child, pipe):
        saved = read_all(pipe)
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    subprocess.run(["mount", "-o", "remount,size=64m", str(parent)], check=True)
    ballast.unlink(missing_ok=True)
    return code != 2 or is_lost(folder, saved)


def ranks(count: int, chance: random.Random) -> Iterator[bool]:
    """Kill a rank that trains a sharded table, and check that the other ranks stop."""
    train_in_memory(2)
    for _ in range(count):
        world = chance.choice([2, 3])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            port = free.getsockname()[1]
        with contextlib.ExitStack() as stack:
            children = [
                stack.enter_context(forked(functools.partial(run_rank, rank, world, port)))
                for rank in range(world)
            ]
            for _, pipe in children:
                os.read(pipe, 1)  # the rank has finished its first step
            time.sleep(chance.random() * MAX_SECONDS)
            victim, _ = children.pop(chance.randrange(world))
            os.kill(victim, signal.SIGKILL)
            os.waitpid(victim, 0)
            yield not all(list(map(_ends, (child for child, _ in children))))


def run_rank(rank: int, world: int, port: int, pipe: int) -> None:
    """Train a sharded table until a step fails."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # hide gloo's error
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://127.0.0.1:{port}",
        rank=rank,
        world_size=world,
        timeout=timedelta(seconds=RANK_TIMEOUT / 2),
    )
    model = hotrow.convert(nn.Sequential(nn.Embedding(ROWS, COLUMNS)), min_entries=0)
    model = shard(model, dist.init_device_mesh("cpu", (world,)))
    optimizer = hotrow.optim.AdamW(model.parameters(), lr=0.05)
    t = 0
    while True:
        step(model, optimizer, t)
        if not t:
            os.write(pipe, b".")
        t += 1


def _ends(child: int) -> bool:
    """Return whether a rank exits with an error in time; kill it if it is still running."""
    end = time.monotonic() + RANK_TIMEOUT
    while time.monotonic() < end:
        done, status = os.waitpid(child, os.WNOHANG)
        if done:
            return os.waitstatus_to_exitcode(status) in (1, 2)
        time.sleep(0.01)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def measure_checks(rows: int = 1_000_000, steps: int = 20, rounds: int = 4) -> dict[str, Any]:
    """Measure the time of steps with checksums, relative to the same steps without checksums.

    Each round opens the folder once with checks and once without. Both times, the steps run twice:
    first on pages that have not been checked, then on the same pages again.
    """
    torch.set_num_threads(1)
    columns, ids = 64, 4096
    batches = Batches(rows, ids)
    all_ids = [batches[t] for t in range(steps)]
    seconds: dict[tuple[bool, bool], list[float]] = {}
    with tempfile.TemporaryDirectory(dir=ROOT) as parent:
        folder = Path(parent, "table")
        disk.create(folder, rows, columns, fill=nn.init.normal_).close()
        with disk.open(folder) as store:  # creates the state
            optimizer = hotrow.optim.Adam(store.layer.parameters())
            for each in all_ids:
                take_step(store.layer, optimizer, each)
            store.save()
        for i in range(2 * rounds):
            verify = i % 2 == 0
            with disk.open(folder, verify=verify) as store:
                optimizer = hotrow.optim.Adam(store.layer.parameters())
                for is_first in (True, False):
                    for each in all_ids:
                        begin = time.perf_counter()
                        take_step(store.layer, optimizer, each)
                        if i > 1:  # the first round is a warm-up
                            times = seconds.setdefault((verify, is_first), [])
                            times.append(time.perf_counter() - begin)
                    store.save()
        begin = time.perf_counter()
        size = disk.verify(folder)
        verify_seconds = time.perf_counter() - begin
    medians = {key: statistics.median(values) for key, values in seconds.items()}
    result = {
        "first_use_ratio": round(medians[True, True] / medians[False, True], 2),
        "later_use_ratio": round(medians[True, False] / medians[False, False], 2),
        "verify_gigabytes_per_second": round(size / verify_seconds / 1e9, 2),
    }
    print(result, flush=True)
    return result


def take_step(layer: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> None:
    """Run one step of the checksum benchmark."""
    optimizer.zero_grad()
    layer(ids).square().sum().backward()
    optimizer.step()


ATTACKS: dict[str, Callable[[int, random.Random], Iterator[bool]]] = {
    "kills": kills,
    "flips": flips,
    "full": full,
    "ranks": ranks,
}


def attack(name: str, count: int, seed: int = 0) -> dict[str, Any]:
    """Run an attack, print its result, and return it."""
    results = list(ATTACKS[name](count, random.Random(seed)))
    print(f"{name}: {len(results):,} tried, {sum(results):,} lost", flush=True)
    return {"attack": name, "tried": len(results), "lost": sum(results)}


def main() -> None:
    """Run one attack, or all attacks with `--record`."""
    torch.set_num_threads(1)
    name, *counts = sys.argv[1:]
    count = int(counts[0]) if counts else 100
    if name == "checks":
        measure_checks()
        return
    if name != "--record":
        sys.exit(bool(attack(name, count)["lost"]))
    from benchmarks import scale

    record = json.loads(scale.RECORD.read_text())
    record["checks"] = measure_checks()
    record["attacks"] = [
        attack("kills", count),
        attack("flips", 2 * count),
        attack("full", count // 5),
        attack("ranks", count // 10),
    ]
    scale.RECORD.write_text(json.dumps(record, indent=1) + "\n")
    scale.write_page(record, scale.RECORD.parent)


if __name__ == "__main__":
    main()
