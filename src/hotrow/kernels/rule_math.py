"""The operations that a rule's update may use, for torch tensors.

An update is one function of `(w, g, slots, entry, flags)`. In Python these operations call torch,
so an update runs on tensors of gathered rows in any dtype and on any device, exactly like the
single-tensor code of torch.optim. `cpu/rule_math.py` defines the same operations for numba over
scalars, with the rounding of torch's CPU kernels. Which of torch's operations are one fused
multiply-add was measured; `tests/optim/test_rules.py` compares every rule with torch.

Scalars (`alpha`, `weight`, `value`) are Python floats here, as in torch.optim.
"""

from __future__ import annotations

import torch
from torch import Tensor


def axpy(a: Tensor, b: Tensor, alpha: float) -> Tensor:
    """`a + alpha * b`, rounded once: `a.add(b, alpha=alpha)`."""
    return a.add(b, alpha=alpha)


def lerp(a: Tensor, b: Tensor, weight: float) -> Tensor:
    """`a + weight * (b - a)`: a subtraction, then one fused multiply-add."""
    return a.lerp(b, weight)


def addcmul(a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
    """`a + (value * b) * c`, the last two operations fused."""
    return a.addcmul(b, c, value=value)


def addcdiv(a: Tensor, b: Tensor, c: Tensor, value: float) -> Tensor:
    """`a + (value * b) / c`, each operation rounded."""
    return a.addcdiv(b, c, value=value)


def sqrt(a: Tensor) -> Tensor:
    """The square root. torch's CPU kernel uses MKL, up to 1 ulp off; numba's is exactly rounded."""
    return a.sqrt()


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger of two values; NaN if either is NaN."""
    return torch.maximum(a, b)


def scaled_reciprocal(scalar: float, a: Tensor) -> Tensor:
    """`scalar / a`, computed by torch as `a.reciprocal() * scalar`: two roundings."""
    return scalar / a


def clamp(a: Tensor, low: float, high: float) -> Tensor:
    """`a` limited to `low` .. `high`; NaN stays NaN."""
    return a.clamp(low, high)


def sign(a: Tensor) -> Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return a.sign()


def select_by_sign(a: Tensor, negative: float, zero: float, positive: float) -> Tensor:
    """`negative`, `zero` or `positive`, by the sign of `a`; `zero` for NaN."""
    selected = torch.full_like(a, zero)
    selected[a > 0] = positive
    selected[a < 0] = negative
    return selected


def zero_where_negative(a: Tensor, b: Tensor) -> Tensor:
    """0 where `a` is negative, `b` elsewhere."""
    return torch.where(a < 0, 0.0, b)
