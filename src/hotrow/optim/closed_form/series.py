r"""The closed form of Adam, NAdam and RAdam: any number of idle steps at the cost of about one.

A row settled at step s with moments m, v gets no gradient for K steps. Its k-th missed step moves
it by h_k b1^k m / (x y_k + eps), with x = sqrt(v), y_k = b2^(k/2) c_k and the step's size h_k:

    Adam     h_k = lr / (1 - b1^t)                                c_k = 1 / sqrt(1 - b2^t)
    NAdam    h_k = lr mu_(t+1) / (1 - mu_1 ... mu_(t+1))          c_k = 1 / sqrt(1 - b2^t)
    RAdam    h_k = lr / (1 - b1^t) sqrt(1 - b2^t) r_t             c_k = 1
             h_k = lr / (1 - b1^t),  y_k = 0,  eps = 1            while it is not rectified

With Q_k the product of the decays up to it,

    w_K = Q_K (w - m sum_k h_k b1^k / Q_k / (x y_k + eps)),   m_K = b1^K m,   v_K = b2^K v.

Around a centre Y, with d_k = 1 - y_k / Y and p = x Y / (x Y + eps), which is between 0 and 1,

    1 / (x y_k + eps) = 1 / (x Y + eps) * (1 + p d_k + (p d_k)^2 + ...),

so that the sum is a polynomial in p whose coefficients T_j = sum_k h_k b1^k / Q_k d_k^j belong to
s and not to the row. They are kept for every s; a step changes only the last few hundred, since
b1^k vanishes. Ten terms are kept, with a bound of the remainder. A row is fast-forwarded when the
bound is less than half an ulp of the move or, in every column, of w. Otherwise one more step is
replayed, which makes the move smaller. That takes some tens of steps at most: in the first
hundreds of a run, and with a b2 far from 1 in float64.

With amsgrad x is the root of the largest v, which stays, and y_k = c_k. Coupled decay gives an
idle row a gradient, which the series does not cover: every step is replayed.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.rule_math import sqrt
from hotrow.optim.closed_form.base import Coefficients, to_columns
from hotrow.optim.closed_form.sums import MissedStepSums

TERMS = 10
# Columns after the terms: the bound of the remainder, Y, the log of the product of all decays.
REMAINDER, CENTRE, LOG_DECAY, WIDTH = 10, 11, 12, 13
MIN_STEPS = 3  # compiled code replays fewer steps
MIN_SHRINK = 1e-38  # times a smaller factor an infinite v would become NaN


def apply_series(w: Any, m: Any, v: Any, top: Any, one: Any, eps: Any, row: Any, terms: Any) -> Any:
    """`(w, m, v)` after the missed steps: scalars, or tensors with `row` and `terms` as (n, 1)."""
    decay, shrink, shrink2, centre = row
    t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 = terms
    inverse = one / (sqrt(top) * centre + eps)
    p = one - eps * inverse
    total = t5 + p * (t6 + p * (t7 + p * (t8 + p * t9)))
    total = t0 + p * (t1 + p * (t2 + p * (t3 + p * (t4 + p * total))))
    return (w - m * inverse * total) * decay, m * shrink, v * shrink2


def is_inexact(
    w: Any, m: Any, top: Any, one: Any, eps: Any, centre: Any, remainder: Any, tolerance: Any
) -> Any:
    """Whether the remainder may be more than `tolerance` times w."""
    return abs(m * (one / (sqrt(top) * centre + eps))) * remainder > abs(w) * tolerance


def fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Bring a row from step t to `end_step`, or leave it as it is."""
    sums, first_step, b1, b2, eps, tolerance = coefficients
    if end_step - t < MIN_STEPS or t < first_step:
        return t
    cast = w.dtype.type
    one, eps, centre = cast(1), cast(eps), cast(sums[t, CENTRE])
    means, squares, tops = slots[0], slots[1], slots[len(slots) - 1]
    if not sums[t, REMAINDER] <= tolerance * sums[t, 0]:
        remainder, tolerance = cast(sums[t, REMAINDER]), cast(tolerance)
        inexact = 0  # counted over all columns, which vectorizes
        for j in range(len(w)):
            inexact += is_inexact(w[j], means[j], tops[j], one, eps, centre, remainder, tolerance)
        if inexact:
            return t
    decay = cast(math.exp(sums[end_step, LOG_DECAY] - sums[t, LOG_DECAY]))
    row = decay, cast(b1 ** (end_step - t)), cast(max(b2 ** (end_step - t), MIN_SHRINK)), centre
    low = cast(sums[t, 0]), cast(sums[t, 1]), cast(sums[t, 2]), cast(sums[t, 3]), cast(sums[t, 4])
    high = cast(sums[t, 5]), cast(sums[t, 6]), cast(sums[t, 7]), cast(sums[t, 8]), cast(sums[t, 9])
    terms = low + high
    for j in range(len(w)):
        new = apply_series(w[j], means[j], squares[j], tops[j], one, eps, row, terms)
        w[j], means[j], squares[j] = new
    return end_step


class PowerSeries(MissedStepSums):
    """The coefficients T_j for every step of a ledger.

    Arguments:
        idle_step: entry -> (h, root, eps) of its step, where y = b2^(k/2) / root.
        amsgrad: whether the last slot is the largest v.
    """

    def __init__(
        self,
        idle_step: Callable[[tuple[float, ...]], tuple[float, float, float]],
        amsgrad: bool = False,
    ) -> None:
        super().__init__(WIDTH)
        self.fast_forward = fast_forward
        self.idle_step, self.amsgrad = idle_step, amsgrad

    def last_coefficient(self, dtype: torch.dtype) -> float:
        """The tolerance: the part of a move, or of w, that the remainder may be."""
        return torch.finfo(dtype).eps / 4

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """`fast_forward` for many rows, in plain torch."""
        sums, first_step, b1, b2, eps, tolerance = coefficients
        row_sums, gaps = sums[steps], (end_step - steps).astype(np.float64)
        row_sums[:, LOG_DECAY] = np.exp(sums[end_step, LOG_DECAY] - row_sums[:, LOG_DECAY])
        shrinks = np.stack([b1**gaps, np.maximum(b2**gaps, MIN_SHRINK)], axis=1)
        exact_move = row_sums[:, REMAINDER] <= tolerance * row_sums[:, 0]
        flags = np.stack([steps >= first_step, exact_move], axis=1)
        in_range, exact_move = to_columns(flags, w.new_empty(0, dtype=torch.bool))
        *terms, remainder, centre, decay = to_columns(row_sums, w)
        m, v, top = slots[0], slots[1], slots[-1]
        inexact = is_inexact(w, m, top, 1.0, eps, centre, remainder, tolerance)
        exact_w = ~inexact.any(1, keepdim=True)
        row = decay, *to_columns(shrinks, w), centre
        w, m, v = apply_series(w, m, v, top, 1.0, eps, row, terms)
        return w, (m, v, *slots[2:]), (in_range & (exact_move | exact_w))[:, 0]

    def add_entry(self, i: int, entry: tuple[float, ...]) -> None:
        """Add entry i to the sums of the steps in its window."""
        sums, (decay, coupled, a1, b2, _) = self.sums, entry[:5]
        size, root, eps = self.idle_step(entry)
        self.set_hyperparameters(i, (1 - a1, b2, eps, coupled))
        usable = coupled == 0 and decay > 0 and root > 0 and bool(self.window)
        if not (usable and math.isfinite(size) and math.isfinite(decay)):
            sums[i + 1, LOG_DECAY] = sums[i, LOG_DECAY]
            self.first_step = i + 1
            return
        sums[i + 1, LOG_DECAY] = sums[i, LOG_DECAY] + math.log(decay)
        sums[i, CENTRE] = self._centre(root, b2)
        begin = max(self.first_step, i + 1 - self.window)
        n = i + 1 - begin
        # numba is imported with the first kernel
        from hotrow.kernels.cpu.series import add_terms

        window = sums[begin : i + 1]
        powers = self.moment_powers[-n:], self.root_powers[-n:]
        add_terms(
            window, (REMAINDER, CENTRE, LOG_DECAY), sums[i + 1, LOG_DECAY], size, *powers, root
        )

    def _centre(self, root: float, b2: float) -> float:
        """The centre Y for rows settled before a step with this root."""
        if self.amsgrad:
            return 1 / root
        # y where (b1 / sqrt(b2))^k times a power of the distance is smallest
        correction = 1 - (1 - root * root) * b2 ** (self.centre_step - 1)
        return b2 ** (self.centre_step / 2) / math.sqrt(correction) if math.isfinite(root) else 0.0

    def compute_powers(self, b1: float, b2: float) -> None:
        """Compute the window, and b1^k and sqrt(b2)^k for its steps k, the last first."""
        k = self.set_window(b1 if self.amsgrad else b1 / math.sqrt(b2) if b2 > 0 else 1.0)
        self.centre_step = 1.3 / (1 - b1) if b1 < 1 else 1.0
        self.moment_powers = b1**k
        self.root_powers = np.ones(len(k)) if self.amsgrad else b2 ** (k / 2)
