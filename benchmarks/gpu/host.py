"""Measure how much CPU time a training step on a GPU takes, on a computer without a GPU.

    python -m benchmarks.gpu.host

The kernels are empty, and hotrow treats CPU tensors as GPU tensors. The times exclude kernel
launches, both Triton's (four per step) and torch's.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
import types
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.bench.peers import GivenGradient
from hotrow.kernels import devices
from hotrow.table.parameter import Table

IDS, COLUMNS, ROWS, STEPS, WARMUP = 64, 64, 100_000, 400, 100


class EmptyKernel:
    """A kernel that does nothing but count its launches."""

    launches = 0

    def __getitem__(self, grid: Any) -> Any:
        return self._launch

    @staticmethod
    def _launch(*arguments: Any, **options: Any) -> None:
        EmptyKernel.launches += 1


def empty_kernels() -> None:
    """Replace the kernels, and make hotrow treat CPU tensors as GPU tensors."""
    rows, translate = (types.ModuleType(name) for name in ("rows", "translate"))
    for name in ("look_up", "settle", "sum_chunks", "merge", "step", "advance_clock"):
        setattr(rows, name, EmptyKernel())
    translate.translate = lambda function: function  # type: ignore[attr-defined]
    sys.modules["hotrow.kernels.triton.rows"] = rows
    sys.modules["hotrow.kernels.triton.translate"] = translate
    import hotrow.kernels.triton as package

    package.rows, package.translate = rows, translate  # type: ignore[attr-defined]
    devices.is_on_cpu = lambda tensor: False
    devices.is_on_gpu = lambda tensor: True
    devices.has_triton_kernels = lambda rows: rows.is_contiguous()
    torch.UntypedStorage.is_shared = lambda storage: True  # type: ignore[method-assign]


def measure(table_count: int, optimizer_name: str) -> dict[str, Any]:
    """Return the median time of each part of a step, in milliseconds."""
    tables = nn.ModuleList([nn.Embedding(ROWS, COLUMNS) for _ in range(table_count)])
    hotrow.convert(tables, min_entries=0)
    assert all(isinstance(table.weight, Table) for table in tables)
    optimizer = getattr(hotrow.optim, optimizer_name)(tables.parameters())
    gradient = torch.randn(IDS, COLUMNS)
    ids: list[Tensor] = [torch.randint(ROWS, (IDS,)) for _ in range(table_count)]
    parts: dict[str, list[float]] = {name: [] for name in ("forward", "backward", "optimizer")}
    for number in range(WARMUP + STEPS):
        optimizer.zero_grad()
        times = [time.process_time()]
        losses = [
            GivenGradient.apply(table(each), [gradient.clone()])  # type: ignore[no-untyped-call]
            for table, each in zip(tables, ids, strict=True)
        ]
        times.append(time.process_time())
        torch.autograd.backward(losses)
        times.append(time.process_time())
        del losses
        EmptyKernel.launches = 0
        begin = time.process_time()
        optimizer.step()
        times[-1:] = [times[-1], times[-1] + time.process_time() - begin]
        if number >= WARMUP:
            for name, start, end in zip(parts, times, times[1:], strict=False):
                parts[name].append(1e3 * (end - start))
    medians = {name: round(statistics.median(values), 4) for name, values in parts.items()}
    lag = tables[0].weight.lag
    return {
        "optimizer": optimizer_name,
        "tables": table_count,
        "median_ms": medians | {"step": round(sum(medians.values()), 4)},
        "triton_launches_of_optimizer": EmptyKernel.launches,
        "has_stale_rows": bool(lag is not None and lag.has_stale_rows),
    }


def main() -> None:
    """Print a JSON line for each case."""
    empty_kernels()
    for name, count in (("AdamW", 1), ("SGD", 1), ("AdamW", 26)):
        print(json.dumps(measure(count, name)), flush=True)


if __name__ == "__main__":
    main()
