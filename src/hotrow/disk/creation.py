"""Create the folder of a table."""

from __future__ import annotations

import os
import shutil
import uuid
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path

import torch
from torch import Tensor

from hotrow.disk.folder import Folder, check_path, fix_for, reason_for
from hotrow.disk.layout import MAX_BYTES, Layout
from hotrow.disk.mapped_tensor import RowBlocks, filled_blocks, write_new
from hotrow.disk.record import RECORD_FILE, TABLE, Record, new_name
from hotrow.disk.rest import REST_FILE, describe_rest, serialize_rest
from hotrow.disk.store import Store
from hotrow.errors import HotrowError


def create(
    path: str | Path,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    fill: Callable[[Tensor], object] | None = None,
) -> Store:
    """Create a folder with a new table, and open it.

    The table contains zeros, or the values that `fill` writes.

    Args:
        path: the folder, which must not exist yet.
        rows: V, at least 1.
        columns: D, at least 1.
        dtype: float32 or float64.
        fill: a function that writes values in place, such as `torch.nn.init.normal_`. `create`
            calls the function with one (n, D) block of rows at a time.

    Returns:
        The open store.

    Raises:
        HotrowError: the folder exists, the dtype is not supported, `rows` or `columns` is not a
            positive integer, or the disk or memory is full. After an error, no new folder remains.

    Cost: `create` writes the table once. Zeros cost nothing, because the files are sparse. In a
    tmpfs such as `/dev/shm`, however, zeros take space.

    >>> import tempfile, torch, hotrow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hotrow.disk.create(folder + "/users", 1_000_000, 16) as store:
    ...         optimizer = hotrow.optim.Adam(store.layer.parameters())
    ...         store.layer(torch.tensor([3, 999_999])).sum().backward()
    ...         optimizer.step()
    ...         store.save()
    ...     with hotrow.disk.open(folder + "/users") as store:
    ...         round(store.layer.weight[3, 0].item(), 4)
    -0.001
    """
    folder = Path(path)
    check_path(folder)
    if dtype not in (torch.float32, torch.float64):
        raise HotrowError(
            f"dtype is {dtype}, but a table on disk must be float32 or float64",
            fix="pass dtype=torch.float32 or torch.float64",
        )
    if not (type(rows) is int and type(columns) is int):  # bool is a subclass of int
        raise HotrowError(
            f"rows is {rows!r} and columns is {columns!r}, but both must be integers",
            fix="pass integers",
        )
    if rows < 1 or columns < 1 or rows * columns * dtype.itemsize > MAX_BYTES:
        raise HotrowError(
            f"rows is {rows} and columns is {columns}, but both must be at least 1, and the table "
            f"must have at most {MAX_BYTES:,} bytes",
            fix="pass 1 or more",
        )
    if os.path.lexists(folder):
        raise HotrowError(
            f"{folder} already exists", fix="open it with hotrow.disk.open, or use another path"
        )
    values = filled_blocks((rows, columns), dtype, fill) if fill else ()
    # Use a unique name, because another process may be creating the same folder. A name can have
    # at most 255 bytes, or 63 characters of up to 4 bytes.
    current = folder.with_name(f"{folder.name[:48]}.{uuid.uuid4().hex[:12]}")
    with ExitStack() as undo:  # runs after an error
        try:
            parents = _make_parents(folder, undo)
            undo.callback(lambda: shutil.rmtree(current, ignore_errors=True))
            current.mkdir()
            new_folder = Folder(current)
            undo.callback(new_folder.close)
            new_folder.path = folder  # for error messages
            _write_first_save(new_folder, Layout(TABLE, (rows, columns), dtype), values)
            # Lock the folder before others can find it, so that only this process can delete it.
            store = Store.in_folder(new_folder)
            current = current.rename(folder)
            new_folder.set_path(folder)
            for parent in parents:
                _flush_folder(parent)
        except (OSError, MemoryError) as error:
            raise HotrowError(
                f"{folder} could not be created ({reason_for(error)})",
                fix=f"{fix_for(error)}, or use another path",
            ) from None
        undo.pop_all()
    return store


def _make_parents(folder: Path, undo: ExitStack) -> list[Path]:
    """Create missing parent folders, and return the folders that get a new entry.

    `undo` deletes the created folders again, unless they are in use by then.
    """
    missing = [parent for parent in folder.parents if not parent.exists()]
    for parent in reversed(missing):
        try:
            parent.mkdir()
        except FileExistsError:
            if not parent.is_dir():
                raise
        else:
            undo.callback(_remove_empty_folder, parent)
    return [folder.parent, *(parent.parent for parent in missing)]


def _remove_empty_folder(path: Path) -> None:
    with suppress(OSError):
        path.rmdir()


def _write_first_save(folder: Folder, table: Layout, values: RowBlocks) -> None:
    """Write the files of a new table."""
    save, rest = new_name(), serialize_rest(None)
    tensors = {table.name: table}
    record = Record(save, save, save, table.shape[0], tensors, describe_rest(rest))
    write_new(folder, table, save, values)
    folder.write(REST_FILE, [rest])
    folder.write(RECORD_FILE, [record.serialize()])
    folder.flush()


def _flush_folder(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
