"""Read tensors, numbers, strings and collections from a .pt file that may be untrusted.

`torch.load(weights_only=True)` executes no code. But a small file can still make it run forever,
fill the memory, or create a sparse tensor whose indices point outside of its memory. So hotrow
checks the archive, then the pickle program before it runs, and the objects before they are used.
"""

from __future__ import annotations

import io
import itertools
import pickletools
import re
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from pickle import UnpicklingError
from typing import IO, Any

import torch
from torch.serialization import default_restore_location

from hotrow.errors import HotrowError
from hotrow.inputs.archive import check_archive
from hotrow.inputs.regular_file import reader_errors
from hotrow.inputs.text import escape_unprintable

MAX_OBJECTS = 1_000_000
MAX_DEPTH = 50
# The pickle program of an ordinary file takes a few bytes per object, and `_check_program` counts
# each object once for every level at which it is nested.
_OBJECTS_PER_BYTE = MAX_DEPTH
# torch.load accepts more names. Some of them create objects of any size, or objects that are not
# plain tensors. Nested and quantized tensors aren't needed, and torch checks their sizes late.
_ALLOWED = re.compile(
    r"torch [A-Za-z0-9]+Storage|torch\.storage (Untyped|Typed)Storage|torch (Size|device)|"
    r"torch (b?float|complex|u?int)\d\w*|torch bool|"
    r"torch\._utils _rebuild_(tensor_v[23]|parameter|sparse_tensor)|"
    r"torch\.serialization _get_layout|"
    r"collections (OrderedDict|Counter)|(builtins|__builtin__) (set|complex)|_codecs encode"
)


def load_checkpoint(
    file: IO[bytes],
    name: str | Path,
    *,
    mapped_path: str | None = None,
    device: str | None = None,
) -> Any:
    """Return the contents of a .pt file.

    Args:
        file: the open .pt file.
        name: the name of the file, for error messages.
        mapped_path: the path of the file, if the tensors should be memory-mapped rather than read.
        device: where to put the tensors, or None to use the devices they were saved from, and the
            CPU in place of those that this machine lacks.

    Raises:
        HotrowError: the file is damaged, or contains anything other than tensors, numbers, strings,
            and lists, tuples, sets and dicts of these.
    """
    fix = "is the file complete? Write it with torch.save"
    with reader_errors(f"{name} cannot be read as a .pt file", fix), _unpickling_errors(name):
        size = file.seek(0, io.SEEK_END)
        check_archive(file)
        _check_program(_read_program(file), size)
        file.seek(0)
        # Otherwise, a sparse tensor could have indices outside of its memory.
        with torch.sparse.check_sparse_tensor_invariants(True):  # type: ignore[no-untyped-call]
            try:
                contents = torch.load(
                    mapped_path or file,
                    map_location=_saved_device if device is None else device,
                    weights_only=True,
                    mmap=mapped_path is not None,
                )
            finally:
                # After an error, the next load would check the sparse tensors of this file, which
                # another program may have truncated since.
                torch._utils._sparse_tensors_to_validate.clear()
        _check_contents(contents, name, size)
        return contents


def _saved_device(storage: Any, location: str) -> Any:
    """Move a storage to the device it was saved from, or leave it on the CPU."""
    try:
        return default_restore_location(storage, location)  # type: ignore[no-untyped-call]
    except RuntimeError:  # this machine lacks the device
        return storage


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


def _check_program(program: bytes, size: int) -> None:
    """Raise an error if the pickle program would take too long or create a forbidden object.

    A program can use the same object many times. For example, 50 pairs, each of which contains the
    previous pair twice, take 200 bytes, but computing the hash of the last pair takes days. So this
    function simulates the program: it counts the objects instead of creating them.
    """
    stack: list[int] = []
    memo: dict[Any, int] = {}
    marks: list[int] = []
    total, limit = 0, MAX_OBJECTS + _OBJECTS_PER_BYTE * size
    for opcode, argument, _ in pickletools.genops(program):
        if opcode.name == "GLOBAL" and not _ALLOWED.fullmatch(str(argument)):
            raise UnpicklingError(f"GLOBAL {str(argument).replace(' ', '.', 1)}")
        if "PUT" in opcode.name:
            memo[argument] = stack[-1]
        elif "GET" in opcode.name:
            stack.append(memo[argument])
        elif opcode.name == "MARK":
            marks.append(len(stack))
        else:
            used = opcode.stack_before
            if pickletools.markobject in used:
                start = marks.pop() - used.index(pickletools.markobject)
            else:
                start = len(stack) - len(used)
            count = 1 + sum(stack[start:])
            total += count
            if start < 0 or total > limit:
                raise ValueError(f"it has more than {limit:,} objects")
            stack[start:] = [count] * len(opcode.stack_after)


def _check_contents(contents: Any, name: str | Path, size: int) -> None:
    """Raise `HotrowError` if a few bytes represent a huge tensor or a huge number of objects.

    A tensor can repeat its elements, and a list can contain another list many times.
    """
    objects, most = [(contents, 0)], max(MAX_OBJECTS, size)
    for count in itertools.count(1):
        if not objects:
            return
        each, depth = objects.pop()
        parts: Iterable[Any] = ()
        if isinstance(each, torch.Tensor):
            stored = size if each.layout == torch.strided and not each.is_meta else 0
            if each.numel() > max(stored, MAX_OBJECTS):
                raise HotrowError(
                    f"{name} has a tensor of {each.numel():,} elements, but stores fewer",
                    fix="save the tensor with tensor.contiguous()",
                )
        elif isinstance(each, dict):
            parts = itertools.chain(each.keys(), each.values())
        elif isinstance(each, list | tuple | set | frozenset):
            parts = each
        objects += ((part, depth + 1) for part in parts)
        if count + len(objects) > most or depth > MAX_DEPTH:
            raise HotrowError(
                f"{name} has more than {most:,} objects, or objects nested more than {MAX_DEPTH} "
                "levels deep",
                fix="save fewer, larger tensors",
            )
