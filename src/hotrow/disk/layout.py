"""The files of a tensor: one safetensors file with its values, and one with their checksums.

Each file starts with a one-page header that names the format and the save that wrote the file. The
values begin at the next page and end with the file, so adding rows only extends the files. The
header of a file of checksums also contains their digest; see `mapped_tensor`.
"""

from __future__ import annotations

import dataclasses
import json
import math
import mmap
import os
import re
import struct
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hotrow.disk.folder import Folder, damaged_file

PAGE = mmap.PAGESIZE
FORMAT = "hotrow.disk 2"  # version 1 (hotrow 0.2) had no checksums
DTYPES = {"F32": torch.float32, "F64": torch.float64, "I32": torch.int32}
DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}
MAX_BYTES = 1 << 60  # the maximum size of the values in a file
_SECTOR = 512  # a disk writes each sector completely or not at all
_DIGEST = re.compile(rb'"digest": "([0-9a-f]{16})"')


@dataclass(frozen=True)
class Layout:
    """The name, shape and dtype of a tensor, which determine the layout of its file."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def file_name(self) -> str:
        """The name of the file."""
        return f"{self.name}.safetensors"

    @property
    def value_bytes(self) -> int:
        """The size of the values in bytes."""
        return math.prod(self.shape) * self.dtype.itemsize

    @property
    def row_bytes(self) -> int:
        """The size of a row in bytes."""
        return math.prod(self.shape[1:]) * self.dtype.itemsize

    @property
    def page_count(self) -> int:
        """The number of pages of values; the last page may be shorter."""
        return -(-self.value_bytes // PAGE)

    @property
    def file_bytes(self) -> int:
        """The length of the file in bytes."""
        return PAGE + self.value_bytes

    @property
    def checksums(self) -> Layout:
        """The layout of the file that contains a checksum for each page of values."""
        return Layout(f"{self.name}.checksums", (self.page_count,), torch.int32)

    @property
    def files(self) -> tuple[Layout, Layout]:
        """The layouts of the values file and of the checksums file."""
        return self, self.checksums

    def with_rows(self, rows: int) -> Layout:
        """Return a copy of the layout with this number of rows."""
        return dataclasses.replace(self, shape=(rows, *self.shape[1:]))

    def header(self, save: str, digest: int | None = None) -> bytes:
        """Return the header of the file, which fills the first page.

        Arguments:
            save: the name of the save that writes the file.
            digest: the digest of the checksums in the file, if it contains checksums.
        """
        tensor = {
            "dtype": DTYPE_NAMES[self.dtype],
            "shape": self.shape,
            "data_offsets": [0, self.value_bytes],
        }
        metadata = {"format": FORMAT, "save": save}
        if digest is not None:
            metadata["digest"] = f"{digest:016x}"
        header = {"__metadata__": metadata, self.name: tensor}
        return struct.pack("<Q", PAGE - 8) + json.dumps(header).encode().ljust(PAGE - 8)

    def describe(self) -> str:
        """Describe the shape and dtype for an error message."""
        return f"{' x '.join(map(str, self.shape))} {self.dtype}"


def read_digest(header: bytes) -> int | None:
    """Return the digest in a header, or None if it contains none.

    The files of values, and files of checksums from earlier versions, have no digest.
    """
    found = _DIGEST.search(header, 0, _SECTOR)
    return int(found[1], 16) if found else None


def check_file(folder: Folder, versions: Iterable[tuple[Layout, str]]) -> None:
    """Check that a file has the length and header of one of its valid versions.

    Arguments:
        folder: the folder of the file.
        versions: (layout, name of the save) pairs. The first pair is the expected version. While a
            journal is replayed, the header can contain sectors from two saves, and the length can
            be anywhere between the lengths in these saves.

    Raises:
        HotrowError: the file is missing, has the wrong length, or belongs to another save.
    """
    versions = list(versions)
    layout = versions[0][0]
    path = folder.path / layout.file_name
    try:
        with folder.open(layout.file_name, "rb") as file:
            size, found = os.fstat(file.fileno()).st_size, file.read(PAGE)
    except FileNotFoundError:
        raise damaged_file(path, "it is missing") from None
    sizes = [each.file_bytes for each, _ in versions]
    if not min(sizes) <= size <= max(sizes):
        raise damaged_file(path, f"it has {size:,} bytes instead of {layout.file_bytes:,}")
    # `MappedTensor` compares the digest with the checksums.
    headers = [each.header(save, read_digest(found)) for each, save in versions]
    for begin in range(0, PAGE, _SECTOR):
        sector = slice(begin, begin + _SECTOR)
        if found[sector] not in [header[sector] for header in headers]:
            raise damaged_file(path, _header_problem(found, layout))


def _header_problem(found: bytes, layout: Layout) -> str:
    """Describe what is wrong with a header."""
    try:
        save = json.loads(found[8:])["__metadata__"]["save"]
        if isinstance(save, str) and found == layout.header(save, read_digest(found)):
            return "it is not from the same save as the other files in the folder"
    except (ValueError, KeyError, TypeError, RecursionError):
        pass
    return f"its header is not that of a {layout.describe()} tensor"
