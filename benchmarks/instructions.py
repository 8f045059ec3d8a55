"""Count the instructions in short training steps, because counts vary less than times.

    python -m benchmarks.instructions
    python -m benchmarks.instructions --update

callgrind, a valgrind tool, counts the instructions of hotrow's step and of torch's step in one
process. `make test-all` compares the ratios of hotrow's counts to torch's with the ratios in
benchmarks/instructions.json. `--update` rewrites that file.
"""

from __future__ import annotations

import gc
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

import hotrow
from benchmarks.record_files import ROOT
from hotrow.inputs import files

RECORD = ROOT / "benchmarks" / "instructions.json"
WARMUP_STEPS, STEPS = 12, 10
# Compile kernels for a CPU that valgrind supports, so that the process under valgrind finds them in
# the cache.
CPU = {"NUMBA_CPU_NAME": "generic", "NUMBA_CPU_FEATURES": "+avx2,+fma,+f16c,+sse4.2,+popcnt"}
# The process calls this C library function to end a phase. callgrind then writes the phase's count.
END_OF_PHASE = "getpgid"


@dataclass(frozen=True)
class Workload:
    """Training steps on embeddings. With hotrow, all the embeddings become tables.

    Attributes:
        optimizer: the name of the optimizer.
        tables: the number of embeddings.
        rows: V, the number of rows of each embedding.
        columns: D, the number of columns of each embedding.
        ids: N, the number of ids that a step looks up in each embedding.
        peer: the options of torch's optimizer, or None for embeddings with `sparse=True`.
    """

    optimizer: str
    tables: int
    rows: int
    columns: int
    ids: int
    peer: dict[str, bool] | None

    def step(self, with_hotrow: bool) -> Callable[[int], None]:
        """Return a function that runs training step n, with hotrow or with torch alone."""
        torch.manual_seed(0)
        is_sparse = self.peer is None and not with_hotrow
        layers = [
            nn.Embedding(self.rows, self.columns, sparse=is_sparse) for _ in range(self.tables)
        ]
        model, optimizers = nn.ModuleList(layers), torch.optim
        options = self.peer or {}
        if with_hotrow:
            model, optimizers, options = hotrow.convert(model, min_entries=0), hotrow.optim, {}
        optimizer = getattr(optimizers, self.optimizer)(model.parameters(), lr=0.01, **options)
        batches = torch.randint(self.rows, (WARMUP_STEPS + STEPS, self.tables, self.ids))
        factors = torch.randn(self.ids, self.columns)

        def step(n: int) -> None:
            optimizer.zero_grad()
            loss: Tensor = sum(
                (layer(ids) * factors).sum() for layer, ids in zip(model, batches[n], strict=True)
            )
            loss.backward()
            optimizer.step()

        return step


WORKLOADS = {
    "AdamW, 1,000 x 16, 64 ids": Workload("AdamW", 1, 1_000, 16, 64, {"fused": True}),
    "SGD, 1,000 x 16, 64 ids": Workload("SGD", 1, 1_000, 16, 64, None),
    "AdamW, 26 tables, 1,000 x 16, 64 ids": Workload("AdamW", 26, 1_000, 16, 64, {"fused": True}),
    "AdamW, 5,000 x 64, 4,096 ids": Workload("AdamW", 1, 5_000, 64, 4_096, {"fused": True}),
}


def run_steps() -> None:
    """Run the steps of all workloads; call `END_OF_PHASE` before and after each measurement."""
    end_phase = getattr(os, END_OF_PHASE)
    torch.set_num_threads(1)
    gc.disable()  # a collection takes as many instructions as several steps
    for workload in WORKLOADS.values():
        for with_hotrow in (True, False):
            step = workload.step(with_hotrow)
            for n in range(WARMUP_STEPS):
                step(n)
            end_phase(0)
            for n in range(WARMUP_STEPS, WARMUP_STEPS + STEPS):
                step(n)
            end_phase(0)


def count_instructions() -> dict[str, dict[str, float]]:
    """For each workload, return the instructions per step of hotrow and torch, and their ratio.

    Raises:
        FileNotFoundError: valgrind is not installed.
    """
    command = [sys.executable, "-c", "from benchmarks import instructions as i; i.run_steps()"]
    with tempfile.TemporaryDirectory() as folder:
        environment = os.environ | CPU | {
            "NUMBA_CACHE_DIR": f"{folder}/cache", "OMP_NUM_THREADS": "1", "PYTHONHASHSEED": "0",
        }  # fmt: skip
        callgrind = [
            "valgrind", "--quiet", "--tool=callgrind", f"--dump-before={END_OF_PHASE}",
            f"--callgrind-out-file={folder}/count",
        ]  # fmt: skip
        subprocess.run(command, cwd=ROOT, env=environment, check=True)  # fill the cache
        subprocess.run([*callgrind, *command], cwd=ROOT, env=environment, check=True)
        counts = [
            _read_count(Path(folder, f"count.{phase}")) / STEPS
            for phase in range(2, 4 * len(WORKLOADS) + 1, 2)
        ]
    return {
        name: {"hotrow": count, "torch": peer, "ratio": round(count / peer, 4)}
        for name, count, peer in zip(WORKLOADS, counts[::2], counts[1::2], strict=True)
    }


def _read_count(path: Path) -> int:
    """Return the number of instructions in a file that callgrind wrote."""
    total = re.search(r"^totals: (\d+)", path.read_text(), re.MULTILINE)
    assert total, path
    return int(total[1])


def main(arguments: list[str]) -> int:
    """Print the counts; with `--update`, also write them to the record."""
    if shutil.which("valgrind") is None:
        print("valgrind is missing: install it (Debian: apt-get install valgrind)", file=sys.stderr)
        return 1
    counts = count_instructions()
    for name, count in counts.items():
        print(f"{name:38} {count['hotrow']:12,.0f} {count['torch']:12,.0f} {count['ratio']:8.3f}")
    if "--update" in arguments:
        files.write_text(RECORD, json.dumps(counts, indent=1) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
