r"""The closed form of Adam, NAdam and RAdam, which makes many idle steps about as cheap as one.

Suppose a row was settled at step s with moments m and v, and has missed K steps since. Its k-th
missed step subtracts h_k b1^k m / (x y_k + eps) from w, with x = sqrt(v), y_k = b2^(k/2) c_k, and:

    Adam     h_k = lr / (1 - b1^t)                                c_k = 1 / sqrt(1 - b2^t)
    NAdam    h_k = lr mu_(t+1) / (1 - mu_1 ... mu_(t+1))          c_k = 1 / sqrt(1 - b2^t)
    RAdam    h_k = lr / (1 - b1^t) sqrt(1 - b2^t) r_t             c_k = 1
             h_k = lr / (1 - b1^t),  y_k = 0,  eps = 1            while rho_t <= 5

Let Q_k be the product of the decay factors of the first k missed steps. Then

    w_K = Q_K (w - m sum_k h_k b1^k / Q_k / (x y_k + eps)),   m_K = b1^K m,   v_K = b2^K v.

Expand around a center Y, with d_k = 1 - y_k / Y and p = x Y / (x Y + eps), 0 <= p <= 1:

    1 / (x y_k + eps) = 1 / (x Y + eps) * (1 + p d_k + (p d_k)^2 + ...).

The sum becomes a polynomial in p with coefficients T_j = sum_k h_k b1^k / Q_k d_k^j, which depend
on s but not on the row. The coefficients are stored for every s. A new step changes the
coefficients only for the last few hundred values of s, because b1^k becomes negligible.

The first ten coefficients are stored with a bound on the remainder. A row is fast-forwarded if the
bound is less than half an ulp of the change in w, or less than half an ulp of w in every column.
Otherwise, one step is replayed to make the remaining change smaller, and the bound is checked
again. At most a few dozen steps are replayed. Such replays occur in the first few hundred steps of
a run, and in float64 if b2 is far from 1.

With amsgrad, x is the square root of the largest v, and y_k = c_k. Idle steps don't change the
largest v unless it is less than v, for example after the caller has reset it, or v is NaN. Then one
step is replayed, which makes it at least v, or NaN.
With coupled decay, an idle row has a nonzero gradient. The series doesn't include this gradient, so
every missed step is replayed.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.program import FastForward
from hotrow.kernels.rule_math import addcmul, sqrt
from hotrow.optim.closed_form.base import Coefficients, to_columns
from hotrow.optim.closed_form.sums import MIN_SHRINK, MissedStepSums

TERMS = 10
# The columns after the terms contain the bound on the remainder, Y, and the log of the product of
# all decay factors before the step.
REMAINDER, CENTER, LOG_FACTOR, WIDTH = 10, 11, 12, 13
COLUMNS = REMAINDER, CENTER, LOG_FACTOR
SHRINK, SHRINK2, FACTOR_COUNT = 13, 14, 15  # the last two factors, which follow the columns
MIN_STEPS = 3  # compiled code replays up to two missed steps one by one
MIN_DECAY = 2.0**-8  # the smallest product of the decay factors in a window
# In float32, sqrt(v) underflows below 1e-19. A smaller eps than MIN_EPS would not hide that. At
# MAX_EPS, the reciprocal is still a normal number in float32.
MIN_EPS, MAX_EPS = 1e-16, 1e37


def apply_series(w: Any, m: Any, v: Any, top: Any, one: Any, eps: Any, row: Any, terms: Any) -> Any:
    """Return `(w, m, v)` after the missed steps.

    The arguments are scalars or tensors of n rows. Tensors in `row` and `terms` have shape (n, 1).
    """
    decay_factor, shrink, shrink2, center = row
    t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 = terms
    inverse = one / (sqrt(top) * center + eps)
    p = one - eps * inverse
    total = t9
    for term in (t8, t7, t6, t5, t4, t3, t2, t1, t0):
        total = addcmul(term, p, total, one)  # fused, to shorten this chain of dependent sums
    return (w - m * inverse * total) * decay_factor, m * shrink, v * shrink2


def is_inexact(
    w: Any, m: Any, top: Any, one: Any, eps: Any, center: Any, remainder: Any, tolerance: Any
) -> Any:
    """Return whether the bound on the remainder exceeds `tolerance` times w."""
    return abs(m * (one / (sqrt(top) * center + eps))) * remainder > abs(w) * tolerance


def compute_factors(t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """For rows at step t, set the terms, the remainder, and the factors of w, m and v."""
    sums, first_step, b1, b2, _, tolerance = coefficients
    if end_step - t < MIN_STEPS or t < first_step:
        return
    for j in range(TERMS):
        factors[j] = sums[t, j]
    factors[CENTER] = sums[t, CENTER]
    decay_factor = math.exp(sums[end_step, LOG_FACTOR] - sums[t, LOG_FACTOR])
    factors[LOG_FACTOR] = max(decay_factor, MIN_SHRINK)
    factors[SHRINK] = b1 ** (end_step - t)
    factors[SHRINK2] = max(b2 ** (end_step - t), MIN_SHRINK)
    is_exact = sums[t, REMAINDER] <= tolerance * sums[t, 0]
    factors[REMAINDER] = 0.0 if is_exact else sums[t, REMAINDER]


def fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """Advance a row from step t to `end_step`, or leave it unchanged."""
    _, first_step, _, _, eps, tolerance = coefficients
    if end_step - t < MIN_STEPS or t < first_step:
        return t
    cast = w.dtype.type
    one, eps, center = cast(1), cast(eps), cast(factors[CENTER])
    means, squares, tops = slots[0], slots[1], slots[len(slots) - 1]
    if len(slots) == 3:
        behind = 0
        for j in range(len(w)):
            is_nan = (squares[j] != squares[j]) & (tops[j] == tops[j])
            behind += (tops[j] < squares[j]) | is_nan
        if behind:
            return t
    has_root = center != 0  # otherwise, the denominator is eps; an infinite v times 0 would be NaN
    if factors[REMAINDER] != 0:
        remainder, tolerance = cast(factors[REMAINDER]), cast(tolerance)
        inexact = 0  # counting over all columns without an early exit lets LLVM vectorize the loop
        for j in range(len(w)):
            top = tops[j] if has_root else one
            inexact += is_inexact(w[j], means[j], top, one, eps, center, remainder, tolerance)
        if inexact:
            return t
    row = cast(factors[LOG_FACTOR]), cast(factors[SHRINK]), cast(factors[SHRINK2]), center
    low = cast(factors[0]), cast(factors[1]), cast(factors[2]), cast(factors[3]), cast(factors[4])
    high = cast(factors[5]), cast(factors[6]), cast(factors[7]), cast(factors[8]), cast(factors[9])
    terms = low + high
    for j in range(len(w)):
        top = tops[j] if has_root else one
        new = apply_series(w[j], means[j], squares[j], top, one, eps, row, terms)
        w[j], means[j], squares[j] = new
    return end_step


@functools.cache
def tolerance_of(dtype: torch.dtype) -> float:
    """Return the largest allowed remainder, relative to w or to the change in w."""
    return torch.finfo(dtype).eps / 4


class PowerSeries(MissedStepSums):
    """The coefficients T_j for every step in a ledger.

    Arguments:
        idle_step: `idle_step(entry)`, which returns (h, root, eps) for a step; root is 1 / c_k.
        amsgrad: whether the last slot stores the largest v.
    """

    def __init__(
        self,
        idle_step: Callable[[tuple[float, ...]], tuple[float, float, float]],
        amsgrad: bool = False,
    ) -> None:
        super().__init__(WIDTH)
        self.idle_step, self.amsgrad = idle_step, amsgrad

    @functools.cached_property
    def fast_forward(self) -> FastForward:
        """See `ClosedForm.fast_forward`."""
        return FastForward(
            fast_forward,
            self.fast_forward_batch,
            compute_factors,
            FACTOR_COUNT,
            "series",
            (apply_series, is_inexact),
            self.changed_since,
        )

    def last_coefficient(self, dtype: torch.dtype) -> float:
        """Return the tolerance; see `tolerance_of`."""
        return tolerance_of(dtype)

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Fast-forward many rows in plain torch."""
        sums, first_step, b1, b2, eps, tolerance = coefficients
        row_sums, gaps = sums[steps], (end_step - steps).astype(np.float64)
        decay_factors = np.exp(sums[end_step, LOG_FACTOR] - row_sums[:, LOG_FACTOR])
        row_sums[:, LOG_FACTOR] = np.maximum(decay_factors, MIN_SHRINK)
        shrinks = np.stack([b1**gaps, np.maximum(b2**gaps, MIN_SHRINK)], axis=1)
        exact_move = row_sums[:, REMAINDER] <= tolerance * row_sums[:, 0]
        flags = np.stack([steps >= first_step, exact_move], axis=1)
        in_range, exact_move = to_columns(flags, w.new_empty(0, dtype=torch.bool))
        *terms, remainder, center, factor = to_columns(row_sums, w)
        m, v, top = slots[0], slots[1], slots[-1]
        in_range = in_range & ((v <= top) | top.isnan()).all(1, keepdim=True)  # not if v is NaN
        top = torch.where(center != 0, top, torch.ones_like(top))  # see `fast_forward`
        inexact = is_inexact(w, m, top, 1.0, eps, center, remainder, tolerance)
        exact_w = ~inexact.any(1, keepdim=True)
        row = factor, *to_columns(shrinks, w), center
        w, m, v = apply_series(w, m, v, top, 1.0, eps, row, terms)
        return w, (m, v, *slots[2:]), (in_range & (exact_move | exact_w))[:, 0]

    def add_entry(self, i: int, entry: tuple[float, ...]) -> None:
        """Add entry i to the sums for the steps in its window."""
        sums, (factor, coupled_decay, a1, b2, _) = self.sums, entry[:5]
        size, root, eps = self.idle_step(entry)
        # RAdam's first steps have no root; their sums can't be continued in the other steps.
        self.set_hyperparameters(i, 1 - a1, b2, eps, coupled_decay, math.isfinite(root))
        # With stronger decay, changes outside the window would not be negligible relative to w.
        is_weak = factor > 0 and min(factor, 1.0) ** self.window >= MIN_DECAY
        usable = coupled_decay == 0 and is_weak and root > 0 and bool(self.window)
        # With b2 = 0, torch's step turns an infinite v into 0 * inf = NaN. With a tiny eps, the
        # step depends on how v underflows: in torch, v can stop at the smallest number above 0.
        usable = usable and b2 > 0 and MIN_EPS <= eps <= MAX_EPS
        if not (usable and math.isfinite(size) and math.isfinite(factor)):
            sums[i + 1, LOG_FACTOR] = sums[i, LOG_FACTOR]
            self.first_step = i + 1
            return
        from hotrow.kernels.cpu.series import add_step  # imports numba

        begin, center = max(self.first_step, i + 1 - self.window), self._center(root, b2)
        powers = self.moment_powers, self.root_powers
        add_step(sums, COLUMNS, i, begin, size, factor, root, center, *powers)

    def _center(self, root: float, b2: float) -> float:
        """Return the center Y for rows that were settled just before a step with this root."""
        if self.amsgrad:
            return 1 / root
        # Use y_k for k = `center_step`, which keeps the bound on the remainder small.
        correction = 1 - (1 - root * root) * b2 ** (self.center_step - 1)
        return b2 ** (self.center_step / 2) / math.sqrt(correction) if math.isfinite(root) else 0.0

    def compute_powers(self, b1: float, b2: float) -> None:
        """Compute the window, and the powers b1^k and sqrt(b2)^k for k = window, ..., 2, 1."""
        k = self.set_window(b1 if self.amsgrad else b1 / math.sqrt(b2) if b2 > 0 else 1.0)
        self.center_step = 1.3 / (1 - b1) if b1 < 1 else 1.0
        self.moment_powers = b1**k
        self.root_powers = np.ones(len(k)) if self.amsgrad else b2 ** (k / 2)
