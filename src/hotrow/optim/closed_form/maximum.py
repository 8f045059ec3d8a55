r"""Adamax's way over any number of idle steps: a norm that shrinks until it is eps.

A row settled at step s with m and u gets no gradient for K steps. Its k-th missed step moves it by
h_k b1^k m / max(b2^k u, eps), with h_k = lr / (1 - b1^t). Up to the step e after which b2^k u is
no more than eps the norm is the one, from then on the other:

    w_K = w - m / u * sum_(k <= e) h_k (b1 / b2)^k - m / eps * sum_(k > e) h_k b1^k
    m_K = b1^K m,   u_K = max(b2^K u, eps)

Two sums without an end are kept for every s, A_s of h_k (b1 / b2)^k and B_s of h_k b1^k; a step
changes the last few hundred only. The first sum above is A_s - (b1 / b2)^e A_(s+e), the second
b1^e B_(s+e).

Weight decay gives an idle row a gradient, which nothing here covers: every step is replayed.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.rule_math import maximum
from hotrow.optim.closed_form.shortcut import Memo, columns
from hotrow.optim.closed_form.sums import Sums

FEW = 3  # so few steps are replayed where that is compiled
LEAST = 1e-37  # an eps below it is not in float32's range


def land(w: Any, m: Any, u: Any, eps: Any, row: Any, above: Any, below: Any) -> Any:
    """`(w, m, u)` after the jump; `above` and `below` are the sums before and after u is eps."""
    shrink, shrink2 = row
    move = m / maximum(u, eps) * above + m * (below / eps)  # m / eps may be infinite
    return w - move, m * shrink, maximum(u * shrink2, eps)


def meet(u: Any, t: Any, upto: Any, memo: Any) -> Any:
    """`(above, below)` of elements whose u becomes eps: numbers, or arrays of them."""
    sums, _, b1, b2, eps, _ = memo
    e = np.floor(np.log(np.maximum(u / eps, 1.0)) / -np.log(b2))
    e = np.minimum(e, upto - t)
    s = t + np.int64(e)
    return sums[t, 0] - (b1 / b2) ** e * sums[s, 0], b1**e * sums[s, 1]


def safe(gap: Any, memo: Any) -> Any:
    """A u above it does not become eps in any step that is felt."""
    _, _, _, b2, eps, reach = memo
    return eps / b2 ** np.minimum(gap, reach)


def jump(w: Any, slots: Any, t: Any, upto: Any, memo: Any) -> Any:
    """Bring a row from step t to `upto`, or leave it."""
    sums, first, b1, b2, eps, _ = memo
    if upto - t < FEW or t < first:
        return t
    kind = w.dtype.type
    means, norms = slots
    row = kind(b1 ** (upto - t)), kind(b2 ** (upto - t))
    limit, whole, least = kind(safe(upto - t, memo)), kind(sums[t, 0]), kind(eps)
    for j in range(len(w)):
        above, below = whole, kind(0)
        if norms[j] <= limit:
            found = meet(np.float64(norms[j]), t, upto, memo)
            above, below = kind(found[0]), kind(found[1])
        w[j], means[j], norms[j] = land(w[j], means[j], norms[j], least, row, above, below)
    return upto


class Floor(Sums):
    """The sums A_s and B_s for every step of a ledger of Adamax's."""

    def __init__(self) -> None:
        super().__init__(2)
        self.jump = jump

    def last(self, dtype: torch.dtype) -> int:
        """How far back a step is felt."""
        return self.reach

    def leap(
        self, w: Tensor, slots: tuple[Tensor, ...], at: NDArray[np.int64], upto: int, memo: Memo
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """The jumps of many rows, in plain torch."""
        sums, first, b1, b2, eps, _ = memo
        m, u = slots
        at, gaps = np.where(at < first, upto, at), (upto - at).astype(np.float64)
        limits, whole = safe(gaps, memo), sums[at, 0]
        limit, whole, shrink, shrink2 = columns(
            np.stack([limits, whole, b1**gaps, b2**gaps], axis=1), w
        )
        above, below = whole.expand(w.shape).clone(), torch.zeros_like(w)
        meets = (u <= limit).nonzero(as_tuple=True)
        rows = at[meets[0].cpu().numpy()]
        found = meet(u[meets].double().cpu().numpy(), rows, upto, memo)
        above[meets], below[meets] = (torch.from_numpy(each).to(w) for each in found)
        w, m, u = land(w, m, u, torch.tensor(eps).to(w), (shrink, shrink2), above, below)
        return w, (m, u), torch.from_numpy(at < upto).to(w.device)

    def add(self, i: int, entry: tuple[float, ...]) -> None:
        """Entry i, into the sums of the steps whose rows still feel it."""
        decay, a1, b2, eps, size = entry
        self.renew(i, (1 - a1, b2, eps, decay))
        if decay != 0 or not self.reach or not eps >= LEAST or not math.isfinite(size):
            self.first = i + 1
            return
        part = self.sums[max(self.first, i + 1 - self.reach) : i + 1]
        part += self.weights[-len(part) :] * -size

    def tables(self, b1: float, b2: float) -> None:
        """How far back a step is felt; (b1 / b2)^k and b1^k from there to k = 1."""
        speed = b1 / b2 if b2 > 0 else 1.0
        k = self.felt(speed)
        self.weights = np.stack([speed**k, b1**k], axis=1)
