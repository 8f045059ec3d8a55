"""Map a tensor in a safetensors file to memory, even if it is larger than the memory."""

from __future__ import annotations

import json
import math
import mmap
import sys
from typing import Any

import torch
from torch import Tensor

# Reserve no memory for pages before they are written. Without this flag, Linux refuses private
# mappings that are larger than the memory. Python 3.13 added it to `mmap`.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)


def map_tensor(descriptor: int, name: str, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """Return a tensor that is mapped to the file; writes to it don't change the file.

    Args:
        descriptor: the open safetensors file.
        name: the name of the tensor in the file.
        shape: its shape.
        dtype: its dtype.

    The safetensors library has checked the header. But it can't map a file larger than the memory.

    Raises:
        ValueError: the file has changed since.
    """
    flags: dict[str, Any] = {"access": mmap.ACCESS_COPY}
    if sys.platform == "linux":
        flags = {"flags": mmap.MAP_PRIVATE | NO_RESERVE, "prot": mmap.PROT_READ | mmap.PROT_WRITE}
    memory = mmap.mmap(descriptor, 0, **flags)
    data = 8 + int.from_bytes(memory[:8], "little")
    begin, end = (data + offset for offset in json.loads(memory[8:data])[name]["data_offsets"])
    count = math.prod(shape)
    if end - begin != count * dtype.itemsize or not data <= begin <= end <= len(memory):
        raise ValueError("the file has changed while it was read")
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=begin).view(shape)
