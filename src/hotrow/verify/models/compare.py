"""What converting a model saves: run plain and converted on the same inputs, and measured."""

from __future__ import annotations

import inspect
import platform
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import nn

from hotrow.cli.model_report import lines
from hotrow.conversion.convert import Finding, convert
from hotrow.conversion.modules import way_of
from hotrow.errors import HotrowError
from hotrow.inputs.text import told
from hotrow.table.parameter import Table
from hotrow.verify.agreement import Agreement
from hotrow.verify.measure import Measured, in_turn, peak_memory
from hotrow.verify.models.products import Count, Counted
from hotrow.verify.models.trial import Inputs, Side, Trial, looked_up_in
from hotrow.verify.models.verdict import held, worse

Progress = Callable[[str, int, int], None]

_ROUNDS = 7


@dataclass(frozen=True)
class Spent:
    """What one kind of run takes, plain and converted.

    Attributes:
        what: "forward", or "forward and gradient".
        plain_multiplications: by the one-hots that became look-ups, while they were none.
        converted_multiplications: what is left of them.
        plain: time and memory of the plain model, as measured.
        converted: the same of the converted one.
    """

    what: str
    plain_multiplications: int
    converted_multiplications: int
    plain: Measured
    converted: Measured

    @property
    def ratio(self) -> float:
        """How many times longer the plain model took, median against median."""
        return self.plain.median_ms / self.converted.median_ms

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON. Units are in the names."""
        return {
            "what": self.what,
            "plain": _measured(self.plain_multiplications, self.plain),
            "converted": _measured(self.converted_multiplications, self.converted),
            "time_ratio": self.ratio,
        }


def _measured(multiplications: int, work: Measured) -> dict[str, Any]:
    return {
        "one_hot_multiplications": multiplications,
        "measured_bytes_peak": work.bytes_peak,
        "median_ms": work.median_ms,
        "runs_ms": list(work.milliseconds),
    }


@dataclass(frozen=True, eq=False)
class Saved:
    """What `saved` found; true if both models are equal, and prints as a report.

    Attributes:
        title: what was compared.
        inputs: the inputs, in words.
        seed: of both runs, and of the outputs' gradients.
        training: whether the model was in training mode.
        tables: weights that are looked up in, and were made tables, as a first step does.
        findings: what was converted and what was left, where, and why.
        agreements: one for each output, gradient, and buffer that the run changed.
        spent: products, memory and time; of the forward run alone where it has no gradient.
        notes: why they differ or it cannot be told, where the cause is known.
    """

    title: str
    inputs: str
    seed: int
    training: bool
    tables: tuple[str, ...]
    findings: tuple[Finding, ...]
    agreements: tuple[Agreement, ...]
    spent: tuple[Spent, ...]
    notes: tuple[str, ...]

    @property
    def equal(self) -> bool:
        """Whether outputs and gradients are the same numbers."""
        return all(agreement.equal for agreement in self.agreements)

    @property
    def verdict(self) -> str:
        """The one line to remember."""
        verdicts = {agreement.verdict for agreement in self.agreements}
        if "different" in verdicts:
            return "NOT equal: the converted model gives different numbers here"
        if "unsure" in verdicts:
            return "CANNOT TELL: no bound on rounding says whether they are the same"
        if not any(finding.converted for finding in self.findings):
            return "equal: nothing was converted, so nothing is saved"
        if "rounding" in verdicts:
            return "equal within rounding: the same sums, none of the zeros"
        return "equal: the same numbers, none of the zeros"

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        return "\n".join(line.rstrip() for line in lines(self))

    __repr__ = __str__

    def to_dict(self) -> dict[str, Any]:
        """Every figure, for JSON. Units are in the names."""
        return {
            "title": self.title,
            "equal": self.equal,
            "verdict": self.verdict,
            "inputs": self.inputs,
            "seed": self.seed,
            "training": self.training,
            "tables": list(self.tables),
            "findings": [asdict(finding) for finding in self.findings],
            "agreements": [{"what": found.what} | found.to_dict() for found in self.agreements],
            "spent": [each.to_dict() for each in self.spent],
            "notes": list(self.notes),
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def saved(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    title: str | None = None,
    to: str = "lookup",
    seed: int = 0,
    seconds: float = 2.0,
    progress: Progress | None = None,
) -> Saved:
    """Run a model as it is and converted, on the same inputs; compare and measure.

    Two copies of the model run, one as it is and one that `hotrow.convert` has converted, with the
    same random numbers, forward, and backward from a gradient of the outputs that is drawn from the
    integers. Every output, every gradient of a parameter, and every buffer that the run changed is
    compared: as converted, and again with the weights that are looked up in as tables, as an
    optimizer of `hotrow.optim` has them from its first step on. That is also what is measured.

    Equal means: the same bits; or the same numbers but for the sign of a zero; or within rounding,
    in two steps. Each product that became a look-up is no further from it than adding the same
    terms in another order can bring it. And with the products put back in their places, all the
    rest of the model gives the same bits, the gradients of weights but for the order of their
    terms. Where that cannot be shown (a computed weight's own parameters, a model that does not
    repeat itself, a step that makes much of a little rounding), the verdict is that it cannot tell.

    Args:
        model: a module, which is copied and not changed, or what makes one.
        inputs: what it is called with: a tensor, a tuple or list of positional arguments, or a
            dict of keyword arguments.
        title: what to call it.
        to: which way it is converted, as for `hotrow.convert`.
        seed: of both runs, and of the outputs' gradient.
        seconds: how long to go on timing each kind of run: one round at least, 7 at most, both
            models in turn.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        HotrowError: not a module, a model that is converted already or cannot be copied, inputs
            that it does not take, or outputs without a tensor.
        RuntimeError: the converted model fails where the plain one does not, a fault of hotrow's.

    Cost: a dozen runs of each, and three or four copies of the model.

    >>> class Policy(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(16, 4)
    ...     def forward(self, states):
    ...         return self.linear(nn.functional.one_hot(states, 16).float())
    >>> found = saved(Policy, torch.tensor([3, 1, 2]), seconds=0)
    >>> print(found.verdict)
    equal: the same numbers, none of the zeros
    >>> found.spent[0].plain_multiplications, found.spent[0].converted_multiplications
    (192, 0)
    """
    tell = progress or (lambda what, done, total: None)
    steps = 5 + 2 * (1 + _ROUNDS)
    tell("making the model", 0, steps)
    name = title or ""
    try:
        with torch.random.fork_rng():
            torch.manual_seed(seed)
            original = model if isinstance(model, nn.Module) else model()
            name = name or type(original).__name__
            _check(original, name)
            trial = Trial(original, name, Inputs.of(inputs), seed, to)
            return _saved(trial, tell, steps, seconds)
    except Exception as error:
        if not _lacks_memory(error):
            raise
        raise HotrowError(
            f"the system refused the memory that {name} needs on these inputs, written out",
            fix="give smaller inputs",
        ) from None


def _saved(trial: Trial, tell: Progress, steps: int, seconds: float) -> Saved:
    tell("plain", 1, steps)
    plain = trial.plain()
    try:
        expected = plain.results()
    except Exception as error:
        if isinstance(error, HotrowError) or _lacks_memory(error):
            raise
        raise HotrowError(
            f"{trial.name} cannot be run on these inputs ({trial.given.described}): {told(error)}",
            fix=f"give what it takes{_signature(trial.original)}",
        ) from error
    if not expected:
        raise HotrowError(
            f"{trial.name} returns no tensor, but {plain.returned}, so there is nothing to compare",
            fix="compare a module that returns tensors, or tuples, dicts or dataclasses of them",
        )
    tell("converted", 2, steps)
    first = trial.converted()
    with _Fault():
        count = Count()
        results = first.results(count)
        tables = looked_up_in(first.model)
        found = [held(trial, expected, results, (), plain.scales)]
        tell("comparing", 3, steps)
        if tables:
            del first
            first = trial.converted(tables)
            results = first.results()
            found.append(held(trial, expected, results, tables, plain.scales))
    del results
    agreements = worse(*(agreements for agreements, _ in found))
    notes = tuple(dict.fromkeys(note for _, several in found for note in several))
    spent = []
    for index, gradient in enumerate((False, True)):
        if plain.runs(gradient):
            done = 4 + index * (1 + _ROUNDS)
            spent.append(_measure(plain, first, gradient, count, tell, done, steps, seconds))
    tell("done", steps, steps)
    return Saved(
        trial.name,
        trial.given.described,
        trial.seed,
        trial.original.training,
        tuple(name for name, _ in tables),
        tuple(convert.report(first.model).findings),  # type: ignore[attr-defined]
        agreements,
        tuple(spent),
        notes,
    )


def _lacks_memory(error: Exception) -> bool:
    refused = "can't allocate memory" in str(error)
    return refused or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _check(model: Any, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise HotrowError(
            f"the model is a {type(model).__name__}, and no torch.nn.Module",
            fix="give a module, or a function without arguments that returns one",
        )
    for path, module in model.named_modules():
        tables = [each for each in module.parameters(recurse=False) if isinstance(each, Table)]
        if way_of(module) is not None or tables:
            raise HotrowError(
                f"{name} is converted already, at {path or 'the model itself'}",
                fix="give it as it was before hotrow.convert",
            )


def _signature(model: nn.Module) -> str:
    try:
        return f", forward{inspect.signature(model.forward)}"
    except (TypeError, ValueError):
        return ""


class _Fault(AbstractContextManager[None]):
    """What the converted model raises where the plain one did not is a fault of hotrow's."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not _lacks_memory(error):
            raise RuntimeError(
                f"the converted model raises what the plain one does not: {told(error)}"
            ) from error


def _measure(
    plain: Side,
    converted: Side,
    gradient: bool,
    count: Count,
    tell: Progress,
    done: int,
    steps: int,
    seconds: float,
) -> Spent:
    what = "forward and gradient" if gradient else "forward"
    tell(f"memory, {what}", done, steps)
    peaks = []
    for side in (plain, converted):
        with _Fault() if side is converted else nullcontext():
            side.work(gradient)  # what is made once is not counted
            side.clear()
            _kept = side.state()  # the profiler warns of what goes that was there before
            result, peak = peak_memory(lambda side=side: side.work(gradient))  # type: ignore[misc]
            del result
            side.clear()
            peaks.append(peak)
    times = []
    works = [lambda: _cleared(plain, gradient), lambda: _cleared(converted, gradient)]
    for each in in_turn(works, seconds, _ROUNDS):
        times.append(each)
        tell(f"timing, {what}", done + len(times), steps)
    of_plain, of_converted = zip(*times, strict=True)

    def products(counted: Counted) -> int:
        return counted.forward + (counted.gradient if gradient else 0)

    return Spent(
        what,
        products(count.plain),
        products(count.converted),
        Measured(of_plain, peaks[0]),
        Measured(of_converted, peaks[1]),
    )


def _cleared(side: Side, gradient: bool) -> None:
    side.clear()
    side.work(gradient)
