"""Check the pickle program of a .pt file before it runs.

`torch.load(weights_only=True)` calls only the functions in a list. But it calls them with any
arguments. For example, a few bytes are enough for a tensor of 2e9 elements that share their memory,
and for a call of `set` that iterates over it. So this module simulates the program: it tracks the
kinds and sizes of the objects, but creates none of them.

`torch.save` writes the contents of an object before the objects that contain it. So the simulation
knows the final size of each object when another object takes it, and refuses later changes.
"""

from __future__ import annotations

import math
import pickletools
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from pickle import UnpicklingError
from typing import Any

from torch.serialization import StorageType

from hotrow.errors import HotrowError

_MIN_ELEMENTS = 1_000_000  # the number of elements that a tensor may have in a file of any size
_MOST_SHARED = 16  # all tensors together may have this many times as many elements
_MAX_DEPTH = 150
# The pickle program of an ordinary file takes a few bytes per object. But objects can be shared.
_MIN_OBJECTS, _OBJECTS_PER_BYTE = 1_000_000, 50
_CHARACTERS_PER_OBJECT = 50  # a long text counts as several objects
_MAX_ARGUMENT = 100  # the number of objects in a size, a stride or the metadata of a tensor

# torch.load accepts more names. Some of them create objects of any size, or objects that are not
# plain tensors. Nested and quantized tensors aren't needed, and torch checks their sizes late.
_VALUES = re.compile(
    r"torch\.(?!Q)[A-Za-z0-9]+Storage|torch\.storage\.(Untyped|Typed)Storage|"
    r"torch\.(b?float|complex|u?int)\d\w*|torch\.bool"
)
_LOCATION = re.compile(r"[a-z_]{1,20}(:\d+)?", re.ASCII)
# These functions copy their argument. `torch.save` writes an argument for each call.
_COPYING = "torch.Size", "collections.Counter", "builtins.set"
# The functions that a program may call, and the kinds of the arguments that `torch.save` writes.
_FUNCTIONS = {
    "torch._utils._rebuild_tensor_v2": "storage constant tuple tuple constant dict( dict)?",
    "torch._utils._rebuild_tensor_v3": "storage constant tuple tuple constant dict name( dict)?",
    "torch._utils._rebuild_parameter": "(tensor|sparse) constant dict",
    "torch._utils._rebuild_sparse_tensor": "other tuple",
    "torch.serialization._get_layout": "text",
    "torch.Size": "tuple",
    "torch.device": "text( constant)?",
    "collections.OrderedDict": "",
    "collections.Counter": "(dict)?",
    "builtins.set": "list",
    "builtins.complex": "constant constant",
    "_codecs.encode": "text text",
}
_SPARSE_CONTENTS = "tensor tensor (tensor )?(size|tuple)( constant)?"
# The kinds of their results, if other functions take them.
_RESULTS = {
    "torch._utils._rebuild_tensor_v2": "tensor",
    "torch._utils._rebuild_tensor_v3": "tensor",
    "torch._utils._rebuild_sparse_tensor": "sparse",
    "torch.Size": "size",
    "collections.OrderedDict": "dict",
}


@dataclass(slots=True)
class _Object:
    """A simulated object.

    Attributes:
        kind: "constant" for None and numbers, "text", "list", "dict", "tuple", "storage", "tensor"
            for a dense tensor, "sparse" for a sparse one, "size", "name" for a class or function,
            or "other".
        count: the number of objects in it and itself, counted once for each path to them.
        depth: the number of levels of objects in it.
        uses: how many times other objects contain it.
        value: the value of a constant, text or name, or the number of elements of a dense tensor.
        parts: the items of a tuple.
    """

    kind: str
    count: int = 1
    depth: int = 0
    uses: int = 0
    value: Any = None
    parts: tuple[_Object, ...] = ()


def check_program(program: bytes, storages: Mapping[str, int], size: int, name: str | Path) -> None:
    """Raise an error if the program would take too long, or create a forbidden object.

    A program can use the same object many times. For example, 50 pairs, each of which contains the
    previous pair twice, take 200 bytes, but computing the hash of the last pair takes days.

    Args:
        program: the pickle program.
        storages: the size of each storage in the file, in bytes.
        size: the size of the file in bytes.
        name: the name of the file, for error messages.

    Raises:
        HotrowError: a tensor has more elements than the file.
        UnpicklingError: the program uses a class or function that is not needed for tensors.
        ValueError: the program is damaged, creates too many objects, or contains an operation or a
            call that `torch.save` does not write.
    """
    _Simulation(program, storages, size, name).run()


class _Simulation:
    """A pickle program while it is simulated; see `check_program`."""

    def __init__(
        self, program: bytes, storages: Mapping[str, int], size: int, name: str | Path
    ) -> None:
        self._program, self._storages, self._name = program, storages, name
        self._most_elements = max(size, _MIN_ELEMENTS)
        self._most_objects = _MIN_OBJECTS + _OBJECTS_PER_BYTE * len(program)
        self._object_count = self._element_count = self._encoded_length = 0
        self._stack: list[_Object] = []
        self._marks: list[int] = []
        self._memo: dict[int, _Object] = {}

    def run(self) -> None:
        """Simulate the program."""
        for opcode, argument, _ in pickletools.genops(self._program):
            try:
                self._run_operation(opcode.name, argument)
            except IndexError:
                raise ValueError(f"{opcode.name} takes an object that does not exist") from None

    def _run_operation(self, name: str, argument: Any) -> None:
        stack = self._stack
        if name == "MARK":
            self._marks.append(len(stack))
        elif name in ("BINPUT", "LONG_BINPUT"):
            self._memo[argument] = stack[-1]
        elif name in ("BINGET", "LONG_BINGET"):
            if argument not in self._memo:
                raise IndexError
            stack.append(self._memo[argument])
        elif name in ("BININT", "BININT1", "BININT2", "LONG1", "BINFLOAT"):
            self._create("constant", value=argument)
        elif name in ("NONE", "NEWTRUE", "NEWFALSE"):
            self._create("constant")
        elif name in ("BINUNICODE", "SHORT_BINSTRING"):
            count = 1 + len(argument) // _CHARACTERS_PER_OBJECT
            self._create("text", value=argument, count=count)
        elif name in ("EMPTY_LIST", "EMPTY_DICT"):
            self._create(name.removeprefix("EMPTY_").lower())
        elif name in ("EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"):
            length = ["EMPTY_TUPLE", "TUPLE1", "TUPLE2", "TUPLE3"].index(name)
            self._create_tuple([stack.pop() for _ in range(length)][::-1])
        elif name == "TUPLE":
            self._create_tuple(self._pop_to_mark())
        elif name in ("APPEND", "APPENDS"):
            items = [stack.pop()] if name == "APPEND" else self._pop_to_mark()
            self._add(stack[-1], items)
        elif name in ("SETITEM", "SETITEMS"):
            items = [stack.pop(), stack.pop()][::-1] if name == "SETITEM" else self._pop_to_mark()
            self._add(stack[-1], items)
            self._count(sum(key.count for key in items[::2]))  # computing a hash takes as long
        elif name == "GLOBAL":
            self._create("name", value=_allowed_name(argument))
        elif name == "REDUCE":
            arguments, function = stack.pop(), stack.pop()
            self._call(function, arguments)
        elif name == "BUILD":
            state, target = stack.pop(), stack[-1]
            if (target.kind, state.kind) != ("dict", "dict"):  # an OrderedDict with `_metadata`
                raise ValueError("it sets the state of an object")
            self._add(target, [state])
            _check_copied_once(state)
        elif name == "BINPERSID":
            self._check_storage(stack[-1])
            self._create("storage", [stack.pop()])
        elif name == "STOP":
            self._count(stack[-1].count)
        elif name != "PROTO":
            raise ValueError(f"it contains the operation {name}")

    def _count(self, objects: int) -> None:
        self._object_count += objects
        if self._object_count > self._most_objects:
            raise ValueError(f"it has more than {self._most_objects:,} objects")

    def _pop_to_mark(self) -> list[_Object]:
        start = self._marks.pop()
        items = self._stack[start:]
        del self._stack[start:]
        return items

    def _create_tuple(self, items: list[_Object]) -> None:
        self._create("tuple", items).parts = tuple(items)

    def _create(self, kind: str, contents: Iterable[_Object] = (), **attributes: Any) -> _Object:
        created = _Object(kind, **attributes)
        self._stack.append(created)
        self._add(created, contents)
        return created

    def _add(self, target: _Object, items: Iterable[_Object]) -> None:
        for item in items:
            item.uses += 1
            target.count += item.count
            target.depth = max(target.depth, item.depth + 1)
        if target.uses:
            raise ValueError("it changes an object that another object contains")
        if target.depth > _MAX_DEPTH:
            raise ValueError(f"its objects are nested more than {_MAX_DEPTH} levels deep")

    def _call(self, function: _Object, arguments: _Object) -> None:
        name, parts = function.value, arguments.parts
        kinds = " ".join(part.kind for part in parts)
        if function.kind != "name" or name not in _FUNCTIONS or arguments.kind != "tuple":
            raise ValueError(f"it calls {name}")
        is_latin1 = name != "_codecs.encode" or parts[-1].value == "latin1"
        if not re.fullmatch(_FUNCTIONS[name], kinds) or not is_latin1:
            raise ValueError(f"it calls {name} with arguments that torch.save does not write")
        result = self._create(_RESULTS.get(name, "other"), [arguments])
        if name in _COPYING:
            _check_copied_once(arguments, *parts)
            self._count(result.count)
        elif result.kind == "tensor":
            _check_small(*parts[2:])
            result.value = self._count_elements(parts[2])
        elif name == "torch._utils._rebuild_parameter":
            _check_small(*parts[1:])
            result.kind, result.value = parts[0].kind, parts[0].value
        elif result.kind == "sparse":
            contents = parts[1].parts
            if not re.fullmatch(_SPARSE_CONTENTS, " ".join(part.kind for part in contents)):
                raise ValueError("it has a sparse tensor that is not made of tensors")
            _check_small(*(part for part in contents if part.kind != "tensor"))
            # torch checks all indices.
            self._add_elements(sum(part.value for part in contents if part.kind == "tensor"))
        elif name == "_codecs.encode":
            self._encoded_length += len(parts[0].value)
            if self._encoded_length > len(self._program):
                raise ValueError("it encodes the same text several times")

    def _check_storage(self, id: _Object) -> None:
        """Check that a storage has a record of its size, which no other storage has."""
        if " ".join(part.kind for part in id.parts) != "text name text text constant":
            raise ValueError("it has a storage that torch.save does not write")
        _check_small(id)
        _, path, key, location, count = (part.value for part in id.parts)
        # torch would read a record for "meta" again at each use of the storage.
        if location == "meta" or not _LOCATION.fullmatch(location):
            raise ValueError(f"it has a storage on the device {location!r:.60}")
        kind = path.rpartition(".")[-1]
        is_typed = kind != "UntypedStorage"
        item_size = StorageType(kind).dtype.itemsize if is_typed else 1  # type: ignore[no-untyped-call]
        if self._storages.get(key) != count * item_size:
            raise ValueError(
                f"it has no storage of {count * item_size:,} bytes with the key {key!r}"
            )

    def _count_elements(self, size: _Object) -> int:
        """Return the number of elements of a tensor.

        Raises:
            HotrowError: the tensor repeats its elements, so that it is larger than the file.
        """
        sizes = [part.value for part in size.parts]
        if any(type(each) is not int or each < 0 for each in sizes):
            raise ValueError("it has a tensor whose size is not a tuple of integers")
        count: int = math.prod(sizes)
        if count > self._most_elements:
            raise HotrowError(
                f"{self._name} has a tensor of {count:,} elements, but stores fewer",
                fix="save the tensor with tensor.contiguous()",
            )
        self._add_elements(count)
        return count

    def _add_elements(self, count: int) -> None:
        self._element_count += count
        if self._element_count > _MOST_SHARED * self._most_elements:
            raise ValueError("its tensors share their elements too often")


def _check_small(*arguments: _Object) -> None:
    """Raise an error if an argument that torch reads in each call is large."""
    if any(each.count > _MAX_ARGUMENT for each in arguments):
        raise ValueError("it creates a tensor with large arguments")


def _check_copied_once(*copied: _Object) -> None:
    """Raise an error if an object that is copied could be copied again.

    Otherwise, a few bytes would be enough for each copy of a large object.
    """
    if any(each.uses > 1 for each in copied):
        raise ValueError("it copies an object several times")


def _allowed_name(argument: str) -> str:
    """Return the name in the argument of the operation GLOBAL, in today's spelling."""
    module, _, name = argument.partition(" ")
    path = f"{'builtins' if module == '__builtin__' else module}.{name}"
    if not (path in _FUNCTIONS or _VALUES.fullmatch(path)):
        raise UnpicklingError(f"GLOBAL {path}")
    return path
