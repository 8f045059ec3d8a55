"""Open only regular files, up to a size limit, so that a pipe or device can't block a command."""

from __future__ import annotations

import os
import stat
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from hotrow.errors import HotrowError
from hotrow.inputs.text import format_size, one_line

_CHUNK = 1 << 20  # the number of bytes to read at a time
# O_NONBLOCK: don't wait for a process at the other end of a pipe. Not every system has all flags.
_FLAGS = sum(getattr(os, name, 0) for name in ("O_NONBLOCK", "O_NOCTTY", "O_CLOEXEC", "O_BINARY"))
_KINDS = {
    stat.S_IFDIR: "a folder",
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


@contextmanager
def open_regular(path: str | Path, what: str, limit: int | None = None) -> Iterator[int]:
    """Open a regular file for reading, and yield its descriptor.

    This function opens the file before it checks the type, so the file can't be replaced in
    between.

    Args:
        path: the file; symbolic links are followed.
        what: the role of the file, for error messages.
        limit: the largest valid size in bytes.

    Raises:
        HotrowError: the file can't be opened, isn't a regular file or is too large.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | _FLAGS)
    except (OSError, ValueError) as error:  # ValueError: a null character in the path
        raise _unreadable_error(what, path, error) from None
    try:
        check_regular(os.fstat(descriptor), f"{what}: {path}")
        if limit is not None and os.fstat(descriptor).st_size > limit:
            raise _size_error(f"{what}: {path}", limit)
        yield descriptor
    finally:
        os.close(descriptor)


def read_regular(path: str | Path, what: str, limit: int) -> bytes:
    """Return the contents of a regular file of at most `limit` bytes.

    Raises:
        HotrowError: the file can't be opened or read, isn't a regular file or is too large.
    """
    with open_regular(path, what, limit) as descriptor:
        return _read_descriptor(descriptor, what, path, limit)


def read_standard_input(what: str, limit: int) -> bytes:
    """Return the contents of standard input (a file, a pipe or a terminal), at most `limit` bytes.

    Raises:
        HotrowError: standard input is closed, can't be read, or is larger than the limit.
    """
    # If standard input is closed, its descriptor may belong to another file.
    if sys.stdin is None:
        raise HotrowError(f"{what}: standard input is closed", fix="pass a file")
    return _read_descriptor(0, what, "standard input", limit)


def check_regular(status: os.stat_result, name: str) -> None:
    """Raise `HotrowError` if the status isn't that of a regular file."""
    if not stat.S_ISREG(status.st_mode):
        kind = _KINDS.get(stat.S_IFMT(status.st_mode), "a special file")
        raise HotrowError(
            f"{name} is {kind}, not a regular file", fix="pass the path of a regular file"
        )


def path_of_descriptor(descriptor: int, path: str | Path) -> str:
    """Return a path that a library can use to open the same file again.

    The path refers to the same file even if the original path is replaced. On a system without
    /dev/fd, this is the original path.
    """
    found = f"/dev/fd/{descriptor}"
    return found if os.path.exists(found) else str(path)


@contextmanager
def reader_errors(problem: str, fix: str) -> Iterator[None]:
    """Raise `HotrowError` for any failure of another library's reader.

    Args:
        problem: what failed, including the file's name; the library's own message is added.
        fix: how to fix it.
    """
    try:
        yield
    except HotrowError:
        raise
    except BaseException as error:
        if not isinstance(error, Exception) and not is_panic(error):
            raise  # Ctrl-C, for example
        raise HotrowError(f"{problem} ({one_line(error)})", fix=fix) from None


def is_panic(error: BaseException) -> bool:
    """Return whether the error is a Rust panic, which doesn't derive from `Exception`.

    Each library written in Rust has its own panic class, which can't be imported.
    """
    return type(error).__name__ == "PanicException"


def _read_descriptor(descriptor: int, what: str, path: str | Path, limit: int) -> bytes:
    """Read to the end, because a file may have grown and the size of a pipe is unknown."""
    data = bytearray()
    try:
        while len(data) <= limit and (
            chunk := os.read(descriptor, min(_CHUNK, limit + 1 - len(data)))
        ):
            data += chunk
    except OSError as error:
        raise _unreadable_error(what, path, error) from None
    if len(data) > limit:
        raise _size_error(f"{what}: {path}", limit)
    return bytes(data)


def _size_error(name: str, limit: int) -> HotrowError:
    return HotrowError(
        f"{name} is larger than {format_size(limit)}, the limit for this kind of file",
        fix="pass a smaller file",
    )


def _unreadable_error(what: str, path: str | Path, error: OSError | ValueError) -> HotrowError:
    reason = error.strerror if isinstance(error, OSError) else str(error)
    return HotrowError(
        f"{what}: {path} cannot be read ({reason})", fix="check the path and the permissions"
    )
