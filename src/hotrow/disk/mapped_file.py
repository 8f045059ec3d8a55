"""A file mapped copy-on-write, with room in memory for rows that the file does not contain yet.

The mapping is private: the first write to a page gives the process its own copy, and the file does
not change. Linux lists these copies in `/proc/self/pagemap` as pages in memory or swap that are not
backed by a file. A save writes these copies to the file. If the process may not read this list, a
save compares all pages with the file instead.

The number of rows in memory can change before the file does. The mapping reserves addresses for
twice the number of rows, and the memory after the end of the file contains zeros. So adding rows
writes only the new rows. The next save changes the length of the file, and maps the file again.

Tensors can outlive the use of their memory for the file: code may keep `weight.data` and assign
other values to it, or two optimizers may have a state of the same name. So a file can be mapped
several times. In each of these memories, a page that Linux has not copied equals the page of the
file. Before a save changes a page of the file, `keep_pages` copies it in all other memories.
"""

from __future__ import annotations

import contextlib
import copy
import ctypes
import errno
import mmap
import os
import weakref
from typing import IO

import numpy as np
from numpy.typing import NDArray

from hotrow.disk.folder import Folder, close_later, damaged_file
from hotrow.disk.layout import PAGE, Layout
from hotrow.errors import HotrowError
from hotrow.inputs.mapped_tensor import NO_RESERVE
from hotrow.table.storage_growth import FAILED, libc

GROWTH = 2  # reserve addresses for this multiple of the number of rows
_FIXED = 0x10  # a flag of mmap
_MREMAP_FLAGS = 3  # MREMAP_MAYMOVE and MREMAP_FIXED
_POPULATE_WRITE = 23  # advice for madvise
_COPY_PAGES = 1 << 12  # the number of pages that are copied at once
_PRESENT, _SWAPPED, _FILE_BACKED = (np.uint64(1 << bit) for bit in (63, 62, 61))


class _Memory(mmap.mmap):
    """A reserved range of addresses, which exists as long as any tensor uses it.

    Attributes:
        used: the range contains only zeros after this many bytes.
        changed_from: `MappedFile.changed_from` when a `MappedFile` last used this memory.
    """

    used: int
    changed_from: int

    def __new__(cls, size: int) -> _Memory:
        size = _round_up(size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self = super().__new__(cls, -1, GROWTH * size, flags=flags)
        except OSError:  # the system limits the address space of a process
            self = super().__new__(cls, -1, size, flags=flags)
        with contextlib.suppress(OSError):  # raised by a kernel without huge pages
            # With huge pages, each new row that is read or written could take 2 MB of memory.
            self.madvise(mmap.MADV_NOHUGEPAGE)
        self.used = self.changed_from = 0
        return self

    @property
    def bytes(self) -> NDArray[np.uint8]:
        """All bytes of the range; the array keeps the memory alive."""
        return np.frombuffer(self, np.uint8)

    def map(self, begin: int, end: int, descriptor: int = -1) -> None:
        """Map part of the range again, either to a file or to zeros."""
        if end <= begin:
            return
        flags = mmap.MAP_PRIVATE | NO_RESERVE | _FIXED
        if descriptor < 0:
            flags |= mmap.MAP_ANONYMOUS
        address = self.bytes.ctypes.data + begin
        protection = mmap.PROT_READ | mmap.PROT_WRITE
        size, offset = end - begin, begin if descriptor >= 0 else 0
        if libc().mmap(address, size, protection, flags, descriptor, offset) != address:
            raise MemoryError
        if descriptor >= 0:  # reads are random, so don't read ahead
            self.madvise(mmap.MADV_RANDOM, begin, -(-size // PAGE) * PAGE)

    def clear(self, begin: int) -> None:
        """Fill the range with zeros from this byte on."""
        page = _round_up(begin)
        if self.used > begin:
            self.bytes[begin:page] = 0
            self.map(page, _round_up(self.used))
            self.used = begin

    def keep_pages(self, pages: NDArray[np.int64]) -> None:
        """Give this memory its own copy of these pages, so that the file can change."""
        pages = pages[pages < -(-self.used // PAGE)]
        for run in np.split(pages, np.flatnonzero(np.diff(pages) != 1) + 1):
            if len(run):
                self._populate(int(run[0]), len(run))

    def _populate(self, first: int, count: int) -> None:
        """Make Linux copy these pages, without changing values that other threads may write."""
        try:
            self.madvise(_POPULATE_WRITE, first * PAGE, count * PAGE)
        except OSError as error:
            if error.errno != errno.EINVAL:  # EINVAL: before Linux 5.14
                raise
            first_bytes = self.bytes[first * PAGE : (first + count) * PAGE : PAGE]
            first_bytes[:] = first_bytes.copy()

    def keep_end(self, begin: int) -> None:
        """Keep the values of all pages that begin after this byte, so that the file can end there.

        When a file is truncated, Linux also drops the copies of its pages. So copy the values to
        memory that isn't mapped to the file. Other threads may read the values meanwhile.
        """
        begin, end = _round_up(begin), _round_up(self.used)
        for first in range(begin, end, _COPY_PAGES * PAGE):
            chunk = slice(first, min(first + _COPY_PAGES * PAGE, end))
            _replace_memory(self.bytes[chunk], self.bytes[chunk].copy())


def _replace_memory(target: NDArray[np.uint8], values: NDArray[np.uint8]) -> None:
    """Replace whole pages by new memory with these values, in one step."""
    size, protection = len(target), mmap.PROT_READ | mmap.PROT_WRITE
    flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
    new = libc().mmap(None, size, protection, flags, -1, 0)
    if new == FAILED:
        raise MemoryError
    ctypes.memmove(new, values.ctypes.data, size)
    if libc().mremap(new, size, size, _MREMAP_FLAGS, target.ctypes.data) == FAILED:
        raise MemoryError


def _round_up(size: int) -> int:
    return -(-size // PAGE) * PAGE


class MappedFile:
    """A memory-mapped file with one tensor.

    Arguments:
        folder: the folder of the file.
        layout: the layout of the file. The caller must already have checked the file with
            `check_file`.

    Attributes:
        layout: the layout of the tensor in memory.
        saved: the layout of the tensor in the file.
        bytes: the mapped memory, from the header to the end of the last row.
        changed_from: the memory is mapped to the file only before this page of values.
    """

    def __init__(self, folder: Folder, layout: Layout) -> None:
        self.layout = self.saved = layout
        self.path = folder.path / layout.file_name
        self._reserve(folder)
        with folder.open(layout.file_name, "rb") as file:
            if os.fstat(file.fileno()).st_size < layout.file_bytes:  # it was longer in `check_file`
                raise damaged_file(self.path, "another program has truncated it")
            self._descriptor = _Descriptor(file)
        self._memories: weakref.WeakSet[_Memory] = weakref.WeakSet()  # all that are mapped
        self._use(_Memory(layout.file_bytes), layout)
        self.map_saved()

    def _reserve(self, folder: Folder) -> None:
        """Reserve space for the holes in a file in a tmpfs; see `Folder.reserve`."""
        if not folder.is_tmpfs():
            return
        name, size = self.layout.file_name, self.layout.file_bytes
        try:
            with folder.open(name, "r+b") as file:
                folder.reserve(file, size)
        except OSError as error:
            if error.errno not in (errno.EACCES, errno.EROFS):
                raise
            with folder.open(name, "rb") as file:  # a folder that this process can only read
                if os.fstat(file.fileno()).st_blocks * 512 < size:
                    raise

    def _use(self, memory: _Memory, layout: Layout) -> None:
        self._memory, self.layout = memory, layout
        self._memories.add(memory)
        memory.used = max(memory.used, layout.file_bytes)
        self.bytes = memory.bytes[: layout.file_bytes]

    def _in(self, memory: _Memory, layout: Layout, changed_from: int) -> MappedFile:
        """Return this file in other memory, or with another layout."""
        self._memory.changed_from = self.changed_from
        result = copy.copy(self)
        result._use(memory, layout)
        result.changed_from = changed_from
        return result

    def map_saved(self) -> None:
        """Map the file, and discard the changed pages in memory.

        The layout of the file must already be `self.layout`.
        """
        self.saved, self.changed_from = self.layout, self.layout.page_count
        self._memory.clear(self.layout.file_bytes)
        self._memory.map(0, self.layout.file_bytes, self._descriptor.number)
        os.posix_fadvise(self._descriptor.number, 0, 0, os.POSIX_FADV_RANDOM)

    def reopen(self, folder: Folder) -> None:
        """Open the file again after a write to its name.

        In an overlay file system, the first write copies a file of a lower layer, such as a file in
        a container's image. The old descriptor and the old mapping still refer to the lower file.
        """
        with folder.open(self.path.name, "rb") as file:
            os.dup2(file.fileno(), self._descriptor.number, inheritable=False)

    def close(self) -> None:
        """Close the file. The memory stays mapped."""
        self._descriptor.close()

    # --- Changes in the number of rows -----------------------------------------------------------

    def resized(self, layout: Layout, changing: NDArray[np.int64]) -> MappedFile:
        """Return this file with the number of rows in `layout`; added rows are zeros.

        A file with more rows shares the memory of this file if enough addresses are reserved, and
        this file remains valid until the added rows are written.

        Arguments:
            layout: the layout of the result.
            changing: see `mapped_again`.
        """
        memory = self._memory
        kept = min(self.layout.value_bytes, layout.value_bytes)
        if layout.file_bytes > len(memory) or layout.file_bytes < self.layout.file_bytes:
            memory = self._copy_memory(layout.file_bytes, changing)
        else:
            memory.clear(self.layout.file_bytes)  # left by a change that failed
        return self._in(memory, layout, min(self.changed_from, kept // PAGE))

    def emptied(self, layout: Layout) -> MappedFile:
        """Return this file in new memory, with the number of rows in `layout`, all zeros."""
        return self._in(_Memory(layout.file_bytes), layout, 0)

    def mapped_again(self, changing: NDArray[np.int64]) -> MappedFile:
        """Return this file in new memory, with unspecified values.

        Arguments:
            changing: pages that an unfinished save may still change in the file.
        """
        memory = self._map_again(len(self.bytes))
        memory.keep_pages(changing)
        return self._in(memory, self.layout, self.changed_from)

    def at_address(self, address: int) -> MappedFile | None:
        """Return this file in the earlier memory at this address, or None if there is none."""
        for memory in self._memories:
            is_as_long = memory.used == self.layout.file_bytes
            if is_as_long and memory.bytes.ctypes.data == address:
                # Rows that were removed meanwhile have lost their checksums.
                changed_from = min(memory.changed_from, self.changed_from)
                return self._in(memory, self.layout, changed_from)
        return None

    def _map_again(self, size: int) -> _Memory:
        """Return a new range of addresses, mapped to the file where this memory is."""
        memory, end = _Memory(size), min(size, len(self.bytes))
        memory.used = end
        unchanged = min(self.saved.file_bytes, (1 + self.changed_from) * PAGE)
        memory.map(0, min(end, unchanged), self._descriptor.number)
        return memory

    def _copy_memory(self, size: int, changing: NDArray[np.int64]) -> _Memory:
        """Return a new range of addresses with the same contents, as far as they fit."""
        memory = self._map_again(size)
        end = memory.used
        count = -(-end // PAGE)
        pages = np.union1d(self.written_pages(), changing)
        pages = pages[pages < count]
        source, target = (
            each.bytes[: count * PAGE].reshape(-1, PAGE) for each in (self._memory, memory)
        )
        for begin in range(0, len(pages), _COPY_PAGES):
            chunk = pages[begin : begin + _COPY_PAGES]
            target[chunk] = source[chunk]
        memory.bytes[end : count * PAGE] = 0
        return memory

    # --- Saving ----------------------------------------------------------------------------------

    def check_name(self, folder: Folder) -> None:
        """Raise an error if the file's name now belongs to another file.

        A save writes to the file with this name, but reads still come from the mapped file.
        """
        if not folder.is_same(self.path.name, self._descriptor.number):
            raise HotrowError(
                f"{self.path} was replaced by another file while the folder was open",
                fix="close the store, and open the folder again",
            )

    def written_pages(self) -> NDArray[np.int64]:
        """Return the indices of the pages of the file that a save must write."""
        page_count = min(self.saved.page_count, self.layout.page_count)
        changed = np.arange(self.changed_from, page_count)
        return np.union1d(self._pages_in_memory(), changed + 1)

    def keep_pages(self, pages: NDArray[np.int64]) -> None:
        """Keep the values of these pages and of removed rows in all other memories of the file."""
        for memory in self._memories:
            if memory is not self._memory:
                memory.keep_pages(pages)
                if self.layout.file_bytes < self.saved.file_bytes:
                    memory.keep_end(self.layout.file_bytes)

    def _pages_in_memory(self) -> NDArray[np.int64]:
        """Return the indices of the pages of the file that this process has modified."""
        page_count = -(-len(self.bytes) // PAGE)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                file.seek(self.bytes.ctypes.data // PAGE * 8)
                flags = np.frombuffer(_read_exactly(file, page_count * 8), np.uint64)
        except OSError:  # for example, after os.setuid or in a sandbox
            return self._differing_pages()
        in_memory = (flags & (_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(in_memory & ((flags & _FILE_BACKED) == 0))

    def _differing_pages(self) -> NDArray[np.int64]:
        """Return the indices of the pages in memory that differ from the file.

        This reads the whole file and all pages in memory.
        """
        pages = []
        for begin in range(0, len(self.bytes), _COPY_PAGES * PAGE):
            memory = self.bytes[begin : begin + _COPY_PAGES * PAGE]
            data = os.pread(self._descriptor.number, len(memory), begin)
            saved = np.zeros(len(memory), np.uint8)  # memory after the end of the file is zeros
            saved[: len(data)] = np.frombuffer(data, np.uint8)
            differs = np.zeros(_round_up(len(memory)), np.bool_)
            differs[: len(memory)] = memory != saved
            pages.append(begin // PAGE + np.flatnonzero(differs.reshape(-1, PAGE).any(1)))
        return np.concatenate(pages)

    def page(self, number: int) -> bytes:
        """Return a copy of a page in memory, so that writes by other threads don't change it."""
        return self.bytes[number * PAGE : (number + 1) * PAGE].tobytes()

    # --- Reading the file ------------------------------------------------------------------------

    def read(self, first: int, end: int) -> bytes:
        """Read pages of values from the file."""
        return os.pread(self._descriptor.number, (end - first) * PAGE, (1 + first) * PAGE)

    def next_data(self, page: int) -> tuple[int, int]:
        """Return the next (first, end) range of pages of values that is not a hole in the file."""
        descriptor, count = self._descriptor.number, self.saved.page_count
        try:
            begin = os.lseek(descriptor, (1 + page) * PAGE, os.SEEK_DATA)
            end = os.lseek(descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: the rest of the file is a hole
                raise
            return count, count
        return min(count, begin // PAGE - 1), min(count, -(-end // PAGE) - 1)


class _Descriptor:
    """A file descriptor that is closed by `close`, or once no `MappedFile` uses it."""

    def __init__(self, file: IO[bytes]) -> None:
        self.number = os.dup(file.fileno())
        self._close = close_later(self, self.number)

    def close(self) -> None:
        self.number = -1
        self._close()


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    """Read the next `count` bytes; a single `read` may return fewer bytes."""
    data = b""
    while len(data) < count:
        chunk = file.read(count - len(data))
        if not chunk:
            raise OSError(errno.ENODATA, "the file is too short")
        data += chunk
    return data
