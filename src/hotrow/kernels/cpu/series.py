"""The compiled half of `optim/series.py`."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import math

from hotrow.kernels.cpu.cache import cached


@cached
def add_terms(sums, columns, upto, size, weight, fall, root):
    """One step, into the sums of the rows that feel it.

    Arguments:
        sums: (n, ...) of these rows; the terms come first.
        columns: where the bound of what is left out, the centre and the log of all decays are.
        upto: that log after this step.
        size: h of the step.
        weight: (n,) b1^k of the k steps since.
        fall: (n,) sqrt(b2)^k.
        root: of the step.
    """
    rest, centre, decay = columns
    for i in range(len(sums)):
        term = weight[i] * size * math.exp(sums[i, decay] - upto)
        ratio = fall[i] / root / sums[i, centre] if math.isfinite(root) else 1.0
        distance = 1.0 - ratio
        for j in range(rest):
            sums[i, j] += term
            term *= distance
        sums[i, rest] += abs(term) / min(ratio, 1.0)
