"""Check whether hotrow.optim takes the same steps as torch.optim.

A table is trained three times: with torch.optim in float64 as the reference, and in float32 with
torch.optim and with hotrow.optim. The error of hotrow.optim must be at most the error of
torch.optim plus 2 ulp.
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
SLACK = 2  # in ulp of the largest weight; torch may be this much closer to float64 by chance
_PROGRESS_STEPS = 50  # steps between two progress reports
_BYTES_PER_VALUE = 96  # weights, gradient, state and temporaries in float64


@dataclass
class Batches:
    """The ids and gradients of a training run.

    Row 0 is in every batch. A quarter of the rows are not in any batch. The other ids follow Zipf's
    law. The gradients don't depend on the table, so rounding errors don't feed back into them. This
    way, the run tests only the optimizer. Raises `HotrowError` if there is not enough free memory
    for the run.
    """

    steps: int = 250
    rows: int = 40
    columns: int = 19  # one or two SIMD vectors of float32, plus a remainder
    ids: int = 12
    scale: float = 1.0
    seed: int = 0
    schedule: bool = True
    all_ids: list[Tensor] = field(init=False)
    weights: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._check_size()
        random = np.random.default_rng(self.seed)
        touched_rows = self.rows * 3 // 4  # the other rows are not in any batch
        frequencies = 1 / np.arange(1, touched_rows + 1) ** 1.6
        drawn_ids = random.choice(
            touched_rows, (self.steps, self.ids - 1), p=frequencies / frequencies.sum()
        )
        self.all_ids = list(torch.from_numpy(np.pad(drawn_ids, ((0, 0), (0, 1)))))  # add row 0
        self.weights = torch.from_numpy(random.standard_normal((self.rows, self.columns))).float()

    def _check_size(self) -> None:
        needed = (
            self.rows + self.ids
        ) * self.columns * _BYTES_PER_VALUE + self.steps * self.ids * 16
        free = free_memory()
        if needed > free:
            raise HotrowError(
                f"{self.steps:,} steps of {self.ids:,} ids on a {self.rows:,} x {self.columns:,} "
                f"table need about {needed / 1e9:,.1f} GB of memory, but only "
                f"{free / 1e9:,.1f} GB are free",
                fix="use fewer rows, columns, ids or steps",
            )

    def gradients(self, t: int) -> Tensor:
        """Return the (N, D) gradient of step t in float32, whatever the training dtype is."""
        random = torch.Generator().manual_seed(1000 * self.seed + t)
        shape = self.ids, self.columns
        return torch.randn(shape, generator=random, device="cpu") * self.scale

    def learning_rate_factor(self, t: int) -> float:
        """Return the learning rate factor at step t: warm-up, then cosine decay."""
        if not self.schedule:
            return 1.0
        warmup = self.steps // 10
        if t < warmup:
            return (t + 1) / warmup
        return 0.55 + 0.45 * float(np.cos(np.pi * (t - warmup) / (self.steps - warmup)))

    def count_idle(self) -> tuple[int, int]:
        """Count the never-touched rows, and return the longest idle time of the others in steps."""
        last = np.full(self.rows, self.steps)  # self.steps: not in a batch yet
        longest = 0
        for t, ids in enumerate([*self.all_ids, torch.arange(self.rows, device="cpu")]):
            longest = max(longest, int((t - 1 - last[ids.numpy()]).max()))
            if t < self.steps:
                last[ids.numpy()] = t
        return int((last == self.steps).sum()), longest


@dataclass(frozen=True)
class Distance:
    """The errors of two float32 runs relative to a float64 run, at one gradient scale.

    Attributes:
        scale: the factor applied to the standard normal gradients.
        hotrow_error: max |w - w64| for hotrow.optim; inf if any w is not finite.
        torch_error: max |w - w64| for torch.optim.
        ulp: the spacing of float32 at the largest |w64|.
        bitwise_count: the number of weights with the same bits in both runs.
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
        """Return whether hotrow's error is at most torch's error plus 2 ulp."""
        return self.hotrow_error <= self.torch_error + SLACK * self.ulp

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON."""
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
    """The result of `measure_sameness`.

    It is truthy if the error is within the bound at every scale.

    Attributes:
        optimizer: the optimizer's name in torch and hotrow.
        options: the options of both optimizers.
        batches: the training data, before scaling.
        distances: one `Distance` for each scale.
        device: the device of the tables.
    """

    optimizer: str
    options: dict[str, Any]
    batches: Batches
    distances: tuple[Distance, ...]
    device: str = "cpu"

    @property
    def within_bound(self) -> bool:
        """Return whether hotrow's error is within the bound at every scale."""
        return all(distance.within_bound for distance in self.distances)

    def __bool__(self) -> bool:
        return self.within_bound

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON."""
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
            "device": self.device,
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
    device: str = "cpu",
    progress: Progress | None = None,
) -> Sameness:
    """Train a table in three ways at each gradient scale, and compare the results.

    Args:
        optimizer: a name in `hotrow.optim`.
        options: the options for both constructors; the function does not change them.
        batches: the training data.
        scales: the factors applied to the gradients. A separate table is trained for each factor.
        device: the device of the tables.
        progress: a function called with (the current activity, steps done, total steps).

    Raises:
        HotrowError: torch rejects the options or raises an error, or torch's weights become inf or
            NaN.

    Cost: for each scale, two dense training runs and one run with hotrow.
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
                tables = train(
                    optimizer_class, options, batches, scales, dtype, report_step, device
                )
        # RuntimeError: torch converts an option to float32, but its value is too large.
        except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
            if package is hotrow.optim:
                raise
            raise HotrowError(
                f"{what} fails with {_describe_options(options)}: {error}", fix=_OPTIONS_FIX
            ) from None
        for scale, table in zip(scales, tables, strict=True):
            if package is torch.optim and not bool(table.isfinite().all()):
                raise HotrowError(
                    f"{what} ends with inf or NaN in the weights at gradient scale {scale:g}, so "
                    "there is nothing to compare with",
                    fix=_OPTIONS_FIX,
                )
        results.append(tables)
    float64_tables, torch_tables, hotrow_tables = results
    distances = map(measure_distance, scales, hotrow_tables, torch_tables, float64_tables)
    return Sameness(optimizer, dict(options), batches, tuple(distances), device)


_OPTIONS_FIX = "use options closer to the defaults; try a smaller lr first"


def check_options(optimizer: str, options: Mapping[str, Any]) -> None:
    """Raise `HotrowError` if torch's constructor rejects the options."""
    optimizer_class = getattr(hotrow.optim, optimizer).torch_class
    try:
        optimizer_class([nn.Parameter(torch.zeros(1, device="cpu"))], **options)
    except (RuntimeError, TypeError, ValueError) as error:  # RuntimeError: beyond float32
        raise HotrowError(
            f"torch.optim.{optimizer} rejects {_describe_options(options)}: {error}",
            fix="change that option, or leave it at its default",
        ) from None


def _describe_options(options: Mapping[str, Any]) -> str:
    return ", ".join(f"{name}={value}" for name, value in options.items()) or "its default options"


def train(
    optimizer_class: type[torch.optim.Optimizer],
    options: Mapping[str, Any],
    batches: Batches,
    scales: Sequence[float],
    dtype: torch.dtype,
    report_step: Callable[[int], None] = lambda t: None,
    device: str = "cpu",
) -> list[Tensor]:
    """Train a (V, D) table for each scale in an ordinary training loop.

    Returns:
        The tables, on the CPU.
    """
    tables = [
        nn.Embedding(batches.rows, batches.columns, _weight=batches.weights.to(dtype, copy=True))
        for _ in scales
    ]
    model = nn.ModuleList(tables).to(device)
    kwargs = copy.deepcopy(dict(options))  # a schedule changes a learning rate tensor in place
    is_dense = not issubclass(optimizer_class, RowOptimizer)
    if is_dense:
        kwargs["foreach"] = False  # the reference implementation, one tensor at a time
    else:
        convert(model, min_entries=0)
    make_optimizer: Callable[..., torch.optim.Optimizer] = optimizer_class
    optimizer = make_optimizer(model.parameters(), **kwargs)
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, batches.learning_rate_factor)
    for t, ids in enumerate(batches.all_ids):
        if t % _PROGRESS_STEPS == 0:
            report_step(t)
        optimizer.zero_grad()
        grads = batches.gradients(t)
        values = [(grads * scale).to(dtype) for scale in scales]
        if is_dense and device != "cpu":  # a GPU's order of addition varies
            for table, gradients in zip(tables, values, strict=True):
                dense = torch.zeros(batches.rows, batches.columns, dtype=dtype, device="cpu")
                table.weight.grad = dense.index_add_(0, ids, gradients).to(device)
        else:
            losses = [
                (table(ids.to(device)) * gradients.to(device)).sum()
                for table, gradients in zip(tables, values, strict=True)
            ]
            torch.autograd.backward(losses)
        optimizer.step()
        schedule.step()
    return [table.weight.detach().to("cpu", copy=True) for table in tables]


@contextmanager
def _single_thread() -> Iterator[None]:
    """Run torch on one thread, because a second thread costs more than it saves in small steps."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def measure_distance(
    scale: float, hotrow_weights: Tensor, torch_weights: Tensor, float64_weights: Tensor
) -> Distance:
    """Measure the errors of two float32 (V, D) tables relative to a finite float64 table."""

    def error(weights: Tensor) -> float:
        found = float((weights.double() - float64_weights).abs().max())
        return math.inf if math.isnan(found) else found

    largest = np.float32(float(float64_weights.abs().max()))
    same = int((hotrow_weights.view(torch.int32) == torch_weights.view(torch.int32)).sum())
    ulp = float(np.spacing(largest))
    return Distance(
        scale, error(hotrow_weights), error(torch_weights), ulp, same, hotrow_weights.numel()
    )
