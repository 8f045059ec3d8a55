"""Measure whether a step of hotrow.optim is the same as torch.optim's.

One table is trained three times. torch.optim in float64 is the reference. Of the two float32
runs, hotrow.optim may end no further from it than torch.optim does, plus 2 ulp.
"""

from __future__ import annotations

import copy
import math
import platform
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

import hotrow.optim
from hotrow.conversion.convert import convert
from hotrow.errors import HotrowError
from hotrow.optim.optimizer import RowOptimizer
from hotrow.verify.measure import Progress, free_memory

SCALES = (1.0, 1e-4, 1e-7, 1e-9)
SLACK = 2  # ulp of the largest weight: torch may be closer by chance by that much
_PROGRESS_STEPS = 50  # steps between two reports of progress
_BYTES_PER_VALUE = 96  # of the table: weights, gradient, state and temporaries in float64


@dataclass
class Batches:
    """The ids and gradients of a run: one row in every batch, some in none, the rest by Zipf.

    The gradients are given, not computed from the table, so that no rounding feeds back through
    a model: what is measured is the optimizer alone. Raises `HotrowError` if a run would not fit
    into the free memory.
    """

    steps: int = 250
    rows: int = 40
    columns: int = 19  # a vector or two of float32, and a rest
    ids: int = 12
    scale: float = 1.0
    seed: int = 0
    schedule: bool = True
    all_ids: list[Tensor] = field(init=False)
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._check_size()
        random = np.random.default_rng(self.seed)
        touched_rows = self.rows * 3 // 4  # the others are in no batch
        frequencies = 1 / np.arange(1, touched_rows + 1) ** 1.6
        drawn_ids = random.choice(
            touched_rows, (self.steps, self.ids - 1), p=frequencies / frequencies.sum()
        )
        self.all_ids = list(torch.from_numpy(np.pad(drawn_ids, ((0, 0), (0, 1)))))  # row 0 in each
        self.weights = torch.from_numpy(random.standard_normal((self.rows, self.columns))).float()

    def _check_size(self) -> None:
        needed = (
            self.rows + self.ids
        ) * self.columns * _BYTES_PER_VALUE + self.steps * self.ids * 16
        free = free_memory()
        if needed > free:
            raise HotrowError(
                f"{self.steps:,} steps of a table of {self.rows:,} x {self.columns:,} with "
                f"{self.ids:,} ids each take about {needed / 1e9:,.1f} GB of memory, and "
                f"{free / 1e9:,.1f} GB are free",
                fix="take fewer rows, columns, ids or steps",
            )

    def gradients(self, t: int) -> Tensor:
        """(N, D), the same float32 numbers for every dtype."""
        random = torch.Generator().manual_seed(1000 * self.seed + t)
        shape = self.ids, self.columns
        return torch.randn(shape, generator=random) * self.scale

    def learning_rate_factor(self, t: int) -> float:
        """The factor of the learning rate at step t: warm-up, then cosine."""
        if not self.schedule:
            return 1.0
        warmup = self.steps // 10
        if t < warmup:
            return (t + 1) / warmup
        return 0.55 + 0.45 * float(np.cos(np.pi * (t - warmup) / (self.steps - warmup)))

    def count_idle(self) -> tuple[int, int]:
        """Count the rows in no batch, and the longest run of steps that any other row missed."""
        last = np.full(self.rows, self.steps)  # of a row in no batch yet
        longest = 0
        for t, ids in enumerate([*self.all_ids, torch.arange(self.rows)]):
            longest = max(longest, int((t - 1 - last[ids.numpy()]).max()))
            if t < self.steps:
                last[ids.numpy()] = t
        return int((last == self.steps).sum()), longest


@dataclass(frozen=True)
class Distance:
    """How far two float32 runs ended from float64, at one scale of the gradients.

    Attributes:
        scale: what the gradients, standard normal numbers, were multiplied with.
        hotrow_error: max |w - w64| over the table, of hotrow.optim; inf if any w is not finite.
        torch_error: the same of torch.optim.
        ulp: the spacing of float32 at the largest |w64|.
        bitwise_count: how many of the two runs' weights have the same bits.
        value_count: the number of weights.
    """

    scale: float
    hotrow_error: float
    torch_error: float
    ulp: float
    bitwise_count: int
    value_count: int

    @property
    def within_bound(self) -> bool:
        """Whether hotrow is no further from float64 than torch, plus 2 ulp."""
        return self.hotrow_error <= self.torch_error + SLACK * self.ulp

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        return {
            "scale": self.scale,
            "within": self.within_bound,
            "hotrow_error": self.hotrow_error if math.isfinite(self.hotrow_error) else None,
            "torch_float32_error": self.torch_error,
            "ulp": self.ulp,
            "bitwise": self.bitwise_count,
            "values": self.value_count,
        }


@dataclass(frozen=True)
class Sameness:
    """The result of `measure_sameness`; true if hotrow is within the rule at every scale.

    Attributes:
        optimizer: the name that torch and hotrow have for it.
        options: given to both, under torch's names.
        batches: what all runs were trained on, before scaling.
        distances: one for each scale.
    """

    optimizer: str
    options: dict[str, Any]
    batches: Batches
    distances: tuple[Distance, ...]

    @property
    def within_bound(self) -> bool:
        """Whether hotrow is within the rule at every scale."""
        return all(distance.within_bound for distance in self.distances)

    def __bool__(self) -> bool:
        return self.within_bound

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        never, longest = self.batches.count_idle()
        return {
            "optimizer": self.optimizer,
            "options": {
                name: f"tensor({value:g})" if isinstance(value, Tensor) else value
                for name, value in self.options.items()
            },
            "within": self.within_bound,
            "scales": [distance.to_dict() for distance in self.distances],
            "slack_ulp": SLACK,
            "steps": self.batches.steps,
            "rows": self.batches.rows,
            "columns": self.batches.columns,
            "ids_a_step": self.batches.ids,
            "seed": self.batches.seed,
            "rows_never_touched": never,
            "longest_idle_steps": longest,
            "torch": torch.__version__,
            "threads": 1,
            "machine": platform.machine(),
        }


def measure_sameness(
    optimizer: str,
    options: Mapping[str, Any],
    batches: Batches,
    *,
    scales: Sequence[float] = SCALES,
    progress: Progress | None = None,
) -> Sameness:
    """Train a table for each scale of the gradients, three ways, and compare the results.

    Args:
        optimizer: a name in `hotrow.optim`.
        options: of both constructors; not changed.
        batches: what to train on.
        scales: what their gradients are multiplied with; a table is trained for each.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        HotrowError: options that torch refuses, or with which it does not get through.

    Cost: two dense trainings and one by rows, of a table for each scale.
    """
    check_options(optimizer, options)
    runs = [
        (f"torch.optim.{optimizer}, float64", torch.optim, torch.float64),
        (f"torch.optim.{optimizer}, float32", torch.optim, torch.float32),
        (f"hotrow.optim.{optimizer}, float32", hotrow.optim, torch.float32),
    ]
    results = []
    for i, (what, package, dtype) in enumerate(runs):

        def report_step(t: int, what: str = what, done: int = i * batches.steps) -> None:
            if progress is not None:
                progress(what, done + t, len(runs) * batches.steps)

        optimizer_class = getattr(package, optimizer)
        try:
            with _single_thread():
                tables = train(optimizer_class, options, batches, scales, dtype, report_step)
        except (ArithmeticError, TypeError, ValueError) as error:
            if package is hotrow.optim:
                raise
            raise HotrowError(
                f"{what} does not get through with these options: {error}", fix=_OPTIONS_FIX
            ) from None
        for scale, table in zip(scales, tables, strict=True):
            if package is torch.optim and not bool(table.isfinite().all()):
                raise HotrowError(
                    f"{what} ends in weights that are inf or NaN with gradients of scale "
                    f"{scale:g}, so that nothing can be compared with it",
                    fix=_OPTIONS_FIX,
                )
        results.append(tables)
    float64_tables, torch_tables, hotrow_tables = results
    distances = map(measure_distance, scales, hotrow_tables, torch_tables, float64_tables)
    return Sameness(optimizer, dict(options), batches, tuple(distances))


_OPTIONS_FIX = "take options nearer to the defaults, a smaller lr first"


def check_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise `HotrowError` if torch's constructor refuses the options."""
    optimizer_class = getattr(hotrow.optim, optimizer).torch_class
    try:
        optimizer_class([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        settings = ", ".join(f"{name}={value}" for name, value in options.items())
        raise HotrowError(
            f"torch.optim.{optimizer} refuses {settings}: {error}",
            fix="change what it names, or leave it at its default",
        ) from None


def train(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    batches: Batches,
    scales: Sequence[float],
    dtype: torch.dtype,
    report_step: Callable[[int], None] = lambda t: None,
) -> list[Tensor]:
    """Train a table for each scale, with an ordinary training loop; returns (V, D) each."""
    tables = [
        nn.Embedding(batches.rows, batches.columns, _weight=batches.weights.to(dtype, copy=True))
        for _ in scales
    ]
    model = nn.ModuleList(tables)
    kwargs = copy.deepcopy(dict(options))  # a schedule writes into a learning rate's tensor
    if issubclass(optimizer_class, RowOptimizer):
        convert(model, min_entries=0)
    else:
        kwargs["foreach"] = False  # the plain code, tensor by tensor
    make_optimizer: Callable[..., torch.optim.Optimizer] = optimizer_class
    optimizer = make_optimizer(model.parameters(), **kwargs)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, batches.learning_rate_factor)
    for t, ids in enumerate(batches.all_ids):
        if t % _PROGRESS_STEPS == 0:
            report_step(t)
        optimizer.zero_grad()
        grads = batches.gradients(t)
        losses = [
            (table(ids) * (grads * scale).to(dtype)).sum()
            for table, scale in zip(tables, scales, strict=True)
        ]
        torch.autograd.backward(losses)
        optimizer.step()
        schedule.step()
    return [table.weight.detach().clone() for table in tables]


@contextmanager
def _single_thread() -> Iterator[None]:
    """Run torch on one thread: in small steps a second one costs more than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_distance(
    scale: float, hotrow_weights: Tensor, torch_weights: Tensor, float64_weights: Tensor
) -> Distance:
    """How far two float32 tables are from the float64 one; (V, D) each, and that one finite."""

    def error(weights: Tensor) -> float:
        found = float((weights.double() - float64_weights).abs().max())
        return math.inf if math.isnan(found) else found

    largest = np.float32(float(float64_weights.abs().max()))
    same = int((hotrow_weights.view(torch.int32) == torch_weights.view(torch.int32)).sum())
    ulp = float(np.spacing(largest))
    return Distance(
        scale, error(hotrow_weights), error(torch_weights), ulp, same, hotrow_weights.numel()
    )
