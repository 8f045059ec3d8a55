"""A memory-mapped tensor, and the checksum of each page of its values.

Each checksum is the CRC-32 of the page XORed with the CRC-32 of a page of zeros. So a page of zeros
has the checksum 0, and the checksums of a new sparse file don't have to be written.

But if a disk or a copy loses both a page and its checksum, both are zero and match. So the header
of the checksums contains their digest, the sum of (2 n + 1) times the checksum of page n, modulo
2^64. Each save updates the digest for the changed pages, and `open` compares it with the checksums.
"""

from __future__ import annotations

import contextlib
import copy
import zlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.disk.folder import Folder, damaged_file, flush
from hotrow.disk.journal import FileWrite
from hotrow.disk.layout import PAGE, Layout, read_digest
from hotrow.disk.mapped_file import MappedFile
from hotrow.disk.record import RECORD_FILE
from hotrow.errors import HotrowError

NUMPY_DTYPES = {torch.float32: np.float32, torch.float64: np.float64, torch.int32: np.int32}
_CHUNK_PAGES = 256  # the number of pages that are read or compared at once
_HOLE_PAGES = 1 << 20  # the number of pages in a hole that are checked at once
_DIGEST_LIMIT = 1 << 64
_NO_PAGES = np.empty(0, np.int64)
_BLOCK_VALUES = 1 << 22  # the number of values per write to a new file

RowBlocks = Iterable[Tensor]  # blocks of rows, in order


def filled_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], object]
) -> Iterator[Tensor]:
    """Yield blocks of rows in order, with the values that `fill` writes."""
    rows, columns = shape
    block_rows = max(1, _BLOCK_VALUES // columns)
    for begin in range(0, rows, block_rows):
        block = torch.empty(min(block_rows, rows - begin), columns, dtype=dtype, device="cpu")
        shape = block.shape
        fill(block)
        if block.shape != shape:
            raise HotrowError(
                f"fill changed the shape of its block from {tuple(shape)} to {tuple(block.shape)}",
                fix="let fill write values to the block, for example with block.normal_()",
            )
        yield block


def write_new(folder: Folder, layout: Layout, save: str, values: RowBlocks = ()) -> None:
    """Write the files of a tensor; omitted values are zero and take no disk space."""
    pages = _pages(block.detach().to("cpu", layout.dtype).contiguous() for block in values)
    sums = np.zeros(layout.page_count, np.uint32)

    def summed_pages() -> Iterator[memoryview]:
        for number, page in enumerate(pages):
            sums[number] = _checksum(page)
            yield page

    _write_file(folder, layout, layout.header(save), summed_pages())
    header = layout.checksums.header(save, _digest(sums))
    _write_file(folder, layout.checksums, header, [sums.data] if sums.any() else ())
    folder.flush()  # a journal that names these files must not become durable before they do


def _write_file(
    folder: Folder, layout: Layout, header: bytes, values: Iterable[memoryview]
) -> None:
    new_name = f"{layout.file_name}.new"
    try:
        with folder.create(new_name, like=RECORD_FILE) as file:
            file.write(header)
            file.truncate(layout.file_bytes)
            folder.reserve(file, layout.file_bytes)
            file.writelines(values)
            flush(file)
    except OSError:  # if the disk is full, this file may be what fills it
        with contextlib.suppress(OSError):
            folder.remove(new_name)
        raise
    folder.rename(new_name, layout.file_name)


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
    """Return the checksum of a page; a page of zeros has the checksum 0."""
    return zlib.crc32(page) ^ _zero_checksum(len(page))


_zero_checksums: dict[int, int] = {}


def _zero_checksum(length: int) -> int:
    if length not in _zero_checksums:
        _zero_checksums[length] = zlib.crc32(bytes(length))
    return _zero_checksums[length]


def _digest(checksums: NDArray[np.uint32], first: int = 0) -> int:
    """Return the digest of the checksums of consecutive pages, from page `first` on."""
    weights = 2 * np.arange(first, first + len(checksums), dtype=np.uint64) + 1
    return int(np.dot(weights, checksums.astype(np.uint64)))  # modulo 2^64


class MappedTensor:
    """A memory-mapped tensor from files that `write_new` created.

    Arguments:
        folder: the folder of the files.
        layout: the layout of the tensor. The caller must already have checked the files with
            `check_file`.
        largest: the largest valid value, or None. If it is set, values below 0 are invalid too.
    """

    def __init__(self, folder: Folder, layout: Layout, largest: int | None = None) -> None:
        self.largest = largest
        self.file, sums_file = (MappedFile(folder, each) for each in layout.files)
        self._set_sums_file(sums_file)
        self._digest = read_digest(sums_file.bytes[:PAGE].tobytes())
        self._is_checked = np.zeros(layout.page_count, np.bool_)
        self._all_checked = False
        self._unsaved = _NO_PAGES  # pages of values of which a failed save changed the checksum

    @property
    def layout(self) -> Layout:
        """The layout of the tensor in memory."""
        return self.file.layout

    def _set_sums_file(self, file: MappedFile) -> None:
        self._sums_file = file
        self._checksums: NDArray[np.uint32] = file.bytes[PAGE:].view(np.uint32)

    def tensor(self) -> Tensor:
        """Return the values as a tensor that shares the mapped memory."""
        values = self.file.bytes[PAGE:].view(NUMPY_DTYPES[self.layout.dtype])
        return torch.from_numpy(values.reshape(self.layout.shape))

    def with_values(self, tensor: Tensor) -> MappedTensor:
        """Return this tensor with the values of another one; tensors in this memory don't change.

        The result uses new memory, unless the other tensor is already in memory of the file.
        """
        return self.in_memory_of(tensor) or self._copy_of(tensor)

    def in_memory_of(self, tensor: Tensor) -> MappedTensor | None:
        """Return this tensor in the memory of another tensor, or None if the file isn't there."""
        mapped = self.tensor()
        is_alike = (tensor.shape, tensor.dtype) == (mapped.shape, mapped.dtype)
        if not is_alike or tensor.is_neg() or not tensor.is_contiguous():
            return None
        if tensor.data_ptr() == mapped.data_ptr():
            return self
        file = self.file.at_address(tensor.data_ptr() - PAGE)
        if file is None:
            return None
        result = copy.copy(self)
        result.file = file
        return result

    def _copy_of(self, tensor: Tensor) -> MappedTensor:
        """Return this tensor in new memory, with the values of a tensor.

        Write only the pages that differ from the file, because a save writes all pages that were
        written.
        """
        result = copy.copy(self)
        result.file = self.file.mapped_again(self._unsaved + 1)
        target = result.file.bytes[PAGE:]
        values = tensor.detach().resolve_neg().contiguous()
        source = values.numpy().reshape(-1).view(np.uint8)
        for begin in range(0, len(target), _CHUNK_PAGES * PAGE):
            chunk = slice(begin, begin + _CHUNK_PAGES * PAGE)
            old, new = target[chunk], source[chunk]
            for number in np.unique(np.flatnonzero(old != new) // PAGE).tolist():
                page = slice(number * PAGE, (number + 1) * PAGE)
                old[page] = new[page]
        return result

    def close(self) -> None:
        """Close the files. The values stay mapped."""
        self.file.close()
        self._sums_file.close()

    def resized(self, rows: int) -> MappedTensor:
        """Return this tensor with this many rows; see `MappedFile.resized`."""
        layout, result = self.layout.with_rows(rows), copy.copy(self)
        result.file = self.file.resized(layout, self._unsaved + 1)
        if self._digest is not None:  # the checksums of added pages are zeros
            removed = _digest(self._checksums[layout.page_count :], layout.page_count)
            result._digest = (self._digest - removed) % _DIGEST_LIMIT
        result._set_sums_file(self._sums_file.resized(layout.checksums, _NO_PAGES))
        # Pages that begin after the old rows contain nothing to check.
        old_count = min(self.layout.page_count, layout.page_count)
        result._is_checked = np.ones(max(layout.page_count, len(self._is_checked)), np.bool_)
        result._is_checked[:old_count] = self._is_checked[:old_count]
        return result

    def emptied(self, rows: int) -> MappedTensor:
        """Return this tensor in new memory, with this many rows of zeros."""
        result = self.resized(rows)
        result.file = self.file.emptied(result.layout)
        return result

    # --- Checks ----------------------------------------------------------------------------------

    def check_digest(self) -> None:
        """Check the checksums, without reading the holes in a sparse file.

        Raises:
            HotrowError: the digest of the checksums does not match them.
        """
        file, position, digest = self._sums_file, 0, 0
        while position < file.saved.page_count:
            first, position = file.next_data(position)
            for begin in range(first, position, _CHUNK_PAGES):
                data = file.read(begin, min(begin + _CHUNK_PAGES, position))
                digest += _digest(np.frombuffer(data, np.uint32), begin * PAGE // 4)
        digest %= _DIGEST_LIMIT
        if self._digest is None:  # from an earlier version
            self._digest = digest
        if digest != self._digest:
            raise damaged_file(file.path, "its checksums do not match the digest in its header")

    def check_rows(self, rows: NDArray[np.int64] | None) -> None:
        """Check the pages of these rows, or of all rows, that have not been checked yet.

        Raises:
            HotrowError: the checksum of a page does not match its values.
        """
        if rows is None:
            self._check_all()
            return
        row_bytes = self.layout.row_bytes
        first, last = rows * row_bytes // PAGE, ((rows + 1) * row_bytes - 1) // PAGE
        pages = first[:, None] + np.arange(row_bytes // PAGE + 2)
        self.check_pages(np.minimum(pages, last[:, None]).ravel())

    def check_pages(self, pages: NDArray[np.int64]) -> None:
        """Check these pages of values, except those that have been checked before."""
        numbers = np.unique(pages[~self._is_checked[pages]])
        values = self.file.bytes[PAGE:].data
        for number, expected in zip(
            numbers.tolist(), self._checksums[numbers].tolist(), strict=True
        ):
            page = values[number * PAGE : (number + 1) * PAGE]
            # The page may have changed in memory, so check the page in the file.
            if self.largest is not None or _checksum(page) != expected:
                self._check(number, self.file.read(number, number + 1))
        self._is_checked[numbers] = True

    def _check_all(self) -> None:
        """Check all pages, without reading the holes in a sparse file."""
        if self._all_checked:
            return
        position, count = 0, min(self.file.saved.page_count, self.layout.page_count)
        while position < count:
            first, end = (min(count, page) for page in self.file.next_data(position))
            for begin in range(position, first, _HOLE_PAGES):
                hole = slice(begin, min(begin + _HOLE_PAGES, first))
                is_wrong = (self._checksums[hole] != 0) & ~self._is_checked[hole]
                if is_wrong.any():  # the first wrong page was not zero when it was saved
                    raise self._damaged_page(begin + int(is_wrong.argmax()))
            for begin in range(first, end, _CHUNK_PAGES):
                data = memoryview(self.file.read(begin, min(begin + _CHUNK_PAGES, end)))
                for number in range(begin, min(begin + _CHUNK_PAGES, end)):
                    start = (number - begin) * PAGE
                    self._check(number, data[start : start + PAGE])
            position = end
        self._all_checked = True

    def _check(self, number: int, data: bytes | memoryview) -> None:
        if self._is_checked[number]:
            return
        length = min(PAGE, self.file.saved.value_bytes - number * PAGE)
        if len(data) != length or _checksum(data) != self._checksums[number]:
            raise self._damaged_page(number)
        if self.largest is not None:
            steps = np.frombuffer(data, np.int32)
            if steps.min() < 0 or steps.max() > self.largest:
                raise damaged_file(self.file.path, f"it has values outside of 0..{self.largest}")
        self._is_checked[number] = True

    def _damaged_page(self, number: int) -> HotrowError:
        saved = self.file.saved
        first = number * PAGE // saved.row_bytes
        last = min(saved.shape[0], -(-(number + 1) * PAGE // saved.row_bytes)) - 1
        return damaged_file(
            self.file.path,
            f"the checksum of rows {first:,} to {last:,} does not match the one in "
            f"{self.layout.checksums.file_name}",
        )

    # --- Saving ----------------------------------------------------------------------------------

    def check_names(self, folder: Folder) -> None:
        """Raise an error if another program has replaced the files."""
        for file in (self.file, self._sums_file):
            file.check_name(folder)

    def set_saved_rows(self, rows: int) -> None:
        """Set the number of rows in the files; a failed save may have changed it."""
        saved = self.layout.with_rows(rows)
        self.file.saved, self._sums_file.saved = saved, saved.checksums

    def changes(self, save: str, *, check: bool) -> Iterator[FileWrite]:
        """Yield (file name, offset, data) of the pages to write, and update their checksums.

        Arguments:
            save: the name of the save.
            check: whether to check the old values of these pages. The new values are computed from
                the old values, so the new checksums would hide any damage to the old values.

        Raises:
            HotrowError: the checksum of a page does not match its old values.
        """
        unsaved = self._unsaved[self._unsaved < self.layout.page_count]
        pages = np.union1d(self.file.written_pages(), unsaved + 1)
        numbers = self._unsaved = pages[pages > 0] - 1
        self.file.keep_pages(pages)
        if check:
            self.check_pages(numbers)
        self._is_checked[numbers] = True
        old_count = self.file.saved.page_count
        for number in numbers.tolist():
            data = self.file.page(number + 1)
            checksum = _checksum(data)
            change = checksum - int(self._checksums[number])
            if change:
                digest = self._digest
                if digest is not None:
                    digest = (digest + (2 * number + 1) * change) % _DIGEST_LIMIT
                self._checksums[number], self._digest = checksum, digest
            if number < old_count or data.count(0) < len(data):  # added pages are zeros
                yield self.layout.file_name, (number + 1) * PAGE, data
        for number in self._sums_file.written_pages().tolist():
            yield self._sums_file.layout.file_name, number * PAGE, self._sums_file.page(number)
        yield self.layout.file_name, 0, self.layout.header(save)
        sums = self.layout.checksums
        yield sums.file_name, 0, sums.header(save, self._digest)

    def map_saved(self, folder: Folder) -> None:
        """Discard the changed pages in memory, so that the next read comes from the files."""
        for file in (self.file, self._sums_file):
            file.reopen(folder)
        self._unsaved = _NO_PAGES
        for file in (self.file, self._sums_file):
            file.map_saved()


Files = dict[str, MappedTensor]  # by the name of the tensor
