"""Decide which kernels and checks fit a tensor's device.

All code that depends on the device asks these functions, so that tests on a computer without a GPU
can replace them and run the code for GPUs on CPU tensors.
"""

from __future__ import annotations

from torch import Tensor


def is_on_cpu(tensor: Tensor) -> bool:
    """Return whether Python and compiled code can read the tensor's memory directly."""
    return tensor.is_cpu
