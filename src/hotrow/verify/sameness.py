"""The sameness of the optimizer's step, measured: one table, trained three ways.

torch.optim in float64 is the truth. torch.optim in float32 and hotrow.optim in float32 are as far
from it as they are, and hotrow may be no further than torch, plus 2 ulp.
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
from hotrow.verify.measure import free_memory

Progress = Callable[[str, int, int], None]

SCALES = (1.0, 1e-4, 1e-7, 1e-9)
SLACK = 2  # ulp of the largest weight: torch may be lucky by that much
_TOLD = 50  # steps between two words of progress
_BYTES = 96  # for each value of the table: weights, gradient, state and temporaries in float64


@dataclass
class Batches:
    """Ids and gradients of a run: a row in every batch, rows in none, and Zipf in between.

    The gradients are given, not computed from the table, so that no rounding feeds back through
    a model: what is left is the optimizer's own. Raises `HotrowError` if a run would not fit into
    the memory that is free.
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
        busy = self.rows * 3 // 4  # the rest is idle all along
        odds = 1 / np.arange(1, busy + 1) ** 1.6
        drawn = random.choice(busy, (self.steps, self.ids - 1), p=odds / odds.sum())
        self.all_ids = list(torch.from_numpy(np.pad(drawn, ((0, 0), (0, 1)))))  # row 0 in each
        self.weights = torch.from_numpy(random.standard_normal((self.rows, self.columns))).float()

    def _check_size(self) -> None:
        needed = (self.rows + self.ids) * self.columns * _BYTES + self.steps * self.ids * 16
        free = free_memory()
        if needed > free:
            raise HotrowError(
                f"{self.steps:,} steps of a table of {self.rows:,} x {self.columns:,} with "
                f"{self.ids:,} ids each take about {needed / 1e9:,.1f} GB of memory, and "
                f"{free / 1e9:,.1f} GB are free",
                fix="take fewer rows, columns, ids or steps",
            )

    def grads(self, t: int) -> Tensor:
        """(N, D), the same float32 numbers for every dtype."""
        random = torch.Generator().manual_seed(1000 * self.seed + t)
        shape = self.ids, self.columns
        return torch.randn(shape, generator=random) * self.scale

    def rate(self, t: int) -> float:
        """Warm-up, then cosine: what the learning rate is multiplied with."""
        if not self.schedule:
            return 1.0
        warm = self.steps // 10
        if t < warm:
            return (t + 1) / warm
        return 0.55 + 0.45 * float(np.cos(np.pi * (t - warm) / (self.steps - warm)))

    def idle(self) -> tuple[int, int]:
        """Rows in no batch, and the most steps that any other row missed in one go."""
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
        hotrow: max |w - w64| over the table, of hotrow.optim; inf if any w is not finite.
        torch: the same of torch.optim.
        ulp: the spacing of float32 at the largest |w64|.
        same: how many of the two runs' weights have the same bits.
        values: how many weights there are.
    """

    scale: float
    hotrow: float
    torch: float
    ulp: float
    same: int
    values: int

    @property
    def within(self) -> bool:
        """Whether hotrow is no further from float64 than torch, plus 2 ulp."""
        return self.hotrow <= self.torch + SLACK * self.ulp

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        return {
            "scale": self.scale,
            "within": self.within,
            "hotrow_error": self.hotrow if math.isfinite(self.hotrow) else None,
            "torch_float32_error": self.torch,
            "ulp": self.ulp,
            "bitwise": self.same,
            "values": self.values,
        }


@dataclass(frozen=True)
class Sameness:
    """What `measure` found; true if hotrow is within the rule at every scale.

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
    def within(self) -> bool:
        """Whether hotrow is within the rule at every scale."""
        return all(distance.within for distance in self.distances)

    def __bool__(self) -> bool:
        return self.within

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON."""
        never, longest = self.batches.idle()
        return {
            "optimizer": self.optimizer,
            "options": {
                name: f"tensor({value:g})" if isinstance(value, Tensor) else value
                for name, value in self.options.items()
            },
            "within": self.within,
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


def measure(
    optimizer: str,
    options: Mapping[str, Any],
    batches: Batches,
    *,
    scales: Sequence[float] = SCALES,
    progress: Progress | None = None,
) -> Sameness:
    """Train a table for each scale of the gradients, three ways, and hold the ends together.

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
    ways = [
        (f"torch.optim.{optimizer}, float64", torch.optim, torch.float64),
        (f"torch.optim.{optimizer}, float32", torch.optim, torch.float32),
        (f"hotrow.optim.{optimizer}, float32", hotrow.optim, torch.float32),
    ]
    ends = []
    for i, (what, package, dtype) in enumerate(ways):

        def tell(t: int, what: str = what, done: int = i * batches.steps) -> None:
            if progress is not None:
                progress(what, done + t, len(ways) * batches.steps)

        kind = getattr(package, optimizer)
        try:
            with _one_thread():
                tables = train(kind, options, batches, scales, dtype, tell)
        except (ArithmeticError, TypeError, ValueError) as error:
            if package is hotrow.optim:
                raise
            raise HotrowError(
                f"{what} does not get through with these options: {error}", fix=_DEFAULTS
            ) from None
        for scale, table in zip(scales, tables, strict=True):
            if package is torch.optim and not bool(table.isfinite().all()):
                raise HotrowError(
                    f"{what} ends in weights that are inf or NaN with gradients of scale "
                    f"{scale:g}, so that nothing can be held against it",
                    fix=_DEFAULTS,
                )
        ends.append(tables)
    truths, rivals, ours = ends
    distances = map(distance, scales, ours, rivals, truths)
    return Sameness(optimizer, dict(options), batches, tuple(distances))


_DEFAULTS = "take options nearer to the defaults, a smaller lr first"


def check_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise `HotrowError` if torch's constructor refuses the options."""
    kind = getattr(torch.optim, optimizer)
    try:
        kind([nn.Parameter(torch.zeros(1))], **options)
    except (TypeError, ValueError) as error:
        given = ", ".join(f"{name}={value}" for name, value in options.items())
        raise HotrowError(
            f"torch.optim.{optimizer} refuses {given}: {error}",
            fix="change what it names, or leave it at its default",
        ) from None


def train(
    optimizer: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    batches: Batches,
    scales: Sequence[float],
    dtype: torch.dtype,
    tell: Callable[[int], None] = lambda t: None,
) -> list[Tensor]:
    """A table for each scale after all steps, by the loop that people write; (V, D) each."""
    tables = [
        nn.Embedding(batches.rows, batches.columns, _weight=batches.weights.to(dtype, copy=True))
        for _ in scales
    ]
    model = nn.ModuleList(tables)
    given = copy.deepcopy(dict(options))  # a schedule writes into a learning rate's tensor
    if issubclass(optimizer, RowOptimizer):
        convert(model, least=0)
    else:
        given["foreach"] = False  # the plain code, tensor by tensor
    kind: Callable[..., torch.optim.Optimizer] = optimizer
    chosen = kind(model.parameters(), **given)
    schedule = torch.optim.lr_scheduler.LambdaLR(chosen, batches.rate)
    for t, ids in enumerate(batches.all_ids):
        if t % _TOLD == 0:
            tell(t)
        chosen.zero_grad()
        grads = batches.grads(t)
        losses = [
            (table(ids) * (grads * scale).to(dtype)).sum()
            for table, scale in zip(tables, scales, strict=True)
        ]
        torch.autograd.backward(losses)
        chosen.step()
        schedule.step()
    return [table.weight.detach().clone() for table in tables]


@contextmanager
def _one_thread() -> Iterator[None]:
    """So many small steps lose more time waiting for a second thread than it saves."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def distance(scale: float, ours: Tensor, rival: Tensor, truth: Tensor) -> Distance:
    """How far float32 `ours` and `rival` are from float64 `truth`; (V, D) each, of finite truth."""

    def error(weights: Tensor) -> float:
        found = float((weights.double() - truth).abs().max())
        return math.inf if math.isnan(found) else found

    largest = np.float32(float(truth.abs().max()))
    same = int((ours.view(torch.int32) == rival.view(torch.int32)).sum())
    ulp = float(np.spacing(largest))
    return Distance(scale, error(ours), error(rival), ulp, same, ours.numel())
