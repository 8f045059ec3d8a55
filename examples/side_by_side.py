"""Train two copies of a model alternately, and compare their losses, times and memory."""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

NAMES = "torch.optim", "hotrow"
Step = Callable[[Any], Tensor]


class SideBySide:
    """Prints the results of torch and hotrow in columns, and records whether they are equal.

    Arguments:
        steps: the step functions of torch and hotrow; each takes a batch and returns the loss.
    """

    def __init__(self, steps: Iterable[Step]) -> None:
        self.steps = dict(zip(NAMES, steps, strict=True))
        self.seconds: dict[str, list[float]] = {name: [] for name in NAMES}
        self.same = True

    def train(
        self,
        batch: Callable[[int], Any],
        steps: int,
        block: int = 10,
        what: str = "train loss",
    ) -> None:
        """Train for `steps` steps on batch(0), batch(1), ..., and print the mean losses."""
        print(f"\n{'':24}{NAMES[0]:>14}{NAMES[1]:>14}")
        losses: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        begin = 0
        while begin < steps:
            end = min(begin + block, steps)
            batches = [batch(t) for t in range(begin, end)]
            for name, step in self.steps.items():  # each block: first torch, then hotrow
                for each in batches:
                    start = time.perf_counter()
                    losses[name].append(step(each).detach())
                    self.seconds[name].append(time.perf_counter() - start)
            if end * 10 // steps > begin * 10 // steps:
                means = [torch.stack(losses[name]).double().mean().item() for name in NAMES]
                self.compare(f"step {end:5,}, {what}", means)
                losses = {name: [] for name in NAMES}
            begin = end

    def compare(self, what: str, numbers: Iterable[float]) -> None:
        """Print the values from torch and hotrow, and whether they are equal to four decimals."""
        a, b = (f"{number:.4f}" for number in numbers)
        self.same = self.same and a == b
        print(f"{what:24}{a:>14}{b:>14}{'' if a == b else '   <- NOT the same'}", flush=True)

    def compare_tensors(self, what: str, a: Tensor, b: Tensor, tolerance: float = 0.0) -> None:
        """Print how many values are equal, and the largest difference.

        The difference and the tolerance are relative to the largest value.
        """
        difference = ((a - b).abs().max() / a.abs().max()).item()
        same = difference <= tolerance
        self.same = self.same and same
        others = f", max relative difference {difference:.1e}" if difference else ""
        verdict = "" if same else "   <- NOT the same"
        print(f"{what:24}{(a == b).sum():14,} of {a.numel():,} equal{others}{verdict}")

    def print_times(self) -> None:
        """Print the median step time and the total time, which may include compilation."""
        a, b = (statistics.median(self.seconds[name]) * 1e3 for name in NAMES)
        print(f"{'step (median), ms':24}{a:14.2f}{b:14.2f}{a / b:9.1f}x")
        a, b = (sum(self.seconds[name]) for name in NAMES)
        print(f"{'all steps, s':24}{a:14.3f}{b:14.3f}{a / b:9.1f}x")

    def print_memory(self, models: Iterable[nn.Module]) -> None:
        """Print how much memory the last step's gradients use."""
        a, b = (
            sum(_gradient_bytes(p.grad) for p in m.parameters() if p.grad is not None)
            for m in models
        )
        print(f"{'gradients, MB':24}{a / 1e6:14.1f}{b / 1e6:14.1f}{a / b:9.1f}x")

    def print_verdict(self, what: str = "losses") -> int:
        """Print whether all compared values are equal, and return the exit code."""
        if self.same:
            print(f"\nall printed {what} are the same")
            return 0
        print(f"\nthe printed {what} are NOT the same")
        return 1


def trainer(optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], Tensor]) -> Step:
    """Return a training step that minimizes `loss_of(batch)`."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def options(
    arguments: list[str] | None, doc: str, **defaults: tuple[float, str]
) -> argparse.Namespace:
    """Parse the command line.

    Arguments:
        arguments: the command-line arguments, or None for `sys.argv`.
        doc: the module's docstring; its first line becomes the description in `--help`.
        defaults: the default value and the help text of each option. Each option has the same type
            as its default.
    """
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, (default, text) in defaults.items():
        text = f"{text} (default %(default)s)"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    args = parser.parse_args(arguments)
    for name, value in vars(args).items():
        if value <= 0 and name != "seed":
            parser.error(f"--{name} must be positive, but is {value}")
    if args.seed < 0:
        parser.error(f"--seed must be 0 or more, but is {args.seed}")
    return args


def _gradient_bytes(gradient: Tensor) -> int:
    # A table's gradient stores only the touched rows and their ids.
    if hasattr(gradient, "rows"):
        return gradient.rows.nbytes + gradient.ids.nbytes
    return gradient.nbytes
