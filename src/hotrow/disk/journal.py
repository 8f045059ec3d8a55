"""Write to several files atomically, using a journal.

    1. Write all data to `journal.new`, and flush it to disk.
    2. Rename `journal.new` to `journal`, and flush the folder. From this point on, the save is
       complete.
    3. Change the lengths of the files if the number of rows has changed. Write the data to the
       files, and flush them.
    4. Delete `journal`.

If the process or the machine stops before the end of step 2, the folder contains the previous save
or a complete journal. If either stops later, it contains a complete journal. The next process that
opens the folder flushes the journal again, repeats step 3 and continues with step 4.

The journal contains a magic line, all writes, and a 32-byte SHA-256 hash of all preceding bytes.
Each write consists of three numbers (file name length, offset, data length), the file name and the
data. The first write is the record of the save, which says what the other writes may change. The
second write is `rest.pt`. All other writes change a page of a tensor's file. The whole journal is
checked before any file changes.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import struct
from collections.abc import Callable, Iterable, Iterator
from typing import IO, Any

from hotrow.disk.folder import Folder, damaged_file, flush
from hotrow.disk.layout import PAGE, Layout, check_file
from hotrow.disk.record import MAX_RECORD_BYTES, RECORD_FILE, Record, parse_record
from hotrow.disk.rest import REST_FILE
from hotrow.errors import HotrowError
from hotrow.inputs.sparse_file import check_not_sparse

JOURNAL = "journal"
WHOLE_FILE = (1 << 64) - 1  # this offset means that the data replaces the whole file

FileWrite = tuple[str, int, Any]  # the file name, the offset and the data

_MAGIC = b"hotrow journal 2\n"
_HEADER = struct.Struct("<HQQ")
_HASH_BYTES = 32
_MAX_NAME_BYTES = 100
_CHUNK = 1 << 20


def commit(
    folder: Folder,
    layouts: Iterable[Layout],
    writes: Iterable[FileWrite],
    complete: Callable[[], object],
) -> None:
    """Apply all writes to the files of a folder, or none of them.

    No other thread and no signal handler may use the journal meanwhile; see `FileAccess`.

    Arguments:
        folder: the folder.
        layouts: the layouts of the tensors' files after the save.
        writes: the writes.
        complete: called as soon as the journal is complete.

    Raises:
        HotrowError, OSError: the disk is full, or a write fails. The folder then contains either
            this save or the previous one.
    """
    new_journal = f"{JOURNAL}.new"
    try:
        longest = _check_writable(folder, layouts)
        with folder.create(new_journal, like=RECORD_FILE) as file:
            file.truncate(longest)  # fails if the system doesn't allow files of this length
            file.truncate(0)
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
            # `replay_journal` would refuse a sparse journal.
            check_not_sparse(file.fileno(), folder.path / JOURNAL)
        folder.rename(new_journal, JOURNAL)
        complete()
        replay_journal(folder)
    except (OSError, HotrowError):
        with contextlib.suppress(OSError):
            folder.remove(new_journal)
        raise


def _check_writable(folder: Folder, layouts: Iterable[Layout]) -> int:
    """Raise an error if a file can't be written, before the journal is complete.

    Later, the same error would prevent other processes from opening the folder.

    Returns the length of the longest file that the system may not allow, or 0.
    """
    import resource  # does not exist on Windows

    for name in (RECORD_FILE, REST_FILE):
        folder.check_replaceable(name)
    is_limited = resource.getrlimit(resource.RLIMIT_FSIZE)[0] != resource.RLIM_INFINITY
    longest = 0
    for layout in layouts:
        with folder.open(layout.file_name, "r+b") as file:
            if is_limited or os.fstat(file.fileno()).st_size < layout.file_bytes:
                longest = max(longest, layout.file_bytes)
    return longest


def replay_journal(folder: Folder) -> bool:
    """Apply the writes in a complete journal, at the end of a save or after a crash.

    Returns whether a journal existed.

    Raises:
        HotrowError: the journal is damaged or does not match the files in the folder. In this case,
            no file has changed.
    """
    try:
        file = folder.open(JOURNAL, "rb")
    except FileNotFoundError:
        return False
    with file:
        journal = _Journal(folder, file)
        journal.check()
        # Without the journal, a power failure would leave a mixture of two saves. The process that
        # wrote the journal may have stopped before it flushed the folder.
        os.fsync(file.fileno())
        folder.flush()
        journal.apply()
    folder.remove(JOURNAL)
    folder.flush()
    return True


class _Journal:
    """An open journal. Its contents are not trusted."""

    def __init__(self, folder: Folder, file: IO[bytes]) -> None:
        self.folder, self.file, self.path = folder, file, folder.path / JOURNAL
        self.end = os.fstat(file.fileno()).st_size - _HASH_BYTES
        self._record: Record | None = None
        self._layouts: dict[str, Layout] = {}

    def check(self) -> None:
        """Check the writes and the hash, and check that the writes belong to the folder's files.

        Checking the hash reads the whole journal, which would take hours for a huge sparse file. So
        it is checked last. Valid writes bound the length: only `run.json` and `rest.pt` can be
        longer than a page, and each is written once. `check_not_sparse` bounds the holes in them.
        """
        check_not_sparse(self.file.fileno(), self.path)
        count, record = sum(1 for _ in self._writes()), self._record
        if record is None or count < 2:
            raise damaged_file(self.path, "it does not contain a complete save")
        self._check_hash()
        for layout, old in record.files().values():
            versions = (layout, record.save), (old, record.previous), (old, record.session)
            check_file(self.folder, versions)

    def apply(self) -> None:
        """Write the data to the files."""
        with contextlib.ExitStack() as stack:
            files: dict[str, IO[bytes]] = {}
            for layout in self._layouts.values():
                file = stack.enter_context(self.folder.open(layout.file_name, "r+b"))
                files[layout.file_name] = file
                self._set_length(file, layout.file_bytes)
            for name, offset, length in self._writes():
                if offset == WHOLE_FILE:
                    self.folder.write(name, self._read_chunks(length))
                    continue
                files[name].seek(offset)
                files[name].writelines(self._read_chunks(length))
            for file in files.values():
                flush(file)
        self.folder.flush()

    def _set_length(self, file: IO[bytes], size: int) -> None:
        """Set a file to the length that the save specifies."""
        if os.fstat(file.fileno()).st_size != size:
            file.truncate(size)
            self.folder.reserve(file, size)

    def _check_hash(self) -> None:
        self.file.seek(0)
        digest = hashlib.sha256()
        for data in self._read_chunks(self.end):
            digest.update(data)
        if self.file.read() != digest.digest():
            raise damaged_file(self.path, "its checksum does not match its contents")

    def _writes(self) -> Iterator[tuple[str, int, int]]:
        """Check each write, and yield its (name, offset, length), like `_headers`.

        `apply` checks the writes again, because another process can change the journal.
        """
        for number, (name, offset, length) in enumerate(self._headers()):
            data = self.file.tell()
            if number == 0 or self._record is None:
                self._check_record(name, offset, length)
            elif number == 1:
                if (name, offset, length) != (REST_FILE, WHOLE_FILE, self._record.rest[0]):
                    raise damaged_file(self.path, f"it does not contain all of {REST_FILE}")
            else:
                self._check_page(name, offset, length)
            self.file.seek(data)
            yield name, offset, length

    def _check_record(self, name: str, offset: int, length: int) -> None:
        if (name, offset) != (RECORD_FILE, WHOLE_FILE) or length > MAX_RECORD_BYTES:
            raise damaged_file(self.path, f"it does not start with {RECORD_FILE}")
        if self._record is None:
            self._record = parse_record(self.file.read(length), self.path)
            self._layouts = {name: each for name, (each, _) in self._record.files().items()}

    def _check_page(self, name: str, offset: int, length: int) -> None:
        if name not in self._layouts:
            raise damaged_file(self.path, "it changes a file that is not part of the save")
        layout = self._layouts[name]
        if offset + length > layout.file_bytes:
            raise damaged_file(self.path, f"it writes beyond the end of {name}")
        if length > PAGE:
            raise damaged_file(self.path, f"it writes more than a page of {name} at once")

    def _headers(self) -> Iterator[tuple[str, int, int]]:
        """Yield (name, offset, length) of each write, with the file positioned at the data."""
        self.file.seek(0)
        if self.end < len(_MAGIC):
            raise damaged_file(self.path, "it is too short")
        if self.file.read(len(_MAGIC)) != _MAGIC:
            raise HotrowError(
                f"{self.path} is damaged, or another version of hotrow wrote it",
                fix="open and close the folder once with that version, to finish its last save",
            )
        position = len(_MAGIC)
        while position < self.end:
            self.file.seek(position)
            header = self.file.read(_HEADER.size)
            if len(header) < _HEADER.size:
                raise damaged_file(self.path, "it ends in the middle of a write")
            name_length, offset, length = _HEADER.unpack(header)
            name = self.file.read(min(name_length, _MAX_NAME_BYTES))
            position += _HEADER.size + name_length + length
            if position > self.end or name_length > _MAX_NAME_BYTES:
                raise damaged_file(self.path, "it ends in the middle of a write")
            yield name.decode("ascii", "replace"), offset, length

    def _read_chunks(self, length: int) -> Iterator[bytes]:
        while length > 0 and (data := self.file.read(min(length, _CHUNK))):
            length -= len(data)
            yield data
