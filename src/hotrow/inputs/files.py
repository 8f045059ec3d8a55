"""Read tables, text and ids from files, and write text files. No file is ever unpickled."""

from __future__ import annotations

import difflib
import errno
import os
import re
import secrets
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.inputs.mapped_tensor import map_tensor
from hotrow.inputs.regular_file import (
    check_regular,
    open_regular,
    path_of_descriptor,
    read_regular,
    read_standard_input,
    reader_errors,
)
from hotrow.inputs.stale_table import check_settled
from hotrow.inputs.text import elide, escape_unprintable

MAX_TEXT_BYTES = 64_000_000
MAX_JSON_BYTES = 16_000_000
# Valid table dtypes, as safetensors names them.
_TABLE_DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
_MAX_LISTED = 40  # maximum number of candidates in an error message
_ID = re.compile("-?[0-9]{1,18}")  # 18 digits fit in an int64


def read_table(path: str | Path, tensor: str | None = None) -> tuple[str, Tensor]:
    """Return the name and values of one 2-D floating-point tensor in a safetensors file.

    The file is memory-mapped, so rows are read only when they are used. Other tensors are never
    read.

    Args:
        path: the safetensors file.
        tensor: the tensor's name; may be None if exactly one tensor in the file is a table.

    Raises:
        HotrowError: the file can't be read, it has no table with this name, or `tensor` is None and
            the file doesn't have exactly one table.
    """
    with open_safetensors(path, "the table", "save the tensor", "np") as (file, descriptor):
        slices = {name: file.get_slice(name) for name in file.keys()}  # noqa: SIM118
        tensors = {key: (tuple(s.get_shape()), s.get_dtype()) for key, s in slices.items()}
        name = _choose_table(tensors, tensor, Path(path))
        shape, dtype = tensors[name]
        return name, map_tensor(descriptor, name, shape, _TABLE_DTYPES[dtype])


@contextmanager
def open_safetensors(
    path: str | Path, what: str, fix: str, framework: str = "pt"
) -> Iterator[tuple[Any, int]]:
    """Open a safetensors file, and yield its reader and the file's descriptor.

    Raise `HotrowError` if reading fails, or if it is a table on disk whose rows may be stale.

    Args:
        path: the file.
        what: the role of the file, for error messages.
        fix: the start of the advice in error messages, such as "save the tensor".
        framework: the library of the tensors that the reader returns.
    """
    from safetensors import safe_open

    with (
        open_regular(path, what) as descriptor,
        reader_errors(
            f"{path} cannot be read as a safetensors file",
            "is the file complete? hotrow never opens pickled files (.pt, .bin); "
            f"{fix} with safetensors.torch.save_file",
        ),
        safe_open(path_of_descriptor(descriptor, path), framework=framework) as file,
    ):
        check_settled(Path(path), file, descriptor)
        yield file, descriptor


def _choose_table(
    tensors: dict[str, tuple[tuple[int, ...], str]], wanted: str | None, path: Path
) -> str:
    """Return the name of the tensor to read, or raise an error that lists the candidates."""
    tables = {
        name: shape
        for name, (shape, dtype) in tensors.items()
        if len(shape) == 2 and dtype in _TABLE_DTYPES
    }
    largest_first = sorted(tables.items(), key=lambda item: -item[1][0])
    listing = "".join(
        f"\n  {escape_unprintable(name)}  {' x '.join(f'{n:,}' for n in shape)}"
        for name, shape in largest_first[:_MAX_LISTED]
    )
    if len(tables) > _MAX_LISTED:
        listing += f"\n  and {len(tables) - _MAX_LISTED} more"
    others = f"the tables in this file are:{listing}" if tables else "this file has no table"
    if wanted in tables:
        return wanted
    if wanted in tensors:
        shape, dtype = tensors[wanted]
        raise HotrowError(
            f"tensor {wanted} in {path} is {dtype} of shape {shape}, but a table must be 2-D with "
            f"one of the dtypes {', '.join(_TABLE_DTYPES)}; {others}"
        )
    if wanted is not None:
        matches = difflib.get_close_matches(wanted, tables, n=1)
        guess = f" (did you mean {escape_unprintable(matches[0])}?)" if matches else ""
        raise HotrowError(f"there is no tensor {wanted} in {path}{guess}; {others}")
    if len(tables) == 1:
        return next(iter(tables))
    if not tables:
        raise HotrowError(
            f"{path} has no table: none of its tensors is 2-D with one of the dtypes "
            f"{', '.join(_TABLE_DTYPES)}"
        )
    raise HotrowError(f"{path} has {len(tables)} tables; name one with --tensor:{listing}")


def read_text(path: str | Path, limit: int = MAX_TEXT_BYTES) -> str:
    """Return the text of a UTF-8 file, or of standard input for "-"."""
    what = "the text"
    if str(path) == "-":
        name, data = "standard input", read_standard_input(what, limit)
    else:
        name, data = str(path), read_regular(path, what, limit)
    try:
        text = data.decode("utf-8-sig")
        wrong = data.find(0)  # as in UTF-16
    except UnicodeDecodeError as error:
        wrong = error.start
    if wrong >= 0:
        raise HotrowError(
            f"{name} is not UTF-8 text: byte {wrong:,} is 0x{data[wrong]:02x}",
            fix="convert it with iconv -f ENCODING -t UTF-8",
        )
    return text


def parse_ids(text: str, source: str) -> list[int]:
    """Parse decimal ids separated by commas or whitespace; error messages name the `source`."""
    ids = []
    for number, line in enumerate(text.split("\n"), 1):
        for word in line.replace(",", " ").split():
            if not _ID.fullmatch(word):
                raise HotrowError(
                    f"{source}, line {number}: {elide(word, 40)!r} is not an id",
                    fix="ids must be whole numbers of at most 18 digits, separated by commas or "
                    "spaces",
                )
            ids.append(int(word))
    return ids


def check_writable(path: str | Path, inputs: Iterable[str | None] = ()) -> None:
    """Raise an error if the path can't be written; call this before any expensive work.

    Arguments:
        path: the path of the output.
        inputs: paths of files that the output must not replace; "-" is standard input.

    Raises:
        HotrowError: the path can't be written, or is one of the inputs.
    """
    target, _ = _find_target(path)
    for name in inputs:
        if name is not None and _is_input(name, target):
            raise HotrowError(
                f"{path} is also an input, so the output would replace it",
                fix="write the output to another file",
            )


def _is_input(name: str, target: Path) -> bool:
    """Return whether the input is the target; "-" is standard input, or a table of that name."""
    for file in (name, 0) if name == "-" else (name,):
        with suppress(OSError, ValueError):  # reading the input reports this error
            if os.path.samestat(os.stat(file), os.stat(target)):
                return True
    return False


def write_text(path: str | Path, text: str) -> None:
    """Write a text file in UTF-8; see `write_bytes`."""
    # A lone surrogate, which UTF-8 can't encode, raises an error that names the file.
    with _write_errors(path):
        data = text.encode()
    write_bytes(path, data)


def write_bytes(path: str | Path, data: bytes) -> None:
    """Write a file so that an interruption leaves either the old file or the complete new one.

    The data goes to a temporary file in the same folder, which is then renamed to the target. The
    new file keeps the read, write and execute permissions of the old one.

    Raises:
        HotrowError: the path can't be written, or another program replaces the temporary file.
    """
    target, permissions = _find_target(path)
    temporary = target.with_name(f".hotrow-{secrets.token_hex(8)}")
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | getattr(os, "O_NOFOLLOW", 0)
    flags |= getattr(os, "O_BINARY", 0)
    with _write_errors(path):
        descriptor = os.open(temporary, flags, 0o666)  # the umask applies
        try:
            with open(descriptor, "wb") as file:
                file.write(data)
                file.flush()
                # Changes by path could affect another file: a user who may write to the folder can
                # replace the temporary file by a link. Windows lacks fchmod before Python 3.13.
                if permissions is not None and hasattr(os, "fchmod"):
                    os.fchmod(descriptor, permissions)
                os.fsync(descriptor)
                written = os.fstat(descriptor)
            if not os.path.samestat(written, os.lstat(temporary)):
                raise ValueError("another program replaced hotrow's temporary file")
            os.replace(temporary, target)
        except BaseException:
            with suppress(OSError):
                temporary.unlink()
            raise


def _find_target(path: str | Path) -> tuple[Path, int | None]:
    """Return the file to replace, and its permissions if it exists; follow symbolic links.

    If the file exists, this function opens it for writing, but does not change it. This lets the
    system reject a link that another user has put into a shared folder. Replacing a file doesn't
    trigger that check.
    """
    status = permissions = None
    with _write_errors(path):
        try:
            flags = os.O_WRONLY | getattr(os, "O_NONBLOCK", 0)
            descriptor = os.open(path, flags)
        except FileNotFoundError:
            _check_new_name(str(path))
        except OSError:
            # Opening a folder or a pipe for writing fails with a less helpful error.
            check_regular(os.stat(path), str(path))
            raise
        else:
            try:
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
            check_regular(status, str(path))
            permissions = status.st_mode & 0o777  # a set-user-ID bit would now apply to this user
        target = Path(path).resolve()
        if status is not None:
            _check_name(status, target, path)
        if target.is_dir():  # for example, because the path is empty
            check_regular(target.stat(), str(path) or "''")
        if not target.parent.is_dir():
            raise HotrowError(
                f"{path} cannot be written: there is no folder {target.parent}",
                fix="create it first",
            )
        if not os.access(target.parent, os.W_OK | os.X_OK):
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
    return target, permissions


def _check_new_name(path: str) -> None:
    """Raise `HotrowError` if no file can be created at this path.

    `Path.resolve` accepts such paths: it ignores a separator at the end, and it removes a missing
    folder before "..".
    """
    folder, name = os.path.split(path)
    if path and name in ("", "."):
        raise HotrowError(
            f"{path} cannot be written: it names a folder, not a file",
            fix="add the name of the file",
        )
    if not os.path.isdir(folder or "."):
        raise HotrowError(
            f"{path} cannot be written: there is no folder {folder}", fix="create it first"
        )


def _check_name(status: os.stat_result, target: Path, path: str | Path) -> None:
    """Raise `HotrowError` if replacing `target` would not change the file at `path`.

    A path such as /dev/stdout or /proc/self/fd/5 names an open file, which may have been deleted.
    If the file is standard output, replacing it would lose the command's other output.
    """
    if not target.exists():
        raise HotrowError(
            f"{path} cannot be written: it is an open file that was deleted or renamed",
            fix="pass the path of a file in a folder",
        )
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        with suppress(OSError):  # the stream is closed
            if stream is not None and os.path.samestat(status, os.fstat(descriptor)):
                raise HotrowError(
                    f"{path} cannot be written: the command's own output goes to this file",
                    fix="write one of them to another file",
                )


@contextmanager
def _write_errors(path: str | Path) -> Iterator[None]:
    """Turn errors that occur while the file is written into `HotrowError`."""
    try:
        yield
    except PermissionError:
        raise HotrowError(
            f"{path} cannot be written: no permission",
            fix="change the permissions, or choose another path",
        ) from None
    # RuntimeError: a loop of symbolic links, in Python before 3.13. UnicodeError (a ValueError): a
    # name that is not valid UTF-8.
    except (OSError, RuntimeError, ValueError) as error:
        if isinstance(error, HotrowError):
            raise
        why = error.strerror if isinstance(error, OSError) else str(error)
        raise HotrowError(f"{path} cannot be written ({why})", fix="choose another path") from None
