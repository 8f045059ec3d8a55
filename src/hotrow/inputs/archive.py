"""Read a .pt file, a zip archive of the kind that `torch.save` writes.

Readers of zip archives disagree about unusual files: which of two directories is valid, whether
names differ by case, and whether bytes may precede the archive. So hotrow rejects such archives,
and reads each entry once: it uses the same bytes that it has checked.
"""

from __future__ import annotations

import io
import re
import struct
import zipfile
from typing import IO, Any

_START = b"PK\x03\x04"  # torch reads a file that starts with anything else as a pickle
# The names that torch 1.6 and newer write, without the folder that contains them.
_RECORD = re.compile(
    r"data\.pkl|data/\d+|(\.data/)?version|byteorder|\.format_version|\.storage_alignment|"
    r"\.data/serialization_id",
    re.ASCII,
)
_BLOCK_BYTES = 1 << 20
_END = struct.Struct("<4s4H2LH")  # the last bytes of an archive
_LOCATOR = struct.Struct("<4sLQL")  # before the end of a zip64 archive
_LONG_END = struct.Struct("<4sQ2H2L4Q")  # before the locator


class Archive:
    """The entries of a .pt file.

    A compressed file, or a file that contains the same bytes under several names, could fill the
    memory. torch doesn't write such files.

    Attributes:
        size: the size of the file in bytes.
        sizes: the size of each entry in bytes, keyed by its name without the folder.

    Raises:
        ValueError, zipfile.BadZipFile: `torch.save` could not have written the file, or its
            contents don't match their checksums.
    """

    def __init__(self, file: IO[bytes]) -> None:
        self.size = file.seek(0, io.SEEK_END)
        file.seek(0)
        if file.read(len(_START)) != _START:
            raise ValueError("it was not written by torch 1.6 or newer")
        _check_end(file, self.size)
        self._archive = zipfile.ZipFile(file)
        entries = self._archive.infolist()
        folder = _check_entries(entries, self.size)
        self._entries = {each.orig_filename[len(folder) + 1 :]: each for each in entries}
        self.sizes = {name: each.file_size for name, each in self._entries.items()}
        for each in entries:
            if not each.CRC:  # `torch.save` may omit the checksums
                each.CRC = None  # type: ignore[assignment]

    def read(self, name: str) -> bytes:
        """Return an entry. If it doesn't exist, return no bytes."""
        content = bytearray(self.sizes.get(name, 0))
        self.read_into(name, memoryview(content))
        return bytes(content)

    def read_into(self, name: str, target: memoryview) -> None:
        """Write an entry into memory of the same size, and compare its checksum."""
        if not len(target):
            return
        position = 0
        with self._archive.open(self._entries[name]) as stream:
            while block := stream.read(_BLOCK_BYTES):
                target[position : position + len(block)] = block
                position += len(block)


def _check_entries(entries: list[zipfile.ZipInfo], size: int) -> str:
    """Check the directory of an archive, and return the folder that contains all files."""
    for each in entries:
        if each.compress_type != zipfile.ZIP_STORED or each.compress_size != each.file_size:
            raise ValueError("it is compressed")
    if sum(each.file_size for each in entries) > size:
        raise ValueError("it is smaller than its contents")
    names = [each.orig_filename for each in entries]
    folder = names[0].partition("/")[0] if names else ""
    for name in names:
        if not (name.startswith(f"{folder}/") and _RECORD.fullmatch(name[len(folder) + 1 :])):
            raise ValueError(f"it has an entry that torch does not write: {name!r:.60}")
    if len(set(names)) < len(names):
        raise ValueError("it has two entries of the same name")
    return folder


def _check_end(file: IO[bytes], size: int) -> None:
    """Check that the file ends with its only directory: no reader can find another one."""
    place = size - _END.size
    file.seek(max(place, 0))
    magic, *_, length, start, comment = _unpack(_END, file)
    if magic != b"PK\x05\x06" or comment:
        raise ValueError("bytes follow the archive")
    long_place = place - _LOCATOR.size - _LONG_END.size
    if long_place > 0:
        file.seek(long_place)
        long_end, locator = _unpack(_LONG_END, file), _unpack(_LOCATOR, file)
        if locator[0] == b"PK\x06\x07":
            if locator[2] != long_place or long_end[0] != b"PK\x06\x06":
                raise ValueError("its directory is not at its end")
            place = long_place
            length, start = long_end[-2:]
    if start + length != place:
        raise ValueError("its directory is not at its end")


def _unpack(layout: struct.Struct, file: IO[bytes]) -> tuple[Any, ...]:
    return layout.unpack(file.read(layout.size))
