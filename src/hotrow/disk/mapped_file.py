"""A file mapped copy-on-write, with room in memory for rows that the file does not contain yet.

The mapping is private: the first write to a page gives the process its own copy, and the file does
not change. Linux lists these copies in `/proc/self/pagemap` as pages in memory or swap that are not
backed by a file. A save writes these copies to the file. If the process may not read this list, a
save compares all pages with the file instead.

The number of rows in memory can change before the file does. The mapping reserves addresses for
twice the number of rows, and the memory after the end of the file contains zeros. So adding rows
writes only the new rows. The next save changes the length of the file, and maps the file again.
"""

from __future__ import annotations

import contextlib
import copy
import errno
import mmap
import os
import weakref
from typing import IO

import numpy as np
from numpy.typing import NDArray

from hotrow.disk.folder import Folder, damaged_file
from hotrow.disk.layout import PAGE, Layout
from hotrow.errors import HotrowError
from hotrow.table.storage_growth import libc

# Reserve no memory for pages that have not been written yet. Python 3.13 added this flag to `mmap`.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
GROWTH = 2  # reserve addresses for this multiple of the number of rows
_FIXED = 0x10  # a flag of mmap
_COPY_PAGES = 1 << 12  # the number of pages that are copied at once
_PRESENT, _SWAPPED, _FILE_BACKED = (np.uint64(1 << bit) for bit in (63, 62, 61))


class _Memory:
    """A reserved range of addresses.

    Attributes:
        bytes: all bytes of the range.
        used: the range contains only zeros after this many bytes.
    """

    def __init__(self, size: int) -> None:
        size = _round_up(size)
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | NO_RESERVE
        try:
            self._map = mmap.mmap(-1, GROWTH * size, flags=flags)
        except OSError:  # the system limits the address space of a process
            self._map = mmap.mmap(-1, size, flags=flags)
        with contextlib.suppress(OSError):  # raised by a kernel without huge pages
            # With huge pages, each new row that is read or written could take 2 MB of memory.
            self._map.madvise(mmap.MADV_NOHUGEPAGE)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self.used = 0

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
            self._map.madvise(mmap.MADV_RANDOM, begin, -(-size // PAGE) * PAGE)

    def clear(self, begin: int) -> None:
        """Fill the range with zeros from this byte on."""
        page = _round_up(begin)
        if self.used > begin:
            self.bytes[begin:page] = 0
            self.map(page, _round_up(self.used))
            self.used = begin


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
        memory.used = max(memory.used, layout.file_bytes)
        self.bytes = memory.bytes[: layout.file_bytes]

    def map_saved(self) -> None:
        """Map the file, and discard the changed pages in memory.

        The layout of the file must already be `self.layout`.
        """
        self.saved, self.changed_from = self.layout, self.layout.page_count
        # Pages that differed at a save that failed, which may have changed their checksums.
        self._found_pages = np.empty(0, np.int64)
        self._memory.clear(self.layout.file_bytes)
        self._memory.map(0, self.layout.file_bytes, self._descriptor.number)
        os.posix_fadvise(self._descriptor.number, 0, 0, os.POSIX_FADV_RANDOM)

    def close(self) -> None:
        """Close the file. The memory stays mapped."""
        self._descriptor.close()

    # --- Changes in the number of rows -----------------------------------------------------------

    def resized(self, layout: Layout) -> MappedFile:
        """Return this file with the number of rows in `layout`; added rows are zeros.

        The result shares the memory of this file if enough addresses are reserved. This file
        remains valid until the result is first written to. No other tensor may use the memory.
        """
        result, memory = copy.copy(self), self._memory
        kept = min(self.layout.value_bytes, layout.value_bytes)
        if layout.file_bytes > len(memory.bytes):
            memory = self._copy_memory(layout.file_bytes)
        if layout.file_bytes > self.layout.file_bytes:
            memory.clear(self.layout.file_bytes)
        result._use(memory, layout)
        result.changed_from = min(self.changed_from, kept // PAGE)
        return result

    def emptied(self, layout: Layout) -> MappedFile:
        """Return this file in new memory, with the number of rows in `layout`, all zeros."""
        result = copy.copy(self)
        result._use(_Memory(layout.file_bytes), layout)
        result.changed_from = 0
        return result

    def _copy_memory(self, size: int) -> _Memory:
        """Return a larger range of addresses with the same contents."""
        memory, end = _Memory(size), len(self.bytes)
        memory.used = end
        unchanged = min(self.saved.file_bytes, (1 + self.changed_from) * PAGE)
        memory.map(0, min(end, unchanged), self._descriptor.number)
        pages = self.written_pages()
        source, target = (
            each.bytes[: _round_up(end)].reshape(-1, PAGE) for each in (self._memory, memory)
        )
        for begin in range(0, len(pages), _COPY_PAGES):
            chunk = pages[begin : begin + _COPY_PAGES]
            target[chunk] = source[chunk]
        memory.bytes[end : _round_up(end)] = 0
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
        changed = np.arange(self.changed_from, min(self.saved.page_count, self.layout.page_count))
        return np.union1d(self._pages_in_memory(), changed + 1)

    def _pages_in_memory(self) -> NDArray[np.int64]:
        """Return the indices of the pages of the file that this process has modified."""
        page_count = -(-len(self.bytes) // PAGE)
        try:
            with open("/proc/self/pagemap", "rb", buffering=0) as file:
                file.seek(self.bytes.ctypes.data // PAGE * 8)
                flags = np.frombuffer(_read_exactly(file, page_count * 8), np.uint64)
        except OSError:  # for example, after os.setuid
            found = self._found_pages[self._found_pages < page_count]
            self._found_pages = np.union1d(found, self._differing_pages())
            return self._found_pages
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
        self._close = weakref.finalize(self, os.close, self.number)

    def close(self) -> None:
        self.number = -1
        self._close()


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    """Read the next `count` bytes; a single `read` may return fewer bytes."""
    data = b""
    while len(data) < count:
        data += file.read(count - len(data))
    return data
