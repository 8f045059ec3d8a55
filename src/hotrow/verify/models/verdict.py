"""Whether a plain and a converted run gave the same: bit for bit, or shown to be rounding."""

from __future__ import annotations

import dataclasses

import torch
from torch import Tensor, nn

from hotrow.inputs.text import elide, told
from hotrow.verify.agreement import Agreement, Verdict
from hotrow.verify.models.splice import Splice, compared
from hotrow.verify.models.trial import Trial

_BY_BADNESS: tuple[Verdict, ...] = "bitwise", "zeros", "rounding", "unsure", "different"


def held(
    trial: Trial,
    expected: dict[str, Tensor],
    results: dict[str, Tensor],
    tables: tuple[tuple[str, bool], ...],
    scales: dict[str, float],
) -> tuple[list[Agreement], list[str]]:
    """One agreement for each result, and what is known of the cause where they differ."""
    missing = torch.zeros(0)
    names = list(dict.fromkeys([*expected, *results]))
    # A weight nothing was selected of may have no gradient, or one of zeros.
    pairs = {name: (expected.get(name, missing), results.get(name, missing)) for name in names}
    for name, (a, b) in pairs.items():
        if name.startswith("gradient") and (name in expected) != (name in results):
            there = a if name in expected else b
            pairs[name] = (there, torch.zeros_like(there))
    found = [compared(name, a, b) for name, (a, b) in pairs.items()]
    if all(each.verdict in ("bitwise", "zeros") for each in found):
        return found, []
    notes = _poison(trial.original)
    again = trial.plain().results()
    if any(
        name not in again or compared(name, expected[name], again[name]).verdict != "bitwise"
        for name in expected
    ):
        notes.append(
            "the plain model does not repeat itself: two runs of it with one seed differ as well"
        )
        return [_changed(each, "unsure") for each in found], notes
    splice = Splice()
    side = trial.converted(tables)
    try:
        spliced = side.results(splice)
    except Exception as error:
        spliced = {}
        said = elide(told(error), 200)
        notes.append(f"the products could not be put back in their places to tell: {said}")
    parameters = dict(side.model.named_parameters())
    wrong = [each for each in splice.found if each.verdict == "different"]
    proven = bool(spliced) and all(each.equal for each in splice.found)
    notes += [f"{each.what}: the look-up and the product are {each}" for each in wrong[:3]]
    judged = []
    for each in found:
        name = each.what
        if each.verdict in ("bitwise", "zeros"):
            judged.append(each)
            continue
        bound = None
        parameter = parameters.get(name.removeprefix("gradient of "))
        if parameter is not None and name in expected and name.startswith("gradient of "):
            bound = splice.bound_of(parameter, expected[name])
        put_back = spliced.get(name, missing)
        rest = compared(name, pairs[name][0], put_back, bound)
        # Half of the digits: beyond it something is wrong, or makes too much of rounding.
        unit = _unit(pairs[name][0])  # an integer is not rounded
        tolerated = (max(splice.unit, unit) if unit else 0.0) ** 0.5
        near = each.max_error <= tolerated * scales.get(name, 0.0)
        if proven and rest.equal:
            judged.append(_changed(each, "rounding" if near else "unsure"))
        else:
            unsure = near and not wrong
            judged.append(_changed(each, "unsure" if unsure else "different"))
    return judged, notes


def _unit(values: Tensor) -> float:
    exact = not (values.is_floating_point() or values.is_complex())
    return 0.0 if exact else torch.finfo(values.dtype).eps


def _changed(agreement: Agreement, verdict: Verdict) -> Agreement:
    return dataclasses.replace(agreement, verdict=verdict)


def worse(*several: list[Agreement]) -> tuple[Agreement, ...]:
    """Of the agreements on each result, the worse."""
    by_name: dict[str, list[Agreement]] = {}
    for each in (agreement for agreements in several for agreement in agreements):
        by_name.setdefault(each.what, []).append(each)
    return tuple(
        max(alike, key=lambda each: (_BY_BADNESS.index(each.verdict), -each.bitwise))
        for alike in by_name.values()
    )


def _poison(model: nn.Module) -> list[str]:
    for name, parameter in model.named_parameters():
        if not parameter.isfinite().all():
            return [
                f"{name} holds inf or NaN: 0 x inf is NaN, so in a matmul it reaches every output; "
                "a look-up reads only the rows it selects"
            ]
    return []
