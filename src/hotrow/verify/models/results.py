"""Collect the results of a run as tensors: what the model returns, and the state that it changes.

A result that is not a tensor becomes one. For a text, the values of this tensor are its bytes.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from enum import Enum
from types import ModuleType
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor, nn

from hotrow.inputs.text import elide
from hotrow.onehot.tensor import OneHot
from hotrow.verify.models.splice import compare_any_tensors

_TEXT = "text of "
_PLAIN_TEXTS = str, bytes, bytearray, Enum, range, slice, type(None)
_TORCH_TEXTS = torch.Size, torch.dtype, torch.device, torch.layout
_TEXTS = *_PLAIN_TEXTS, *_TORCH_TEXTS  # compared by their repr
_NUMBERS = bool, int, float, complex
_UNREADABLE = nn.Module, ModuleType, type
_WITH_VALUES = Tensor, np.ndarray, Mapping, Sequence, Set, *_NUMBERS, *_TEXTS
_PLAIN = {*_NUMBERS, *_TEXTS}  # without attributes, unlike their subclasses
_MODULE_ATTRIBUTES = frozenset(vars(nn.Module()))
# A sparse tensor with at most so many elements, or so many per value that it stores, is compared
# as dense.
_MIN_DENSE, _DENSE_PER_VALUE = 1_000, 10
# The number of characters of a key, and of a path, in the names of the values below it.
_MAX_KEY, _MAX_PATH = 60, 300
_Named = tuple[str, str, Tensor]
_Value = TypeVar("_Value")
_HEAP_TYPE = 1 << 9  # Python's Py_TPFLAGS_HEAPTYPE: the class was created by a class statement


@dataclasses.dataclass(frozen=True)
class _Visited:
    """What a traversal has found.

    Attributes:
        objects: (object, path) of each object with attributes, keyed by `id()`.
        containers: the path of each container around the current value, keyed by `id()`.
    """

    objects: dict[int, tuple[Any, str]] = dataclasses.field(default_factory=dict)
    containers: dict[int, str] = dataclasses.field(default_factory=dict)


def named_leaves(
    value: Any, name: str, objects: bool = True, visited: _Visited | None = None
) -> Iterator[tuple[str, Any]]:
    """Yield (path, leaf) for each leaf of nested containers and, if `objects`, of other objects.

    An empty container is a leaf, and so is an object of a type that may store values outside of
    its attributes. For an object that is found a second time, and for a container that contains
    itself, the leaf is the path of the first.
    """
    visited = visited or _Visited()
    if isinstance(value, OneHot):
        value = value.materialize()
    if type(value) in _PLAIN or isinstance(value, (Enum, *_UNREADABLE)):
        yield name, value
        return
    contents: list[tuple[str, Any]] = []
    if isinstance(value, Mapping):
        contents = [(f"[{_short_repr(key)}]", each) for key, each in value.items()]
    elif isinstance(value, Sequence) and not isinstance(value, _TEXTS):
        contents = [(f"[{index}]", each) for index, each in enumerate(value)]
    is_object = not isinstance(value, _WITH_VALUES)
    attributes = _attributes(value) if objects or dataclasses.is_dataclass(value) else {}
    if id(value) in visited.containers:
        yield name, f"the same object as {visited.containers[id(value)]}"
        return
    if attributes and id(value) in visited.objects:
        if is_object:
            yield name, f"the same object as {visited.objects[id(value)][1]}"
            return
        attributes = {}
    if attributes:
        # Keep the object alive, so that no other gets its id.
        visited.objects[id(value)] = value, name
    consists_of_attributes = is_object and attributes and not _is_built_in(type(value))
    if not (contents or consists_of_attributes):
        yield name, value
    if len(name) > _MAX_PATH:
        name = name[:_MAX_PATH] + "…"
    if contents:
        visited.containers[id(value)] = name
    for path, each in [*contents, *((f".{key}", each) for key, each in attributes.items())]:
        yield from named_leaves(each, name + path, objects, visited)
    visited.containers.pop(id(value), None)


def _short_repr(key: Any) -> str:
    start = key[: _MAX_KEY + 1] if isinstance(key, str | bytes) else key
    return elide(repr(start), _MAX_KEY)


def _attributes(value: Any) -> dict[str, Any]:
    """Return the attributes of an object, including slots.

    For objects that also have values, such as containers and tensors, these are the public
    attributes that aren't also items of a mapping.
    """
    names = list[str]()
    if dataclasses.is_dataclass(value):
        names = [field.name for field in dataclasses.fields(value)]
    for cls in type(value).__mro__:
        slots = vars(cls).get("__slots__", ())
        for slot in [slots] if isinstance(slots, str) else slots:
            is_private = slot.startswith("__")
            names.append(f"_{cls.__name__.lstrip('_')}{slot}" if is_private else slot)
    attributes: dict[str, Any] = {}
    for name in names:
        with suppress(Exception):  # the attribute isn't set
            attributes[name] = getattr(value, name)
    attributes |= {
        name: each for name, each in getattr(value, "__dict__", {}).items() if isinstance(name, str)
    }
    if not isinstance(value, _WITH_VALUES):
        return attributes
    if isinstance(value, Tensor) and (
        isinstance(value, nn.Parameter)  # hotrow adds attributes
        or type(value).__torch_dispatch__ is not Tensor.__torch_dispatch__
    ):
        return {}  # such a subclass may keep its values in attributes
    items = value if isinstance(value, Mapping) else {}
    return {
        name: each
        for name, each in attributes.items()
        if not (name.startswith("_") or (name in items and items[name] is each))
    }


def _is_built_in(cls: type) -> bool:
    """Return whether a base class other than `object` is implemented in C."""
    return any(not base.__flags__ & _HEAP_TYPE for base in cls.__mro__[:-1])


def collect_results(
    value: Any, name: str, objects: bool = True
) -> tuple[dict[str, Tensor], dict[str, str]]:
    """Return the tensor of each leaf by name, and the type of each leaf that has none by path."""
    results, types = list[tuple[str, Tensor]](), dict[str, str]()
    converted: dict[int, tuple[Any, list[_Named]]] = {}  # keyed by `id()` of the leaf in the value
    for path, leaf in named_leaves(value, name, objects):
        if id(leaf) not in converted:
            converted[id(leaf)] = leaf, list(_to_tensors(leaf))
        _, tensors = converted[id(leaf)]
        if not tensors:
            types[path] = type(leaf).__name__
        results += [(before + path + after, tensor) for before, after, tensor in tensors]
    return dict(number_repeats(results)), types


def number_repeats(pairs: Iterable[tuple[str, _Value]]) -> Iterator[tuple[str, _Value]]:
    """Yield (name, value) pairs, with a number after a name that has come before.

    Several keys of a dict may have the same text, and names are cut.
    """
    repeats = Counter[str]()
    for name, value in pairs:
        repeats[name] += 1
        yield name if repeats[name] == 1 else f"{name} ({repeats[name]})", value


def named_tensors(module: nn.Module, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters and the buffers of a module, with their names."""
    yield from module.named_parameters(prefix)
    yield from module.named_buffers(prefix)


def collect_state(model: nn.Module, args: Mapping[str, Any]) -> dict[str, Tensor]:
    """Return all that a run can change, by name: the model's state and the arguments.

    The state consists of the parameters, the buffers, and other tensors in attributes of modules,
    including those of modules in lists or dicts.
    Numbers and texts there, such as a logged loss, may depend on rounding or on the time.
    """
    state: list[tuple[str, Tensor]] = [
        (f"parameter {name}", parameter) for name, parameter in model.named_parameters()
    ]
    for name, buffer in model.named_buffers():
        state += collect_results(buffer, f"buffer {name}")[0].items()
    known = {*map(id, model.modules()), *map(id, model.parameters())}
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if key not in _MODULE_ATTRIBUTES:
                name = f"attribute {path}.{key}" if path else f"attribute {key}"
                for leaf_name, leaf in named_leaves(value, name, objects=False):
                    if id(leaf) in known:
                        continue
                    if isinstance(leaf, Tensor):
                        for before, after, tensor in _to_tensors(leaf):
                            state.append((before + leaf_name + after, tensor))
                    elif isinstance(leaf, nn.Module):  # the module tree doesn't contain it
                        named = named_tensors(leaf, leaf_name)
                        state += [each for each in named if id(each[1]) not in known]
    for name, value in args.items():
        state += collect_results(value, name)[0].items()
    return dict(number_repeats(state))


def find_changes(before: Mapping[str, Tensor], after: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return a copy of each value that changed or is new, and a text for each that is gone."""
    changed = {
        name: value.detach().clone()
        for name, value in after.items()
        if name not in before
        or compare_any_tensors(name, before[name], value.detach()).verdict != "bitwise"
    }
    paths = {name.removeprefix(_TEXT) for name in after}
    gone = [path for name in before if (path := name.removeprefix(_TEXT)) not in paths]
    return changed | {_TEXT + path: _encode_text("removed") for path in gone}


def describe_difference(name: str, a: Tensor | None, b: Tensor | None) -> str | None:
    """Describe how results of the plain and the converted model differ other than in numbers."""
    if a is None or b is None:
        return f"only the {'converted' if a is None else 'plain'} model has {name}"
    if name.startswith(_TEXT):
        if torch.equal(a, b):
            return None
        values = [bytes(each.tolist()).decode(errors="replace") for each in (a, b)]
    else:
        values = [f"{str(each.dtype)[6:]} {tuple(each.shape)}" for each in (a, b)]
    if values[0] == values[1]:
        return None
    return f"{name}: {values[0]} in the plain model, {values[1]} in the converted model"


def _to_tensors(leaf: Any) -> Iterator[_Named]:
    """Yield the tensors with the values of a leaf, and what to add before and after its path.

    There are none if the leaf can't be read, and several if it is nested.
    """
    text = _text_of(leaf)
    if text is not None:
        yield _TEXT, "", _encode_text(text)
    elif isinstance(leaf, Tensor) and leaf.is_nested:
        yield from (("", f"[{index}]", each) for index, each in enumerate(leaf.unbind()))
    elif isinstance(leaf, Tensor) and not (leaf.is_meta or leaf.is_quantized):
        is_dense = leaf.layout == torch.strided
        yield from [("", "", leaf)] if is_dense else _sparse_to_tensors(leaf)
    elif isinstance(leaf, _NUMBERS) and not isinstance(leaf, np.generic):
        dtype = torch.float64 if isinstance(leaf, float) else None
        dtype = torch.complex128 if isinstance(leaf, complex) else dtype
        yield "", "", torch.tensor(leaf, dtype=dtype, device="cpu")
    elif isinstance(leaf, np.ndarray | np.generic):
        with suppress(TypeError):  # torch has no such dtype
            yield "", "", torch.from_numpy(np.array(leaf, order="C"))
            if isinstance(leaf, np.ma.MaskedArray):
                yield "", ".mask", torch.from_numpy(np.ma.getmaskarray(leaf))


def _sparse_to_tensors(leaf: Tensor) -> Iterator[_Named]:
    """Yield the tensors with the values of a sparse tensor.

    The dense form also compares tensors that store different zeros. But for a large graph it does
    not fit into memory.
    """
    sparse = leaf.to_sparse(layout=torch.sparse_coo).coalesce()
    if leaf.numel() <= max(_MIN_DENSE, _DENSE_PER_VALUE * sparse.values().numel()):
        yield "", "", leaf.to_dense()
    else:
        yield _TEXT, ".shape", _encode_text(str(tuple(leaf.shape)))
        yield "", ".indices", sparse.indices()
        yield "", ".values", sparse.values()


def _text_of(leaf: Any) -> str | None:
    is_empty = isinstance(leaf, Mapping | Sequence) and not leaf
    for kind in (str, bytes, bytearray):
        if isinstance(leaf, kind) and not isinstance(leaf, Enum):
            return kind.__repr__(leaf)  # a subclass may hide the value
    if isinstance(leaf, _TEXTS) or is_empty:
        return repr(leaf)
    if isinstance(leaf, int) and not -(2**63) <= leaf < 2**63:
        return int.__repr__(leaf)
    is_set = isinstance(leaf, set | frozenset)
    if is_set and all(isinstance(each, (*_NUMBERS, *_TEXTS)) for each in leaf):
        return f"{{{', '.join(sorted(map(repr, leaf)))}}}"
    return None


def _encode_text(text: str) -> Tensor:
    """Return the bytes of a text as a tensor."""
    return torch.frombuffer(bytearray(text, "utf-8", "surrogatepass"), dtype=torch.uint8)
