"""A module whose own methods run with a mode of torch's on: the same object, of a class between.

The class is made of the module's own, has its name, and is rebuilt from it when the module is
copied or loaded.
"""

from __future__ import annotations

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves, tree_map

from hotrow.compilation import is_compiling
from hotrow.conversion import resting
from hotrow.conversion.finder import Finder, finder_of
from hotrow.conversion.matmul import Multiplier
from hotrow.conversion.origins import Record
from hotrow.conversion.resting import running, saver
from hotrow.errors import HotrowError
from hotrow.onehot.rules import write_out
from hotrow.onehot.tensor import OneHot

_records: dict[int, Record] = {}  # by the id of the module, while it lives: asked in each call
WAYS = ("lookup", "matmul")


class _Run:
    """What the classes in between have in common.

    Attributes:
        _own: the module's own class.
        _way: "lookup" or "matmul".
        _least: entries of a one-hot that is looked up.
    """

    _own: ClassVar[type[nn.Module]]
    _way: ClassVar[str]
    _least: ClassVar[int]

    def __init_subclass__(cls) -> None:
        """A class in between is none that its own class should hear of."""

    def __reduce_ex__(self, protocol: Any) -> Any:
        made, arguments, *rest = tuple(super().__reduce_ex__(protocol))
        if arguments and arguments[0] is type(self):  # a new object of this class
            made, arguments = _new, (made, self._own, self._way, self._least, *arguments[1:])
        return made, arguments, *rest


def _new(
    made: Callable[..., Any], own: type[nn.Module], way: str, least: int, *arguments: Any
) -> Any:
    return made(_between(own, way, least), *arguments)


def way_of(module: nn.Module) -> str | None:
    """How the module's methods run, None if as they are."""
    return module._way if isinstance(module, _Run) else None


def own_class(module: nn.Module) -> type[nn.Module]:
    """The class that the module was written as."""
    return module._own if isinstance(module, _Run) else type(module)


def record_of(model: nn.Module) -> Record:
    """What was found in the model."""
    record = _records.get(id(model))
    if record is None:
        record = _records[id(model)] = _new_record(model)
        weakref.finalize(model, _records.pop, id(model), None).atexit = False
    return record


def _new_record(model: nn.Module) -> Record:
    return Record(model, model._least if isinstance(model, _Run) else 0)


def records_in(model: nn.Module) -> Iterator[tuple[str, Record]]:
    """(path, record) of each module in the model that was called with something to find."""
    for path, module in model.named_modules():
        if id(module) in _records:
            yield path, _records[id(module)]


def run_with_mode(model: nn.Module, way: str, least: int | None = None) -> None:
    """Have the methods of every module in the model run with the mode of that way.

    One-hots of fewer than `least` entries are not looked up; None keeps what was said before.

    Those of torch's own layers are left alone: they make no one-hots. Only a Sequential hands them
    on.
    """
    changes = []
    for module in model.modules():
        own = own_class(module)
        if isinstance(module, torch.jit.ScriptModule):
            continue
        if way_of(module) == way and least in (None, module._least):
            continue
        if _is_torchs(module) and not (way == "matmul" and module is model):
            continue
        changes.append((module, _between(own, way, resting.LEAST if least is None else least)))
    before = []
    try:
        for module, kind in changes:
            before.append((module, type(module)))
            module.__class__ = kind
            if id(module) in _records:
                _records[id(module)] = _new_record(module)
    except TypeError as error:
        for module, kind in before[:-1]:
            module.__class__ = kind
        raise HotrowError(
            f"the methods of a {type(module).__name__} cannot be run with "
            f"one-hots looked up: {error}",
            fix="convert the modules inside it",
        ) from None


def _is_torchs(module: nn.Module) -> bool:
    if not own_class(module).__module__.startswith("torch.nn."):
        return False
    return not isinstance(module, nn.Sequential) or all(map(_is_torchs, module))


def _between(own: type[nn.Module], way: str, least: int) -> type[nn.Module]:
    ours = {"_own": own, "_way": way, "_least": least}
    for kind in own.__subclasses__():
        if ours.items() <= vars(kind).items():
            return kind
    methods = {
        name: _within(own, name, value)
        for base in reversed(own.__mro__[: own.__mro__.index(nn.Module)])
        for name, value in vars(base).items()
        if inspect.isfunction(value)
        and not name.startswith("__")
        and not inspect.isgeneratorfunction(value)
        and not inspect.iscoroutinefunction(value)
    }
    named = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    members = {**methods, **named, "__doc__": own.__doc__, **ours}
    return type(own.__name__, (_Run, own), members)


def _within(own: type[nn.Module], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        now = getattr(own, name)  # which may have been replaced
        before = running.state, running.saver
        saves = saver()
        if before[0] and saves is before[1]:
            return now(self, *args, **kwargs)
        looks = before[0] == "looks"
        mode = None if looks else _mode(self, name, args, kwargs)
        running.state, running.saver = "looks" if looks or mode else "rests", saves
        try:
            if mode is None:
                return now(self, *args, **kwargs)
            with mode:
                result = now(self, *args, **kwargs)
        finally:
            running.state, running.saver = before
        return _plain(result)

    return run


def _plain(value: Any) -> Any:
    """What leaves the model is a plain tensor."""
    if isinstance(value, Tensor):
        return _returned(value) if isinstance(value, OneHot) else value
    if any(isinstance(leaf, OneHot) for leaf in tree_leaves(value)):
        return tree_map(_plain, value, is_leaf=lambda each: isinstance(each, torch.Size))
    return value


def _returned(value: OneHot) -> Tensor:
    for origin in value.origins:
        origin.is_returned = True
    return write_out(value)


def _mode(module: Any, name: str, args: Any, kwargs: Any) -> AbstractContextManager[Any] | None:
    """None if the module may run as it is."""
    if module._way == "matmul":
        return Multiplier()
    if is_compiling():
        return Finder()
    # `training` is not there yet while a module is being copied or loaded.
    method = name, getattr(module, "training", True)
    return finder_of(record_of(module), method, args, kwargs)
