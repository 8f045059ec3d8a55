"""The compiled part of `optim/closed_form/series.py`, which defines h, c_k, y_k and the center."""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

import math

from hotrow.kernels.cpu.cache import cached_jit


@cached_jit
def add_step(sums, columns, i, begin, size, factor, root, center, moment_powers, root_powers):
    """Add step i to the sums that started at steps `begin` to i.

    Arguments:
        sums: (more than i + 1, width), one row for each step at which a table row may have been
            settled. The first columns contain the terms.
        columns: the columns of the remainder's bound, of the center, and of the log of the product
            of all decay factors before the step.
        i: the number of the step.
        begin: the starting step of the first sums that change.
        size: h for this step.
        factor: the decay factor of this step.
        root: 1 / c_k for this step; y_k = sqrt(b2)^k / root.
        center: the center of the sums that start at step i.
        moment_powers: b1^k, for k from the array's length down to 1.
        root_powers: sqrt(b2)^k, for the same k.
    """
    remainder, center_column, log_column = columns
    log_factor = sums[i, log_column] + math.log(factor)
    sums[i + 1, log_column] = log_factor
    sums[i, center_column] = center
    last = len(moment_powers) - 1
    for s in range(begin, i + 1):
        term = moment_powers[last - i + s] * size * math.exp(sums[s, log_column] - log_factor)
        ratio = 1.0
        if math.isfinite(root):
            ratio = root_powers[last - i + s] / root / sums[s, center_column]
        distance = 1.0 - ratio
        for j in range(remainder):
            sums[s, j] += term
            term *= distance
        sums[s, remainder] += abs(term) / min(ratio, 1.0)
