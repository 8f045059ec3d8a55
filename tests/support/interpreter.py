"""Run Triton kernels on CPU tensors, in Triton's interpreter.

Import this module before Triton: Triton reads TRITON_INTERPRET when it defines a kernel.
"""

import math
import os

os.environ["TRITON_INTERPRET"] = "1"

import numpy as np
import pytest
import torch
from numba import njit

from hotrow.kernels import devices
from hotrow.kernels.cpu.intrinsics import JIT_OPTIONS, fma

if True:  # import Triton only after setting the environment variable
    import triton.language as tl
    import triton.runtime.interpreter as interpreter


@njit(**JIT_OPTIONS)
def _fma(a, b, c, result):
    for i in range(len(result)):
        result[i] = fma(a[i], b[i], c[i])


def create_fma(self, x, y, z):
    """Round once, as a GPU does; the interpreter's own fma rounds twice."""
    a, b, c = np.broadcast_arrays(x.data, y.data, z.data)
    result = np.empty(a.shape, a.dtype)
    flat = [np.ascontiguousarray(each).reshape(-1) for each in (a, b, c)]
    _fma(*flat, result.reshape(-1))
    return interpreter.TensorHandle(result, z.dtype.scalar)


def apply_elementwise(function):
    """Return an operation that calls a function of `math`, the way numba's compiled code does."""

    def create(self, x):
        result = np.vectorize(function, otypes=[x.data.dtype])(x.data)
        return interpreter.TensorHandle(result, x.dtype.scalar)

    return create


_cast = interpreter.InterpreterBuilder.cast_impl


def cast(self, x, dtype):
    """Round to the nearest bfloat16, as a GPU does; the interpreter truncates."""
    source, target = x.dtype.scalar, dtype.scalar
    if (source, target) == (tl.float32, tl.bfloat16):
        rounded = torch.from_numpy(np.array(x.data)).bfloat16()
        return interpreter.TensorHandle(rounded.view(torch.int16).numpy().view(np.uint16), target)
    if (source, target) == (tl.bfloat16, tl.float32):
        bits = x.data.astype(np.uint32) << np.uint32(16)
        return interpreter.TensorHandle(bits.view(np.float32), target)
    return _cast(self, x, dtype)


_patch_tensor = interpreter._patch_lang_tensor


def patch_tensor(tensor, scope):
    """Let `range` accept an array with one element; with Triton 3.6, numpy 2.4 rejects it."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())


# The interpreter copies all arguments to the CPU and back. Here, they are already on the CPU, and
# the copying code would keep references that count as aliases of a table.
interpreter.GridExecutor._init_args_hst = lambda self, arguments, named: (arguments, named)
interpreter.GridExecutor._restore_args_dev = lambda self, *arguments: None
interpreter._patch_lang_tensor = patch_tensor
interpreter.InterpreterBuilder.create_fma = create_fma
interpreter.InterpreterBuilder.cast_impl = cast
interpreter.InterpreterBuilder.create_exp = apply_elementwise(math.exp)
interpreter.InterpreterBuilder.create_log = apply_elementwise(math.log)


def _has_triton_kernels(rows):
    return rows.dtype in devices.TRITON_DTYPES and devices.has_layout(rows)


def use_triton(monkeypatch):
    """Make hotrow treat every tensor as a tensor on a GPU with Triton."""
    monkeypatch.setattr(devices, "is_on_cpu", lambda tensor: False)
    monkeypatch.setattr(devices, "is_on_gpu", lambda tensor: True)
    monkeypatch.setattr(devices, "has_triton_kernels", _has_triton_kernels)
    monkeypatch.setattr(torch.UntypedStorage, "is_shared", lambda storage: True)


@pytest.fixture
def interpreted(monkeypatch):
    use_triton(monkeypatch)
