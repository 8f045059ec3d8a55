"""Read tensors, numbers, strings and collections from a .pt file that may be untrusted.

`torch.load(weights_only=True)` executes no code. But a small file can still make it run forever,
fill the memory, or create a sparse tensor whose indices point outside of its memory. So hotrow
checks the archive, the pickle program before it runs, and the sparse tensors. It runs the program
with the same unpickler as torch, but reads the archive itself.
"""

from __future__ import annotations

import io
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch import _weights_only_unpickler
from torch.serialization import default_restore_location
from torch.storage import TypedStorage

from hotrow.errors import HotrowError
from hotrow.inputs.archive import Archive
from hotrow.inputs.pickle_program import check_program
from hotrow.inputs.regular_file import reader_errors
from hotrow.inputs.text import escape_unprintable

_STORAGES = "data/"  # the folder of the storages in the archive
_TypedStorage: Any = TypedStorage


def load_checkpoint(file: IO[bytes], name: str | Path, *, device: str | None = None) -> Any:
    """Return the contents of a .pt file.

    Args:
        file: the open .pt file.
        name: the name of the file, for error messages.
        device: where to put the tensors, or None to use the devices they were saved from, and the
            CPU in place of those that this machine lacks.

    Raises:
        HotrowError: the file is damaged, or contains anything other than tensors, numbers, strings,
            and lists, tuples, sets and dicts of these.
    """
    fix = "is the file complete? Write it with torch.save"
    with reader_errors(f"{name} cannot be read as a .pt file", fix), _unpickling_errors(name):
        archive = Archive(file)
        program = archive.read("data.pkl")
        storages = {
            key.removeprefix(_STORAGES): size
            for key, size in archive.sizes.items()
            if key.startswith(_STORAGES)
        }
        check_program(program, storages, archive.size, name)
        contents = _run_program(program, archive, device)
        _check_sparse_tensors(contents)
        return contents


def _run_program(program: bytes, archive: Archive, device: str | None) -> Any:
    """Do what `torch.load` does after it has read the program.

    `torch.load` would read the file again, and check sparse tensors in a way that may crash.
    """
    order = archive.read("byteorder") if "byteorder" in archive.sizes else b"little"
    if order not in (b"little", b"big"):
        raise ValueError(f"its byte order is {order!r:.60}")
    is_swapped = order != sys.byteorder.encode()
    storages: dict[str, Any] = {}

    def load_storage(id: tuple[str, Any, str, str, int]) -> Any:
        _, kind, key, location, count = id
        if key in storages:
            return storages[key]
        dtype = torch.uint8 if kind is torch.UntypedStorage else kind.dtype
        content = torch.empty(count * dtype.itemsize, dtype=torch.uint8, device="cpu")
        archive.read_into(_STORAGES + key, content.numpy().data)
        storage: Any = content.untyped_storage()
        if is_swapped and count:
            storage.byteswap(dtype)
        if device is None:
            storage = _saved_device(storage, location)
        typed = _TypedStorage(wrap_storage=storage, dtype=dtype, _internal=True)
        if count:  # tensors of different dtypes may share an empty storage
            storages[key] = typed
        return typed

    unpickler: Any = _weights_only_unpickler.Unpickler(io.BytesIO(program), encoding="utf-8")
    unpickler.persistent_load = load_storage
    try:
        return unpickler.load()
    finally:
        torch._utils._sparse_tensors_to_validate.clear()  # the next torch.load would check them


def _saved_device(storage: Any, location: str) -> Any:
    """Move a storage to the device it was saved from, or leave it on the CPU."""
    try:
        return default_restore_location(storage, location)  # type: ignore[no-untyped-call]
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # this machine lacks the device
        return storage


def _check_sparse_tensors(contents: Any) -> None:
    """Raise an error if operations on a sparse tensor could read other memory or divide by zero."""
    objects, seen = [contents], set()
    while objects:
        each = objects.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor) and each.layout != torch.strided:
            _check_sparse_tensor(each)
        elif isinstance(each, dict):
            objects += [
                *dict.keys(each),
                *dict.values(each),
                *getattr(each, "__dict__", {}).values(),
            ]
        elif isinstance(each, list | tuple | set):
            objects += each


def _check_sparse_tensor(tensor: torch.Tensor) -> None:
    if tensor.layout == torch.sparse_coo:
        torch._validate_sparse_coo_tensor_args(
            tensor._indices(),
            tensor._values(),
            tensor.shape,
            tensor.is_coalesced(),
            check_pinning=False,
        )
        return
    if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
        compressed, plain = tensor.crow_indices(), tensor.col_indices()
    else:
        compressed, plain = tensor.ccol_indices(), tensor.row_indices()
    # torch uses these indices while it checks others.
    is_inside = (compressed >= 0) & (compressed <= plain.shape[-1])
    if not (is_inside.all() and (compressed.diff() >= 0).all()):
        raise ValueError("it has a sparse tensor with invalid indices")
    values = tensor.values()
    has_blocks = tensor.layout in (torch.sparse_bsr, torch.sparse_bsc)
    if has_blocks and 0 in values.shape[compressed.ndim : compressed.ndim + 2]:
        raise ValueError("it has a sparse tensor whose blocks are empty")
    torch._validate_sparse_compressed_tensor_args(
        compressed, plain, values, tensor.shape, tensor.layout, check_pinning=False
    )


@contextmanager
def _unpickling_errors(name: str | Path) -> Iterator[None]:
    try:
        yield
    except UnpicklingError as error:
        classes = re.search(r"GLOBAL (\S+)", str(error))
        content = escape_unprintable(classes[1]) if classes else ""
        what = f"contains a {content}" if content else "cannot be read as tensors"
        raise HotrowError(
            f"{name} {what}, but hotrow loads only tensors from pickle files",
            fix="save a tensor, or a tuple or dict of tensors, or pass the name of a function "
            "that returns them",
        ) from None
