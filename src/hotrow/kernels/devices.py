"""Choose the kernels and checks for a tensor's device.

All code that depends on the device calls these functions. On a computer without a GPU, tests
replace them to run the GPU code on CPU tensors.
"""

from __future__ import annotations

import functools
import importlib.util

import torch
from torch import Tensor

TRITON_DTYPES = frozenset((torch.float32, torch.float64, torch.bfloat16, torch.float16))


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether Python and compiled code can read the tensor's memory directly."""
    return tensor.is_cpu


def is_on_gpu(tensor: Tensor) -> bool:
    """Return whether Triton kernels can run on the tensor's device."""
    return tensor.is_cuda and _has_triton()


def has_triton_kernels(rows: Tensor) -> bool:
    """Return whether the Triton kernels support the tensor's device, dtype and layout."""
    return is_on_gpu(rows) and rows.dtype in TRITON_DTYPES and has_layout(rows)


def has_layout(rows: Tensor) -> bool:
    """Return whether the rows or the columns are contiguous, as the compiled kernels need."""
    return rows.is_contiguous() or rows.t().is_contiguous()


def is_capturing(tensor: Tensor) -> bool:
    """Return whether a CUDA graph is capturing kernel launches on the tensor's GPU."""
    return tensor.is_cuda and torch.cuda.is_current_stream_capturing()


def all_accelerators() -> range:
    """Return the indices of all GPUs, for `torch.random.fork_rng`.

    On a computer with several GPUs, `fork_rng` shows a warning unless it gets a list of devices.
    """
    return range(torch.accelerator.device_count())


@functools.cache
def _has_triton() -> bool:
    """Return whether Triton is installed; torch's CUDA builds for Linux install it."""
    return torch.version.hip is None and importlib.util.find_spec("triton") is not None
