"""Compare the results, time and memory of a model and its converted copy."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from hotrow.conversion.classes import direction_of
from hotrow.conversion.convert import convert
from hotrow.errors import HotrowError
from hotrow.inputs.text import message_of, one_line
from hotrow.table.parameter import Table
from hotrow.verify.measure import (
    CPU,
    Measurement,
    Progress,
    measure_peak_memory,
    time_interleaved,
)
from hotrow.verify.models.comparison import ModelComparison, ModelCost
from hotrow.verify.models.inputs import Inputs
from hotrow.verify.models.products import Multiplications, ProductCounter
from hotrow.verify.models.trial import CopyCheck, ModelCopy, Trial, find_lookup_weights, seeded
from hotrow.verify.models.verdict import judge_results, merge_agreements

_ROUNDS = 7
_MAX_PARTS = 8  # the maximum number of parts of the output that a note names


def compare_models(
    model: nn.Module | Callable[[], nn.Module],
    inputs: Any,
    *,
    title: str | None = None,
    to: str = "lookup",
    seed: int = 0,
    device: str | None = None,
    seconds: float = 2.0,
    progress: Progress | None = None,
) -> ModelComparison:
    """Compare a model with its converted copy on the same inputs, and measure their cost.

    A plain copy of the model and a copy converted by `hotrow.convert` both run forward and backward
    with the same random numbers. The gradients of the outputs are random integers. The function
    compares:

    - every output: tensors, numbers, numpy arrays and texts, also within containers and objects
      such as a `torch.distributions.Normal`. A note names each output that can't be compared.
    - every gradient. A gradient of zeros differs from a missing one, because optimizers skip a
      parameter without a gradient.
    - every parameter and buffer that either run changed, every such tensor in an attribute of a
      module, and every such value in the inputs.

    It then repeats the comparison with the looked-up weights stored as tables, as in training with
    `hotrow.optim`. It measures the time and memory of the converted model with these tables.

    Results are equal if they have the same bits, or differ only in the sign of zeros. Results are
    equal within rounding if both of these conditions hold:

    - Each lookup, and each other product of a one-hot with a dense tensor, differs from the dense
      product by at most the rounding bound for adding the same terms in another order.
    - With the dense products in place of those computed from the ids, the converted model's results
      have the same bits as the plain model's. Only sums in the weights' gradients may differ, by at
      most the rounding bound.

    If no rounding bound is known, for example for a sum of weighted one-hots over the batch, the
    plain model also runs in float64. Results are then equal within rounding if the error of each
    value exceeds the plain model's largest error by at most 2 ulp, and a note says so.

    Otherwise, a small difference is inconclusive. This happens, for example, if the model doesn't
    run in float64, is not deterministic, or amplifies rounding.

    Args:
        model: a module, or a function that returns a module. The module is copied, so it doesn't
            change.
        inputs: a tensor, a tuple or list of positional arguments, or a dict of keyword arguments.
        title: the name of the model in the report.
        to: the direction of the conversion, as for `hotrow.convert`.
        seed: the seed of torch, numpy and Python in all runs, and of the outputs' gradients.
        device: the device to run on; by default, the device of the model's first parameter. The
            inputs are also moved to this device.
        seconds: the time limit for each kind of run (forward only, and forward with gradient). At
            least 1 and at most 7 rounds run.
        progress: a function called with (the current activity, steps done, total steps).

    Returns:
        A `ModelComparison`. It is truthy if both models give equal results.

    Raises:
        HotrowError: the model is not a module, is already converted, can't be copied, rejects the
            inputs, or returns no tensor and changes none.
        RuntimeError: only the converted model fails. This is an internal error in hotrow.

    Cost: a dozen runs of each model, and four or five copies of the model.

    >>> class Policy(nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.linear = nn.Linear(16, 4)
    ...     def forward(self, states):
    ...         return self.linear(nn.functional.one_hot(states, 16).float())
    >>> comparison = compare_models(Policy, torch.tensor([3, 1, 2]), seconds=0)
    >>> print(comparison.verdict)
    equal: the same numbers, none of the zeros
    >>> comparison.costs[0].plain_multiplications, comparison.costs[0].converted_multiplications
    (192, 0)
    """
    report = progress or (lambda what, done, total: None)
    steps = 5 + 2 * (1 + _ROUNDS)
    report("creating the model", 0, steps)
    name = title or ""
    try:
        with seeded(seed):
            original = model if isinstance(model, nn.Module) else model()
            name = name or type(original).__name__
            _check_model(original, name)
            trial = Trial(original, name, Inputs.of(inputs), seed, to, device)
            return _compare_trial(trial, report, steps, seconds)
    except SystemExit as stop:  # its code would become hotrow's exit code
        raise HotrowError(
            f"{name} exits Python: {one_line(stop)}", fix="remove sys.exit() or exit() from it"
        ) from stop
    except Exception as error:
        if not _is_out_of_memory(error):
            raise
        raise HotrowError(
            f"out of memory: {name} with dense one-hots needs more memory than is free",
            fix="pass smaller inputs",
        ) from None


def _compare_trial(trial: Trial, report: Progress, steps: int, seconds: float) -> ModelComparison:
    report("plain", 1, steps)
    plain = trial.make_plain()
    try:
        expected = plain.compute_results(CopyCheck(trial, plain))
    except Exception as error:
        if isinstance(error, HotrowError) or _is_out_of_memory(error):
            raise
        raise HotrowError(
            f"{trial.name} fails on these inputs ({trial.inputs.description}): {one_line(error)}",
            fix=_fix_for(error, trial.model),
        ) from error
    if all(name.startswith("text ") for name in expected):
        raise HotrowError(
            f"{trial.name} returns a {plain.output_type} without tensors, so there is nothing to "
            "compare",
            fix="compare a module that returns tensors, or tuples, dicts or dataclasses of tensors",
        )
    outputs = [each for name, each in expected.items() if name.startswith("output")]
    if outputs and not any(each.numel() for each in outputs):
        raise HotrowError(
            f"{trial.name} returns only empty tensors for these inputs "
            f"({trial.inputs.description}), so there is nothing to compare",
            fix="pass inputs with at least one element",
        )
    report("converted", 2, steps)
    converted = trial.make_converted()
    with _InternalErrors():
        counter = ProductCounter()
        results = converted.compute_results(counter)
        tables = find_lookup_weights(converted.model)
        judgements = [judge_results(trial, expected, results, (), plain.magnitudes)]
        not_compared = plain.not_compared | converted.not_compared
        report("comparing", 3, steps)
        if tables:
            del converted
            converted = trial.make_converted(tables)
            results = converted.compute_results()
            judgements.append(judge_results(trial, expected, results, tables, plain.magnitudes))
    del results
    agreements = merge_agreements(*(agreements for agreements, _ in judgements))
    notes = tuple(
        dict.fromkeys(note for _, judgement_notes in judgements for note in judgement_notes)
    )
    if plain.unnamed_count:
        count = plain.unnamed_count
        notes += (f"not compared: gradients of tensors outside of the model's modules ({count})",)
    if not_compared:
        parts = [f"{path} ({kind})" for path, kind in not_compared.items()]
        more = f" and {len(parts) - _MAX_PARTS} more" if len(parts) > _MAX_PARTS else ""
        notes += (
            f"parts of the output that cannot be compared: {', '.join(parts[:_MAX_PARTS])}{more}",
        )
    costs = []
    for index, gradient in enumerate((False, True)):
        try:
            with _RepetitionErrors():
                can_run = plain.can_run(gradient)
            if not can_run:
                continue
            cost = _measure_cost(
                plain,
                converted,
                gradient,
                counter if trial.to == "lookup" else None,
                report,
                4 + index * (1 + _ROUNDS),
                steps,
                seconds,
            )
        except _CannotRunAgain as error:
            note = f"the cost was not measured: when it runs again, {trial.name} fails: {error}"
            notes += (note,)
            break
        costs.append(cost)
    report("done", steps, steps)
    return ModelComparison(
        trial.name,
        trial.inputs.description,
        trial.seed,
        trial.model.training,
        tuple(name for name, _ in tables),
        tuple(convert.report(converted.model).findings),  # type: ignore[attr-defined]
        agreements,
        tuple(costs),
        notes,
        trial.to,
    )


def _is_out_of_memory(error: Exception) -> bool:
    refused = "can't allocate memory" in message_of(error)
    return refused or isinstance(error, MemoryError | torch.OutOfMemoryError)


def _check_model(model: Any, name: str) -> None:
    if not isinstance(model, nn.Module):
        raise HotrowError(
            f"the model has type {type(model).__name__}, but it must be a torch.nn.Module",
            fix="pass a module, or a function without arguments that returns a module",
        )
    if any(map(is_lazy, model.parameters())):
        raise HotrowError(
            f"{name} has lazy modules that have no parameters yet",
            fix="run the model once before the comparison",
        )
    for path, module in model.named_modules():
        tables = [each for each in module.parameters(recurse=False) if isinstance(each, Table)]
        if direction_of(module) is not None or tables:
            where = f"module {path!r}" if path else "the whole model"
            raise HotrowError(
                f"{name} is already converted ({where})",
                fix="pass a model that is not converted",
            )


def _fix_for(error: Exception, model: nn.Module) -> str:
    """Return what to do if the plain model raises this error."""
    dtypes = {each.dtype for each in model.parameters() if each.is_floating_point()}
    if _DTYPE_ERROR.search(message_of(error)) and dtypes - {torch.float32}:
        names = ", ".join(sorted(str(dtype).removeprefix("torch.") for dtype in dtypes))
        return (
            f"its parameters are {names}, but its code seems to fix another dtype, for example in "
            "F.one_hot(x, V).float(); write .to(z.dtype), where z is the tensor that the one-hot "
            "multiplies, or compare the model in float32"
        )
    return f"pass arguments that it accepts{_signature_text(model)}"


_DTYPE_ERROR = re.compile(r"\bdtype\b|scalar type|data type")


def _signature_text(model: nn.Module) -> str:
    try:
        return f": forward{inspect.signature(model.forward)}"
    except (TypeError, ValueError):
        return ""


class _InternalErrors(AbstractContextManager[None]):
    """Re-raise an exception from the converted model as an internal error."""

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        is_known = isinstance(error, HotrowError)  # the conversion does not support the model
        if isinstance(error, NotImplementedError):
            raise HotrowError(
                f"hotrow does not support this model: {one_line(error)}",
                fix="compare the model without this operation",
            ) from error
        if isinstance(error, Exception) and not (is_known or _is_out_of_memory(error)):
            raise RuntimeError(f"only the converted model raises {one_line(error)}") from error


class _CannotRunAgain(Exception):
    """The model works in a comparison, but fails when the same copy runs again."""


class _RepetitionErrors(AbstractContextManager[None]):
    """Re-raise an exception of repeated runs as `_CannotRunAgain`.

    Both copies have run equally often before, so the plain model fails first.
    """

    def __exit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, Exception) and not _is_out_of_memory(error):
            raise _CannotRunAgain(one_line(error)) from error


def _measure_cost(
    plain: ModelCopy,
    converted: ModelCopy,
    gradient: bool,
    counter: ProductCounter | None,
    report: Progress,
    done: int,
    steps: int,
    seconds: float,
) -> ModelCost:
    what = "forward and gradient" if gradient else "forward"
    report(f"memory, {what}", done, steps)
    peaks, device = [], next((each.device for each in plain.model.parameters()), CPU)
    sides = (plain, _RepetitionErrors()), (converted, _InternalErrors())
    for side, errors in sides:
        with errors:
            side.run(gradient)  # keep one-time allocations out of the measurement
            side.clear_gradients()
            _references = side.state_tensors()  # the profiler warns if these tensors are freed
            result, peak = measure_peak_memory(lambda side=side: side.run(gradient), device)  # type: ignore[misc]
            del result
            side.clear_gradients()
            peaks.append(peak)
    times = []
    works = [partial(_run_cleared, side, gradient, errors) for side, errors in sides]
    for each in time_interleaved(works, seconds, _ROUNDS, device):
        times.append(each)
        report(f"timing, {what}", done + len(times), steps)
    plain_times, converted_times = zip(*times, strict=True)

    def count_products(multiplications: Multiplications) -> int:
        return multiplications.forward + (multiplications.gradient if gradient else 0)

    return ModelCost(
        what,
        None if counter is None else count_products(counter.plain),
        None if counter is None else count_products(counter.converted),
        Measurement(plain_times, peaks[0]),
        Measurement(converted_times, peaks[1]),
    )


def _run_cleared(side: ModelCopy, gradient: bool, errors: AbstractContextManager[None]) -> None:
    side.clear_gradients()
    with errors:
        side.run(gradient)
