"""numba overloads of the operations in `kernels/rule_math.py`, for scalars.

Importing this module registers the overloads. Fast-math is off. Where torch's CPU kernels fuse two
operations, the overloads call `fma`; nothing else is fused.
"""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

import functools
import math

import numpy as np
from numba import types
from numba.extending import overload

from hotrow.kernels import rule_math
from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS, fma


def overload_floats(operation):
    """Overload `operation` for float32 and float64; `bfloat16.py` has its own overloads."""

    def register(make):
        @functools.wraps(make)
        def choose(*args, **kwargs):
            numba_types = (*args, *kwargs.values())
            numbers = all(isinstance(each, types.Number | types.Literal) for each in numba_types)
            return make(*args, **kwargs) if numbers else None

        overload(operation, jit_options=JIT_OPTIONS)(choose)
        return make

    return register


@overload_floats(rule_math.axpy)
def _axpy(a, b, alpha):
    return lambda a, b, alpha: fma(b, alpha, a)


@overload_floats(rule_math.lerp)
def _lerp(a, b, weight):
    one = numpy_type(a)(1)

    def lerp(a, b, weight):
        # torch distinguishes the same two cases, so the result for weight = 1 is exactly b.
        if abs(weight) < 0.5:
            return fma(weight, b - a, a)
        return fma(weight - one, b - a, b)

    return lerp


@overload_floats(rule_math.addcmul)
def _addcmul(a, b, c, value):
    return lambda a, b, c, value: fma(value * b, c, a)


@overload_floats(rule_math.addcdiv)
def _addcdiv(a, b, c, value):
    return lambda a, b, c, value: a + value * b / c


@overload_floats(rule_math.sqrt)
def _sqrt(a):
    return lambda a: math.sqrt(a)


@overload_floats(rule_math.maximum)
def _maximum(a, b):
    return lambda a, b: a if a > b or a != a else b


@overload_floats(rule_math.scaled_reciprocal)
def _scaled_reciprocal(scalar, a):
    one = numpy_type(a)(1)
    return lambda scalar, a: one / a * scalar


@overload_floats(rule_math.clamp)
def _clamp(a, low, high):
    def clamp(a, low, high):
        b = low if a < low else a
        return high if b > high else b

    return clamp


@overload_floats(rule_math.sign)
def _sign(a):
    dtype = numpy_type(a)
    minus, zero, plus = dtype(-1), dtype(0), dtype(1)

    def sign(a):
        if a > 0:
            return plus
        return minus if a < 0 else zero

    return sign


@overload_floats(rule_math.select_by_sign)
def _select_by_sign(a, negative, zero, positive):
    def select_by_sign(a, negative, zero, positive):
        if a > 0:
            return positive
        return negative if a < 0 else zero

    return select_by_sign


@overload_floats(rule_math.zero_where_negative)
def _zero_where_negative(a, b):
    zero = numpy_type(b)(0)
    return lambda a, b: zero if a < 0 else b


def numpy_type(numba_type: types.Type) -> type:
    """Return the numpy type that constants need; a literal 1 would promote float32 to float64."""
    return np.float32 if numba_type == types.float32 else np.float64
