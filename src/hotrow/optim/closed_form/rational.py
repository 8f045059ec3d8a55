"""Rational numbers with torch's names: a rule runs on them without any rounding."""

from __future__ import annotations

import math
from fractions import Fraction


class Exact:
    """A number with the operations of `kernels/ops.py` that linear rules are written in.

    Only a root is rounded; whatever it divides is 0 in a rule that is linear.
    """

    def __init__(self, value: float | Fraction) -> None:
        self.value = Fraction(value)

    def __eq__(self, other: object) -> bool:
        return self.value == (other.value if isinstance(other, Exact) else other)

    __hash__ = None  # type: ignore[assignment]

    def __neg__(self) -> Exact:
        return Exact(-self.value)

    def __add__(self, other: Exact) -> Exact:
        return Exact(self.value + other.value)

    def __sub__(self, other: Exact) -> Exact:
        return Exact(self.value - other.value)

    def __mul__(self, other: Exact) -> Exact:
        return Exact(self.value * other.value)

    def __truediv__(self, other: Exact) -> Exact:
        return Exact(self.value / other.value)

    def add(self, b: Exact, alpha: Exact) -> Exact:
        """`self + alpha * b`."""
        return self + alpha * b

    def lerp(self, b: Exact, weight: Exact) -> Exact:
        """`self + weight * (b - self)`."""
        return self + weight * (b - self)

    def addcmul(self, b: Exact, c: Exact, value: Exact) -> Exact:
        """`self + value * b * c`."""
        return self + value * b * c

    def addcdiv(self, b: Exact, c: Exact, value: Exact) -> Exact:
        """`self + value * b / c`."""
        return self + value * b / c

    def sqrt(self) -> Exact:
        """The root, of the size where it is negative."""
        return Exact(math.sqrt(abs(self.value)))
