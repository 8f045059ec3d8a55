"""The operations that a rule's update may use, for torch tensors.

An update is one function of `(w, g, slots, entry, flags)`. In Python these operations call torch,
so an update runs on tensors of gathered rows, in any dtype and on any device. The results equal
those of torch.optim's single-tensor code. `cpu/rule_math.py` defines the same operations for numba
on scalars, with the rounding of torch's CPU kernels. Measurements showed which torch operations use
a fused multiply-add. `tests/optim/test_rules.py` compares every rule with torch.

Scalars (`alpha`, `weight`, `value`) are Python floats here, as in torch.optim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def axpy(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """Return `a + alpha * b`, rounded once."""
    return a.add(b, alpha=alpha)


def lerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """Return `a + weight * (b - a)`: a subtraction, then a fused multiply-add."""
    return a.lerp(b, weight)


def addcmul(a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
    """Return `a + (value * b) * c`, with the last two operations fused."""
    return a.addcmul(b, c, value=value)


def addcdiv(a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
    """Return `a + (value * b) / c`, rounding after each operation."""
    return a.addcdiv(b, c, value=value)


def sqrt(a: Tensor) -> Tensor:
    """Return the square root.

    The result of numba's version is correctly rounded; torch's result on the CPU (MKL) may be off
    by 1 ulp.
    """
    return a.sqrt()


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """Return the larger of two values, or NaN if either is NaN."""
    return torch.maximum(a, b)


def scaled_reciprocal(scalar: float, a: Tensor) -> Tensor:
    """Return `scalar / a`. torch computes `a.reciprocal() * scalar`, which rounds twice."""
    return scalar / a


def clamp(a: Tensor, low: float, high: float) -> Tensor:
    """Limit `a` to the range from `low` to `high`; NaN stays NaN."""
    return a.clamp(low, high)


def sign(a: Tensor) -> Tensor:
    """Return the sign of `a`: -1, 0 or 1, and 0 for NaN."""
    return a.sign()


def select_by_sign(a: Tensor, negative: float, zero: float, positive: float) -> Tensor:
    """Return `negative`, `zero` or `positive` depending on the sign of `a`; `zero` for NaN."""
    selected = torch.full_like(a, zero)
    selected[a > 0] = positive
    selected[a < 0] = negative
    return selected


def zero_where_negative(a: Tensor, b: Tensor) -> Tensor:
    """Return 0 where `a` is negative, and `b` elsewhere."""
    return torch.where(a < 0, 0.0, b)
