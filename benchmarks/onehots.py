"""Benchmark operations on one-hots before and after `convert`, one operation per process.

    python -m benchmarks.onehots --records benchmarks/records

Each use of a one-hot is the forward method of a model. The benchmark times the forward and backward
passes of the plain model, the model converted with the default `min_entries`, and the code that an
expert would write with the ids. Before timing starts, the benchmark checks that the results and
gradients of all three agree. The models take turns. The first run of a turn is not timed, because
the CPU caches then contain the previous model's data, unlike in training. The gradient of the
result is created before timing starts. Peak memory is the largest number of bytes that are
allocated at any one time during a run.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable
from pathlib import Path
from typing import Annotated, Any

import torch
import torch.nn.functional as F
import typer
from torch import Tensor
from torch.profiler import ProfilerActivity, profile

import hotrow
from benchmarks import record_files
from benchmarks.onehots_by_hand import BY_HAND
from benchmarks.onehots_operands import EXPERTS, Operands
from hotrow.bench.percentiles import percentiles
from hotrow.bench.process import run_job
from hotrow.bench.workload import ignore_progress

SIZES = ((64, 200_000), (8_192, 1_000), (64, 1_600))  # rows of the one-hot, classes
SECONDS, WARMUPS = 2.5, 10
# The number of timed runs per turn, as for the steps in `benchmarks.workloads`.
RUNS, DENSE_RUNS, DENSE_ENTRIES = 20, 2, 1_000_000


def _multi_hot(n: Operands) -> Tensor:
    return torch.zeros(n.rows_count, n.classes).scatter_(1, n.label_ids, 1)


def _few(n: Operands) -> Tensor:
    return F.one_hot(n.few_ids, EXPERTS).float()


def _places(n: Operands) -> Tensor:
    x = n.one_hot()
    return ((x.cumsum(0) - 1) * x).sum(1)


def _dispatch(n: Operands) -> Tensor:
    mask = n.one_hot().float().unsqueeze(-1) * _few(n).unsqueeze(1)
    return torch.einsum("sec,sm->ecm", mask, n.rows)


def _combine(n: Operands) -> Tensor:
    mask = n.one_hot().float().unsqueeze(-1) * _few(n).unsqueeze(1)
    return torch.einsum("sec,ecm->sm", mask, n.experts)


def _straight_through(n: Operands) -> Tensor:
    p = n.dense.softmax(-1)
    x = F.one_hot(p.argmax(-1), n.classes).float()
    return (x - p.detach() + p) @ n.table


def _perplexity(share: Tensor) -> Tensor:
    return torch.exp(-(share * torch.log(share + 1e-10)).sum())


def _dice(p: Tensor, x: Tensor) -> Tensor:
    return (2 * (p * x).sum(0) / (p.sum(0) + x.sum(0) + 1e4)).mean()


def _x(n: Operands) -> Tensor:
    return n.one_hot().float()


USES: dict[str, Callable[[Operands], Tensor]] = {
    "x @ table": lambda n: _x(n) @ n.table,
    "linear(x)": lambda n: F.linear(_x(n), n.linear_weight, n.linear_bias),
    "x.T @ rows": lambda n: _x(n).T @ n.rows,
    "rows.T @ x": lambda n: n.rows.T @ _x(n),
    "x.mean(0), perplexity": lambda n: _perplexity(_x(n).mean(0)),
    "x.T @ y (pairs)": lambda n: _x(n).T @ _few(n),
    "(q * x).sum(1)": lambda n: (n.dense * _x(n)).sum(1),
    "q[x.bool()]": lambda n: n.dense[n.one_hot().bool()],
    "where(x > 0, q, 0).sum(1)": lambda n: torch.where(_x(n) > 0, n.dense, 0).sum(1),
    "(weights * x).sum(1)": lambda n: (n.weights * _x(n)).sum(1),
    "x[:, 0] * q[:, 0]": lambda n: _x(n)[:, 0] * n.dense[:, 0],
    "(x.cumsum(0) - 1) * x": _places,
    "dispatch to experts": _dispatch,
    "combine from experts": _combine,
    "cross_entropy(q, x)": lambda n: F.cross_entropy(n.dense, _x(n)),
    "cross_entropy(q, smoothed x)": lambda n: F.cross_entropy(
        n.dense, _x(n) * 0.9 + 0.1 / n.classes
    ),
    "bce_with_logits(q, x)": lambda n: F.binary_cross_entropy_with_logits(n.dense, _x(n)),
    "bce_with_logits(q, multi-hot)": lambda n: F.binary_cross_entropy_with_logits(
        n.dense, _multi_hot(n)
    ),
    "mse_loss(q, x)": lambda n: F.mse_loss(n.dense, _x(n)),
    "q - x": lambda n: n.dense - _x(n),
    "dice": lambda n: _dice(n.dense, _x(n)),
    "straight-through @ table": _straight_through,
}

# Uses whose result, or a gradient, has as many entries as the one-hot.
DENSE_USES = {
    *("(q * x).sum(1)", "q[x.bool()]", "where(x > 0, q, 0).sum(1)", "x[:, 0] * q[:, 0]"),
    *("cross_entropy(q, x)", "cross_entropy(q, smoothed x)", "mse_loss(q, x)", "q - x", "dice"),
    *("bce_with_logits(q, x)", "bce_with_logits(q, multi-hot)", "straight-through @ table"),
}


def main(
    records: Annotated[str | None, typer.Option(help="Write the record to this folder.")] = None,
) -> None:
    """Measure all uses, print the results, and write the record."""
    measured, threads = [], torch.get_num_threads()
    for rows, classes in SIZES:
        for name in USES:
            case = {"use": name, "rows": rows, "classes": classes}
            result = case | run_job("benchmarks.onehots:measure", case, threads, ignore_progress)
            measured.append(result)
            ratio = result["torch"]["median_ms"] / result["hotrow"]["median_ms"]
            best = result["torch"]["median_ms"] / result["by_hand"]["median_ms"]
            peaks = (each["peak_bytes"] / 1e6 for each in result.values() if isinstance(each, dict))
            print(
                f"{name:30} {f'{rows:,} x {classes:,}':>16} {ratio:8.2f}x (by hand {best:8.2f}x)"
                + " ".join(f"{peak:9.2f} MB" for peak in peaks),
                flush=True,
            )
    if records is not None:
        record = {
            "workload": "onehots",
            "about": "uses of a one-hot, before and after convert",
            "uses": measured,
            "environment": record_files.describe_environment(threads),
        }
        record_files.write(record, Path(records))


def measure(use: str, rows: int, classes: int, report_progress: object) -> dict[str, Any]:
    """Check that the models agree, and return the time and the peak memory of each."""
    plain = Operands(rows, classes, USES[use])
    converted, by_hand = hotrow.convert(copy.deepcopy(plain)), copy.deepcopy(plain)
    by_hand.use = BY_HAND[use]
    result = plain(plain.ids)
    gradient = torch.ones_like(result) if result.requires_grad else None
    for model in (converted, by_hand):
        for theirs, ours in zip(_step(plain, gradient), _step(model, gradient), strict=True):
            torch.testing.assert_close(ours, theirs.to(ours.dtype), rtol=1e-3, atol=1e-4)
    for _ in range(WARMUPS):  # the first calls search for one-hots
        _step(converted, gradient)
    models = {"torch": plain, "hotrow": converted, "by_hand": by_hand}
    times: dict[str, list[float]] = {name: [] for name in models}
    deadline = time.perf_counter() + SECONDS
    is_dense = rows * classes >= DENSE_ENTRIES
    counts = {name: DENSE_RUNS if is_dense and name == "torch" else RUNS for name in models}
    while len(times["torch"]) < 6 or (time.perf_counter() < deadline and len(times["torch"]) < 200):
        for name, model in models.items():
            _step(model, gradient)
            for _ in range(counts[name]):
                start = time.perf_counter()
                _step(model, gradient)
                times[name].append(1e3 * (time.perf_counter() - start))
    return {
        name: percentiles(times[name]) | {"peak_bytes": _peak(model, gradient)}
        for name, model in models.items()
    }


def _step(model: Any, gradient: Tensor | None) -> list[Tensor]:
    """Run the forward and backward passes; return the result and the gradients."""
    result = model(model.ids)
    if gradient is None:
        return [result]
    leaves = list(model.parameters())
    gradients = torch.autograd.grad(result, leaves, gradient, allow_unused=True)
    return [result.detach(), *(each.to_dense() for each in gradients if each is not None)]


def _peak(model: Any, gradient: Tensor | None) -> int:
    """Return the largest number of bytes that are allocated at any one time during a run."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        _step(model, gradient)
    events = found.profiler.kineto_results.events()
    changes = sorted((e.start_ns(), e.nbytes()) for e in events if e.name() == "[memory]")
    total = peak = 0
    for _, change in changes:
        total += change
        peak = max(peak, total)
    return peak


if __name__ == "__main__":
    typer.run(main)
