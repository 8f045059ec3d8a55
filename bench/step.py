"""Time group + step of the AdamW kernel beside torch's fused dense AdamW, A B A B.

    python bench/step.py [--rows 1000000] [--columns 256] [--ids 16384] [--steps 1000]

Steady state: `--steps` steps of Zipf(1.1) ids first, so that the gaps between the touches of a row
are what they are in a long run. Run with THP_MEM_ALLOC_ENABLE=1 to give torch huge pages.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time

import numpy as np
import torch

from hotrow import optim
from hotrow.kernels.grouping import group, new_head
from hotrow.optim.ledger import Ledger
from hotrow.optim.settle import settle, step


def zipf(rows: int, count: int, random: np.random.Generator) -> torch.Tensor:
    """`count` ids with odds 1 / rank^1.1, the ranks spread over the table."""
    sums = np.cumsum(1 / np.arange(1, rows + 1) ** 1.1)
    ranks = np.searchsorted(sums, random.random(count) * sums[-1])
    return torch.from_numpy((ranks * 7919 + 13) % rows)


def percentiles(seconds: list[float]) -> dict[str, float]:
    """Median, 20th and 80th percentile, in ms."""
    low, *_, high = statistics.quantiles(seconds, n=5)
    named = {"p20_ms": low, "median_ms": statistics.median(seconds), "p80_ms": high}
    return {key: round(value * 1e3, 3) for key, value in named.items()}


def main() -> None:
    """Run and print one JSON record."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, default=1_000_000)
    parser.add_argument("--columns", type=int, default=256)
    parser.add_argument("--ids", type=int, default=16_384)
    parser.add_argument("--steps", type=int, default=1_000)
    parser.add_argument("--rounds", type=int, default=5)
    asked = parser.parse_args()
    random = np.random.default_rng(0)
    torch.manual_seed(0)

    shape = asked.rows, asked.columns
    parameter = torch.nn.Parameter(torch.randn(shape))
    fused = torch.optim.AdamW([parameter], fused=True)
    chosen = dict(fused.param_groups[0])
    table, slots = parameter.detach().clone(), [torch.zeros(shape), torch.zeros(shape)]
    last = torch.zeros(asked.rows, dtype=torch.int32)
    head, ledger = new_head(asked.rows), Ledger(optim.AdamW.rule, chosen)
    grads = torch.randn(asked.ids, asked.columns)

    def ours(ids: torch.Tensor) -> dict[str, float]:
        begin = time.perf_counter()
        rows, sums = group(ids, grads, head)
        middle = time.perf_counter()
        ledger.record(chosen)
        step(ledger, table, slots, last, rows, sums)
        end = time.perf_counter()
        return {"group": middle - begin, "step": end - middle, "both": end - begin}

    def theirs(ids: torch.Tensor) -> float:
        begin = time.perf_counter()
        fused.step()
        return time.perf_counter() - begin

    # Correct first: a few steps beside torch's fused step.
    for _ in range(3):
        ids = zipf(asked.rows, asked.ids, random)
        rows, sums = group(ids, grads, head)
        parameter.grad = torch.zeros(shape).index_copy_(0, rows, sums)
        ours(ids)
        theirs(ids)
    settle(ledger, table, slots, last, torch.arange(asked.rows))
    torch.testing.assert_close(table, parameter.detach(), rtol=1e-5, atol=1e-6)

    for _ in range(asked.steps):
        ours(zipf(asked.rows, asked.ids, random))
    found: dict[str, list[float]] = {"group": [], "step": [], "both": [], "fused": []}
    for _ in range(asked.rounds):
        for _ in range(10):
            for key, value in ours(zipf(asked.rows, asked.ids, random)).items():
                found[key].append(value)
        for _ in range(2):
            found["fused"].append(theirs(ids))
    record = {
        "rows": asked.rows,
        "columns": asked.columns,
        "ids": asked.ids,
        "distinct": len(rows),
        "steps_before": asked.steps,
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        **{key: percentiles(values) for key, values in found.items()},
    }
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
