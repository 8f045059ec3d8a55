"""Two trainings of one model on the same batches, A B A B: their losses, their times, a verdict."""

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
    """Prints both sides' figures in columns, and notes whether they were the same as printed.

    Arguments:
        steps: what trains each side: called with a batch, it makes a step and returns the loss.
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
        """Make `steps` steps on batch(0), batch(1), ...; print the means of what they give."""
        print(f"\n{'':24}{NAMES[0]:>14}{NAMES[1]:>14}")
        losses: dict[str, list[Tensor]] = {name: [] for name in NAMES}
        begin = 0
        while begin < steps:
            end = min(begin + block, steps)
            batches = [batch(t) for t in range(begin, end)]
            for name, step in self.steps.items():  # a block of one, then the same of the other
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
        """Print a figure of both sides, which is to be the same to four decimals."""
        a, b = (f"{number:.4f}" for number in numbers)
        self.same = self.same and a == b
        print(f"{what:24}{a:>14}{b:>14}{'' if a == b else '   <- NOT the same'}", flush=True)

    def agree(self, what: str, a: Tensor, b: Tensor, within: float = 0.0) -> None:
        """Print how many values of both sides are equal, and how far apart the others are.

        That, and how far is the same, are shares of the largest value.
        """
        apart = ((a - b).abs().max() / a.abs().max()).item()
        same = apart <= within
        self.same = self.same and same
        others = f", the others within {apart:.1e} of the largest" if apart else ""
        verdict = "" if same else "   <- NOT the same"
        print(f"{what:24}{(a == b).sum():14,} of {a.numel():,} equal{others}{verdict}")

    def times(self) -> None:
        """Print the time of a step, and of all, in which hotrow's first run ever compiles."""
        a, b = (statistics.median(self.seconds[name]) * 1e3 for name in NAMES)
        print(f"{'step (median), ms':24}{a:14.1f}{b:14.1f}{a / b:9.1f} x")
        a, b = (sum(self.seconds[name]) for name in NAMES)
        print(f"{'all steps, s':24}{a:14.1f}{b:14.1f}{a / b:9.1f} x")

    def memory(self, models: Iterable[nn.Module]) -> None:
        """Print what the gradients take, as the last step left them."""
        a, b = (sum(_bytes(p.grad) for p in m.parameters() if p.grad is not None) for m in models)
        print(f"{'gradients, MB':24}{a / 1e6:14.1f}{b / 1e6:14.1f}{a / b:9.1f} x")

    def verdict(self, what: str = "losses") -> int:
        """Print whether all that was compared was the same; the exit code."""
        if self.same:
            print(f"\nthe same {what}, to every digit printed")
            return 0
        print(f"\nNOT the same {what}")
        return 1


def trainer(optimizer: torch.optim.Optimizer, loss_of: Callable[[Any], Tensor]) -> Step:
    """A training step as anywhere, for a loss of a batch."""

    def step(batch: Any) -> Tensor:
        optimizer.zero_grad()
        loss = loss_of(batch)
        loss.backward()
        optimizer.step()
        return loss

    return step


def options(
    arguments: list[str] | None, doc: str, **known: tuple[float, str]
) -> argparse.Namespace:
    """The command line: of each option its default, which gives its type, and its help."""
    parser = argparse.ArgumentParser(description=doc.splitlines()[0])
    for name, (default, text) in known.items():
        text = f"{text} (default %(default)s)"
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    asked = parser.parse_args(arguments)
    for name, value in vars(asked).items():
        if value <= 0 and name != "seed":
            parser.error(f"--{name} is {value}: choose a positive number")
    if asked.seed < 0:
        parser.error(f"--seed is {asked.seed}: choose 0 or more")
    return asked


def _bytes(gradient: Tensor) -> int:
    # A table's gradient holds the rows that were touched, and their ids.
    if hasattr(gradient, "rows"):
        return gradient.rows.nbytes + gradient.ids.nbytes
    return gradient.nbytes
