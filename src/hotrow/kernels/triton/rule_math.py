"""The operations of `kernels/rule_math.py` on Triton blocks, with the same names and roundings.

Triton's own `/` and `sqrt` are approximate on a GPU; the functions below round correctly. The
kernels are compiled with `enable_fp_fusion=False`, so only `fma` fuses operations.

A bfloat16 or float16 block is rounded after every operation, as in torch: the operation is computed
in float32, and the result is rounded once. torch rounds a scalar to the low precision in sums, but
not in products.
"""
# mypy: ignore-errors
# Triton compiles the functions in this file, so mypy can't check their types.

import triton
import triton.language as tl


@triton.constexpr_function
def is_low(dtype):
    """Return whether a dtype is bfloat16 or float16."""
    return dtype == tl.bfloat16 or dtype == tl.float16


@triton.constexpr_function
def result_dtype(a, b):
    """Return the result's dtype: a low precision takes precedence over a scalar's float32."""
    return a if is_low(a) or a == b else b


@triton.jit
def widen(a):
    """Return the values in the dtype used for arithmetic."""
    if is_low(a.dtype):
        return a.to(tl.float32)
    else:
        return a


@triton.jit
def term(a, dtype: tl.constexpr):
    """Return an operand of a sum; if `dtype` is a low precision, round the operand to it."""
    if is_low(dtype):
        return a.to(dtype).to(tl.float32)
    else:
        return a


@triton.jit
def add(a, b):
    """Return `a + b`."""
    dtype: tl.constexpr = result_dtype(a.dtype, b.dtype)
    return (term(a, dtype) + term(b, dtype)).to(dtype)


@triton.jit
def subtract(a, b):
    """Return `a - b`."""
    dtype: tl.constexpr = result_dtype(a.dtype, b.dtype)
    return (term(a, dtype) - term(b, dtype)).to(dtype)


@triton.jit
def multiply(a, b):
    """Return `a * b`."""
    dtype: tl.constexpr = result_dtype(a.dtype, b.dtype)
    return (widen(a) * widen(b)).to(dtype)


@triton.jit
def quotient(a, b):
    """Return `a / b` for float32 or float64, correctly rounded."""
    a, b = tl.broadcast(a, b)  # div_rn requires blocks of the same shape
    if a.dtype == tl.float64:
        return a / b
    else:
        return tl.div_rn(a, b)


@triton.jit
def divide(a, b):
    """Return `a / b`."""
    dtype: tl.constexpr = result_dtype(a.dtype, b.dtype)
    return quotient(widen(a), widen(b)).to(dtype)


@triton.jit
def absolute(a):
    """Return the absolute value."""
    return tl.abs(widen(a)).to(a.dtype)


@triton.jit
def negative(a):
    """Return `-a`."""
    return (widen(a) * -1).to(a.dtype)  # Triton computes -a as 0 - a, which loses the sign of 0


@triton.jit
def axpy(a, b, alpha):
    """Return `a + alpha * b`, rounded once."""
    return tl.fma(widen(b), term(alpha, a.dtype), widen(a)).to(a.dtype)


@triton.jit
def lerp(a, b, weight):
    """Return `a + weight * (b - a)`: a subtraction, then a fused multiply-add."""
    x, y = widen(a), widen(b)
    near = tl.abs(weight) < 0.5  # torch distinguishes the same two cases
    return tl.fma(tl.where(near, weight, weight - 1), y - x, tl.where(near, x, y)).to(a.dtype)


@triton.jit
def addcmul(a, b, c, value):
    """Return `a + (value * b) * c`, with the last two operations fused."""
    return tl.fma(value * widen(b), widen(c), widen(a)).to(a.dtype)


@triton.jit
def addcdiv(a, b, c, value):
    """Return `a + (value * b) / c`, rounding to the dtype used for arithmetic each time."""
    return (widen(a) + quotient(value * widen(b), widen(c))).to(a.dtype)


@triton.jit
def sqrt(a):
    """Return the square root, correctly rounded."""
    if a.dtype == tl.float64:
        return tl.sqrt(a)
    else:
        return tl.sqrt_rn(widen(a)).to(a.dtype)


@triton.jit
def maximum(a, b):
    """Return the larger of two values, or NaN if either is NaN."""
    dtype: tl.constexpr = result_dtype(a.dtype, b.dtype)
    return tl.maximum(widen(a), widen(b), propagate_nan=tl.PropagateNan.ALL).to(dtype)


@triton.jit
def scaled_reciprocal(scalar, a):
    """Return `scalar / a`, rounded twice as in torch."""
    one = tl.full(widen(a).shape, 1, widen(a).dtype).to(a.dtype)
    return multiply(divide(one, a), scalar)


@triton.jit
def clamp(a, low, high):
    """Limit `a` to the range from `low` to `high`; NaN stays NaN."""
    x = widen(a)
    y = tl.where(x < low, low, x)
    return tl.where(y > high, high, y).to(a.dtype)


@triton.jit
def sign(a):
    """Return the sign of `a`: -1, 0 or 1, and 0 for NaN."""
    x = widen(a)
    return tl.where(x > 0, 1.0, tl.where(x < 0, -1.0, 0.0)).to(a.dtype)


@triton.jit
def select_by_sign(a, negative, zero, positive):
    """Return `negative`, `zero` or `positive` depending on the sign of `a`; `zero` for NaN."""
    x = widen(a)
    return tl.where(x > 0, positive, tl.where(x < 0, negative, zero)).to(a.dtype)


@triton.jit
def zero_where_negative(a, b):
    """Return 0 where `a` is negative, and `b` elsewhere."""
    return tl.where(widen(a) < 0, tl.zeros_like(b), b)


@triton.jit
def power(base, exponent):
    """Return base ** exponent by repeated squaring, the way numba computes integer powers.

    The base is a float64 scalar or block; the exponent is an integer from 0 to 65,536.
    """
    result = tl.full(exponent.shape, 1, tl.float64)
    square = result * base
    for _ in tl.static_range(17):
        result = tl.where(exponent % 2 == 1, result * square, result)
        square = square * square
        exponent = exponent // 2
    return result
