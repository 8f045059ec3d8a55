"""Measure a training step of hotrow and of torch's optimizers on a GPU, side by side.

Before timing starts, sampled rows are compared with dense training. `host_ms` is the time until
Python can continue; `device_ms` is the time between two CUDA events around the step.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.table.parameter import Table

WARMUP, ROUNDS, STEPS_PER_ROUND = 30, 6, 20


@dataclass(frozen=True)
class Workload:
    """A workload with one table, and ids that follow Zipf's law."""

    name: str
    rows: int
    columns: int
    ids: int
    with_dense: bool = True


WORKLOADS = (
    Workload("adamw-1m-256", 1_000_000, 256, 16_384),
    Workload("adamw-50k-768", 50_257, 768, 4_096),
    Workload("adamw-10m-64", 10_000_000, 64, 16_384),
    Workload("adamw-1m-256-many-ids", 1_000_000, 256, 262_144),
)


def draw_batches(workload: Workload, count: int) -> list[Tensor]:
    """Return batches on the GPU; the id of rank k has a probability proportional to k^-1.1."""
    random = torch.Generator().manual_seed(0)
    weights = torch.arange(1, workload.rows + 1, dtype=torch.float64) ** -1.1
    sums = weights.cumsum(0)
    draws = torch.rand(count, workload.ids, generator=random, dtype=torch.float64) * sums[-1]
    ranks = torch.searchsorted(sums, draws).clamp_(max=workload.rows - 1)
    return list(((ranks * 7919 + 13) % workload.rows).cuda())


def make_layer(workload: Workload, sparse: bool = False) -> nn.Embedding:
    """Return an embedding on the GPU that has the same values on every call."""
    random = torch.Generator("cuda").manual_seed(0)
    weight = torch.empty(workload.rows, workload.columns, device="cuda")
    weight.uniform_(generator=random)
    return nn.Embedding(workload.rows, workload.columns, sparse=sparse, _weight=weight)


def make_step(layer: nn.Embedding, optimizer: Any, gradient: Tensor) -> Callable[[Tensor], None]:
    """Return a function that runs one training step."""

    def step(ids: Tensor) -> None:
        optimizer.zero_grad()
        layer(ids).backward(gradient)
        optimizer.step()

    return step


def make_hotrow(workload: Workload) -> tuple[nn.Embedding, Any]:
    """Return hotrow's table and optimizer."""
    layer = hotrow.convert(make_layer(workload), min_entries=0)
    assert isinstance(layer.weight, Table)
    return layer, hotrow.optim.AdamW(layer.parameters())


def compare_rows(workload: Workload, batches: list[Tensor], gradient: Tensor) -> dict[str, float]:
    """Compare sampled rows with dense training of the same rows; raise an error if they differ."""
    layer, optimizer = make_hotrow(workload)
    step = make_step(layer, optimizer, gradient)
    for ids in batches:
        step(ids)
    rows = torch.unique(torch.cat([batches[0][:60], batches[-1][:60], batches[3][:60]]))
    ours = layer(rows).detach().cpu()
    del layer, optimizer
    initial, places = make_layer(workload)(rows).detach().cpu(), rows.cpu()
    results = []
    for dtype in (torch.float32, torch.float64):
        weight = nn.Parameter(initial.to(dtype, copy=True))
        rival = torch.optim.AdamW([weight])
        for ids in batches:
            ids = ids.cpu()
            slots = torch.searchsorted(places, ids).clamp_(max=len(places) - 1)
            found = (places[slots] == ids).nonzero()[:, 0]
            weight.grad = torch.zeros_like(weight).index_add_(
                0, slots[found], gradient.cpu()[found].to(dtype)
            )
            rival.step()
        results.append(weight.detach())
    truth = results[1]
    error, allowed = (float((each.double() - truth).abs().max()) for each in (ours, results[0]))
    allowed += 2 * torch.finfo(torch.float32).eps * float(truth.abs().max())
    assert error <= allowed, f"{workload.name}: error {error:.3g} exceeds {allowed:.3g}"
    return {"max_error": error, "allowed_error": allowed}


def time_steps(step: Callable[[Tensor], None], batches: list[Tensor]) -> dict[str, list[float]]:
    """Return the time of each step in milliseconds, on the device and in Python."""
    device, host = [], []
    for ids in batches:
        torch.cuda.synchronize()
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start = time.perf_counter()
        begin.record()
        step(ids)
        end.record()
        host.append(1e3 * (time.perf_counter() - start))
        torch.cuda.synchronize()
        device.append(begin.elapsed_time(end))
    return {"device_ms": device, "host_ms": host}


def summarize(times: list[float]) -> dict[str, float]:
    """Return the median, and the 20th and 80th percentiles."""
    fifths = statistics.quantiles(times, n=5)
    return {"median": statistics.median(times), "p20": fifths[0], "p80": fifths[-1]}


def make_graph(workload: Workload, batch: Tensor, gradient: Tensor) -> Callable[[Tensor], None]:
    """Return a function that replays a captured step of hotrow."""
    layer, optimizer = make_hotrow(workload)
    static_ids, step = batch.clone(), make_step(layer, optimizer, gradient)
    for _ in range(3):
        step(static_ids)
    optimizer.prepare_capture()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step(static_ids)

    def replay(ids: Tensor) -> None:
        static_ids.copy_(ids)
        optimizer.replay(graph)

    return replay


def measure(workload: Workload) -> dict[str, Any]:
    """Time all peers in turn; return their times and the ratios to hotrow's time."""
    batches = draw_batches(workload, WARMUP + STEPS_PER_ROUND)
    random = torch.Generator("cuda").manual_seed(1)
    gradient = torch.randn(workload.ids, workload.columns, device="cuda", generator=random)
    equality = compare_rows(workload, batches[:12], gradient)
    makers: dict[str, Callable[[], Callable[[Tensor], None]]] = {
        "hotrow": lambda: make_step(*make_hotrow(workload), gradient),
        "hotrow, graph": lambda: make_graph(workload, batches[0], gradient),
        "torch fused": lambda: make_dense(workload, gradient, fused=True),
        "torch default": lambda: make_dense(workload, gradient),
        "torch SparseAdam (skips rows)": lambda: make_sparse(workload, gradient),
        "FBGEMM TBE, Adam (skips rows)": lambda: make_fbgemm(workload, gradient),
    }
    peers, errors = {}, {}
    for name, make in makers.items():
        try:
            peers[name] = make()
            for ids in batches[:WARMUP] if name.startswith("hotrow") else batches[:3]:
                peers[name](ids)
        except (ImportError, RuntimeError) as error:  # torch.OutOfMemoryError is a RuntimeError
            peers.pop(name, None)
            errors[name] = f"{type(error).__name__}: {error}".splitlines()[0]
            torch.cuda.empty_cache()
    found: dict[str, dict[str, list[float]]] = {name: {} for name in peers}
    for _ in range(ROUNDS):
        for name, step in peers.items():
            for key, values in time_steps(step, batches[WARMUP:]).items():
                found[name].setdefault(key, []).extend(values[2:])
    results = {
        name: {key: summarize(values) for key, values in times.items()}
        for name, times in found.items()
    }
    ours = results["hotrow"]["device_ms"]["median"]
    return {
        "workload": vars(workload),
        "distinct_ids": len(torch.unique(batches[0])),
        "equality": equality,
        "peers": results,
        "not_measured": errors,
        "ratios": {name: times["device_ms"]["median"] / ours for name, times in results.items()},
    }


def make_dense(workload: Workload, gradient: Tensor, **options: bool) -> Callable[[Tensor], None]:
    """Return a dense step of torch.optim.AdamW."""
    layer = make_layer(workload)
    return make_step(layer, torch.optim.AdamW(layer.parameters(), **options), gradient)


def make_sparse(workload: Workload, gradient: Tensor) -> Callable[[Tensor], None]:
    """Return a step of torch.optim.SparseAdam. Unlike dense training, it skips idle rows."""
    layer = make_layer(workload, sparse=True)
    return make_step(layer, torch.optim.SparseAdam(list(layer.parameters())), gradient)


def make_fbgemm(workload: Workload, gradient: Tensor) -> Callable[[Tensor], None]:
    """Return a step of FBGEMM's table with Adam. Unlike dense training, it skips idle rows.

    FBGEMM's backward pass includes the optimizer's step.
    """
    from fbgemm_gpu import split_table_batched_embeddings_ops_training as tbe
    from fbgemm_gpu.split_embedding_configs import EmbOptimType

    place = tbe.EmbeddingLocation.DEVICE, tbe.ComputeDevice.CUDA
    module = tbe.SplitTableBatchedEmbeddingBagsCodegen(
        [(workload.rows, workload.columns, *place)],
        optimizer=EmbOptimType.ADAM,
        learning_rate=1e-3,
        eps=1e-8,
        pooling_mode=tbe.PoolingMode.SUM,
        bounds_check_mode=tbe.BoundsCheckMode.NONE,
        stochastic_rounding=False,
    )
    module.split_embedding_weights()[0].copy_(make_layer(workload).weight.detach())
    offsets = torch.arange(workload.ids + 1, device="cuda")  # one id per bag

    def step(ids: Tensor) -> None:
        module(ids, offsets).backward(gradient)

    return step
