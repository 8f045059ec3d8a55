"""A safetensors file with one tensor and its checksums, mapped copy-on-write.

The mapping is private: the first write to a page gives the process its own copy, and the file does
not change. Linux lists these copies in `/proc/self/pagemap` as pages in memory or swap that are not
backed by a file. A save writes these pages to the file.

The file has three parts, each of which starts at a page boundary:

    1. The header names the format and the save that wrote the file. It takes one page.
    2. The checksums: 32 bits for each page of values, combined by exclusive or with the checksum of
       zeros. So the checksums of zeros are 0, and a sparse file needs no space for them.
    3. The values.
"""

from __future__ import annotations

import errno
import json
import math
import mmap
import os
import struct
import weakref
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import IO, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.disk.folder import Folder, damaged_file, flush
from hotrow.errors import HotrowError

PAGE = mmap.PAGESIZE
# Don't reserve memory for pages before they are written. Python 3.13 added this flag to `mmap`.
NO_RESERVE: int = getattr(mmap, "MAP_NORESERVE", 0x4000)
FORMAT = "hotrow.disk 2"  # version 1 (hotrow 0.2) had no checksums
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I32": torch.int32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32}
MAX_BYTES = 1 << 60  # the maximum size of the values in a file
_SECTOR = 512  # a disk writes each sector completely or not at all
_CHUNK_PAGES = 256  # the number of pages per read when the whole file is checked
_HOLE_PAGES = 1 << 20  # the number of pages in a hole that are checked at once
_PRESENT, _SWAPPED, _FILE_BACKED = (np.uint64(1 << bit) for bit in (63, 62, 61))


RowBlocks = Iterable[Tensor]  # blocks of rows, in order


@dataclass(frozen=True)
class Layout:
    """Where a file stores the parts of a tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"{self.name}.safetensors"

    @property
    def value_bytes(self) -> int:
        """The number of bytes of the values."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def page_count(self) -> int:
        """The number of pages of values; the last one may be shorter."""
        return -(-self.value_bytes // PAGE)

    @property
    def first_page(self) -> int:
        """The page of the file at which the values start."""
        return 1 + -(-4 * self.page_count // PAGE)

    @property
    def file_bytes(self) -> int:
        """The length of the file."""
        return self.first_page * PAGE + self.value_bytes

    def header(self, save: str) -> bytes:
        """Return the first page of the file."""
        begin, end = (self.first_page - 1) * PAGE, self.file_bytes - PAGE
        tensors = {
            "checksums": {"dtype": "I32", "shape": [begin // 4], "data_offsets": [0, begin]},
            self.name: {
                "dtype": DTYPE_NAMES[self.dtype],
                "shape": self.shape,
                "data_offsets": [begin, end],
            },
        }
        text = json.dumps({"__metadata__": {"format": FORMAT, "save": save}, **tensors}).encode()
        return struct.pack("<Q", PAGE - 8) + text.ljust(PAGE - 8)

    def describe(self) -> str:
        """Describe the shape and dtype for an error message."""
        return f"{' x '.join(map(str, self.shape))} {self.dtype}"


def write_new(folder: Folder, layout: Layout, save: str, values: RowBlocks = ()) -> None:
    """Write a file with one tensor; omitted values are zero and take no disk space."""
    with folder.create(f"{layout.file_name}.new") as file:
        file.write(layout.header(save))
        file.truncate(layout.file_bytes)
        folder.reserve(file, layout.file_bytes)
        pages = _pages(block.detach().to("cpu", layout.dtype).contiguous() for block in values)
        sums = np.zeros((layout.first_page - 1) * PAGE // 4, np.uint32)
        file.seek(layout.first_page * PAGE)
        for number, page in enumerate(pages):
            sums[number] = _checksum(page)
            file.write(page)
        if sums.any():
            file.seek(PAGE)
            file.write(sums.data)
        flush(file)
    folder.rename(f"{layout.file_name}.new", layout.file_name)


def _pages(blocks: Iterable[Tensor]) -> Iterator[memoryview]:
    """Split the bytes of tensors into pages; only the last page may be shorter."""
    rest = b""
    for block in blocks:
        data = memoryview(rest + block.numpy().tobytes())
        whole = len(data) // PAGE * PAGE
        for begin in range(0, whole, PAGE):
            yield data[begin : begin + PAGE]
        rest = bytes(data[whole:])
    if rest:
        yield memoryview(rest)


def _checksum(page: Any) -> int:
    """Return the CRC-32 of a page, which is 0 for a page of zeros."""
    return zlib.crc32(page) ^ _zero_checksum(len(page))


_zero_checksums: dict[int, int] = {}


def _zero_checksum(length: int) -> int:
    if length not in _zero_checksums:
        _zero_checksums[length] = zlib.crc32(bytes(length))
    return _zero_checksums[length]


def check_file(folder: Folder, layout: Layout, saves: Iterable[str]) -> None:
    """Check the length of a file, and check that its header names one of these saves.

    While a journal is replayed, the header can contain sectors from two saves.

    Raises:
        HotrowError: the file is missing, has the wrong length, or belongs to another save.
    """
    path = folder.path / layout.file_name
    try:
        with folder.open(layout.file_name, "rb") as file:
            size, found = os.fstat(file.fileno()).st_size, file.read(PAGE)
    except FileNotFoundError:
        raise damaged_file(path, "it is missing") from None
    if size != layout.file_bytes:
        raise damaged_file(path, f"it has {size:,} bytes instead of {layout.file_bytes:,}")
    headers = [layout.header(save) for save in saves]
    for begin in range(0, PAGE, _SECTOR):
        sector = slice(begin, begin + _SECTOR)
        if found[sector] not in [header[sector] for header in headers]:
            raise damaged_file(path, _header_problem(found, layout))


def _header_problem(found: bytes, layout: Layout) -> str:
    """Return what is wrong with a header."""
    try:
        save = json.loads(found[8:])["__metadata__"]["save"]
        if isinstance(save, str) and found == layout.header(save):
            return "it is not from the same save as the other files in the folder"
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return f"its header is not that of a {layout.describe()} tensor"


class MappedTensor:
    """A memory-mapped tensor from a file that `write_new` created.

    Arguments:
        folder: the folder of the file.
        layout: the layout of the file, which `check_file` has checked.
        largest: the largest valid value, or None. If it is set, values below 0 are invalid too.
    """

    def __init__(self, folder: Folder, layout: Layout, largest: int | None = None) -> None:
        self.layout, self.path, self.largest = layout, folder.path / layout.file_name, largest
        if folder.is_tmpfs():
            with folder.open(layout.file_name, "r+b") as file:
                folder.reserve(file, layout.file_bytes)
        with folder.open(layout.file_name, "rb") as file:
            if os.fstat(file.fileno()).st_size < layout.file_bytes:  # shorter than in `check_file`
                raise damaged_file(self.path, "another program has truncated it")
            self._map = mmap.mmap(
                file.fileno(),
                layout.file_bytes,
                flags=mmap.MAP_PRIVATE | NO_RESERVE,
                prot=mmap.PROT_READ | mmap.PROT_WRITE,
            )
            self._descriptor = os.dup(file.fileno())
        weakref.finalize(self, os.close, self._descriptor)
        self._map.madvise(mmap.MADV_RANDOM)  # reads are random, so don't read ahead
        os.posix_fadvise(self._descriptor, 0, 0, os.POSIX_FADV_RANDOM)
        self.bytes: NDArray[np.uint8] = np.frombuffer(self._map, np.uint8)
        self._values_begin = layout.first_page * PAGE
        self._checksums = self.bytes[PAGE : self._values_begin].view(np.uint32)
        self._is_checked = np.zeros(layout.page_count, np.bool_)
        self._all_checked = False

    def tensor(self) -> Tensor:
        """Return the values as a tensor that shares the mapped memory."""
        values = self.bytes[self._values_begin :].view(NUMPY_DTYPES[self.layout.dtype])
        return torch.from_numpy(values.reshape(self.layout.shape))

    # --- Checks ----------------------------------------------------------------------------------

    def check_rows(self, rows: NDArray[np.int64] | None) -> None:
        """Check the pages of these rows, or of all rows, that have not been checked yet.

        Raises:
            HotrowError: the checksum of a page does not match its values.
        """
        if rows is None:
            self._check_all()
            return
        row_bytes = math.prod(self.layout.shape[1:]) * self.layout.dtype.itemsize
        first, last = rows * row_bytes // PAGE, ((rows + 1) * row_bytes - 1) // PAGE
        pages = first[:, None] + np.arange(row_bytes // PAGE + 2)
        self.check_pages(np.minimum(pages, last[:, None]).ravel())

    def check_pages(self, pages: NDArray[np.int64]) -> None:
        """Check these pages of values, except those that have been checked before."""
        numbers = np.unique(pages[~self._is_checked[pages]])
        values = memoryview(self._map)[self._values_begin :]
        for number, expected in zip(
            numbers.tolist(), self._checksums[numbers].tolist(), strict=True
        ):
            page = values[number * PAGE : (number + 1) * PAGE]
            # If the page has changed in memory, compare the page in the file.
            if self.largest is not None or _checksum(page) != expected:
                self._check(number, self._read(number, number + 1))
        self._is_checked[numbers] = True

    def _check_all(self) -> None:
        """Check all pages; don't read the holes of a sparse file."""
        if self._all_checked:
            return
        position, count = 0, self.layout.page_count
        while position < count:
            first, end = self._next_data(position)
            for begin in range(position, first, _HOLE_PAGES):
                hole = slice(begin, min(begin + _HOLE_PAGES, first))
                is_wrong = (self._checksums[hole] != 0) & ~self._is_checked[hole]
                if is_wrong.any():  # these pages were not zero when they were saved
                    raise self._damaged_page(begin + int(is_wrong.argmax()))
            for begin in range(first, end, _CHUNK_PAGES):
                data = memoryview(self._read(begin, min(begin + _CHUNK_PAGES, end)))
                for number in range(begin, min(begin + _CHUNK_PAGES, end)):
                    start = (number - begin) * PAGE
                    self._check(number, data[start : start + PAGE])
            position = end
        self._all_checked = True

    def _next_data(self, page: int) -> tuple[int, int]:
        """Return the next pages that are not in a hole, as (first, end)."""
        count, offset = self.layout.page_count, self._values_begin
        try:
            begin = os.lseek(self._descriptor, offset + page * PAGE, os.SEEK_DATA)
            end = os.lseek(self._descriptor, begin, os.SEEK_HOLE)
        except OSError as error:
            if error.errno != errno.ENXIO:  # ENXIO: only a hole is left
                raise
            return count, count
        return min(count, (begin - offset) // PAGE), min(count, -(-(end - offset) // PAGE))

    def _read(self, first: int, end: int) -> bytes:
        """Read pages of values from the file."""
        return os.pread(self._descriptor, (end - first) * PAGE, self._values_begin + first * PAGE)

    def _check(self, number: int, data: bytes | memoryview) -> None:
        if self._is_checked[number]:
            return
        length = min(PAGE, self.layout.value_bytes - number * PAGE)
        if len(data) != length or _checksum(data) != self._checksums[number]:
            raise self._damaged_page(number)
        if self.largest is not None:
            steps = np.frombuffer(data, np.int32)
            if steps.min() < 0 or steps.max() > self.largest:
                raise damaged_file(self.path, f"it has values outside of 0..{self.largest}")
        self._is_checked[number] = True

    def _damaged_page(self, number: int) -> HotrowError:
        row_bytes = self.layout.value_bytes // self.layout.shape[0]
        first = number * PAGE // row_bytes
        last = min(self.layout.shape[0], -(-(number + 1) * PAGE // row_bytes)) - 1
        return damaged_file(self.path, f"the checksum of rows {first:,} to {last:,} does not match")

    # --- Saving ----------------------------------------------------------------------------------

    def written_pages(self) -> NDArray[np.int64]:
        """Return the indices of the pages modified in memory, which may differ from the file."""
        page_count = -(-len(self.bytes) // PAGE)
        with open("/proc/self/pagemap", "rb", buffering=0) as file:
            file.seek(self.bytes.ctypes.data // PAGE * 8)
            flags = np.frombuffer(_read_exactly(file, page_count * 8), np.uint64)
        in_memory = (flags & (_PRESENT | _SWAPPED)) != 0
        return np.flatnonzero(in_memory & ((flags & _FILE_BACKED) == 0))

    def changes(self, save: str, *, check: bool) -> Iterator[tuple[int, bytes]]:
        """Yield (offset, data) of the pages to write in a save, and update their checksums.

        Arguments:
            save: the name of the save.
            check: whether to check the old values of these pages. The new values are computed from
                the old values, so the new checksums would hide any damage to the old values.

        Raises:
            HotrowError: the checksum of a page does not match its old values.
        """
        first = self.layout.first_page
        pages = self.written_pages()
        numbers = pages[pages >= first] - first
        if check:
            self.check_pages(numbers)
        self._is_checked[numbers] = True
        for number in numbers.tolist():
            data = self._page(number + first)  # a copy, in case another thread writes to the page
            self._checksums[number] = _checksum(data)
            yield (number + first) * PAGE, data
        self.bytes[:PAGE] = np.frombuffer(self.layout.header(save), np.uint8)
        pages = self.written_pages()
        for number in pages[pages < first].tolist():
            yield number * PAGE, self._page(number)

    def _page(self, number: int) -> bytes:
        """Return a copy of a page of the file; the last page may be shorter."""
        return self.bytes[number * PAGE : (number + 1) * PAGE].tobytes()

    def discard_pages(self) -> None:
        """Drop the pages in memory, so that the next read comes from the file."""
        self._map.madvise(mmap.MADV_DONTNEED)


def _read_exactly(file: IO[bytes], count: int) -> bytes:
    """Read the next `count` bytes; a single `read` may return fewer bytes."""
    data = b""
    while len(data) < count:
        data += file.read(count - len(data))
    return data
