"""Time the uses of a one-hot, with and without hotrow, in one process.

    python -m benchmarks.onehots

Each use runs forward and backward on the same numbers, with a one-hot from `F.one_hot` and with one
from `hotrow.one_hot`. The results are compared before timing starts. The table shows both times and
the sum of all memory that a run allocates.
"""

from __future__ import annotations

import functools
import statistics
import sys
import time
from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import hotrow
from hotrow.onehot.tensor import OneHot

SIZES = ((64, 200_000), (8_192, 1_000), (64, 1_600))  # rows of the one-hot, classes
COLUMNS = 16


class Numbers:
    """The operands of one size: a dense tensor of the one-hot's shape, a table, and rows."""

    def __init__(self, rows: int, classes: int) -> None:
        torch.manual_seed(0)
        self.ids = torch.randint(classes, (rows,))
        self.other_ids = torch.randint(100, (rows,))
        self.classes = classes
        self.dense = torch.randn(rows, classes, requires_grad=True)
        self.table = torch.randn(classes, COLUMNS, requires_grad=True)
        self.rows = torch.randn(rows, COLUMNS, requires_grad=True)
        self.weights = torch.randn(classes, requires_grad=True)

    def leaves(self) -> list[Tensor]:
        """Return the tensors that require grad."""
        return [self.dense, self.table, self.rows, self.weights]


Encode = Callable[[Tensor, int], Tensor]


def _float(encode: Encode, n: Numbers) -> Tensor:
    return encode(n.ids, n.classes).float()


USES: dict[str, Callable[[Encode, Numbers], Tensor]] = {
    "x @ table": lambda e, n: _float(e, n) @ n.table,
    "x.T @ rows": lambda e, n: _float(e, n).T @ n.rows,
    "rows.T @ x": lambda e, n: n.rows.T @ _float(e, n),
    "x.sum(0), x.mean(0)": lambda e, n: _float(e, n).sum(0) + _float(e, n).mean(0),
    "perplexity": lambda e, n: _perplexity(_float(e, n).mean(0)),
    "(q * x).sum(1)": lambda e, n: (n.dense * _float(e, n)).sum(1),
    "q[x.bool()]": lambda e, n: n.dense[e(n.ids, n.classes).bool()],
    "where(x > 0, q, 0).sum(1)": lambda e, n: torch.where(_float(e, n) > 0, n.dense, 0).sum(1),
    "(weights * x).sum(1)": lambda e, n: (n.weights * _float(e, n)).sum(1),
    "cross_entropy(q, x)": lambda e, n: F.cross_entropy(n.dense, _float(e, n)),
    "cross_entropy(q, smoothed x)": lambda e, n: F.cross_entropy(
        n.dense, _float(e, n) * 0.9 + 0.1 / n.classes
    ),
    "bce_with_logits(q, x)": lambda e, n: F.binary_cross_entropy_with_logits(n.dense, _float(e, n)),
    "mse_loss(q, x)": lambda e, n: F.mse_loss(n.dense, _float(e, n)),
    "q - x": lambda e, n: n.dense - _float(e, n),
    "dice": lambda e, n: _dice(n.dense, _float(e, n)),
    "x.T @ y (counts)": lambda e, n: _float(e, n).T @ e(n.other_ids, 100).float(),
}


def _perplexity(share: Tensor) -> Tensor:
    return torch.exp(-(share * torch.log(share + 1e-10)).sum())


def _dice(p: Tensor, x: Tensor) -> Tensor:
    return (2 * (p * x).sum(0) / (p.sum(0) + x.sum(0) + 1e4)).mean()


def main() -> int:
    """Print the table."""
    print(
        f"{'use':30} {'size':>16} {'torch ms':>9} {'hotrow ms':>9} {'ratio':>7} {'MB':>7} {'MB':>7}"
    )
    for rows, classes in SIZES:
        numbers = Numbers(rows, classes)
        for name, use in USES.items():
            runs = [
                functools.partial(_step, use, encode, numbers)
                for encode in (F.one_hot, hotrow.one_hot)
            ]
            for theirs, ours in zip(runs[0](), runs[1](), strict=True):
                torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)
            dense, ids = _time(runs)
            memory = [_memory(run) for run in runs]
            print(
                f"{name:30} {f'{rows:,} x {classes:,}':>16} {dense:9.2f} {ids:9.2f} "
                f"{dense / ids:6.1f}x {memory[0]:7.1f} {memory[1]:7.1f}",
                flush=True,
            )
    return 0


def _step(use: Callable[[Encode, Numbers], Tensor], encode: Encode, n: Numbers) -> list[Tensor]:
    """Run forward and backward; return the result and the gradients."""
    result = use(encode, n)
    result = result.materialize() if isinstance(result, OneHot) else result
    if not result.requires_grad:
        return [result]
    gradients = torch.autograd.grad(result, n.leaves(), torch.ones_like(result), allow_unused=True)
    return [result, *(each for each in gradients if each is not None)]


def _time(runs: list[Callable[[], object]]) -> list[float]:
    """Return the median time of each run in ms; the runs take turns."""
    times: list[list[float]] = [[] for _ in runs]
    deadline = time.perf_counter() + 4
    while (time.perf_counter() < deadline and len(times[0]) < 40) or len(times[0]) < 3:
        for run, found in zip(runs, times, strict=True):
            start = time.perf_counter()
            run()
            found.append(1e3 * (time.perf_counter() - start))
    return [statistics.median(found) for found in times]


def _memory(run: Callable[[], object]) -> float:
    """Return the sum of all memory that a run allocates, in MB."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        run()
    total = sum(max(event.self_cpu_memory_usage, 0) for event in found.events())
    return total / 1e6


if __name__ == "__main__":
    sys.exit(main())
