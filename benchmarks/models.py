"""A whole model as a workload: before `convert` and after, side by side.

A step is forward, backward and Adam, by `torch.optim` before and by `hotrow.optim` after, both
fused for what is dense. Equality comes first: output and gradients of both are held to float64.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Callable, Collection
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from benchmarks import floor, memory
from benchmarks.networks import Batch, Made
from benchmarks.workload import Record, Told, quiet, ratios, spread
from hotrow.table.gradient import RowGradient

SIDES = "before", "after"
COMPARED = 256  # examples of a batch


class Side:
    """A model and its optimizer, before or after."""

    def __init__(self, model: nn.Module, converted: bool, min_entries: int | None = None) -> None:
        self.model = hotrow.convert(model, min_entries=min_entries) if converted else model
        kind = hotrow.optim.Adam if converted else torch.optim.Adam
        self.optimizer = kind(model.parameters(), fused=True)  # torch's quickest

    def step(self, batch: Batch) -> None:
        """Forward, backward, step."""
        self.optimizer.zero_grad()
        self.model(*batch).square().mean().backward()
        self.optimizer.step()

    def memory(self, batch: Batch) -> int:
        """Peak resident bytes of a step over model, state and batch."""
        self.optimizer.zero_grad()
        return memory.peak_of(lambda: self.step(batch))

    def touched(self) -> int:
        """Bytes of the parameters that the last step's gradients move: of a table, their rows."""
        found = 0
        for parameter in self.model.parameters():
            gradient = parameter.grad
            moved = gradient.merge().rows if isinstance(gradient, RowGradient) else parameter
            found += moved.nbytes
        return found


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
    min_entries: int | None = None
    rounds: int = 5
    seconds: float = 20.0
    tried: bool = False  # whether it is small

    def small(self) -> Model:
        """A few columns, a few steps."""
        return replace(self, tried=True, turn=(2, 2), rounds=2, seconds=8.0)

    def among(self, peers: Collection[str]) -> Model:
        """The same: both sides always take part."""
        return self

    def run(self, told: Told = quiet) -> Record:
        """Equality, times and memory, and whether the goals were met."""
        told(0.05, "outputs and gradients")
        record: Record = {"workload": self.name, "about": self.about}
        record |= {"equality": self.equality()} | self.times(told)
        found = {"time": record["ratio"]["median"], "memory": record["memory_ratio"]}
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
        after = found(hotrow.convert(copy.deepcopy(model), min_entries=0), batch)
        truth = found(model.double(), wide)
        result = {}
        for what, exact in truth.items():
            errors = [float((side[what].double() - exact).abs().max()) for side in (before, after)]
            slack = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max())
            assert errors[1] <= errors[0] + slack, (self.name, what, errors)
            result[what] = {"unconverted_error": errors[0], "converted_error": errors[1]}
        return result

    def times(self, told: Told) -> dict[str, Any]:
        """Steps of both in turns, and the memory of one of each."""
        model, draw = self.make(self.tried)
        sides = (Side(copy.deepcopy(model), False), Side(model, True, self.min_entries))
        batches = [draw(seed) for seed in range(8)]
        copying = floor.Copying()
        peaks: dict[str, int] = {}
        samples: tuple[list[list[float]], ...] = ([], [])
        for number in range(self.rounds + 1):
            told(0.1 + 0.9 * number / (self.rounds + 1), f"round {number} of {self.rounds}")
            copying.watch()
            for side, count, kept in zip(sides, self.turn, samples, strict=True):
                turn = []
                for k in range(count + (number > 0)):
                    begin = time.perf_counter()
                    side.step(batches[k % len(batches)])
                    turn.append(1e3 * (time.perf_counter() - begin))
                if number:  # the first compiles as well
                    kept.append(turn[1:])
                elif memory.is_seen():
                    peaks[SIDES[len(peaks)]] = side.memory(batches[0])
        steps = {
            side: spread([step for turn in turns for step in turn])
            for side, turns in zip(SIDES, samples, strict=True)
        }
        before, after = (peaks.get(side) for side in SIDES)
        return {
            **steps,
            "ratio": ratios(samples[1], samples[0]),
            "peak_extra_bytes": peaks,
            "memory_ratio": after / before if before and after is not None else None,
            **self.above_floor(sides[1], batches[0], copying.bytes_per_second(), steps),
        }

    def above_floor(
        self, side: Side, batch: Batch, speed: float, steps: dict[str, Any]
    ) -> dict[str, Any]:
        """The bytes that a step must move, and how many times as long as to copy them it takes.

        Of each parameter that the step moves, value and Adam's two numbers are read and written;
        the batch is read.
        """
        side.step(batch)
        moved = 2 * (1 + floor.states("Adam")) * side.touched() + sum(v.nbytes for v in batch)
        lowest = 1e3 * moved / speed
        return {
            "copy_bytes_per_s": speed,
            "floor_bytes": moved,
            "floor_ms": lowest,
            "floor_ratio": {s: float(f"{v['median_ms'] / lowest:.5g}") for s, v in steps.items()},
        }


def found(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """The output, and the gradient of each parameter."""
    output = model(*batch)
    output.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach()} | grads
