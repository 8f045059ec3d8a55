"""Read tensors, numbers, strings and collections from a .pt file that may be untrusted.

`torch.load(weights_only=True)` executes no code. But a small file can still make it run forever,
fill the memory, or create a sparse tensor whose indices point outside of its memory. So hotrow
checks the archive, the pickle program before it runs, and the sparse tensors.
"""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch.serialization import default_restore_location

from hotrow.errors import HotrowError
from hotrow.inputs.archive import check_archive
from hotrow.inputs.pickle_program import check_program
from hotrow.inputs.regular_file import reader_errors
from hotrow.inputs.text import escape_unprintable
from hotrow.locks import ForkSafeLock


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
        size = file.seek(0, io.SEEK_END)
        storages = check_archive(file)
        check_program(_read_program(file), storages, size, name)
        file.seek(0)
        with _unchecked_sparse_tensors:
            contents = torch.load(
                file,
                map_location=_saved_device if device is None else device,
                weights_only=True,
                mmap=False,
            )
        _check_sparse_tensors(contents)
        return contents


class _UncheckedSparseTensors:
    """Let `torch.load` create sparse tensors unchecked, because its own checks may crash.

    torch has one setting for all threads, so the last thread that leaves restores it.
    """

    def __init__(self) -> None:
        self._lock = ForkSafeLock()
        self._count = 0  # the number of threads inside
        self._was_enabled = False

    def __enter__(self) -> None:
        with self._lock.lock:
            if not self._count:
                self._was_enabled = _SETTING.is_enabled()
                _SETTING.disable()
            self._count += 1

    def __exit__(self, *error: object) -> None:
        # After an error, the next load would check the tensors of this file.
        torch._utils._sparse_tensors_to_validate.clear()
        with self._lock.lock:
            self._count -= 1
            if self._was_enabled and not self._count:
                _SETTING.enable()


_SETTING: Any = torch.sparse.check_sparse_tensor_invariants
_unchecked_sparse_tensors = _UncheckedSparseTensors()


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


def _read_program(file: IO[bytes]) -> bytes:
    """Return the pickle program, read with the same reader that `torch.load` uses.

    Another reader could find another program, which `torch.load` would then run unchecked.
    """
    file.seek(0)
    return torch._C.PyTorchFileReader(file).get_record("data.pkl")
