r"""Adam's way over any number of idle steps, at the cost of about one.

A row settled at step s with moments m, v gets no gradient for K steps. Then, with
h_k = lr / (1 - b1^t) and c_k = 1 / sqrt(1 - b2^t) of its k-th missed step, Q_k the product of the
decays up to it, x = sqrt(v) and y_k = b2^(k/2) c_k,

    w_K = Q_K (w - m sum_k h_k b1^k / Q_k / (x y_k + eps)),   m_K = b1^K m,   v_K = b2^K v.

Around a centre Y, with d_k = 1 - y_k / Y and p = x Y / (x Y + eps), which is between 0 and 1,

    1 / (x y_k + eps) = 1 / (x Y + eps) * (1 + p d_k + (p d_k)^2 + ...),

so that the sum is a polynomial in p whose coefficients T_j = sum_k h_k b1^k / Q_k d_k^j belong to
s and not to the row. They are kept for every s; a step changes the last few hundred only, since
b1^k dies out. Five suffice unless y_k varies much, as it does in the first steps of a run; what
they leave out is bounded beside them, and where that bound is too large steps are replayed.

With amsgrad x is the root of the largest v, which stays, and y_k = c_k.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

TERMS = 5
# Columns after the terms: the bound of what they leave out, Y, the log of all decays so far.
REST, CENTRE, DECAY, WIDTH = 5, 6, 7, 8
FEW = 3  # so few steps are replayed
LEFT_OUT = 2.0**-24  # of the move: half an ulp of float32
GONE = 1e-10  # of the move: the steps after it are left out


def jump(table: Any, slots: Any, r: Any, t: Any, upto: Any, memo: Any) -> Any:
    """Bring row r from step t to `upto`, or leave it."""
    sums, first, b1, b2, eps, tolerance = memo
    if upto - t < FEW or t < first:
        return t
    if not sums[t, 5] <= tolerance * sums[t, 0]:
        if eps == 0:
            return t
        for j in range(table.shape[1]):  # a row that has never had a gradient only decays
            if slots[0][r, j] != 0:
                return t
    kind = table.dtype.type
    decay = kind(math.exp(sums[upto, 7] - sums[t, 7]))
    shrink, shrink2 = kind(b1 ** (upto - t)), kind(b2 ** (upto - t))
    centre, one, eps = kind(sums[t, 6]), kind(1), kind(eps)
    t0, t1, t2 = kind(sums[t, 0]), kind(sums[t, 1]), kind(sums[t, 2])
    t3, t4 = kind(sums[t, 3]), kind(sums[t, 4])
    means, squares, roots = slots[0], slots[1], slots[len(slots) - 1]
    for j in range(table.shape[1]):
        inverse = one / (math.sqrt(roots[r, j]) * centre + eps)
        p = one - eps * inverse
        m = means[r, j]
        move = m * inverse * (t0 + p * (t1 + p * (t2 + p * (t3 + p * t4))))
        table[r, j] = (table[r, j] - move) * decay
        means[r, j] = m * shrink
        squares[r, j] = squares[r, j] * shrink2
    return upto


class Series:
    """The sums T_j for every step of a ledger of Adam's."""

    def __init__(self, amsgrad: bool) -> None:
        self.jump = jump
        self.amsgrad = amsgrad
        self.done = 0  # entries that are in the sums
        self.first = 0  # the first step from which the hyperparameters were what they are
        self.constants: tuple[float, ...] = ()
        self.sums = np.zeros((64, WIDTH))

    def advance(self, entries: NDArray[np.float64], upto: int) -> tuple[Any, ...] | None:
        """The memo for jumps to step `upto`; None if it is beyond that step already."""
        if upto < self.done:
            return None
        while len(self.sums) <= upto:
            self.sums = np.concatenate([self.sums, np.zeros_like(self.sums)])
        for i in range(self.done, upto):
            self._add(i, *entries[i].tolist())
        self.done = upto
        if not self.constants:
            return None
        b1, b2, eps, _ = self.constants
        return self.sums, self.first, b1, b2, eps, LEFT_OUT

    def _add(
        self,
        i: int,
        decay: float,
        coupled: float,
        a1: float,
        b2: float,
        a2: float,
        root: float,
        eps: float,
        size: float,
    ) -> None:
        """Entry i, into the sums of the steps whose rows still feel it."""
        sums = self.sums
        if self.constants != (constants := (1 - a1, b2, eps, coupled)):
            self.constants, self.first = constants, i
            self._tables(1 - a1, b2)
        usable = coupled == 0 and decay > 0 and root > 0 and bool(self.reach)
        if not (usable and math.isfinite(size) and math.isfinite(decay)):
            sums[i + 1, DECAY] = sums[i, DECAY]
            self.first = i + 1
            return
        sums[i + 1, DECAY] = sums[i, DECAY] + math.log(decay)
        if self.amsgrad:
            sums[i, CENTRE] = 1 / root
        else:  # y where (b1 / sqrt(b2))^k times the fifth power of the distance is smallest
            ahead = 1 - (1 - root * root) * b2 ** (self.middle - 1)
            sums[i, CENTRE] = b2 ** (self.middle / 2) / math.sqrt(ahead)
        begin = max(self.first, i + 1 - self.reach)
        part = sums[begin : i + 1]
        n = len(part)
        y = self.fall[-n:] / root
        term = self.weight[-n:] * (-size) * np.exp(part[:, DECAY] - sums[i + 1, DECAY])
        ratio = y / part[:, CENTRE]
        distance = 1 - ratio
        for j in range(TERMS):
            part[:, j] += term
            term = term * distance
        part[:, REST] += np.abs(term) / np.minimum(ratio, 1)

    def _tables(self, b1: float, b2: float) -> None:
        """How far back a step is felt, and b1^k and sqrt(b2)^k from there to k = 1."""
        speed = b1 if self.amsgrad else b1 / math.sqrt(b2) if b2 > 0 else 1.0
        self.reach = 0  # no end in sight: every step is replayed
        if 0 <= speed < 0.999:
            self.reach = max(2, math.ceil(math.log(GONE) / math.log(max(speed, 1e-10))))
        k = np.arange(max(self.reach, 1), 0, -1)
        self.middle = 1.3 / (1 - b1) if b1 < 1 else 1.0
        self.weight = b1**k
        self.fall = np.ones(len(k)) if self.amsgrad else b2 ** (k / 2)
