"""bfloat16 for numba, which has none: numbers that every operation rounds, as torch does.

Values are stored as int16 arrays of their bits, and computed with as float32. torch converts to
float32, computes there, and rounds once to the nearest, ties to even; so an operation here is that
of float32, rounded.
"""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from hotrow.kernels import rule_math as ops
from hotrow.kernels.cpu.scalars import OPTIONS

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


class Rounded(types.Type):
    """A float32 that bfloat16 has as well."""

    def __init__(self) -> None:
        super().__init__(name="Rounded")


rounded_type = Rounded()


@register_model(Rounded)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, kind):
        super().__init__(manager, kind, _F32)


@intrinsic
def rounded(typingctx, x):
    """The nearest bfloat16 of a float32, of ties the even one."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        near = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        # A NaN keeps its bits: of what comes from a bfloat16 or a scalar the lower half is zero.
        return builder.bitcast(builder.and_(near, _I32(0xFFFF0000)), _F32)

    return rounded_type(types.float32), codegen


@intrinsic
def as_rounded(typingctx, x):
    """A float32 that is known to be a bfloat16."""
    return rounded_type(types.float32), lambda context, builder, signature, args: args[0]


@intrinsic
def from_bits(typingctx, x):
    """The number with these 16 bits."""

    def codegen(context, builder, signature, args):
        bits = builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(bits, _F32)

    return rounded_type(types.int16), codegen


@intrinsic
def to_bits(typingctx, x):
    """The 16 bits of a float32 that is known to be a bfloat16."""

    def codegen(context, builder, signature, args):
        bits = builder.lshr(builder.bitcast(args[0], _I32), _I32(16))
        return builder.trunc(bits, _I16)

    return types.int16(types.float32), codegen


@intrinsic
def _value(typingctx, x):
    return types.float32(rounded_type), lambda context, builder, signature, args: args[0]


def single(x):  # pragma: no cover - replaced by the overload
    """A number of this or another type as a float32."""


@overload(single, jit_options=OPTIONS)
def _of(x):
    return (lambda x: _value(x)) if isinstance(x, Rounded) else (lambda x: np.float32(x))


def held(x):  # pragma: no cover - replaced by the overload
    """`single` of what a bfloat16 tensor would hold: a scalar is rounded first."""


@overload(held, jit_options=OPTIONS)
def _held(x):
    if isinstance(x, Rounded):
        return lambda x: single(x)
    return lambda x: single(rounded(single(x)))


def _either(a, b):
    return isinstance(a, Rounded) or isinstance(b, Rounded)


def _sum(operation):
    def choose(a, b):  # torch rounds the scalar of a sum, and not that of a product
        return (lambda a, b: rounded(operation(held(a), held(b)))) if _either(a, b) else None

    overload(operation, jit_options=OPTIONS)(choose)


def _product(operation):
    def choose(a, b):
        return (lambda a, b: rounded(operation(single(a), single(b)))) if _either(a, b) else None

    overload(operation, jit_options=OPTIONS)(choose)


def _comparison(operation):
    def choose(a, b):
        return (lambda a, b: operation(single(a), single(b))) if _either(a, b) else None

    overload(operation, jit_options=OPTIONS)(choose)


for _operation in (operator.add, operator.sub):
    _sum(_operation)
for _operation in (operator.mul, operator.truediv):
    _product(_operation)
for _operation in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    _comparison(_operation)


@overload(abs, jit_options=OPTIONS)
def _abs(a):
    return (lambda a: rounded(abs(single(a)))) if isinstance(a, Rounded) else None


@overload(operator.neg, jit_options=OPTIONS)
def _neg(a):
    return (lambda a: rounded(-single(a))) if isinstance(a, Rounded) else None


@overload(ops.axpy, jit_options=OPTIONS)
def _axpy(a, b, alpha):
    if isinstance(a, Rounded):
        return lambda a, b, alpha: rounded(ops.axpy(single(a), single(b), held(alpha)))


@overload(ops.lerp, jit_options=OPTIONS)
def _lerp(a, b, weight):
    if isinstance(a, Rounded):
        return lambda a, b, weight: rounded(ops.lerp(single(a), single(b), weight))


@overload(ops.addcmul, jit_options=OPTIONS)
def _addcmul(a, b, c, value):
    if isinstance(a, Rounded):
        return lambda a, b, c, value: rounded(ops.addcmul(single(a), single(b), single(c), value))


@overload(ops.addcdiv, jit_options=OPTIONS)
def _addcdiv(a, b, c, value):
    if isinstance(a, Rounded):
        return lambda a, b, c, value: rounded(ops.addcdiv(single(a), single(b), single(c), value))


@overload(ops.sqrt, jit_options=OPTIONS)
def _sqrt(a):
    if isinstance(a, Rounded):
        return lambda a: rounded(ops.sqrt(single(a)))


@overload(ops.maximum, jit_options=OPTIONS)
def _maximum(a, b):
    if isinstance(a, Rounded):
        return lambda a, b: rounded(ops.maximum(single(a), single(b)))


@overload(ops.under, jit_options=OPTIONS)
def _under(scalar, a):
    if isinstance(a, Rounded):
        return lambda scalar, a: 1 / a * scalar  # two roundings, as torch


@overload(ops.clamp, jit_options=OPTIONS)
def _clamp(a, low, high):
    if isinstance(a, Rounded):
        return lambda a, low, high: rounded(ops.clamp(single(a), single(low), single(high)))


@overload(ops.sign, jit_options=OPTIONS)
def _sign(a):
    if isinstance(a, Rounded):
        return lambda a: rounded(ops.sign(single(a)))


@overload(ops.by_sign, jit_options=OPTIONS)
def _by_sign(a, negative, zero, positive):
    if isinstance(a, Rounded):
        return lambda a, negative, zero, positive: rounded(
            ops.by_sign(single(a), single(negative), single(zero), single(positive))
        )


@overload(ops.unless_negative, jit_options=OPTIONS)
def _unless_negative(a, b):
    if isinstance(b, Rounded):
        return lambda a, b: rounded(ops.unless_negative(single(a), single(b)))
