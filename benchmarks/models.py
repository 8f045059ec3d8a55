"""Workloads that train a whole model, before and after `convert`.

A step consists of forward, backward and an Adam update. The optimizer is `torch.optim.Adam` before
`convert` and `hotrow.optim.Adam` after it, both with `fused=True` for dense parameters. Before
timing starts, the outputs and gradients of both models are compared with those of a float64 model.
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
from benchmarks.networks import Batch, ModelAndBatches
from hotrow.bench import floor, memory
from hotrow.bench.percentiles import percentiles, turn_ratios
from hotrow.bench.workload import Record, ReportProgress, ignore_progress
from hotrow.table.gradient import RowGradient

SIDES = "before", "after"
EXAMPLES_COMPARED = 256  # per batch


class Side:
    """A model and its optimizer, either before or after `convert`."""

    def __init__(self, model: nn.Module, converted: bool, min_entries: int | None = None) -> None:
        self.model = hotrow.convert(model, min_entries=min_entries) if converted else model
        kind = hotrow.optim.Adam if converted else torch.optim.Adam
        self.optimizer = kind(model.parameters(), fused=True)  # torch's fastest Adam

    def step(self, batch: Batch) -> None:
        """Run forward, backward and the optimizer step."""
        self.optimizer.zero_grad()
        self.model(*batch).square().mean().backward()
        self.optimizer.step()

    def peak_bytes(self, batch: Batch) -> int:
        """Return the peak memory of a step, excluding the model, its state and the batch."""
        self.optimizer.zero_grad()
        return memory.measure_peak(lambda: self.step(batch))

    def updated_bytes(self) -> int:
        """Return the size in bytes of the dense parameters and rows that the last step updated."""
        total = 0
        for parameter in self.model.parameters():
            gradient = parameter.grad
            updated = gradient.merge().rows if isinstance(gradient, RowGradient) else parameter
            total += updated.nbytes
        return total


@dataclass(frozen=True)
class Model:
    """A model to measure before and after `convert`.

    Attributes:
        make: a function that returns the model and its batches; `make(True)` returns a small model
            and small batches.
        steps_per_turn: timed steps per turn, before and after `convert`. Each turn begins with an
            untimed step.
        goals: "time" or "memory", each with the largest allowed ratio of the value after `convert`
            to the value before it.
        min_entries: the `min_entries` argument of `convert`.
        rounds: timed turns per `Side`, after an untimed turn that allocates the optimizer state.
    """

    name: str
    about: str
    make: Callable[[bool], ModelAndBatches]
    steps_per_turn: tuple[int, int]
    goals: tuple[tuple[str, float], ...] = ()
    min_entries: int | None = None
    rounds: int = 5
    seconds: float = 20.0
    is_small: bool = False

    def shrink(self) -> Model:
        """Return a version of this workload with few columns and few steps."""
        return replace(self, is_small=True, steps_per_turn=(2, 2), rounds=2, seconds=8.0)

    def with_peers(self, type_names: Collection[str]) -> Model:
        """Return this workload unchanged: it has no optional peers."""
        return self

    def run(self, report_progress: ReportProgress = ignore_progress) -> Record:
        """Check equality, measure times and memory, and check the goals."""
        report_progress(0.05, "outputs and gradients")
        record: Record = {"workload": self.name, "about": self.about}
        record |= {"equality": self.measure_equality()} | self.measure_times(report_progress)
        ratios = {"time": record["ratio"]["median"], "memory": record["memory_ratio"]}
        goals = []
        for what, most in self.goals:
            met = None if ratios[what] is None else ratios[what] <= most
            goals.append({"what": what, "max_ratio": most, "met": met})
        return record | {"goals": goals}

    def measure_equality(self) -> dict[str, Any]:
        """Compare outputs and gradients before and after `convert` with those of a float64 model.

        The converted model's error may exceed the plain model's by at most 4 ulp of the largest
        value, because a sum of rows rounds differently than a matrix product.

        Raises:
            AssertionError: the error of the converted model exceeds this bound.
        """
        model, draw = self.make(self.is_small)
        batch = tuple(value[:EXAMPLES_COMPARED] for value in draw(0))
        wide = tuple(v.double() if v.is_floating_point() else v for v in batch)
        before = run_model(copy.deepcopy(model), batch)
        after = run_model(hotrow.convert(copy.deepcopy(model), min_entries=0), batch)
        truth = run_model(model.double(), wide)
        result = {}
        for what, exact in truth.items():
            errors = [float((side[what].double() - exact).abs().max()) for side in (before, after)]
            slack = 4 * torch.finfo(torch.float32).eps * float(exact.abs().max())
            assert errors[1] <= errors[0] + slack, (self.name, what, errors)
            result[what] = {"unconverted_error": errors[0], "converted_error": errors[1]}
        return result

    def measure_times(self, report_progress: ReportProgress) -> dict[str, Any]:
        """Time both sides in turn, and measure the peak memory of one step on each side."""
        model, draw = self.make(self.is_small)
        sides = (Side(copy.deepcopy(model), False), Side(model, True, self.min_entries))
        batches = [draw(seed) for seed in range(8)]
        copy_speed = floor.CopySpeed()
        peaks: dict[str, int] = {}
        samples: tuple[list[list[float]], ...] = ([], [])
        for number in range(self.rounds + 1):
            share = 0.1 + 0.9 * number / (self.rounds + 1)
            report_progress(share, f"round {number} of {self.rounds}")
            copy_speed.measure()
            for side, count, turns in zip(sides, self.steps_per_turn, samples, strict=True):
                turn = []
                for k in range(count + (number > 0)):
                    begin = time.perf_counter()
                    side.step(batches[k % len(batches)])
                    turn.append(1e3 * (time.perf_counter() - begin))
                if number:  # the first turn also compiles kernels
                    turns.append(turn[1:])
                elif memory.is_supported():
                    peaks[SIDES[len(peaks)]] = side.peak_bytes(batches[0])
        steps = {
            side: percentiles([step for turn in turns for step in turn])
            for side, turns in zip(SIDES, samples, strict=True)
        }
        before, after = (peaks.get(side) for side in SIDES)
        return {
            **steps,
            "ratio": turn_ratios(samples[1], samples[0]),
            "peak_extra_bytes": peaks,
            "memory_ratio": after / before if before and after is not None else None,
            **self.compare_with_floor(sides[1], batches[0], copy_speed.bytes_per_second(), steps),
        }

    def compare_with_floor(
        self, side: Side, batch: Batch, copy_speed: float, steps: dict[str, Any]
    ) -> dict[str, Any]:
        """Return the bandwidth floor of a step, and each side's ratio of step time to floor.

        A step reads the batch. For each parameter that it updates, the step reads and writes the
        value and Adam's two moments.
        """
        side.step(batch)
        moved = 2 * (1 + floor.state_count("Adam")) * side.updated_bytes() + sum(
            v.nbytes for v in batch
        )
        floor_ms = 1e3 * moved / copy_speed
        return {
            "copy_bytes_per_s": copy_speed,
            "floor_bytes": moved,
            "floor_ms": floor_ms,
            "floor_ratio": {s: float(f"{v['median_ms'] / floor_ms:.5g}") for s, v in steps.items()},
        }


def run_model(model: nn.Module, batch: Batch) -> dict[str, Tensor]:
    """Return the output of a model and the gradient of each parameter."""
    output = model(*batch)
    output.square().mean().backward()
    grads = {name: p.grad for name, p in model.named_parameters() if p.grad is not None}
    return {"output": output.detach()} | grads
