"""A bfloat16 type for numba that rounds after every operation, as torch does.

Arrays store bfloat16 values as int16 bits; compiled code computes in float32. As in torch, the
operands of each operation are converted to float32, and the result is rounded once to the nearest
bfloat16, ties to even.
"""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

import operator

import numpy as np
from llvmlite import ir
from numba import types
from numba.extending import intrinsic, models, overload, register_model

from hotrow.kernels import rule_math
from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS

_I16, _I32, _F32 = ir.IntType(16), ir.IntType(32), ir.FloatType()


class BFloat16(types.Type):
    """A bfloat16 number, represented as a float32 with the same value."""

    def __init__(self) -> None:
        super().__init__(name="BFloat16")


bfloat16 = BFloat16()


@register_model(BFloat16)
class _Model(models.PrimitiveModel):
    def __init__(self, manager, numba_type):
        super().__init__(manager, numba_type, _F32)


@intrinsic
def round_bf16(typingctx, x):
    """Round a float32 to the nearest bfloat16, ties to even."""

    def codegen(context, builder, signature, args):
        bits = builder.bitcast(args[0], _I32)
        odd = builder.and_(builder.lshr(bits, _I32(16)), _I32(1))
        near = builder.add(bits, builder.add(odd, _I32(0x7FFF)))
        # A NaN stays NaN: its lower 16 bits are zero here, so adding at most 0x8000 cannot carry.
        return builder.bitcast(builder.and_(near, _I32(0xFFFF0000)), _F32)

    return bfloat16(types.float32), codegen


@intrinsic
def as_bfloat16(typingctx, x):
    """Convert a float32 to bfloat16; the value must be exactly representable."""
    return bfloat16(types.float32), lambda context, builder, signature, args: args[0]


@intrinsic
def from_bits(typingctx, x):
    """Reinterpret 16 bits as a bfloat16."""

    def codegen(context, builder, signature, args):
        bits = builder.shl(builder.zext(args[0], _I32), _I32(16))
        return builder.bitcast(bits, _F32)

    return bfloat16(types.int16), codegen


@intrinsic
def to_bits(typingctx, x):
    """Return the bfloat16 bits of a float32 that bfloat16 can represent exactly."""

    def codegen(context, builder, signature, args):
        bits = builder.lshr(builder.bitcast(args[0], _I32), _I32(16))
        return builder.trunc(bits, _I16)

    return types.int16(types.float32), codegen


@intrinsic
def _as_f32(typingctx, x):
    return types.float32(bfloat16), lambda context, builder, signature, args: args[0]


def to_f32(x):  # pragma: no cover - replaced by the overload
    """Convert a bfloat16 or any other number to float32."""


@overload(to_f32, jit_options=JIT_OPTIONS)
def _to_f32(x):
    return (lambda x: _as_f32(x)) if isinstance(x, BFloat16) else (lambda x: np.float32(x))


def round_scalar(x):  # pragma: no cover - replaced by the overload
    """Convert a number to float32; round a scalar to bfloat16 first, as torch does in sums."""


@overload(round_scalar, jit_options=JIT_OPTIONS)
def _round_scalar(x):
    if isinstance(x, BFloat16):
        return lambda x: to_f32(x)
    return lambda x: to_f32(round_bf16(to_f32(x)))


def _has_bfloat16(a, b):
    return isinstance(a, BFloat16) or isinstance(b, BFloat16)


def _overload_sum(operation):
    def choose(a, b):  # torch rounds scalars to bfloat16 in sums, but not in products
        return (
            (lambda a, b: round_bf16(operation(round_scalar(a), round_scalar(b))))
            if _has_bfloat16(a, b)
            else None
        )

    overload(operation, jit_options=JIT_OPTIONS)(choose)


def _overload_product(operation):
    def choose(a, b):
        return (
            (lambda a, b: round_bf16(operation(to_f32(a), to_f32(b))))
            if _has_bfloat16(a, b)
            else None
        )

    overload(operation, jit_options=JIT_OPTIONS)(choose)


def _overload_comparison(operation):
    def choose(a, b):
        return (lambda a, b: operation(to_f32(a), to_f32(b))) if _has_bfloat16(a, b) else None

    overload(operation, jit_options=JIT_OPTIONS)(choose)


for _operation in (operator.add, operator.sub):
    _overload_sum(_operation)
for _operation in (operator.mul, operator.truediv):
    _overload_product(_operation)
for _operation in (operator.lt, operator.le, operator.gt, operator.ge, operator.eq, operator.ne):
    _overload_comparison(_operation)


@overload(abs, jit_options=JIT_OPTIONS)
def _abs(a):
    return (lambda a: round_bf16(abs(to_f32(a)))) if isinstance(a, BFloat16) else None


@overload(operator.neg, jit_options=JIT_OPTIONS)
def _neg(a):
    return (lambda a: round_bf16(-to_f32(a))) if isinstance(a, BFloat16) else None


@overload(rule_math.axpy, jit_options=JIT_OPTIONS)
def _axpy(a, b, alpha):
    if isinstance(a, BFloat16):
        return lambda a, b, alpha: round_bf16(
            rule_math.axpy(to_f32(a), to_f32(b), round_scalar(alpha))
        )


@overload(rule_math.lerp, jit_options=JIT_OPTIONS)
def _lerp(a, b, weight):
    if isinstance(a, BFloat16):
        return lambda a, b, weight: round_bf16(rule_math.lerp(to_f32(a), to_f32(b), weight))


@overload(rule_math.addcmul, jit_options=JIT_OPTIONS)
def _addcmul(a, b, c, value):
    if isinstance(a, BFloat16):
        return lambda a, b, c, value: round_bf16(
            rule_math.addcmul(to_f32(a), to_f32(b), to_f32(c), value)
        )


@overload(rule_math.addcdiv, jit_options=JIT_OPTIONS)
def _addcdiv(a, b, c, value):
    if isinstance(a, BFloat16):
        return lambda a, b, c, value: round_bf16(
            rule_math.addcdiv(to_f32(a), to_f32(b), to_f32(c), value)
        )


@overload(rule_math.sqrt, jit_options=JIT_OPTIONS)
def _sqrt(a):
    if isinstance(a, BFloat16):
        return lambda a: round_bf16(rule_math.sqrt(to_f32(a)))


@overload(rule_math.maximum, jit_options=JIT_OPTIONS)
def _maximum(a, b):
    if isinstance(a, BFloat16):
        return lambda a, b: round_bf16(rule_math.maximum(to_f32(a), to_f32(b)))


@overload(rule_math.scaled_reciprocal, jit_options=JIT_OPTIONS)
def _scaled_reciprocal(scalar, a):
    if isinstance(a, BFloat16):
        return lambda scalar, a: 1 / a * scalar  # two roundings, as in torch


@overload(rule_math.clamp, jit_options=JIT_OPTIONS)
def _clamp(a, low, high):
    if isinstance(a, BFloat16):
        return lambda a, low, high: round_bf16(
            rule_math.clamp(to_f32(a), to_f32(low), to_f32(high))
        )


@overload(rule_math.sign, jit_options=JIT_OPTIONS)
def _sign(a):
    if isinstance(a, BFloat16):
        return lambda a: round_bf16(rule_math.sign(to_f32(a)))


@overload(rule_math.select_by_sign, jit_options=JIT_OPTIONS)
def _select_by_sign(a, negative, zero, positive):
    if isinstance(a, BFloat16):
        return lambda a, negative, zero, positive: round_bf16(
            rule_math.select_by_sign(to_f32(a), to_f32(negative), to_f32(zero), to_f32(positive))
        )


@overload(rule_math.zero_where_negative, jit_options=JIT_OPTIONS)
def _zero_where_negative(a, b):
    if isinstance(b, BFloat16):
        return lambda a, b: round_bf16(rule_math.zero_where_negative(to_f32(a), to_f32(b)))
