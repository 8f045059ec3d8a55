"""A whole model as a workload: before `convert` and after, side by side.

A step is forward, backward and Adam, by `torch.optim` before and by `hotrow.optim` after, both
fused for what is dense. Equality comes first: output and gradients of both are held to float64.
"""

from __future__ import annotations

import copy
import gc
import sys
import time
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.bench.memory import CLEAR, resident
from hotrow.bench.networks import Batch, Made
from hotrow.bench.workload import Part, Record, Told, quiet, ratios, spread

TIMES, SIDES = "times", ("before", "after")
COMPARED = 256  # examples of a batch


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


@dataclass(frozen=True)
class Model:
    """A model, how long its two sides are watched, and the goals.

    `rounds` turns of `turn` timed steps, before and after; a turn begins with one step that is
    not timed. A turn comes before them all, of which none is: it makes the state.
    """

    name: str
    about: str
    make: Callable[[bool], Made]
    turn: tuple[int, int]
    goals: tuple[tuple[str, float], ...] = ()  # of "time" or "memory", and at most how much
    least: int | None = None
    memory: bool = False
    rounds: int = 5
    seconds: float = 20.0
    tried: bool = False  # whether it is small

    def small(self) -> Model:
        """A few columns, a few steps."""
        return replace(self, tried=True, turn=(2, 2), rounds=2, seconds=8.0)

    def among(self, peers: Collection[str]) -> Model:
        """The same: both sides always take part."""
        return self

    def parts(self) -> list[Part]:
        """A process for the times, and one for each side's memory."""
        watched = SIDES if self.memory and sys.platform.startswith("linux") else ()
        seconds = self.seconds / 4
        return [
            Part(TIMES, "time", self.seconds),
            *(Part(f"memory {side}", "memory", seconds) for side in watched),
        ]

    def run(self, part: str, told: Told = quiet) -> Record:
        """Equality and times, or one side's memory."""
        if part != TIMES:
            return {"peak_extra_bytes": self._memory(part == "memory after", told)}
        told(0.05, "outputs and gradients")
        return {"equality": self.equality()} | self.times(told)

    def record(self, results: Mapping[str, Record]) -> Record:
        """The times, the memory, and whether the goals were met."""
        record = {"workload": self.name, "about": self.about, **results[TIMES]}
        peaks = {side: results.get(f"memory {side}") for side in SIDES}
        peak = {side: found["peak_extra_bytes"] for side, found in peaks.items() if found}
        found = {"time": record["ratio"]["median"], "memory": None}
        if len(peak) == len(SIDES):
            record["peak_extra_bytes"] = peak
            if peak["before"]:  # so small a model takes none
                record["memory_ratio"] = found["memory"] = peak["after"] / peak["before"]
        goals = []
        for what, most in self.goals:
            met = None if found[what] is None else found[what] <= most
            goals.append({"what": what, "at_most_ratio": most, "met": met})
        return record | {"goals": goals}

    def equality(self) -> dict[str, Any]:
        """How far output and gradients of both are from float64.

        The converted model may be further by at most what a sum of some rows may round otherwise
        than the product: 4 ulp of the largest.

        Raises:
            AssertionError: it is further than that.
        """
        model, draw = self.make(self.tried)
        batch = tuple(value[:COMPARED] for value in draw(0))
        wide = tuple(v.double() if v.is_floating_point() else v for v in batch)
        before = found(copy.deepcopy(model), batch)
        after = found(hotrow.convert(copy.deepcopy(model), least=0), batch)
        truth = found(model.double(), wide)
        result = {}
        for what, exact in truth.items():
            errors = [float((side[what].double() - exact).abs().max()) for side in (before, after)]
            slack = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max())
            assert errors[1] <= errors[0] + slack, (self.name, what, errors)
            result[what] = {"unconverted_error": errors[0], "converted_error": errors[1]}
        return result

    def times(self, told: Told) -> dict[str, Any]:
        """Steps of both in turns."""
        model, draw = self.make(self.tried)
        sides = (Side(copy.deepcopy(model), False), Side(model, True, self.least))
        batches = [draw(seed) for seed in range(8)]
        samples: tuple[list[list[float]], ...] = ([], [])
        for number in range(self.rounds + 1):
            told(0.1 + 0.9 * number / (self.rounds + 1), f"round {number} of {self.rounds}")
            for side, count, kept in zip(sides, self.turn, samples, strict=True):
                turn = []
                for k in range(count + (number > 0)):
                    begin = time.perf_counter()
                    side.step(batches[k % len(batches)])
                    turn.append(1e3 * (time.perf_counter() - begin))
                if number:  # the first compiles as well
                    kept.append(turn[1:])
        steps = {
            side: spread([step for turn in turns for step in turn])
            for side, turns in zip(SIDES, samples, strict=True)
        }
        return {**steps, "ratio": ratios(samples[1], samples[0])}

    def _memory(self, converted: bool, told: Told) -> int:
        """Peak resident bytes of a step over model, state and batch; in a process of its own."""
        few, few_draw = self.make(True)
        warm = Side(few, converted, self.least)
        for seed in range(3):
            warm.step(few_draw(seed))
        told(0.2, "memory")
        model, draw = self.make(self.tried)
        side, batches = Side(model, converted, self.least), [draw(seed) for seed in range(4)]
        # A first step finds what is to be a table, a second orders its memory and loads kernels.
        for batch in batches[:-1]:
            side.step(batch)
        side.optimizer.zero_grad()
        gc.collect()
        before = resident("VmRSS")
        CLEAR.write_text("5")
        side.step(batches[-1])
        return resident("VmHWM") - before


def found(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The output, and the gradient of each parameter."""
    output = model(*batch)
    output.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach()} | grads
