r"""The closed form of Adamax, whose infinity norm shrinks until it reaches eps.

Suppose a row was settled at step s with moment m and norm u, and has missed K steps since. Its k-th
missed step subtracts h_k b1^k m / max(b2^k u, eps) from w, with h_k = lr / (1 - b1^t). Let e be the
last step at which b2^k u exceeds eps. The norm is b2^k u up to step e, and eps afterwards:

    w_K = w - m / u * sum_(k <= e) h_k (b1 / b2)^k - m / eps * sum_(k > e) h_k b1^k
    m_K = b1^K m,   u_K = max(b2^K u, eps)

Two running sums are stored for every s: A_s sums h_k (b1 / b2)^k, and B_s sums h_k b1^k. A new step
changes the sums only for the last few hundred values of s. In the formula for w_K, the first sum is
A_s - (b1 / b2)^e A_(s+e), and the second is b1^e B_(s+e).

With weight decay, an idle row has a nonzero gradient. The sums don't include this gradient, so
every missed step is replayed.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.program import FastForward
from hotrow.kernels.rule_math import maximum
from hotrow.optim.closed_form.base import Coefficients, to_columns
from hotrow.optim.closed_form.sums import MIN_SHRINK, MissedStepSums

MIN_STEPS = 3  # compiled code replays up to two missed steps one by one
MIN_EPS = 1e-37  # a smaller eps underflows in float32


def apply_sums(w: Any, m: Any, u: Any, eps: Any, row: Any, above: Any, below: Any) -> Any:
    """Return `(w, m, u)` after the missed steps.

    `above` is the sum over the steps at which the norm exceeds eps; `below` is the sum over the
    remaining steps.
    """
    shrink, shrink2 = row
    move = m / maximum(u, eps) * above + m * (below / eps)  # m / eps may overflow
    return w - move, m * shrink, maximum(u * shrink2, eps)


def sums_around_eps(u: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Return `(above, below)`, as numbers or arrays, for elements whose norm reaches eps."""
    sums, _, b1, b2, eps, _ = coefficients
    e = np.floor(np.log(np.maximum(u / eps, 1.0)) / -np.log(b2))
    e = np.int64(np.minimum(e, end_step - t))
    return sums[t, 0] - (b1 / b2) ** e * sums[t + e, 0], b1**e * sums[t + e, 1]


def norm_limit(gap: Any, coefficients: Any) -> Any:
    """Return the limit above which a norm does not shrink to eps within the window."""
    _, _, _, b2, eps, window = coefficients
    return eps / b2 ** np.minimum(gap, window)


def compute_factors(t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """For rows at step t, set the factors of m and u, the norm limit and the first sum."""
    sums, first_step, b1, b2, _, _ = coefficients
    if end_step - t < MIN_STEPS or t < first_step:
        return
    factors[0], factors[1] = b1 ** (end_step - t), max(b2 ** (end_step - t), MIN_SHRINK)
    factors[2], factors[3] = norm_limit(end_step - t, coefficients), sums[t, 0]


def fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """Advance a row from step t to `end_step`, or leave it unchanged."""
    _, first_step, _, _, eps, _ = coefficients
    if end_step - t < MIN_STEPS or t < first_step:
        return t
    cast = w.dtype.type
    means, norms = slots
    row = cast(factors[0]), cast(factors[1])
    limit, full_sum, min_norm = cast(factors[2]), cast(factors[3]), cast(eps)
    for j in range(len(w)):
        above, below = full_sum, cast(0)
        if norms[j] <= limit:
            both_sums = sums_around_eps(np.float64(norms[j]), t, end_step, coefficients)
            above, below = cast(both_sums[0]), cast(both_sums[1])
        w[j], means[j], norms[j] = apply_sums(w[j], means[j], norms[j], min_norm, row, above, below)
    return end_step


class InfinityNormSums(MissedStepSums):
    """The sums A_s and B_s for every step of an Adamax ledger."""

    def __init__(self) -> None:
        super().__init__(2)

    @functools.cached_property
    def fast_forward(self) -> FastForward:
        """See `ClosedForm.fast_forward`."""
        return FastForward(
            fast_forward,
            self.fast_forward_batch,
            compute_factors,
            4,
            "infinity norm",
            (apply_sums,),
            self.changed_since,
        )

    def last_coefficient(self, dtype: torch.dtype) -> int:
        """Return the window, that is, the number of missed steps that can change a row."""
        return self.window

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Fast-forward many rows in plain torch."""
        sums, first_step, b1, b2, eps, _ = coefficients
        m, u = slots
        gaps = (end_step - steps).astype(np.float64)
        steps = np.where(steps < first_step, end_step, steps)
        limits, full_sum = norm_limit(gaps, coefficients), sums[steps, 0]
        limit, full_sum, shrink, shrink2 = to_columns(
            np.stack([limits, full_sum, b1**gaps, np.maximum(b2**gaps, MIN_SHRINK)], axis=1), w
        )
        above, below = full_sum.expand(w.shape).clone(), torch.zeros_like(w)
        reaches_eps = (u <= limit).nonzero(as_tuple=True)
        row_steps = steps[reaches_eps[0].cpu().numpy()]
        norms = u[reaches_eps].double().cpu().numpy()
        both_sums = sums_around_eps(norms, row_steps, end_step, coefficients)
        above[reaches_eps], below[reaches_eps] = (
            torch.from_numpy(each).to(w) for each in both_sums
        )
        min_norm = torch.tensor(eps, dtype=w.dtype, device=w.device)
        w, m, u = apply_sums(w, m, u, min_norm, (shrink, shrink2), above, below)
        return w, (m, u), torch.from_numpy(steps < end_step).to(w.device)

    def add_entry(self, i: int, entry: tuple[float, ...]) -> None:
        """Add entry i to the sums for the steps in its window."""
        weight_decay, a1, b2, eps, step_size = entry
        # The formulas divide by b2. If b2 is 0, they aren't used, but are still evaluated.
        self.set_hyperparameters(i, 1 - a1, b2 or MIN_SHRINK, eps, weight_decay)
        is_covered = (
            weight_decay == 0 and eps >= MIN_EPS and 0 < b2 < 1 and math.isfinite(step_size)
        )
        if not (is_covered and self.window):
            self.first_step = i + 1
            return
        window = self.sums[max(self.first_step, i + 1 - self.window) : i + 1]
        window += self.powers[-len(window) :] * -step_size

    def compute_powers(self, b1: float, b2: float) -> None:
        """Compute the window, and the powers (b1 / b2)^k and b1^k for k = window, ..., 2, 1."""
        ratio = b1 / b2
        k = self.set_window(ratio)
        self.powers = np.stack([ratio**k, b1**k], axis=1)
