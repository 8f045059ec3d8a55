"""Rational numbers with tensor methods, so that a rule can run on them without rounding."""

from __future__ import annotations

import math
from fractions import Fraction


class Rational:
    """A rational number with the operations from `kernels/rule_math.py` that linear rules use.

    Only the square root is rounded. This rounding is harmless, because the only number that linear
    rules divide by the root is 0.
    """

    def __init__(self, value: float | Fraction) -> None:
        self.value = Fraction(value)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Rational) else other)

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Rational:
        return Rational(-self.value)

    def __add__(self, other: Rational) -> Rational:
        return Rational(self.value + other.value)

    def __sub__(self, other: Rational) -> Rational:
        return Rational(self.value - other.value)

    def __mul__(self, other: Rational) -> Rational:
        return Rational(self.value * other.value)

    def __truediv__(self, other: Rational) -> Rational:
        return Rational(self.value / other.value)

    def add(self, b: Rational, alpha: Rational) -> Rational:
        """Return `self + alpha * b`."""
        return self + alpha * b

    def lerp(self, b: Rational, weight: Rational) -> Rational:
        """Return `self + weight * (b - self)`."""
        return self + weight * (b - self)

    def addcmul(self, b: Rational, c: Rational, value: Rational) -> Rational:
        """Return `self + value * b * c`."""
        return self + value * b * c

    def addcdiv(self, b: Rational, c: Rational, value: Rational) -> Rational:
        """Return `self + value * b / c`."""
        return self + value * b / c

    def sqrt(self) -> Rational:
        """Return the square root of the absolute value."""
        return Rational(math.sqrt(abs(self.value)))
