"""Enlarge a storage in place; on Linux, without copying its values or writing zeros.

`UntypedStorage.resize_` copies the values to new memory. On Linux, this module instead uses
`mremap` to move the pages of physical memory to another address:

    1. Move the pages of the old memory to a temporary address.
    2. Let torch free the old memory and allocate new memory.
    3. Move the pages to the new memory.

Tensors that use the storage remain valid, because the storage remains the same object. From the
memory allocator's point of view, only the contents of its memory have changed.

Unwritten memory pages contain zeros and take no physical memory. `fill_with_zeros` finds them in
`/proc/self/pagemap`, and doesn't write to them.
"""

from __future__ import annotations

import ctypes
import functools
import mmap
import sys
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.inputs.mapped_tensor import NO_RESERVE

MIN_BYTES = 1 << 25  # smaller blocks may be in the C heap, where alignment is not fixed
_PAGE = mmap.PAGESIZE
_HUGE_PAGE = 1 << 21  # Linux moves a huge page only if its address modulo this size stays the same
_MAYMOVE, _FIXED, _DONTUNMAP = 1, 2, 4  # flags of mremap; the last flag needs Linux 5.7
_FIXED_NOREPLACE = 0x100000  # a flag of mmap
_PRESENT_OR_SWAPPED = np.uint64(3 << 62)  # flags in pagemap
FAILED = ctypes.c_void_p(-1).value

# Memory to which the system could not move pages. It may have a hole that other code uses, so it is
# never unmapped. After the first failure, values are always copied.
_abandoned: list[mmap.mmap] = []


def grow_storage(storage: torch.UntypedStorage, size: int) -> None:
    """Enlarge a storage to `size` bytes; the values of the new bytes are undefined.

    During the call, no signal handler may raise an exception, and no other thread may use the
    storage. Pointers to the old memory, such as `data_ptr()`, become invalid.

    Raises:
        RuntimeError: there is too little memory. The storage is unchanged.
    """
    parked = None
    if _is_movable(storage):
        torch.empty(size, dtype=torch.uint8, device="cpu")  # fails if there is too little memory
        parked = _park(storage)
    if parked is None:
        storage.resize_(size)
        return
    memory, begin, length = parked
    storage.resize_(0)
    storage.resize_(size)
    target = storage.data_ptr()
    if not _move_pages(begin, target, length):
        _fill_hole(target, length)
        ctypes.memmove(target, begin, length)
    del memory  # unmaps it


def fill_with_zeros(rows: Tensor) -> None:
    """Fill rows with zeros, except in unwritten memory pages, which are zero already."""
    begin, length = rows.data_ptr(), rows.nbytes
    first, size = _whole_pages(begin, length)
    is_known = rows.is_contiguous() and size > 0 and _is_private(rows.untyped_storage())
    if not (is_known and _was_never_written(first, size)):
        rows.zero_()
        return
    end = first + size
    ctypes.memset(begin, 0, first - begin)
    ctypes.memset(end, 0, begin + length - end)


def _was_never_written(first: int, size: int) -> bool:
    """Return whether none of these pages is in memory or in swap."""
    count = size // _PAGE
    try:
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(first // _PAGE * 8)
            data = file.read(count * 8)
    except OSError:
        return False
    flags = np.frombuffer(data, np.uint64)
    return len(flags) == count and not (flags & _PRESENT_OR_SWAPPED).any()


def _is_movable(storage: torch.UntypedStorage) -> bool:
    """Return whether the memory belongs to torch's allocator alone, and can be moved."""
    return not _abandoned and _is_private(storage)


def _is_private(storage: torch.UntypedStorage) -> bool:
    """Return whether the memory is large and belongs to torch's allocator alone."""
    return (
        sys.platform == "linux"
        and storage.device.type == "cpu"
        and storage.nbytes() >= MIN_BYTES
        and storage.resizable()
        and not storage.is_shared()
        # In torch 2.11, the storage's own `is_pinned` causes a deprecation warning.
        and not torch.empty(0, dtype=torch.uint8, device="cpu").set_(storage).is_pinned()
    )


def _park(storage: torch.UntypedStorage) -> tuple[mmap.mmap, int, int] | None:
    """Move the values to new memory; return the memory, the values' address and their length."""
    source, length = storage.data_ptr(), storage.nbytes()
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    try:
        memory = mmap.mmap(-1, length + _HUGE_PAGE, flags=flags)
    except OSError:
        return None
    address = ctypes.addressof(ctypes.c_char.from_buffer(memory))
    begin = address + (source - address) % _HUGE_PAGE
    if not _move_pages(source, begin, length):
        _abandoned.append(memory)
        return None
    return memory, begin, length


def _move_pages(source: int, target: int, length: int) -> bool:
    """Move values; if the system can't move pages, leave the values in place and return False."""
    first, size = _whole_pages(source, length)
    offset = target - source
    flags = _MAYMOVE | _FIXED | _DONTUNMAP
    if offset % _PAGE or libc().mremap(first, size, size, flags, first + offset) == FAILED:
        return False
    ctypes.memmove(target, source, first - source)
    end = first + size
    ctypes.memmove(end + offset, end, source + length - end)
    return True


def _fill_hole(address: int, length: int) -> None:
    """Map the pages of a range again if a failed `mremap` has unmapped them."""
    first, size = _whole_pages(address, length)
    protection = mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | _FIXED_NOREPLACE
    libc().mmap(first, size, protection, flags, -1, 0)


def _whole_pages(address: int, length: int) -> tuple[int, int]:
    """Return the address and the size of the whole pages in a range."""
    first = -(-address // _PAGE) * _PAGE
    return first, (address + length) // _PAGE * _PAGE - first


@functools.cache
def libc() -> Any:
    """Return the C library; its functions run without releasing the GIL."""
    library = ctypes.PyDLL(None)
    size = ctypes.c_size_t
    for name, arguments in {
        "mremap": [ctypes.c_void_p, size, size, ctypes.c_int, ctypes.c_void_p],
        "mmap": [ctypes.c_void_p, size, *[ctypes.c_int] * 3, ctypes.c_long],
    }.items():
        function = getattr(library, name)
        function.restype, function.argtypes = ctypes.c_void_p, arguments
    return library
