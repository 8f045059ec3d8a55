"""Measure how long a vocabulary takes to grow: `python -m benchmarks.growth`.

A table with AdamW's state grows by 1,000 rows at a time until it has twice as many rows. The
average includes the growth that moves all rows to a larger block of memory. The baseline is the
usual way to add rows: call `torch.cat` for the weight and for each tensor of the state. It is
measured only a few times. In a virtual machine, the first write to a memory page is slow. So the
benchmark first writes to as much memory as it will need. Steps are timed before the first growth
and after the last one.
"""

from __future__ import annotations

import statistics
import time
from typing import Annotated

import torch
import typer
from torch import Tensor, nn

import hotrow
from hotrow import vocabulary

NEW_ROWS, IDS, STEPS, BASELINE_ROUNDS = 1000, 4096, 20, 3


def main(
    rows: Annotated[int, typer.Option(help="Rows before the first growth.")] = 1_000_000,
    columns: Annotated[int, typer.Option(help="Columns of the table.")] = 256,
) -> None:
    """Print the times of a growth and of a step, and how they compare."""
    torch.ones(8 * rows, columns)
    layer = nn.Embedding(rows, columns, _weight=torch.zeros(rows, columns))
    hotrow.convert(layer, min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    new = torch.zeros(NEW_ROWS, columns)
    before = time_steps(layer, optimizer)
    state = optimizer.state[layer.weight]
    baseline = time_surgery([layer.weight.data, state["exp_avg"], state["exp_avg_sq"]], new)
    del state
    growths = []
    while layer.num_embeddings < 2 * rows:
        begin = time.perf_counter()
        vocabulary.resize(layer, layer.num_embeddings + NEW_ROWS, optimizer, init=new)
        growths.append(1e3 * (time.perf_counter() - begin))
    take_step_with_all_rows(layer, optimizer)
    after = time_steps(layer, optimizer)
    mean = statistics.mean(growths)
    assert (
        optimizer.state[layer.weight]["exp_avg"].shape == layer.weight.shape == (2 * rows, columns)
    )
    print(
        f"{len(growths):,} growths of {rows:,} x {columns} by {NEW_ROWS:,} rows, with AdamW's state"
    )
    print(f"  mean {mean:.3f} ms, median {statistics.median(growths):.3f} ms")
    print(f"  the slowest growth: {max(growths):.0f} ms")
    print(f"  torch.cat: {baseline:.0f} ms per growth, {baseline / mean:.0f}x hotrow's mean")
    print(f"step: {before:.2f} ms before, {after:.2f} ms after ({after / before:.2f}x)")


def time_steps(layer: nn.Embedding, optimizer: torch.optim.Optimizer) -> float:
    """Return the median time of a step, in ms."""
    times = []
    for _ in range(STEPS):
        ids = torch.randint(layer.num_embeddings, (IDS,))
        begin = time.perf_counter()
        optimizer.zero_grad()
        layer(ids).sum().backward()
        optimizer.step()
        times.append(1e3 * (time.perf_counter() - begin))
    optimizer.zero_grad()
    return statistics.median(times)


def take_step_with_all_rows(layer: nn.Embedding, optimizer: torch.optim.Optimizer) -> None:
    """Train every row once, because the first use of a new row's memory is slow."""
    for ids in torch.arange(layer.num_embeddings).split(1 << 16):
        optimizer.zero_grad()
        layer(ids).sum().backward()
        optimizer.step()
    optimizer.zero_grad()


def time_surgery(tensors: list[Tensor], new: Tensor) -> float:
    """Return the median time of `torch.cat` for all tensors, in ms."""
    times = []
    for _ in range(BASELINE_ROUNDS):
        begin = time.perf_counter()
        for tensor in tensors:
            torch.cat([tensor, new])
        times.append(1e3 * (time.perf_counter() - begin))
    return statistics.median(times)


if __name__ == "__main__":
    typer.run(main)
