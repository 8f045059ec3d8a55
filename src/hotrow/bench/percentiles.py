"""Medians and percentiles of times."""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def percentiles(milliseconds: Sequence[float]) -> dict[str, float]:
    """Return the median and the 20th and 80th percentiles, rounded to five significant digits."""
    return {f"{name}_ms": value for name, value in _percentiles(milliseconds).items()}


def turn_ratios(a: Sequence[Sequence[float]], b: Sequence[Sequence[float]]) -> dict[str, float]:
    """Divide a's median time by b's for each turn; return percentiles of these ratios."""
    pairs = zip(a, b, strict=True)
    return _percentiles([statistics.median(x) / statistics.median(y) for x, y in pairs])


def _percentiles(values: Sequence[float]) -> dict[str, float]:
    low, *_, high = statistics.quantiles(values, n=5, method="inclusive")
    named = {"median": statistics.median(values), "p20": low, "p80": high}
    return {name: float(f"{value:.5g}") for name, value in named.items()}
