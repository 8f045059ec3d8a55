"""A save of several files that happens at once, or not at all.

    1. what is to be written is written into `journal.new`, which is flushed to the disk;
    2. it is renamed to `journal`: from now on the save is complete;
    3. its parts are written to their places in the files, which are flushed;
    4. `journal` is removed.

If a process or the machine stops before 2, the files are as the save before left them. After 2,
whoever opens the folder next does 3 again, and 4.

    journal   magic, then the parts: length of the name, name, offset, length, bytes; then 32 bytes
              of SHA-256 over all before
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
_HEAD = struct.Struct("<HQQ")

WHOLE = (1 << 64) - 1  # in the place of an offset: these bytes are all of the file

Part = tuple[str, int, Any]  # a file's name, where in it, the bytes


def commit(folder: Path, parts: Iterable[Part]) -> None:
    """Write the parts into the files of a folder, all or none of them.

    Raises:
        HotrowError: the disk is full or fails. The folder holds this save or the one before.
    """
    beside = folder / "journal.new"
    try:
        with beside.open("wb") as file:
            digest = hashlib.sha256(_MAGIC)
            file.write(_MAGIC)
            for name, offset, data in parts:
                head = _HEAD.pack(len(name.encode()), offset, len(data)) + name.encode()
                digest.update(head)
                digest.update(data)
                file.write(head)
                file.write(data)
            file.write(digest.digest())
            flush(file)
        beside.replace(folder / "journal")
        flush_folder(folder)
        recover(folder)
    except OSError as error:
        beside.unlink(missing_ok=True)
        raise HotrowError(
            f"{folder} could not be saved ({error})",
            fix="free some space and save again; the save before, or this one, is intact",
        ) from None


def recover(folder: Path) -> bool:
    """Finish a save that had been completed but not carried out; whether there was one."""
    journal = folder / "journal"
    if not journal.exists():
        return False
    _verify(journal)
    files: dict[str, Any] = {}
    try:
        for name, offset, data in _parts(journal):
            if name not in files:
                files[name] = (folder / name).open("w+b" if offset == WHOLE else "r+b")
            files[name].seek(0 if offset == WHOLE else offset)
            files[name].write(data)
        for file in files.values():
            flush(file)
    finally:
        for file in files.values():
            file.close()
    journal.unlink()
    flush_folder(folder)
    return True


def _verify(journal: Path) -> None:
    """Raise if it is not what was written."""
    size = journal.stat().st_size - 32
    digest = hashlib.sha256()
    with journal.open("rb") as file:
        while file.tell() < size:
            digest.update(file.read(min(1 << 20, size - file.tell())))
        if size < len(_MAGIC) or file.read() != digest.digest():
            raise HotrowError(
                f"{journal} is damaged: its sum does not match",
                fix="take the folder from a backup",
            )


def _parts(journal: Path) -> Iterator[Part]:
    size = journal.stat().st_size - 32
    with journal.open("rb") as file:
        file.seek(len(_MAGIC))
        while file.tell() < size:
            length, offset, count = _HEAD.unpack(file.read(_HEAD.size))
            yield file.read(length).decode(), offset, file.read(count)


def flush(file: Any) -> None:
    """Have what was written reach the disk."""
    file.flush()
    os.fsync(file.fileno())


def flush_folder(folder: Path) -> None:
    """Have its names reach the disk."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
