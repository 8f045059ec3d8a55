"""A safetensors file of one tensor, mapped so that what is written stays in memory.

The mapping is private: the first write into a page gives the process a copy of it, and the file
stays as it was. Which pages these are the kernel knows (`/proc/self/pagemap`): a page in memory or
in swap that does not belong to a file. They are what a save has to write.
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
# No memory is set aside for pages that may be written; Python 3.13 has a name for it.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
NAMES = {torch.float32: "F32", torch.float64: "F64", torch.int32: "I32"}
KINDS = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32}
_PRESENT, _SWAPPED, _OF_A_FILE = (np.uint64(1 << bit) for bit in (63, 62, 61))


Blocks = Iterable[Tensor]  # values, some rows at a time


def write_new(
    path: Path, name: str, shape: tuple[int, ...], dtype: torch.dtype, values: Blocks = ()
) -> None:
    """A file with one tensor; what is not given is zero, and takes no space on the disk."""
    size = math.prod(shape) * dtype.itemsize
    entry = {"dtype": NAMES[dtype], "shape": shape, "data_offsets": [0, size]}
    header = json.dumps({name: entry}).encode()
    header += b" " * (PAGE - 8 - len(header))  # so that the values begin with a page
    beside = path.with_suffix(".new")
    with beside.open("wb") as file:
        file.write(struct.pack("<Q", len(header)) + header)
        for block in values:
            file.write(block.detach().to("cpu", dtype).contiguous().numpy().data)
        file.truncate(PAGE + size)
        file.flush()
        os.fsync(file.fileno())
    beside.replace(path)


class Mapped:
    """The one tensor of a file that `write_new` made.

    Raises:
        HotrowError: the file is another, or not whole; not on Linux.
    """

    def __init__(self, path: Path) -> None:
        if sys.platform != "linux":
            raise HotrowError(
                f"{path} cannot be trained from here, as only Linux says which pages were written",
                fix="read its rows with hotrow.Embedding.from_file",
            )
        self.path = path
        self.name, self.shape, self.dtype = _described(path)
        self.size = math.prod(self.shape) * self.dtype.itemsize
        with path.open("rb") as file:
            self._map = mmap.mmap(
                file.fileno(),
                PAGE + self.size,
                flags=mmap.MAP_PRIVATE | NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
        self._map.madvise(mmap.MADV_RANDOM)  # or the rows around each would be read as well
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)

    def tensor(self) -> Tensor:
        """The values; another tensor over the same memory each time."""
        values = self.bytes[PAGE:].view(KINDS[self.dtype])
        return torch.from_numpy(values.reshape(self.shape))

    def written(self) -> NDArray[np.int64]:
        """The numbers of the pages that differ from the file's, or may."""
        pages = -(-len(self.bytes) // PAGE)
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(self.bytes.ctypes.data // PAGE * 8)
            found = np.frombuffer(_all_of(file, pages * 8), np.uint64)
        held = (found & (_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(held & ((found & _OF_A_FILE) == 0))

    def page(self, number: int) -> NDArray[np.uint8]:
        """Its bytes; the last may be a part of one."""
        return self.bytes[number * PAGE : (number + 1) * PAGE]

    def forget(self) -> None:
        """Take every page from the file again."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _all_of(file: Any, count: int) -> bytes:
    """The next bytes, of which a call may give fewer."""
    found = b""
    while len(found) < count:
        found += file.read(count - len(found))
    return found


def _described(path: Path) -> tuple[str, tuple[int, ...], torch.dtype]:
    """The name, shape and dtype of the tensor in a file."""
    dtypes = {name: dtype for dtype, name in NAMES.items()}
    try:
        with path.open("rb") as file:
            (length,) = struct.unpack("<Q", file.read(8))
            header = json.loads(file.read(length)) if length == PAGE - 8 else {}
        ((name, entry),) = header.items()
        shape, dtype = tuple(entry["shape"]), dtypes[entry["dtype"]]
        size = math.prod(shape) * dtype.itemsize
        whole = path.stat().st_size == PAGE + size and entry["data_offsets"] == [0, size]
    except FileNotFoundError:
        raise HotrowError(f"there is no {path}", fix="make a table with create") from None
    except (OSError, ValueError, KeyError, TypeError, struct.error) as error:
        raise HotrowError(
            f"{path} is not a file of hotrow.disk ({type(error).__name__}: {error})",
            fix="make a table with hotrow.disk.create, and copy the values into it",
        ) from None
    if not whole:
        raise HotrowError(
            f"{path} is not whole: it has {path.stat().st_size:,} bytes, and needs {PAGE + size:,}",
            fix="take it from a backup",
        )
    return name, shape, dtype
