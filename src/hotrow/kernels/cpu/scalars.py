"""The operations of `ops.py` for numba: the same names, over scalars.

Imported with the first kernel; importing it registers the overloads. No fast-math anywhere:
where torch's CPU kernels fuse, `fma` says so, and nothing else is fused.
"""
# mypy: ignore-errors
# (what numba compiles has types, but not those of the Python it is written in)

from __future__ import annotations

import functools
import math

import numpy as np
from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic, overload
from numba.np.arrayobj import populate_array

from hotrow.kernels import rule_math as ops
from hotrow.kernels.cpu.threads import JOINED, OPENMP, TAKEN, TEAM, THREADS

OPTIONS = {"error_model": "numpy", "nogil": True}  # a division by zero is inf, as in torch


def of_floats(operation):
    """`overload` for float32 and float64; other types of number bring their own."""

    def register(make):
        @functools.wraps(make)
        def choose(*kinds, **others):
            every = (*kinds, *others.values())
            known = all(isinstance(kind, types.Number | types.Literal) for kind in every)
            return make(*kinds, **others) if known else None

        overload(operation, jit_options=OPTIONS)(choose)
        return make

    return register


@intrinsic
def fma(typingctx, a, b, c):
    """`a * b + c`, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return a(a, a, a), codegen


@intrinsic
def take(typingctx, crew, size):
    """How many rows were taken by the threads of a crew; `size` more are now.

    Atomic, so that no two threads get one.
    """

    def codegen(context, builder, signature, args):
        taken = _of_crew(context, builder, crew, args[0], TAKEN)
        return builder.atomic_rmw("add", taken, args[1], "monotonic")

    return types.intp(crew, types.intp), codegen


@intrinsic
def join(typingctx, crew, arguments):
    """The number of this thread in its crew; -1 if there is nothing to do for it.

    `arguments` are all of the kernel that calls this. Where threads are OpenMP's, its first call
    has each of them call the kernel, without Python, and is over when they have done all.
    """

    def codegen(context, builder, signature, args):
        def entry(n):
            return _of_crew(context, builder, crew, args[0], n)

        none, zero, one = (context.get_constant(types.intp, n) for n in (-1, 0, 1))
        who = builder.atomic_rmw("add", entry(JOINED), one, "monotonic")
        with builder.if_then(builder.icmp_signed("<", who, zero), likely=False):
            kernel, whole = builder.function, args[1]
            byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            body = ir.FunctionType(ir.VoidType(), [byte])
            each = ir.Function(builder.module, body, name=f"{kernel.name}.each")
            each.linkage = "internal"
            inside = ir.IRBuilder(each.append_basic_block())
            given = inside.load(inside.bitcast(each.args[0], whole.type.as_pointer()))
            parts = cgutils.unpack_tuple(inside, given)
            # A kernel raises nothing: what it needs is there before it begins.
            context.call_conv.call_function(inside, kernel, types.none, tuple(arguments), parts)
            inside.ret_void()
            # void GOMP_parallel(void (*each)(void *), void *data, unsigned threads, unsigned flags)
            parallel = ir.FunctionType(ir.VoidType(), [body.as_pointer(), byte, flag, flag])
            call = builder.inttoptr(builder.load(entry(OPENMP)), parallel.as_pointer())
            data = builder.bitcast(cgutils.alloca_once_value(builder, whole), byte)
            team = builder.trunc(builder.load(entry(TEAM)), flag)
            builder.call(call, [each, data, team, flag(0)])
        late = builder.icmp_signed(">=", who, builder.load(entry(THREADS)))
        return builder.select(late, none, who)

    return types.intp(crew, arguments), codegen


def _of_crew(context, builder, kind, crew, n):
    """Where entry n of a crew is."""
    array = context.make_array(kind)(context, builder, crew)
    return builder.gep(array.data, [context.get_constant(types.intp, n)])


@intrinsic
def bare(typingctx, array):
    """The same array without an owner, whom the caller keeps.

    numba counts the references to the owner of each row that a loop takes, and threads that count
    in one place wait for each other.
    """

    def codegen(context, builder, signature, args):
        made = context.make_array(signature.return_type)
        known, result = made(context, builder, args[0]), made(context, builder)
        populate_array(
            result,
            data=known.data,
            shape=cgutils.unpack_tuple(builder, known.shape, array.ndim),
            strides=cgutils.unpack_tuple(builder, known.strides, array.ndim),
            itemsize=known.itemsize,
            meminfo=None,
        )
        return result._getvalue()

    return array(array), codegen


@intrinsic
def prefetch(typingctx, array, r, j):
    """Ask for the cache line of `array[r, j]`, which is about to be read and written."""

    def codegen(context, builder, signature, args):
        kind = signature.args[0]
        source = context.make_array(kind)(context, builder, args[0])
        shape = cgutils.unpack_tuple(builder, source.shape, 2)
        strides = cgutils.unpack_tuple(builder, source.strides, 2)
        place = cgutils.get_item_pointer2(
            context, builder, source.data, shape, strides, kind.layout, args[1:]
        )
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        hint = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]),
            "llvm.prefetch.p0",
        )
        # for reading and writing; into every cache; data
        builder.call(hint, [builder.bitcast(place, byte), flag(1), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.none(array, types.intp, types.intp), codegen


@of_floats(ops.axpy)
def _axpy(a, b, alpha):
    return lambda a, b, alpha: fma(b, alpha, a)


@of_floats(ops.lerp)
def _lerp(a, b, weight):
    one = number(a)(1)

    def lerp(a, b, weight):
        # As torch does, so that weight = 1 gives b itself.
        if abs(weight) < 0.5:
            return fma(weight, b - a, a)
        return fma(weight - one, b - a, b)

    return lerp


@of_floats(ops.addcmul)
def _addcmul(a, b, c, value):
    return lambda a, b, c, value: fma(value * b, c, a)


@of_floats(ops.addcdiv)
def _addcdiv(a, b, c, value):
    return lambda a, b, c, value: a + value * b / c


@of_floats(ops.sqrt)
def _sqrt(a):
    return lambda a: math.sqrt(a)


@of_floats(ops.maximum)
def _maximum(a, b):
    return lambda a, b: a if a > b or a != a else b


@of_floats(ops.under)
def _under(scalar, a):
    one = number(a)(1)
    return lambda scalar, a: one / a * scalar


@of_floats(ops.clamp)
def _clamp(a, low, high):
    def clamp(a, low, high):
        b = low if a < low else a
        return high if b > high else b

    return clamp


@of_floats(ops.sign)
def _sign(a):
    kind = number(a)
    minus, zero, plus = kind(-1), kind(0), kind(1)

    def sign(a):
        if a > 0:
            return plus
        return minus if a < 0 else zero

    return sign


@of_floats(ops.by_sign)
def _by_sign(a, negative, zero, positive):
    def by_sign(a, negative, zero, positive):
        if a > 0:
            return positive
        return negative if a < 0 else zero

    return by_sign


@of_floats(ops.unless_negative)
def _unless_negative(a, b):
    none = number(b)(0)
    return lambda a, b: none if a < 0 else b


def number(kind: types.Type) -> type:
    """The numpy scalar of a numba type: a literal 1 would turn float32 into float64."""
    return np.float32 if kind == types.float32 else np.float64
