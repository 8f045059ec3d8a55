"""What converting a one-hot model saves, and what it costs one that has nothing to convert.

    python -m bench.onehot             # everything, about 5 minutes and 13 GB
    python -m bench.onehot --small     # tries the harness; the record goes to build/bench

Three models, each beside its unconverted twin, in turns in one process: a tabular one of 26 fields
(100,000 columns in all, 13 dense columns, batch 4,096, a first layer 256 wide), a policy over 500
states (batch 64), and a plain network of a class of its own in which nothing is found; and the
policy looked up although it is small, larger too. Equality comes first: output and gradients of
both are held to float64.
"""

from __future__ import annotations

import argparse
import copy
import gc
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow
from bench import records
from bench.memory import CLEAR, resident
from bench.timing import spread

Batch = tuple[Tensor, ...]


class Tabular(nn.Module):
    """Fields as one-hots, side by side with dense columns, into a linear layer."""

    def __init__(self, sizes: list[int], dense: int, width: int) -> None:
        super().__init__()
        self.sizes = sizes
        self.net = nn.Sequential(
            nn.Linear(sum(sizes) + dense, width), nn.ReLU(), nn.Linear(width, 1)
        )

    def forward(self, ids: Tensor, dense: Tensor) -> Tensor:
        """(B, fields) and (B, dense) -> (B, 1)."""
        fields = [F.one_hot(ids[:, i], size).to(dense.dtype) for i, size in enumerate(self.sizes)]
        output: Tensor = self.net(torch.cat([*fields, dense], -1))
        return output


class Policy(nn.Module):
    """As an actor-critic over discrete states has it."""

    def __init__(self, states: int, width: int = 64, actions: int = 6) -> None:
        super().__init__()
        self.states = states
        self.body = nn.Sequential(
            nn.Linear(states, width), nn.Tanh(), nn.Linear(width, width), nn.Tanh()
        )
        self.action, self.value = nn.Linear(width, actions), nn.Linear(width, 1)

    def forward(self, states: Tensor) -> Tensor:
        """(B,) -> (B, actions + 1)."""
        dtype = self.value.weight.dtype
        hidden = self.body(F.one_hot(states.long(), self.states).to(dtype).flatten(1))
        return torch.cat([self.action(hidden), self.value(hidden)], -1)


class Plain(nn.Module):
    """Nothing to convert."""

    def __init__(self, width: int, layers: int = 4) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(width, width) for _ in range(layers))
        self.norm = nn.LayerNorm(width)

    def forward(self, x: Tensor) -> Tensor:
        """(B, width) -> the same."""
        for layer in self.layers:
            x = self.norm(x + layer(x).relu())
        return x


def geometric(fields: int, total: int) -> list[int]:
    """Sizes of fields, small ones and large ones, that add up."""
    shares = [1.4**i for i in range(fields)]
    sizes = [max(2, int(total * share / sum(shares))) for share in shares]
    sizes[-1] += total - sum(sizes)
    return sizes


def tabular(small: bool) -> tuple[nn.Module, Callable[[int], Batch]]:
    """The model, and its batches."""
    fields, total, dense, batch, width = (
        (4, 200, 3, 64, 16) if small else (26, 100_000, 13, 4096, 256)
    )
    sizes = geometric(fields, total)

    def draw(seed: int) -> Batch:
        random = torch.Generator().manual_seed(seed)
        # Zipf-like: small ids are frequent.
        drawn = torch.rand(batch, fields, generator=random).pow(3)
        ids = (drawn * torch.tensor(sizes)).long()
        return ids, torch.randn(batch, dense, generator=random)

    return Tabular(sizes, dense, width), draw


def policy(
    small: bool, states: int = 500, batch: int = 64
) -> tuple[nn.Module, Callable[[int], Batch]]:
    """Taxi's size."""

    def draw(seed: int) -> Batch:
        return (torch.randint(states, (batch,), generator=torch.Generator().manual_seed(seed)),)

    return Policy(states), draw


def plain(small: bool) -> tuple[nn.Module, Callable[[int], Batch]]:
    """A network in whose own code nothing is found."""
    width, batch = (16, 8) if small else (512, 256)

    def draw(seed: int) -> Batch:
        return (torch.randn(batch, width, generator=torch.Generator().manual_seed(seed)),)

    return Plain(width), draw


MODELS = {
    "tabular": tabular,
    "policy": policy,
    "plain": plain,
    "policy-64": policy,
    "policy-256": partial(policy, batch=256),
    "policy-2000": partial(policy, states=2000),
}
LOOKED_UP = {"policy-64", "policy-256", "policy-2000"}  # whatever the size
# Steps, before and after.
TURN = {"tabular": (1, 20), "plain": (30, 30)} | {
    name: (300, 300) for name in MODELS if name.startswith("policy")
}
GOALS = {
    "tabular": {"at_most_ratio": 1 / 50, "at_most_memory_ratio": 1 / 20},
    "policy": {"at_most_ratio": 1.0},
    "plain": {"at_most_ratio": 1.03},
}


class Side:
    """A model and its optimizer, before or after."""

    def __init__(self, model: nn.Module, converted: bool, least: int | None = None) -> None:
        self.model = hotrow.convert(model, least=least) if converted else model
        kind = hotrow.optim.Adam if converted else torch.optim.Adam
        self.optimizer = kind(model.parameters(), fused=True)  # torch's quickest

    def step(self, batch: Batch) -> None:
        """Forward, backward, step."""
        self.optimizer.zero_grad()
        self.model(*batch).square().mean().backward()
        self.optimizer.step()


def equal(name: str, small: bool) -> dict[str, Any]:
    """How far output and gradients of both are from float64; raises if the converted is further.

    By at most what a sum of some rows may round otherwise than the product: 4 ulp of the largest.
    """
    model, draw = MODELS[name](small)
    batch = tuple(value[:256] for value in draw(0))
    wide = tuple(v.double() if v.is_floating_point() else v for v in batch)
    before = found(copy.deepcopy(model), batch)
    after = found(hotrow.convert(copy.deepcopy(model), least=0), batch)
    truth = found(model.double(), wide)
    result = {}
    for what, exact in truth.items():
        errors = [float((side[what].double() - exact).abs().max()) for side in (before, after)]
        slack = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max())
        assert errors[1] <= errors[0] + slack, (name, what, errors)
        result[what] = {"unconverted_error": errors[0], "converted_error": errors[1]}
    return result


def found(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The output, and the gradient of each parameter."""
    output = model(*batch)
    output.square().mean().backward()
    grads = {name: p.grad.detach() for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach(), **grads}


def times(name: str, small: bool, rounds: int) -> dict[str, Any]:
    """Steps of both in turns."""
    model, draw = MODELS[name](small)
    least = 0 if name in LOOKED_UP else None
    sides = {"before": Side(copy.deepcopy(model), False), "after": Side(model, True, least)}
    counts = dict(zip(sides, TURN[name], strict=True))
    batches = [draw(seed) for seed in range(8)]
    samples: dict[str, list[list[float]]] = {side: [] for side in sides}
    for number in range(rounds + 1):
        for side, one in sides.items():
            turn = []
            for k in range(2 if small else counts[side] + 1):
                begin = time.perf_counter()
                one.step(batches[k % len(batches)])
                turn.append(1e3 * (time.perf_counter() - begin))
            if number:  # the first round compiles, and makes the state
                samples[side].append(turn[1:])
        print(f"{name}: round {number} of {rounds}", file=sys.stderr)
    ratios = [
        statistics.median(after) / statistics.median(before)
        for before, after in zip(samples["before"], samples["after"], strict=True)
    ]
    found: dict[str, Any] = {
        side: spread([step for turn in turns for step in turn]) for side, turns in samples.items()
    }
    ratio = {key.removesuffix("_ms"): value for key, value in spread(ratios).items()}
    return found | {"ratio": ratio}


def memory(name: str, small: bool, converted: bool) -> int:
    """Peak resident bytes of a step over model, state and batch; in a process of its own."""
    few, few_draw = MODELS[name](True)
    warm = Side(few, converted)
    for seed in range(3):
        warm.step(few_draw(seed))
    model, draw = MODELS[name](small)
    side, batches = Side(model, converted), [draw(seed) for seed in range(4)]
    for batch in batches[:3]:
        side.step(batch)
    side.optimizer.zero_grad()
    gc.collect()
    before = resident("VmRSS")
    CLEAR.write_text("5")
    side.step(batches[3])
    return resident("VmHWM") - before


def measured(name: str, small: bool, rounds: int) -> dict[str, Any]:
    """All of one model."""
    record: dict[str, Any] = {"equality": equal(name, small)}
    gc.collect()
    if name == "tabular":
        arguments = [sys.executable, "-m", "bench.onehot", "--memory"]
        flags = ["--small"] if small else []
        record["peak_extra_bytes"] = {
            side: int(
                subprocess.run([*arguments, side, *flags], check=True, capture_output=True).stdout
            )
            for side in ("before", "after")
        }
    record |= times(name, small, rounds)
    if "peak_extra_bytes" in record:
        peak = record["peak_extra_bytes"]
        record["memory_ratio"] = peak["after"] / peak["before"]
    return record | {"goals": goals(name, record)}


def goals(name: str, record: dict[str, Any]) -> list[dict[str, Any]]:
    """What was asked, and whether it was met."""
    asked = GOALS.get(name)
    if asked is None:
        return []
    result = [{"what": "time", "at_most_ratio": asked["at_most_ratio"]}]
    result[0]["met"] = record["ratio"]["median"] <= asked["at_most_ratio"]
    if "memory_ratio" in record:
        most = asked["at_most_memory_ratio"]
        met = record["memory_ratio"] <= most
        result.append({"what": "memory", "at_most_ratio": most, "met": met})
    return result


def main() -> int:
    """Measure, and write the record."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--small", action="store_true", help="small models, a few steps")
    parser.add_argument("--only", nargs="+", choices=MODELS, default=list(MODELS))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--memory", choices=["before", "after"], help=argparse.SUPPRESS)
    asked = parser.parse_args()
    if asked.memory:
        print(memory("tabular", asked.small, asked.memory == "after"))
        return 0
    folder = records.ROOT / "build" / "bench" if asked.small else records.RECORDS
    for name in asked.only:
        environment = records.environment(torch.get_num_threads())
        record = measured(name, asked.small, asked.rounds) | {"environment": environment}
        print(name, record["ratio"], file=sys.stderr)
        print(records.write({"workload": f"onehot-{name}", **record}, f"onehot-{name}", folder))
    return 0


if __name__ == "__main__":
    sys.exit(main())
