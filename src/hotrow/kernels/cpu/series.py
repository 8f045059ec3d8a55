"""The compiled half of `optim/closed_form/series.py`."""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import math

from hotrow.kernels.cpu.cache import cached_jit


@cached_jit
def add_terms(sums, columns, log_decay, size, weight, fall, root):
    """Add one step to the sums of the rows that it affects.

    Arguments:
        sums: (n, ...) of these rows; the terms come first.
        columns: the indices in `sums` of the truncation bound, the centre and the log of all
            decays.
        log_decay: that log after this step.
        size: h of the step.
        weight: (n,) b1^k, k steps ago.
        fall: (n,) sqrt(b2)^k.
        root: of the step.
    """
    bound, centre, decay = columns
    for i in range(len(sums)):
        term = weight[i] * size * math.exp(sums[i, decay] - log_decay)
        ratio = fall[i] / root / sums[i, centre] if math.isfinite(root) else 1.0
        distance = 1.0 - ratio
        for j in range(bound):
            sums[i, j] += term
            term *= distance
        sums[i, bound] += abs(term) / min(ratio, 1.0)
