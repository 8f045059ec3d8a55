"""The compiled part of `optim/closed_form/series.py`."""
# mypy: ignore-errors
# (numba infers the types of compiled code; mypy cannot check them)

from __future__ import annotations

import math

from hotrow.kernels.cpu.cache import cached_jit


@cached_jit
def add_terms(sums, columns, log_factor, size, moment_powers, root_powers, root):
    """Add one step to the sums that started at each of the n previous steps.

    Arguments:
        sums: (n, width), one row for each step at which a table row may have been settled. The
            first columns contain the terms.
        columns: the column numbers of three values: the remainder's bound, the center, and the log
            of the product of all decay factors.
        log_factor: the log of the product of all decay factors, including this step.
        size: the value of h for this step.
        moment_powers: (n,) b1^k, where k is the number of steps since the row was settled.
        root_powers: (n,) sqrt(b2)^k.
        root: 1 / c_k for this step; y_k = sqrt(b2)^k / root.
    """
    remainder, center, log_column = columns
    for i in range(len(sums)):
        term = moment_powers[i] * size * math.exp(sums[i, log_column] - log_factor)
        ratio = root_powers[i] / root / sums[i, center] if math.isfinite(root) else 1.0
        distance = 1.0 - ratio
        for j in range(remainder):
            sums[i, j] += term
            term *= distance
        sums[i, remainder] += abs(term) / min(ratio, 1.0)
