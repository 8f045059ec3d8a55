"""Apply many missed steps to a row at once, with the closed forms of `optim/closed_form/`.

Each function advances one block of a row from step t to `end_step`, or returns it unchanged. The
row's factors are computed with the same operations, in the same order, as in the closed form's
functions for numba. Formulas for single elements are translated from the numba code.

Arguments of each function:
    w: the block of the row, in float32 or float64.
    slots: the blocks of the optimizer state.
    t, end_step: int32 scalars.
    inside: which columns of the block exist in the table.
    numbers: pointer to float64, the scalars among the closed form's coefficients.
    arrays: pointers to float64 or int64, the arrays among the coefficients.
"""
# mypy: ignore-errors
# Triton compiles the functions in this file, so mypy can't check their types.

import triton
import triton.language as tl

from hotrow.kernels.triton.rule_math import clamp, power

TERMS = tl.constexpr(10)  # as in `optim/closed_form/series.py`
REMAINDER = tl.constexpr(10)
CENTER = tl.constexpr(11)
LOG_FACTOR = tl.constexpr(12)
WIDTH = tl.constexpr(13)
MIN_STEPS = tl.constexpr(3)
MIN_SHRINK = tl.constexpr(1e-38)
MIN_LINEAR_STEPS = tl.constexpr(8)  # as in `optim/closed_form/linear.py`
MIN_LINEAR_SHRINK = tl.constexpr(2.0**-1022)
NEAR_ONE = tl.constexpr(0.5)
INFINITY = tl.constexpr(float("inf"))


@triton.jit
def advance_series(
    w, slots, t, end_step, inside, numbers, arrays, formula: tl.constexpr, is_inexact: tl.constexpr
):
    """Apply the power series of Adam, NAdam and RAdam."""
    dtype: tl.constexpr = w.dtype
    top = slots[len(slots) - 1]
    may_skip = (end_step - t >= MIN_STEPS) & (t >= tl.load(numbers).to(tl.int32))
    if len(slots) == 3:
        behind = ((slots[1] <= top) == 0) & (top == top) & inside
        may_skip = may_skip & (tl.max(behind.to(tl.int32), 0) == 0)
    if may_skip:
        row = arrays[0] + t.to(tl.int64) * WIDTH
        remainder, tolerance = tl.load(row + REMAINDER), tl.load(numbers + 4)
        center, eps = tl.load(row + CENTER).to(dtype), tl.load(numbers + 3).to(dtype)
        one = tl.full(w.shape, 1, dtype)
        top = tl.where(center != 0, top, one)  # otherwise, the denominator is eps
        is_exact = remainder <= tolerance * tl.load(row)
        if not is_exact:
            bound, limit = remainder.to(dtype), tolerance.to(dtype)
            inexact = is_inexact(w, slots[0], top, one, eps, center, bound, limit) & inside
            is_exact = tl.max(inexact.to(tl.int32), 0) == 0
        if is_exact:
            last = arrays[0] + end_step.to(tl.int64) * WIDTH
            gap = end_step - t
            decay = tl.exp(tl.load(last + LOG_FACTOR) - tl.load(row + LOG_FACTOR))
            decay = tl.maximum(decay, MIN_SHRINK).to(dtype)
            shrink = power(tl.load(numbers + 1), gap).to(dtype)
            shrink2 = tl.maximum(power(tl.load(numbers + 2), gap), MIN_SHRINK).to(dtype)
            terms = ()
            for j in tl.static_range(TERMS):
                terms = terms + (tl.load(row + j).to(dtype),)
            factors = (decay, shrink, shrink2, center)
            w, m, v = formula(w, slots[0], slots[1], top, one, eps, factors, terms)
            if len(slots) == 3:
                slots = (m, v, slots[2])
            else:
                slots = (m, v)
            t = end_step
    return w, slots, t


@triton.jit
def multiply_block(block, product, n: tl.constexpr):
    """Multiply the matrix of a block of steps by `product`, the matrix of the earlier steps.

    `block` points to n rows of n + 1 values: the matrix, and its diagonal minus 1.
    """
    result = ()
    for a in tl.static_range(n):
        distance = product[0] * 0
        for b in tl.static_range(n):
            total = product[0] * 0
            for c in tl.static_range(n):
                if not (a == b and b == c):
                    total = total + tl.load(block + a * (n + 1) + c) * product[c * (n + 1) + b]
            if a == b:
                e, f = tl.load(block + a * (n + 1) + n), product[a * (n + 1) + n]
                distance = total + (e + f + e * f)
                second, first = tl.load(block + a * (n + 1) + a), product[a * (n + 1) + a]
                total = total + second * first
                underflows = (tl.abs(total) < MIN_LINEAR_SHRINK) & (second != 0) & (first != 0)
                least = tl.where(total < 0, -MIN_LINEAR_SHRINK, MIN_LINEAR_SHRINK)
                total = tl.where(underflows, least, total)
                total = tl.where(tl.abs(distance) < NEAR_ONE, 1 + distance, total)
            result = result + (total,)
        result = result + (distance,)
    return result


@triton.jit
def advance_linear(w, slots, t, end_step, inside, numbers, arrays):
    """Multiply a row by the product of the steps' matrices, for SGD, ASGD, RMSprop and Adadelta."""
    n: tl.constexpr = len(slots) + 1
    dtype: tl.constexpr = w.dtype
    may_skip = (end_step - t >= MIN_LINEAR_STEPS) & (t >= tl.load(numbers).to(tl.int32))
    root_count = tl.load(numbers + 1).to(tl.int32)
    is_centered = tl.load(numbers + 2).to(tl.int32)
    unusual = (tl.abs(w) < INFINITY) == 0
    is_nan = w != w
    for b in tl.static_range(n - 1):
        is_nan = is_nan & (slots[b] != slots[b])
    for b in tl.static_range(n - 1):
        low = tl.where(root_count > b, 0.0, -INFINITY).to(dtype)
        wrong = (slots[b] >= low) == 0
        if b > 0:
            wrong = wrong | (tl.abs(slots[b]) == INFINITY)
        else:
            wrong = wrong | ((tl.abs(slots[b]) == INFINITY) & (root_count == 0))
        if b == 1:
            wrong = wrong | ((slots[0] < slots[1] * slots[1]) & (is_centered != 0))
        unusual = unusual | wrong
    unusual = unusual & (is_nan == 0)
    if may_skip & (tl.max((unusual & inside).to(tl.int32), 0) == 0):
        begin = t
        zero = tl.load(numbers) * 0
        product = ()
        for a in tl.static_range(n):
            for b in tl.static_range(n):
                product = product + (zero + (1 if a == b else 0),)
            product = product + (zero,)
        while t < end_step:
            level = t * 0
            while ((t & (1 << level)) == 0) & (t + (2 << level) <= end_step):
                level += 1
            t += 1 << level
            start = tl.load(arrays[1] + t - 1) + level
            product = multiply_block(arrays[0] + start * (n * (n + 1)), product, n)
        old = (w.to(tl.float64),)
        for b in tl.static_range(n - 1):
            old = old + (slots[b].to(tl.float64),)
        new = ()
        overflow = zero  # becomes NaN if a product is not finite
        for a in tl.static_range(n):
            total = tl.zeros(w.shape, tl.float64)
            for b in tl.static_range(n):
                scale = product[a * (n + 1) + b]
                overflow = overflow + scale * 0
                # Skip 0 * inf outside the diagonal, because a replay would not produce this NaN.
                total = tl.where((scale != 0) | (a == b), total + scale * old[b], total)
            source = w if a == 0 else slots[a - 1]
            new = new + (tl.where(overflow == 0, total.to(dtype), source),)
        w = new[0]
        slots = new[1:]
        t = tl.where(overflow == 0, t, begin)
    return w, slots, t


@triton.jit
def advance_infinity_norm(w, slots, t, end_step, inside, numbers, arrays, formula: tl.constexpr):
    """Apply Adamax's two sums: one until the norm has shrunk to eps, and one after that."""
    dtype: tl.constexpr = w.dtype
    if (end_step - t >= MIN_STEPS) & (t >= tl.load(numbers).to(tl.int32)):
        gap = end_step - t
        b1, b2 = tl.load(numbers + 1), tl.load(numbers + 2)
        eps, window = tl.load(numbers + 3), tl.load(numbers + 4).to(tl.int32)
        limit = (eps / power(b2, tl.minimum(gap, window))).to(dtype)
        sums = arrays[0] + t.to(tl.int64) * 2
        u = slots[1]
        full_sum = tl.load(sums)
        above = tl.zeros(w.shape, dtype) + full_sum.to(dtype)
        below = tl.zeros(w.shape, dtype)
        reaches_eps = (u <= limit) & inside
        if tl.max(reaches_eps.to(tl.int32), 0) > 0:
            ratio = tl.maximum(u.to(tl.float64) / eps, 1.0)
            # A NaN norm never reaches eps, but its number of steps must still be a valid index.
            ratio = tl.where(reaches_eps, ratio, 1.0)
            steps = tl.minimum(tl.floor(tl.log(ratio) / -tl.log(b2)), gap.to(tl.float64))
            steps = steps.to(tl.int64)
            first = full_sum - power(b1 / b2, steps) * tl.load(sums + steps * 2)
            second = power(b1, steps) * tl.load(sums + steps * 2 + 1)
            above = tl.where(reaches_eps, first.to(dtype), above)
            below = tl.where(reaches_eps, second.to(dtype), below)
        shrink2 = tl.maximum(power(b2, gap), MIN_SHRINK).to(dtype)
        factors = (power(b1, gap).to(dtype), shrink2)
        w, m, u = formula(w, slots[0], u, eps.to(dtype), factors, above, below)
        slots = (m, u)
        t = end_step
    return w, slots, t


@triton.jit
def advance_rprop(w, slots, t, end_step, inside, numbers, arrays):
    """Clear the previous gradient, clamp the step size, and subtract 0 times the step size."""
    dtype: tl.constexpr = w.dtype
    if t >= tl.load(numbers).to(tl.int32):
        low, high = tl.load(numbers + 1).to(dtype), tl.load(numbers + 2).to(dtype)
        zero, step_size = tl.zeros_like(w), clamp(slots[1], low, high)
        w, slots = w - zero * step_size, (zero, step_size)
        t = end_step
    return w, slots, t


@triton.jit
def advance(
    w, slots, t, end_step, inside, numbers, arrays,
    form: tl.constexpr, formula: tl.constexpr, is_inexact: tl.constexpr,
):  # fmt: skip
    """Advance a block of a row with the closed form named `form`; "replay" changes nothing."""
    if form == "series":
        w, slots, t = advance_series(
            w, slots, t, end_step, inside, numbers, arrays, formula, is_inexact
        )
    elif form == "linear":
        w, slots, t = advance_linear(w, slots, t, end_step, inside, numbers, arrays)
    elif form == "infinity norm":
        w, slots, t = advance_infinity_norm(w, slots, t, end_step, inside, numbers, arrays, formula)
    elif form == "rprop":
        w, slots, t = advance_rprop(w, slots, t, end_step, inside, numbers, arrays)
    return w, slots, t
