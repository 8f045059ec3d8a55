"""Train one model in several ways, compare the results, and print the times."""

from __future__ import annotations

import copy
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

import hotrow
from hotrow.table.parameter import Table


@dataclass
class Clock:
    """Records the duration of each step; call `tick` after each step."""

    seconds: list[float] = field(default_factory=list)
    last: float = field(default_factory=time.perf_counter)

    def tick(self) -> None:
        """Record the time since the last tick."""
        now = time.perf_counter()
        self.seconds.append(now - self.last)
        self.last = now

    @property
    def median(self) -> float:
        """The median duration of a step, without the first third of the steps (the warm-up)."""
        return statistics.median(self.seconds[len(self.seconds) // 3 :])


Train = Callable[[nn.Module, str, Clock], None]


def compare(
    title: str,
    model: nn.Module,
    train: Train,
    ways: tuple[str, ...] = ("dense", "fused", "hotrow"),
    *,
    differs: str = "",
    tables: int = 1,
) -> None:
    """Train copies of a model in several ways, and assert that hotrow matches dense training.

    The results are compared in float64, where rounding can't hide a difference, and the times are
    measured in float32.

    Args:
        title: the first line to print.
        model: the model before training, in float32; each way trains a copy.
        train: a function that trains the model in place in the given way, and calls `tick` after
            each step.
        ways: the ways to train; "dense" uses torch's default step, and "hotrow" trains a converted
            model.
        differs: a way that trains a different model, such as SparseAdam.
        tables: the number of tables that the converted model must have.

    Raises:
        AssertionError: hotrow's parameters differ from those of dense training, the way named by
            `differs` trains the same model, an embedding was not converted, or a table took a dense
            step.
    """
    print(title)
    exact = copy.deepcopy(model).double()
    dense = _run(exact, train, "dense", tables)[0]
    ends, times = {}, {}
    for way in ways:
        ends[way] = dense if way == "dense" else _run(exact, train, way, tables)[0]
        times[way] = _run(model, train, way, tables)[1]
    for way in ways:
        distance = max(float((ends[way][name] - dense[name]).abs().max()) for name in dense)
        if way == differs:
            assert distance > 1e-3, f"{way} trains the same model"
        else:
            for name, value in ends[way].items():
                torch.testing.assert_close(value, dense[name], msg=f"{way}: {name} differs")
        result = "a DIFFERENT model" if way == differs else "the same model"
        ratio = times[way] / times["hotrow"]
        print(
            f"  {way:<12} {1e3 * times[way]:8.2f} ms per step {ratio:6.2f} x hotrow's time"
            f"   {result} (largest difference {distance:.1e})"
        )


def _run(model: nn.Module, train: Train, way: str, tables: int) -> tuple[dict[str, Tensor], float]:
    """Train a copy; return its parameters, and the median duration of a step."""
    model = copy.deepcopy(model)
    if way == "hotrow":
        hotrow.convert(model)
        found = [each for each in model.parameters() if isinstance(each, Table)]
        assert len(found) == tables, f"{len(found)} tables\n{hotrow.convert.report(model)}"
    torch.manual_seed(1)  # for dropout and the order of the data
    clock = Clock()
    train(model, way, clock)
    assert "torch's dense step ran" not in str(hotrow.convert.report(model))
    ends = {name: each.detach().clone() for name, each in model.named_parameters()}
    return ends, clock.median


def library_of(way: str) -> Any:
    """Return the optimizer module for a way of training."""
    return hotrow.optim if way == "hotrow" else torch.optim
