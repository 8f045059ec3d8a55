"""The operations a rule is written in, over torch tensors.

A rule is one function over `(w, g, slots, entry, flags)`. Called from Python these operations are
torch's own, so a rule runs on tensors of gathered rows in any dtype, on any device, exactly as
torch.optim's single-tensor code would. `cpu/rule_math.py` gives numba the same operations over
scalars, with the roundings that torch's CPU kernels have: which of them are one fused multiply-add
was measured, and `tests/optim/test_rules.py` compares each to torch.

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
    """The square root. torch's float32 one comes from MKL and may be 1 ulp off; numba's is not."""
    return a.sqrt()


def maximum(a: Tensor, b: Tensor) -> Tensor:
    """The larger; NaN if either is."""
    return torch.maximum(a, b)


def scaled_reciprocal(scalar: float, a: Tensor) -> Tensor:
    """`scalar / a`, which torch computes as `a.reciprocal() * scalar`."""
    return scalar / a


def clamp(a: Tensor, low: float, high: float) -> Tensor:
    """`a` between `low` and `high`; NaN stays."""
    return a.clamp(low, high)


def sign(a: Tensor) -> Tensor:
    """-1, 0 or 1; 0 for NaN."""
    return a.sign()


def select_by_sign(a: Tensor, negative: float, zero: float, positive: float) -> Tensor:
    """One of three scalars by the sign of `a`; `zero` for NaN."""
    selected = torch.full_like(a, zero)
    selected[a > 0] = positive
    selected[a < 0] = negative
    return selected


def zero_where_negative(a: Tensor, b: Tensor) -> Tensor:
    """`b`, but 0 where `a` is negative."""
    return torch.where(a < 0, 0.0, b)
