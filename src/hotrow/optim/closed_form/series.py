r"""The way of Adam, NAdam and RAdam over any number of idle steps, at the cost of about one.

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
s and not to the row. They are kept for every s; a step changes the last few hundred only, since
b1^k dies out. Ten terms are kept. What they leave out is bounded beside them: a row jumps when
that bound is less than half an ulp of the move or, in every column, of w; else one more step is
replayed, which makes the move smaller. Some tens of steps at most: the first hundreds of a run
and a b2 far from 1, in float64.

With amsgrad x is the root of the largest v, which stays, and y_k = c_k. Coupled decay gives an
idle row a gradient, which nothing here covers: every step is replayed.
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
from hotrow.optim.closed_form.shortcut import Memo, columns
from hotrow.optim.closed_form.sums import Sums

TERMS = 10
# Columns after the terms: the bound of what they leave out, Y, the log of all decays so far.
REST, CENTRE, DECAY, WIDTH = 10, 11, 12, 13
FEW = 3  # so few steps are replayed where that is compiled
LEAST = 1e-38  # v times less would make an infinite v NaN


def land(w: Any, m: Any, v: Any, top: Any, one: Any, eps: Any, row: Any, terms: Any) -> Any:
    """`(w, m, v)` after the jump: scalars, or tensors with the row's numbers as (n, 1)."""
    decay, shrink, shrink2, centre = row
    t0, t1, t2, t3, t4, t5, t6, t7, t8, t9 = terms
    inverse = one / (sqrt(top) * centre + eps)
    p = one - eps * inverse
    total = t5 + p * (t6 + p * (t7 + p * (t8 + p * t9)))
    total = t0 + p * (t1 + p * (t2 + p * (t3 + p * (t4 + p * total))))
    return (w - m * inverse * total) * decay, m * shrink, v * shrink2


def far(w: Any, m: Any, top: Any, one: Any, eps: Any, centre: Any, rest: Any, part: Any) -> Any:
    """Whether what the terms leave out may be more than `part` of w."""
    return abs(m * (one / (sqrt(top) * centre + eps))) * rest > abs(w) * part


def jump(w: Any, slots: Any, t: Any, upto: Any, memo: Any) -> Any:
    """Bring a row from step t to `upto`, or leave it."""
    sums, first, b1, b2, eps, part = memo
    if upto - t < FEW or t < first:
        return t
    kind = w.dtype.type
    one, eps, centre = kind(1), kind(eps), kind(sums[t, CENTRE])
    means, squares, tops = slots[0], slots[1], slots[len(slots) - 1]
    if not sums[t, REST] <= part * sums[t, 0]:
        rest, part = kind(sums[t, REST]), kind(part)
        beyond = 0  # counted in all columns, which a processor does several at a time
        for j in range(len(w)):
            beyond += far(w[j], means[j], tops[j], one, eps, centre, rest, part)
        if beyond:
            return t
    decay = kind(math.exp(sums[upto, DECAY] - sums[t, DECAY]))
    row = decay, kind(b1 ** (upto - t)), kind(max(b2 ** (upto - t), LEAST)), centre
    low = kind(sums[t, 0]), kind(sums[t, 1]), kind(sums[t, 2]), kind(sums[t, 3]), kind(sums[t, 4])
    high = kind(sums[t, 5]), kind(sums[t, 6]), kind(sums[t, 7]), kind(sums[t, 8]), kind(sums[t, 9])
    terms = low + high
    for j in range(len(w)):
        w[j], means[j], squares[j] = land(w[j], means[j], squares[j], tops[j], one, eps, row, terms)
    return upto


class Series(Sums):
    """The sums T_j for every step of a ledger.

    Arguments:
        idle: entry -> (h, root, eps) of its step, where y = b2^(k/2) / root.
        amsgrad: whether the last slot is the largest v.
    """

    def __init__(
        self,
        idle: Callable[[tuple[float, ...]], tuple[float, float, float]],
        amsgrad: bool = False,
    ) -> None:
        super().__init__(WIDTH)
        self.jump = jump
        self.idle, self.amsgrad = idle, amsgrad

    def last(self, dtype: torch.dtype) -> float:
        """The part of a move, or of w, that may be left out."""
        return torch.finfo(dtype).eps / 4

    def leap(
        self, w: Tensor, slots: tuple[Tensor, ...], at: NDArray[np.int64], upto: int, memo: Memo
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """The jumps of many rows, in plain torch."""
        sums, first, b1, b2, eps, part = memo
        found, gaps = sums[at], (upto - at).astype(np.float64)
        found[:, DECAY] = np.exp(sums[upto, DECAY] - found[:, DECAY])
        shrinks = np.stack([b1**gaps, np.maximum(b2**gaps, LEAST)], axis=1)
        sure = found[:, REST] <= part * found[:, 0]
        flags = np.stack([at >= first, sure], axis=1)
        able, sure = columns(flags, w.new_empty(0, dtype=torch.bool))
        *terms, rest, centre, decay = columns(found, w)
        m, v, top = slots[0], slots[1], slots[-1]
        near = ~far(w, m, top, 1.0, eps, centre, rest, part).any(1, keepdim=True)
        row = decay, *columns(shrinks, w), centre
        w, m, v = land(w, m, v, top, 1.0, eps, row, terms)
        return w, (m, v, *slots[2:]), (able & (sure | near))[:, 0]

    def add(self, i: int, entry: tuple[float, ...]) -> None:
        """Entry i, into the sums of the steps whose rows still feel it."""
        sums, (decay, coupled, a1, b2, _) = self.sums, entry[:5]
        size, root, eps = self.idle(entry)
        self.renew(i, (1 - a1, b2, eps, coupled))
        usable = coupled == 0 and decay > 0 and root > 0 and bool(self.reach)
        if not (usable and math.isfinite(size) and math.isfinite(decay)):
            sums[i + 1, DECAY] = sums[i, DECAY]
            self.first = i + 1
            return
        sums[i + 1, DECAY] = sums[i, DECAY] + math.log(decay)
        sums[i, CENTRE] = self._centre(root, b2)
        begin = max(self.first, i + 1 - self.reach)
        n = i + 1 - begin
        from hotrow.kernels.cpu.series import add_terms  # numba is imported with the first kernel

        felt = sums[begin : i + 1]
        powers = self.weight[-n:], self.fall[-n:]
        add_terms(felt, (REST, CENTRE, DECAY), sums[i + 1, DECAY], size, *powers, root)

    def _centre(self, root: float, b2: float) -> float:
        """Y for rows settled before a step with this root."""
        if self.amsgrad:
            return 1 / root
        # y where (b1 / sqrt(b2))^k times a power of the distance is smallest
        ahead = 1 - (1 - root * root) * b2 ** (self.middle - 1)
        return b2 ** (self.middle / 2) / math.sqrt(ahead) if math.isfinite(root) else 0.0

    def tables(self, b1: float, b2: float) -> None:
        """How far back a step is felt, and b1^k and sqrt(b2)^k from there to k = 1."""
        k = self.felt(b1 if self.amsgrad else b1 / math.sqrt(b2) if b2 > 0 else 1.0)
        self.middle = 1.3 / (1 - b1) if b1 < 1 else 1.0
        self.weight = b1**k
        self.fall = np.ones(len(k)) if self.amsgrad else b2 ** (k / 2)
