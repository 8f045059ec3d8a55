"""A safetensors file with one tensor, mapped copy-on-write.

The mapping is private: the first write to a page gives the process its own copy, and the file does
not change. Linux lists these copies in `/proc/self/pagemap` as pages in memory or swap that are not
backed by a file. A save writes these pages to the file.
"""

from __future__ import annotations

import json
import math
import mmap
import os
import struct
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.errors import HotrowError

PAGE = mmap.PAGESIZE
# Reserve no memory for pages that are not written yet. Python 3.13 added this flag to `mmap`.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
DTYPE_NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32"}
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32}
_PRESENT, _SWAPPED, _FILE_BACKED = (np.uint64(1 << bit) for bit in (63, 62, 61))


RowBlocks = Iterable[Tensor]  # blocks of rows, in order


def write_new(
    path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, values: RowBlocks = ()
) -> None:
    """Write a file with one tensor; omitted values are zero and take no disk space."""
    size = math.prod(shape) * dtype.itemsize
    entry = {"dtype": DTYPE_NAMES[dtype], "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({name: entry}).encode()
    header += b" " * (PAGE - 8 - len(header))  # the values start at the second page
    new_path = path.with_suffix(".new")
    with new_path.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for block in values:
            file.write(block.detach().to("cpu", dtype).contiguous().numpy().data)
        file.truncate(PAGE + size)
        file.flush()
        os.fsync(file.fileno())
    new_path.replace(path)


class MappedTensor:
    """A memory-mapped tensor from a file that `write_new` created.

    Raises:
        HotrowError: the file was not created by `write_new`, the file has the wrong size, or the
            system is not Linux.
    """

    def __init__(self, path: Path) -> None:
        if sys.platform != "linux":
            raise HotrowError(
                f"{path} cannot be used for training on {sys.platform}, because only Linux "
                "reports which pages were written",
                fix="read its rows with hotrow.Embedding.from_file",
            )
        self.path = path
        self.name, self.shape, self.dtype = _read_header(path)
        self.size = math.prod(self.shape) * self.dtype.itemsize
        with path.open("rb") as file:
            self._map = mmap.mmap(
                file.fileno(),
                PAGE + self.size,
                flags=mmap.MAP_PRIVATE | NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        self._map.madvise(mmap.MADV_RANDOM)  # reads are random, so don't read ahead
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def tensor(self) -> Tensor:
        """Return the values as a tensor that shares the mapped memory."""
        values = self.bytes[PAGE:].view(NUMPY_DTYPES[self.dtype])
        return torch.from_numpy(values.reshape(self.shape))

    def written_pages(self) -> NDArray[np.int64]:
        """Return the indices of the pages modified in memory, which may differ from the file."""
        page_count = -(-len(self.bytes) // PAGE)
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(self.bytes.ctypes.data // PAGE * 8)
            flags = np.frombuffer(_read_exactly(file, page_count * 8), np.uint64)
        in_memory = (flags & (_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(in_memory & ((flags & _FILE_BACKED) == 0))

    def page(self, number: int) -> NDArray[np.uint8]:
        """Return the bytes of a page; the last page of a file may be shorter."""
        return self.bytes[number * PAGE : (number + 1) * PAGE]

    def discard_pages(self) -> None:
        """Drop the pages in memory, so that the next read comes from the file."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_exactly(file: Any, count: int) -> bytes:
    """Read the next `count` bytes; a single `read` may return fewer bytes."""
    data = b""
    while len(data) < count:
        data += file.read(count - len(data))
    return data


def _read_header(path: Path) -> tuple[str, tuple[int, ...], torch.dtype]:
    """Return the name, shape and dtype of the tensor in a file."""
    dtypes = {name: dtype for dtype, name in DTYPE_NAMES.items()}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length == PAGE - 8 else {}
        ((name, entry),) = header.items()
        shape, dtype = tuple(entry["shape"]), dtypes[entry["dtype"]]
        size = math.prod(shape) * dtype.itemsize
        is_complete = path.stat().st_size == PAGE + size and entry["data_offsets"] == [0, size]
    except FileNotFoundError:
        raise HotrowError(
            f"{path} does not exist", fix="create a table with hotrow.disk.create"
        ) from None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise HotrowError(
            f"{path} was not written by hotrow.disk ({type(error).__name__}: {error})",
            fix="create a table with hotrow.disk.create, and copy the values into it",
        ) from None
    if not is_complete:
        raise HotrowError(
            f"{path} is damaged: it has {path.stat().st_size:,} bytes instead of {PAGE + size:,}",
            fix="restore it from a backup",
        )
    return name, shape, dtype
