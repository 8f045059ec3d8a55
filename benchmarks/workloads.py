"""All workloads by name, and the suites.

The `seconds` are estimates for two idle cores. A test checks that they sum to at most 2 minutes for
`quick` and at most 20 minutes for `full`.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial

from benchmarks import networks
from benchmarks.goals import BEST, FLOOR, Goal
from benchmarks.models import Model
from benchmarks.startup import Startup
from benchmarks.tables import TableBenchmark
from benchmarks.workload import Workload
from hotrow import optim
from hotrow.bench.peers import FUSED_OPTIMIZERS
from hotrow.bench.workload import HOTROW, PeerConfig

FUSED, FOREACH = PeerConfig("torch fused"), PeerConfig("torch foreach")
DEFAULT, SPARSE = PeerConfig("torch default"), PeerConfig("torch sparse")
ONE_HOT, FBGEMM = PeerConfig("one-hot matmul"), PeerConfig("fbgemm")
JAX_DENSE, JAX_LAZY = PeerConfig("jax dense"), PeerConfig("jax lazy")
NO_PEER_AHEAD = Goal(BEST, 1.0)
CORES = os.cpu_count() or 1

LARGE = [
    TableBenchmark(
        "adamw-1m-256", "a training step with AdamW", "AdamW", 1_000_000, 256, 16_384,
        (HOTROW, SPARSE, FUSED, FOREACH, DEFAULT, JAX_LAZY, JAX_DENSE),
        goals=(Goal("torch fused", 1 / 30), Goal("torch default", 1 / 150),
               Goal("torch sparse", 0.4), Goal(FLOOR, 2.0), NO_PEER_AHEAD),
        max_extra_bytes=150e6, dense_steps_per_turn=1, seconds=150,
    ),
    TableBenchmark(
        "adamw-50k-768", "a training step with AdamW on GPT-2's table", "AdamW", 50_257, 768, 4_096,
        (HOTROW, SPARSE, FUSED, FOREACH, DEFAULT, JAX_LAZY, JAX_DENSE),
        goals=(Goal("torch fused", 1 / 15), Goal("torch sparse", 0.2), Goal(FLOOR, 2.0),
               NO_PEER_AHEAD),
        seconds=50,
    ),
    TableBenchmark(
        "adamw-50k-768-bf16", "a training step with AdamW on GPT-2's table in bfloat16", "AdamW",
        50_257, 768, 4_096, (HOTROW, SPARSE, FUSED), goals=(NO_PEER_AHEAD,), dtype="bfloat16",
        seconds=45,
    ),
    TableBenchmark(
        "sgd-1m-256", "a training step with SGD", "SGD", 1_000_000, 256, 16_384,
        (HOTROW, SPARSE, FBGEMM, JAX_LAZY),
        goals=(Goal("torch sparse", 0.8), Goal("fbgemm", 0.8), Goal(FLOOR, 1.7), NO_PEER_AHEAD),
        seconds=55,
    ),
    TableBenchmark(
        "adagrad-1m-256", "a training step with Adagrad", "Adagrad", 1_000_000, 256, 16_384,
        (HOTROW, SPARSE, FBGEMM, JAX_LAZY),
        goals=(Goal("torch sparse", 0.8), Goal("fbgemm", 0.8), Goal(FLOOR, 1.7), NO_PEER_AHEAD),
        seconds=70,
    ),
    TableBenchmark(
        "adamw-1m-256-uniform", "a training step with AdamW and uniform ids, few of which repeat",
        "AdamW", 1_000_000, 256, 16_384, (HOTROW, SPARSE, FUSED), goals=(NO_PEER_AHEAD,),
        zipf_exponent=None, rounds=4, seconds=65,
    ),
]  # fmt: skip

GROWING = [
    TableBenchmark(
        "adamw-10m-64", "the effect of the table size at a constant batch size", "AdamW",
        10_000_000, 64, 16_384,
        (HOTROW, *(PeerConfig("hotrow", rows=10**power) for power in (6, 5, 4)), FUSED, SPARSE),
        goals=(Goal(PeerConfig("hotrow", rows=10**6).name, 1.5), NO_PEER_AHEAD),
        dense_steps_per_turn=1, seconds=80,
    ),
    TableBenchmark(
        "sgd-10m-64", "a training step with SGD", "SGD", 10_000_000, 64, 16_384,
        (HOTROW, SPARSE, FUSED, FBGEMM, JAX_LAZY), goals=(NO_PEER_AHEAD,),
        dense_steps_per_turn=1, seconds=55,
    ),
    TableBenchmark(
        "adamw-growing-ids", "the effect of the batch size at a constant table size", "AdamW",
        1_000_000, 64, 65_536,
        (HOTROW, *(PeerConfig("hotrow", ids=4**power) for power in (7, 6, 5, 4, 3))),
        warmup_steps=450, seconds=40,
    ),
    TableBenchmark(
        "adamw-threads", "the effect of the number of threads", "AdamW", 1_000_000, 64, 16_384,
        (HOTROW, *(PeerConfig("hotrow", threads=n) for n in (1, 2, 4, 8, 16) if n < CORES),
         SPARSE, *(PeerConfig("torch sparse", threads=n) for n in (1, 2, 4, 8, 16) if n < CORES)),
        seconds=30,
    ),
]  # fmt: skip

PARTIAL = [
    TableBenchmark(
        "forward-1m-256", "the forward pass", None, 1_000_000, 256, 16_384,
        (HOTROW, DEFAULT, FBGEMM, JAX_DENSE), goals=(Goal(BEST, 1.2),), task="forward",
        warmup_steps=300, seconds=20,
    ),
    TableBenchmark(
        "forward-50k-768", "the forward pass, compared with a one-hot matmul",
        None, 50_257, 768, 4_096,
        (HOTROW, DEFAULT, FBGEMM, JAX_DENSE, ONE_HOT), goals=(Goal(BEST, 1.2),), task="forward",
        warmup_steps=300, dense_warmup_steps=1, rounds=4, dense_steps_per_turn=1, seconds=40,
    ),
    TableBenchmark(
        "gradient-1m-256", "forward and backward, without an optimizer step", None,
        1_000_000, 256, 16_384,
        (HOTROW, SPARSE, DEFAULT, JAX_DENSE), task="gradient", seconds=30,
    ),
]  # fmt: skip

SMALL = [
    TableBenchmark(
        "adamw-10k-64", "a step on a small table, compared with a one-hot matmul", "AdamW",
        10_000, 64, 1_024,
        (HOTROW, SPARSE, FUSED, FOREACH, DEFAULT, JAX_LAZY, JAX_DENSE, ONE_HOT),
        goals=(NO_PEER_AHEAD,), dense_steps_per_turn=20, seconds=25,
    ),
    TableBenchmark(
        "sgd-1k-16", "the fixed overhead of a step", "SGD", 1_000, 16, 64,
        (HOTROW, SPARSE, FUSED, JAX_LAZY), goals=(Goal("torch sparse", 1.5), NO_PEER_AHEAD),
        steps_per_turn=200, dense_steps_per_turn=200, seconds=8,
    ),
    TableBenchmark(
        "sgd-7k-16", "a step on the smallest table that convert converts by default", "SGD",
        7_000, 16, 64, (HOTROW, SPARSE, FUSED, JAX_LAZY),
        goals=(Goal("torch sparse", 1.5), NO_PEER_AHEAD),
        steps_per_turn=200, dense_steps_per_turn=200, seconds=8,
    ),
    TableBenchmark(
        "adamw-1k-16", "the fixed overhead of a step", "AdamW", 1_000, 16, 64,
        (HOTROW, SPARSE, FUSED, JAX_LAZY), goals=(NO_PEER_AHEAD,), steps_per_turn=200,
        dense_steps_per_turn=200, seconds=8,
    ),
]  # fmt: skip


def _optimizer_benchmark(optimizer: str) -> TableBenchmark:
    """Return the workload for one optimizer; all optimizers use the same sizes."""
    sparse = (SPARSE,) if optimizer in FUSED_OPTIMIZERS else ()
    fused = (FUSED,) if optimizer in FUSED_OPTIMIZERS else ()
    return TableBenchmark(
        f"{optimizer.lower()}-1m-64", f"a training step with {optimizer}", optimizer,
        1_000_000, 64, 4_096, (HOTROW, *sparse, *fused, FOREACH, DEFAULT),
        goals=(NO_PEER_AHEAD,), rounds=4, dense_steps_per_turn=1, seconds=14,
    )  # fmt: skip


# Steps on narrow rows, where torch's sparse SGD and FBGEMM do as little work as hotrow.
NARROW = [
    TableBenchmark(
        f"sgd-{size}-{ids}-ids", "a training step with SGD on narrow rows", "SGD", rows, columns,
        ids, (HOTROW, SPARSE, FBGEMM), goals=(NO_PEER_AHEAD,), rounds=4, seconds=12,
    )
    for size, rows, columns, batches in (
        ("300k-100", 300_000, 100, (1024, 4096, 16_384)),
        ("1m-64", 1_000_000, 64, (1024, 16_384)),
        ("10m-64", 10_000_000, 64, (1024, 4096)),
    )
    for ids in batches
] + [
    TableBenchmark(
        "adamw-1m-64-4096-uniform-ids", "a training step with AdamW on narrow rows and uniform ids",
        "AdamW", 1_000_000, 64, 4_096, (HOTROW, SPARSE, FUSED), goals=(NO_PEER_AHEAD,),
        zipf_exponent=None, rounds=4, dense_steps_per_turn=1, seconds=14,
    ),
]  # fmt: skip

OPTIMIZERS = [_optimizer_benchmark(name) for name in sorted(optim.__all__, key=str.lower)]

MODELS = [
    Model(
        "onehot-tabular",
        "tabular: 26 one-hot fields, 100,000 columns in total, batch 4,096",
        networks.tabular, (1, 20), (("time", 1 / 50), ("memory", 1 / 20)),
        rounds=2, seconds=80,
    ),
    Model(
        "onehot-policy", "policy network: one-hots of 500 states, batch 64",
        networks.policy, (300, 300), (("time", 1.0),), seconds=8,
    ),
    Model(
        "onehot-plain", "MLP without embeddings: four layers of 512, batch 256",
        networks.plain, (30, 30), (("time", 1.03),), seconds=12,
    ),
    Model(
        "recommender", "recommender: 26 tables, 2,000,000 x 32 in total, batch 2,048",
        networks.recommender, (3, 20), (("time", 0.3),), seconds=30,
    ),
    Model(
        "language-model", "language model: 50,257 x 128, separate output head, 8 x 32 tokens",
        networks.language_model, (10, 10), seconds=25,
    ),
]  # fmt: skip

# The cost of many tables, compared with one table that contains all their rows.
TABLES = [
    Model(
        f"{name}-batch-{batch}", f"{what}, 2,000,000 x 32 in total, batch {batch:,}, no network",
        partial(networks.lookups, is_joined=is_joined, batch=batch), (3, 50), seconds=14,
    )
    for batch in (64, 2048)
    for name, what, is_joined in (
        ("tables-26", "26 tables", False),
        ("tables-1", "one table looked up 26 times per example", True),
    )
]  # fmt: skip

# These workloads measure the cost of converting small one-hots. They aren't in any suite.
LOOKED_UP = [
    Model(
        f"onehot-policy-{name}", f"the policy network with `min_entries=0`, {what}",
        partial(networks.policy, states=states, batch=batch), (300, 300), min_entries=0,
        seconds=10,
    )
    for name, what, states, batch in (
        ("64", "batch 64", 500, 64),
        ("256", "batch 256", 500, 256),
        ("2000", "2,000 states", 2000, 64),
    )
]  # fmt: skip

_FULL: list[Workload] = [
    *LARGE, *GROWING, *PARTIAL, *SMALL, *OPTIMIZERS, *MODELS, Startup(),
]  # fmt: skip
WORKLOADS: dict[str, Workload] = {
    each.name: each for each in [*_FULL, *NARROW, *TABLES, *LOOKED_UP]
}
SUITES = {
    "quick": ("sgd-1k-16", "adamw-10k-64", "sgd-1m-64", "adamw-1m-64", "onehot-policy"),
    "full": tuple(each.name for each in _FULL),
    "narrow": tuple(each.name for each in NARROW),
    "tables": tuple(each.name for each in TABLES),
}


def select(name: str, small: bool = False, peers: Collection[str] | None = None) -> Workload:
    """Return a workload by name, shrunk if `small`, with only these peers (all if None)."""
    workload = WORKLOADS[name]
    workload = workload if peers is None else workload.with_peers(peers)
    return workload.shrink() if small else workload
