"""numba intrinsics for fused multiply-add, prefetching, views of memory and thread teams."""
# mypy: ignore-errors
# numba infers the types in this file when it compiles the code, so mypy can't check them.

from __future__ import annotations

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic
from numba.np.arrayobj import populate_array

from hotrow.kernels.cpu.threads import CLAIMED, GOMP_PARALLEL, JOINED, MAX_THREADS, TEAM_SIZE

JIT_OPTIONS = {"error_model": "numpy", "nogil": True}  # "numpy": 1 / 0 returns inf, as in torch
# A call that is not inlined passes each array as a dozen machine words, which takes longer than
# processing a short row.
INLINE_OPTIONS = JIT_OPTIONS | {
    "forceinline": True,
    "no_cpython_wrapper": True,  # only compiled code calls these functions
    "no_cfunc_wrapper": True,
}


@intrinsic
def fma(typingctx, a, b, c):
    """Return `a * b + c`, rounded once."""

    def codegen(context, builder, signature, args):
        return builder.fma(*args)

    return a(a, a, a), codegen


@intrinsic
def claim_rows(typingctx, team, size):
    """Claim the next `size` rows for this thread, and return how many rows were already claimed.

    The counter is incremented atomically, so no two threads get the same row.
    """

    def codegen(context, builder, signature, args):
        claimed = _team_entry(context, builder, team, args[0], CLAIMED)
        return builder.atomic_rmw("add", claimed, args[1], "monotonic")

    return types.intp(team, types.intp), codegen


@intrinsic
def join_team(typingctx, team, arguments):
    """Return this thread's number in its team, or -1 if the thread has no work.

    `arguments` contains all arguments of the calling kernel. With OpenMP, the first call runs the
    kernel on every OpenMP thread without entering Python. That call returns -1 once all threads
    have finished.
    """

    def codegen(context, builder, signature, args):
        def entry(n):
            return _team_entry(context, builder, team, args[0], n)

        none, zero, one = (context.get_constant(types.intp, n) for n in (-1, 0, 1))
        thread = builder.atomic_rmw("add", entry(JOINED), one, "monotonic")
        with builder.if_then(builder.icmp_signed("<", thread, zero), likely=False):
            kernel, packed = builder.function, args[1]
            byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
            body_type = ir.FunctionType(ir.VoidType(), [byte])
            body = ir.Function(builder.module, body_type, name=f"{kernel.name}.body")
            body.linkage = "internal"
            inside = ir.IRBuilder(body.append_basic_block())
            loaded = inside.load(inside.bitcast(body.args[0], packed.type.as_pointer()))
            unpacked = cgutils.unpack_tuple(inside, loaded)
            # The returned status is ignored because kernels raise no errors.
            context.call_conv.call_function(inside, kernel, types.none, tuple(arguments), unpacked)
            inside.ret_void()
            # void GOMP_parallel(void (*body)(void *), void *data, unsigned threads, unsigned flags)
            parallel = ir.FunctionType(ir.VoidType(), [body_type.as_pointer(), byte, flag, flag])
            address = builder.load(entry(GOMP_PARALLEL))
            function = builder.inttoptr(address, parallel.as_pointer())
            data = builder.bitcast(cgutils.alloca_once_value(builder, packed), byte)
            size = builder.trunc(builder.load(entry(TEAM_SIZE)), flag)
            builder.call(function, [body, data, size, flag(0)])
        superfluous = builder.icmp_signed(">=", thread, builder.load(entry(MAX_THREADS)))
        return builder.select(superfluous, none, thread)

    return types.intp(team, arguments), codegen


def _team_entry(context, builder, array_type, team, n):
    """Return a pointer to entry n of a team's array."""
    array = context.make_array(array_type)(context, builder, team)
    return builder.gep(array.data, [context.get_constant(types.intp, n)])


@intrinsic
def drop_owner(typingctx, array):
    """Return the array without a reference to its owner; see `view_memory`."""

    def codegen(context, builder, signature, args):
        result = context.make_array(array)(context, builder, args[0])
        result.meminfo = cgutils.get_null_value(result.meminfo.type)
        result.parent = cgutils.get_null_value(result.parent.type)
        return result._getvalue()

    return array(array), codegen


@intrinsic
def view_memory(typingctx, address, shape, dtype):
    """Return the memory at `address` as a contiguous array; the caller must keep the memory alive.

    The array has no reference to an owner. Otherwise, numba would update the owner's reference
    count for every row that a loop reads, and threads that update the same count would wait for
    each other.
    """
    array = types.Array(dtype.dtype, shape.count, "C")

    def codegen(context, builder, signature, args):
        result = context.make_array(array)(context, builder)
        itemsize = context.get_constant(
            types.intp, context.get_abi_sizeof(context.get_data_type(array.dtype))
        )
        sizes = cgutils.unpack_tuple(builder, args[1], array.ndim)
        strides = [itemsize]
        for size in reversed(sizes[1:]):
            strides.insert(0, builder.mul(strides[0], size))
        populate_array(
            result,
            data=builder.inttoptr(args[0], result.data.type),
            shape=sizes,
            strides=strides,
            itemsize=itemsize,
            meminfo=None,
        )
        return result._getvalue()

    return array(address, shape, dtype), codegen


@intrinsic
def prefetch(typingctx, array, index):
    """Prefetch the cache line of `array[index]` for reading and writing; the index is a tuple."""

    def codegen(context, builder, signature, args):
        array_type = signature.args[0]
        source = context.make_array(array_type)(context, builder, args[0])
        shape = cgutils.unpack_tuple(builder, source.shape, array_type.ndim)
        strides = cgutils.unpack_tuple(builder, source.strides, array_type.ndim)
        indices = cgutils.unpack_tuple(builder, args[1], array_type.ndim)
        pointer = cgutils.get_item_pointer2(
            context, builder, source.data, shape, strides, array_type.layout, indices
        )
        byte, flag = ir.IntType(8).as_pointer(), ir.IntType(32)
        hint = cgutils.get_or_insert_function(
            builder.module,
            ir.FunctionType(ir.VoidType(), [byte, flag, flag, flag]),
            "llvm.prefetch.p0",
        )
        # prefetch data for writing, into all cache levels
        builder.call(hint, [builder.bitcast(pointer, byte), flag(1), flag(3), flag(1)])
        return context.get_dummy_value()

    return types.none(array, types.UniTuple(types.intp, array.ndim)), codegen
