"""Write to several files atomically, using a journal.

    1. Write all data to `journal.new`, and flush it to disk.
    2. Rename `journal.new` to `journal`. From this point on, the save is complete.
    3. Write the data to the files, and flush them.
    4. Delete `journal`.

If the process or the machine stops before step 2, the files contain the previous save. If it stops
later, the next process that opens the folder repeats step 3 and continues with step 4.

The journal contains a magic line, all writes, and a 32-byte SHA-256 hash of all preceding bytes.
Each write consists of the length of the file name, the offset, the length of the data, the file
name and the data.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from hotrow.errors import HotrowError

_MAGIC = b"hotrow journal 1\n"
_HEADER = struct.Struct("<HQQ")

WHOLE_FILE = (1 << 64) - 1  # this offset means that the data replaces the whole file

FileWrite = tuple[str, int, Any]  # the file name, the offset and the data


def commit(folder: Path, writes: Iterable[FileWrite]) -> None:
    """Apply all writes to the files of a folder, or none of them.

    Raises:
        HotrowError: the disk is full, or a write fails. The folder then contains either this
            save or the previous one.
    """
    new_journal = folder / "journal.new"
    try:
        with new_journal.open("wb") as file:
            digest = hashlib.sha256(_MAGIC)
            file.write(_MAGIC)
            for name, offset, data in writes:
                header = _HEADER.pack(len(name.encode()), offset, len(data)) + name.encode()
                digest.update(header)
                digest.update(data)
                file.write(header)
                file.write(data)
            file.write(digest.digest())
            flush(file)
        new_journal.replace(folder / "journal")
        flush_folder(folder)
        replay_journal(folder)
    except OSError as error:
        new_journal.unlink(missing_ok=True)
        raise HotrowError(
            f"{folder} could not be saved ({error})",
            fix="free disk space and save again; the folder still contains a complete save",
        ) from None


def replay_journal(folder: Path) -> bool:
    """Apply the writes in a complete journal, at the end of a save or after a crash.

    Returns whether a journal existed.
    """
    journal = folder / "journal"
    if not journal.exists():
        return False
    _verify_checksum(journal)
    files: dict[str, Any] = {}
    try:
        for name, offset, data in _read_writes(journal):
            if name not in files:
                files[name] = (folder / name).open("w+b" if offset == WHOLE_FILE else "r+b")
            files[name].seek(0 if offset == WHOLE_FILE else offset)
            files[name].write(data)
        for file in files.values():
            flush(file)
    finally:
        for file in files.values():
            file.close()
    journal.unlink()
    flush_folder(folder)
    return True


def _verify_checksum(journal: Path) -> None:
    """Raise an error if the checksum of the journal does not match its contents."""
    size = journal.stat().st_size - 32
    digest = hashlib.sha256()
    with journal.open("rb") as file:
        while file.tell() < size:
            digest.update(file.read(min(1 << 20, size - file.tell())))
        if size < len(_MAGIC) or file.read() != digest.digest():
            raise HotrowError(
                f"{journal} is damaged: its checksum does not match its contents",
                fix="restore the folder from a backup",
            )


def _read_writes(journal: Path) -> Iterator[FileWrite]:
    size = journal.stat().st_size - 32
    with journal.open("rb") as file:
        file.seek(len(_MAGIC))
        while file.tell() < size:
            name_length, offset, data_length = _HEADER.unpack(file.read(_HEADER.size))
            yield file.read(name_length).decode(), offset, file.read(data_length)


def flush(file: Any) -> None:
    """Flush a file to disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Flush the directory entries of a folder to disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
