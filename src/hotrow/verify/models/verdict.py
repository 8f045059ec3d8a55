"""Decide whether two runs are equal bit for bit, or equal within rounding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from hotrow.inputs.text import elide, one_line
from hotrow.verify.agreement import Agreement, Bound, Verdict
from hotrow.verify.models.results import describe_difference
from hotrow.verify.models.splice import ProductSplice, compare_any_tensors
from hotrow.verify.models.trial import Trial
from hotrow.verify.models.truth import is_as_close, run_in_float64

_VERDICTS_BY_SEVERITY: tuple[Verdict, ...] = "bitwise", "zeros", "rounding", "unsure", "different"


def judge_results(
    trial: Trial,
    expected: dict[str, Tensor],
    results: dict[str, Tensor],
    tables: tuple[tuple[str, bool], ...],
    magnitudes: dict[str, float],
) -> tuple[list[Agreement], list[str]]:
    """Return an agreement for each result, and notes on the causes of differences."""
    state = trial.state

    def find(found: dict[str, Tensor], name: str) -> Tensor | None:
        """Return the result, or the value before the run if the run did not change it."""
        value = found.get(name)
        return state.get(name) if value is None else value

    pairs = {name: (find(expected, name), find(results, name)) for name in {**expected, **results}}
    agreements = [_compare_results(name, a, b) for name, (a, b) in pairs.items()]
    missing = {name for name, pair in pairs.items() if any(each is None for each in pair)}
    if all(each.verdict in ("bitwise", "zeros") for each in agreements):
        return agreements, []
    described = (describe_difference(name, *pair) for name, pair in pairs.items())
    notes = [elide(text, 200) for text in described if text is not None][:3]
    notes += _find_non_finite(trial.model)
    repeated = trial.make_plain().compute_results()
    varying = [
        name
        for name in {**expected, **repeated}
        if _compare_results(name, find(expected, name), find(repeated, name)).verdict != "bitwise"
    ]
    if varying:
        names = f"{', '.join(varying[:3])}{', …' if len(varying) > 3 else ''}"
        notes.append(
            "the plain model is not deterministic: two of its runs with the same seed also differ "
            f"({names})"
        )
        certain = missing.difference(varying)
        return [
            each if each.name in certain else _with_verdict(each, "unsure") for each in agreements
        ], notes
    splice = ProductSplice()
    side = trial.make_converted(tables)
    try:
        spliced = side.compute_results(splice)
    except Exception as error:
        spliced = {}
        reason = elide(one_line(error), 200)
        notes.append(f"the run with the original one-hot products failed: {reason}")
    parameters = dict(side.model.named_parameters())
    failed = [each for each in splice.agreements if each.verdict == "different"]
    proven = bool(spliced) and all(each.equal for each in splice.agreements)
    notes += [f"{each.name}, lookup against product: {each}" for each in failed[:3]]
    judgements = []
    for each in agreements:
        name = each.name
        if each.verdict in ("bitwise", "zeros") or name in missing:
            judgements.append(each)
            continue
        bound = None
        parameter = parameters.get(name.removeprefix("gradient of "))
        if parameter is not None and name in expected and name.startswith("gradient of "):
            bound = splice.gradient_bound(parameter, expected[name])
        remainder = _compare_results(name, pairs[name][0], find(spliced, name), bound)
        # A difference in more than half of the digits is an error, or strongly amplified rounding.
        epsilon = _epsilon_of(pairs[name][0])  # 0 for integers, whose sums are exact
        tolerated = (max(splice.epsilon, epsilon) if epsilon else 0.0) ** 0.5
        is_near = each.max_error <= tolerated * magnitudes.get(name, 0.0)
        if proven and remainder.equal:
            judgements.append(_with_verdict(each, "rounding" if is_near else "unsure"))
        else:
            unsure = is_near and not failed
            judgements.append(_with_verdict(each, "unsure" if unsure else "different"))
    if not failed and any(each.verdict == "unsure" for each in judgements):
        truths, reason = run_in_float64(trial)
        if reason:
            notes.append(f"a float64 run, which might explain the differences, failed: {reason}")
        for i, each in enumerate(judgements):
            if each.verdict == "unsure" and is_as_close(truths.get(each.name), *pairs[each.name]):
                judgements[i] = _with_verdict(each, "rounding")
                notes.append(
                    f"{each.name}: no rounding bound is known, but the converted model is as close "
                    "to a float64 run as the plain model"
                )
    return judgements, notes


def _compare_results(
    name: str, a: Tensor | None, b: Tensor | None, bound: Bound | None = None
) -> Agreement:
    """Compare like `compare_any_tensors`; a missing result differs from every result."""
    if a is not None and b is not None:
        return compare_any_tensors(name, a, b, bound)
    count = max((each.numel() for each in (a, b) if each is not None), default=0)
    return Agreement(name, count, 0, "different", 0, float("inf"), None)


def _epsilon_of(values: Tensor | None) -> float:
    is_rounded = values is not None and (values.is_floating_point() or values.is_complex())
    return torch.finfo(values.dtype).eps if values is not None and is_rounded else 0.0


def _with_verdict(agreement: Agreement, verdict: Verdict) -> Agreement:
    return dataclasses.replace(agreement, verdict=verdict)


def merge_agreements(*groups: list[Agreement]) -> tuple[Agreement, ...]:
    """For each result, return the agreement whose verdict is worst."""
    by_name: dict[str, list[Agreement]] = {}
    for each in (agreement for agreements in groups for agreement in agreements):
        by_name.setdefault(each.name, []).append(each)
    return tuple(
        max(
            candidates,
            key=lambda each: (_VERDICTS_BY_SEVERITY.index(each.verdict), -each.bitwise_count),
        )
        for candidates in by_name.values()
    )


def _find_non_finite(model: nn.Module) -> list[str]:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return [
                f"{name} contains inf or NaN. 0 x inf is NaN, so a matmul spreads NaN to every "
                "output; a lookup reads only the selected rows"
            ]
    return []
