"""What is measured: every workload by name, and the suites.

`seconds` are estimates for two quiet cores; a test holds their sums: `quick` within 2 minutes,
`full` within 20.
"""

from __future__ import annotations

import os
from collections.abc import Collection
from functools import partial

from benchmarks import networks
from benchmarks.models import Model
from benchmarks.peers import FUSED
from benchmarks.startup import Startup
from benchmarks.tables import BEST, FLOOR, OURS, Entry, Goal, Tables
from benchmarks.workload import Workload
from hotrow import optim

DENSE, FOREACH, DEFAULT = Entry("torch fused"), Entry("torch foreach"), Entry("torch default")
SPARSE, ONE_HOT, FBGEMM = Entry("torch sparse"), Entry("one-hot matmul"), Entry("fbgemm")
JAX_DENSE, JAX_LAZY = Entry("jax dense"), Entry("jax lazy")
NO_PEER_AHEAD = Goal(BEST, 1.0)
CORES = os.cpu_count() or 1

LARGE = [
    Tables(
        "adamw-1m-256", "a training step, AdamW", "AdamW", 1_000_000, 256, 16_384,
        (OURS, SPARSE, DENSE, FOREACH, DEFAULT, JAX_LAZY, JAX_DENSE),
        (Goal("torch fused", 1 / 30), Goal("torch default", 1 / 150), Goal("torch sparse", 0.6),
         Goal(FLOOR, 2.0), NO_PEER_AHEAD),
        extra_bytes_at_most=150e6, dense_turn=1, seconds=150,
    ),
    Tables(
        "adamw-50k-768", "a training step, AdamW, GPT-2's table", "AdamW", 50_257, 768, 4_096,
        (OURS, SPARSE, DENSE, FOREACH, DEFAULT, JAX_LAZY, JAX_DENSE),
        (Goal("torch fused", 1 / 15), Goal("torch sparse", 0.2), Goal(FLOOR, 2.0),
         NO_PEER_AHEAD),
        seconds=50,
    ),
    Tables(
        "adamw-50k-768-bf16", "the same in bfloat16", "AdamW", 50_257, 768, 4_096,
        (OURS, SPARSE, DENSE), (NO_PEER_AHEAD,), dtype="bfloat16", seconds=45,
    ),
    Tables(
        "sgd-1m-256", "a training step, SGD", "SGD", 1_000_000, 256, 16_384,
        (OURS, SPARSE, FBGEMM, JAX_LAZY),
        (Goal("torch sparse", 0.8), Goal("fbgemm", 0.8), Goal(FLOOR, 1.7), NO_PEER_AHEAD),
        seconds=55,
    ),
    Tables(
        "adagrad-1m-256", "a training step, Adagrad", "Adagrad", 1_000_000, 256, 16_384,
        (OURS, SPARSE, FBGEMM, JAX_LAZY),
        (Goal("torch sparse", 0.8), Goal("fbgemm", 0.8), Goal(FLOOR, 1.7), NO_PEER_AHEAD),
        seconds=70,
    ),
    Tables(
        "adamw-1m-256-uniform", "ids that are hardly ever the same", "AdamW",
        1_000_000, 256, 16_384, (OURS, SPARSE, DENSE), (NO_PEER_AHEAD,), zipf=False, rounds=4,
        seconds=65,
    ),
]  # fmt: skip

GROWING = [
    Tables(
        "adamw-10m-64", "growing tables, as many ids", "AdamW",
        10_000_000, 64, 16_384,
        (OURS, *(Entry("hotrow", rows=10**power) for power in (6, 5, 4)), DENSE, SPARSE),
        (Goal(Entry("hotrow", rows=10**6).name, 1.5), NO_PEER_AHEAD), dense_turn=1, seconds=80,
    ),
    Tables(
        "sgd-10m-64", "a training step, SGD", "SGD", 10_000_000, 64, 16_384,
        (OURS, SPARSE, DENSE, FBGEMM, JAX_LAZY), (NO_PEER_AHEAD,), dense_turn=1, seconds=55,
    ),
    Tables(
        "adamw-growing-ids", "growing batches, the same table", "AdamW", 1_000_000, 64, 65_536,
        (OURS, *(Entry("hotrow", ids=4**power) for power in (7, 6, 5, 4, 3))),
        steps_before=450, seconds=40,
    ),
    Tables(
        "adamw-threads", "fewer threads than there are", "AdamW", 1_000_000, 64, 16_384,
        (OURS, *(Entry("hotrow", threads=n) for n in (1, 2, 4, 8, 16) if n < CORES),
         SPARSE, *(Entry("torch sparse", threads=n) for n in (1, 2, 4, 8, 16) if n < CORES)),
        seconds=30,
    ),
]  # fmt: skip

PARTLY = [
    Tables(
        "forward-1m-256", "forward alone", None, 1_000_000, 256, 16_384,
        (OURS, DEFAULT, FBGEMM, JAX_DENSE), (Goal(BEST, 1.2),), task="forward",
        steps_before=300, seconds=20,
    ),
    Tables(
        "forward-50k-768", "forward alone, beside the matmul", None, 50_257, 768, 4_096,
        (OURS, DEFAULT, FBGEMM, JAX_DENSE, ONE_HOT), (Goal(BEST, 1.2),), task="forward",
        steps_before=300, few_before=1, rounds=4, dense_turn=1, seconds=40,
    ),
    Tables(
        "gradient-1m-256", "forward and backward, without a step", None, 1_000_000, 256, 16_384,
        (OURS, SPARSE, DEFAULT, JAX_DENSE), task="gradient", seconds=30,
    ),
]  # fmt: skip

SMALL = [
    Tables(
        "adamw-10k-64", "a small table, which the matmul still fits", "AdamW", 10_000, 64, 1_024,
        (OURS, SPARSE, DENSE, FOREACH, DEFAULT, JAX_LAZY, JAX_DENSE, ONE_HOT), (NO_PEER_AHEAD,),
        dense_turn=20, seconds=25,
    ),
    Tables(
        "sgd-1k-16", "the fixed overhead of a step", "SGD", 1_000, 16, 64,
        (OURS, SPARSE, DENSE, JAX_LAZY), (Goal("torch sparse", 1.5), NO_PEER_AHEAD), turn=200,
        dense_turn=200, seconds=8,
    ),
    Tables(
        "sgd-7k-16", "the smallest table that convert does not leave to torch", "SGD", 7_000, 16,
        64, (OURS, SPARSE, DENSE, JAX_LAZY), (Goal("torch sparse", 1.5), NO_PEER_AHEAD), turn=200,
        dense_turn=200, seconds=8,
    ),
    Tables(
        "adamw-1k-16", "the fixed overhead of a step", "AdamW", 1_000, 16, 64,
        (OURS, SPARSE, DENSE, JAX_LAZY), (NO_PEER_AHEAD,), turn=200, dense_turn=200, seconds=8,
    ),
]  # fmt: skip


def _optimizer(rule: str) -> Tables:
    """A step of one optimizer of `hotrow.optim`, all in one size."""
    sparse = (SPARSE,) if rule in FUSED else ()
    quickest = (DENSE,) if rule in FUSED else ()
    return Tables(
        f"{rule.lower()}-1m-64", f"a training step, {rule}", rule, 1_000_000, 64, 4_096,
        (OURS, *sparse, *quickest, FOREACH, DEFAULT), (NO_PEER_AHEAD,), rounds=4, dense_turn=1,
        seconds=14,
    )  # fmt: skip


OPTIMIZERS = [_optimizer(rule) for rule in sorted(optim.__all__, key=str.lower)]

MODELS = [
    Model(
        "onehot-tabular",
        "26 one-hot fields of 100,000 columns, 13 dense columns, batch 4,096, first layer 256",
        networks.tabular, (1, 20), (("time", 1 / 50), ("memory", 1 / 20)),
        rounds=2, seconds=80,
    ),
    Model(
        "onehot-policy", "one-hots of 500 states, batch 64, two layers of 64",
        networks.policy, (300, 300), (("time", 1.0),), seconds=8,
    ),
    Model(
        "onehot-plain", "nothing to convert: four layers of 512, batch 256",
        networks.plain, (30, 30), (("time", 1.03),), seconds=12,
    ),
    Model(
        "recommender", "26 tables of 2,000,000 x 32 in all, 13 dense columns, batch 2,048",
        networks.recommender, (3, 20), seconds=30,
    ),
    Model(
        "language-model", "50,257 x 128, a recurrent layer and a head of its own, 8 x 32 tokens",
        networks.language_model, (10, 10), seconds=25,
    ),
]  # fmt: skip

# Not in a suite: what looking small one-hots up all the same would cost.
LOOKED_UP = [
    Model(
        f"onehot-policy-{name}", f"the policy with `min_entries=0`, {what}",
        partial(networks.policy, states=states, batch=batch), (300, 300), min_entries=0, seconds=10,
    )
    for name, what, states, batch in (
        ("64", "batch 64", 500, 64),
        ("256", "batch 256", 500, 256),
        ("2000", "2,000 states", 2000, 64),
    )
]  # fmt: skip

_FULL: list[Workload] = [
    *LARGE, *GROWING, *PARTLY, *SMALL, *OPTIMIZERS, *MODELS, Startup(),
]  # fmt: skip
WORKLOADS: dict[str, Workload] = {each.name: each for each in [*_FULL, *LOOKED_UP]}
SUITES = {
    "quick": ("sgd-1k-16", "adamw-10k-64", "sgd-1m-64", "adamw-1m-64", "onehot-policy"),
    "full": tuple(each.name for each in _FULL),
}


def chosen(name: str, small: bool = False, peers: Collection[str] | None = None) -> Workload:
    """A workload in the size, and among the peers, that were asked for; None for all."""
    workload = WORKLOADS[name]
    workload = workload if peers is None else workload.among(peers)
    return workload.small() if small else workload
