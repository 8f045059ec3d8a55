"""Convert modules so that their methods run under a torch function mode.

A converted module stays the same object, but its class becomes a subclass of the original class.
The subclass has the same name as the original class, and is rebuilt when the module is copied or
loaded.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import inspect
import weakref
from collections.abc import Callable, Iterator
from typing import Any, ClassVar, NamedTuple

import torch
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from hotrow.conversion import sampling
from hotrow.conversion.finder import Finder
from hotrow.conversion.matmul import MatmulMode
from hotrow.conversion.origins import Record
from hotrow.conversion.outputs import materialize_outputs
from hotrow.conversion.sampling import call_states, is_traced, top_hooks
from hotrow.errors import HotrowError
from hotrow.kernels.tracing import is_compiling, is_tracing
from hotrow.onehot.tensor import OneHot

_records: dict[int, Record] = {}  # live modules only, keyed by id(module)
# The reason for each module that could not be converted.
refusals: weakref.WeakKeyDictionary[nn.Module, str] = weakref.WeakKeyDictionary()
DIRECTIONS = ("lookup", "matmul")


class _Conversion(NamedTuple):
    """How a class was converted.

    Attributes:
        original: the class before the conversion.
        direction: "lookup" or "matmul".
        min_entries: the minimum size, in entries, of a one-hot whose products become lookups.
    """

    original: type[nn.Module]
    direction: str
    min_entries: int


class _Converted:
    """The base class of all converted modules."""

    _hotrow: ClassVar[_Conversion]  # the only name that isn't the user's

    def __init_subclass__(cls) -> None:
        """Skip the original class's `__init_subclass__`, which is meant for users' subclasses."""


def _reducer(conversion: _Conversion) -> Callable[[Any, Any], Any]:
    """Return a class's `__reduce_ex__`, which tells Python how to copy or pickle its objects."""

    def reduce(module: Any, protocol: Any) -> Any:
        reduced = conversion.original.__reduce_ex__(module, protocol)
        # A string is the name of a global variable, which pickle stores.
        if isinstance(reduced, str) or vars(type(module)).get("_hotrow") is not conversion:
            return reduced  # in the second case, the object's class is a subclass
        constructor, arguments, *state = reduced
        if arguments and arguments[0] is type(module):  # the class of the new object
            constructor, arguments = _rebuild, (constructor, *conversion, *arguments[1:])
        return constructor, arguments, *state

    return reduce


def _rebuild(
    constructor: Callable[..., Any],
    original: type[nn.Module],
    direction: str,
    min_entries: int,
    *arguments: Any,
) -> Any:
    return constructor(_converted_class(original, direction, min_entries), *arguments)


def _conversion_of(module: nn.Module) -> _Conversion | None:
    cls: Any = type(module)  # may be the user's subclass of a converted class
    return cls._hotrow if issubclass(cls, _Converted) else None


def direction_of(module: nn.Module) -> str | None:
    """Return the direction of the conversion, or None if the module is not converted."""
    conversion = _conversion_of(module)
    return None if conversion is None else conversion.direction


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before conversion."""
    conversion = vars(type(module)).get("_hotrow")
    return type(module) if conversion is None else conversion.original


def record_of(model: nn.Module) -> Record:
    """Return the record of the one-hots found in the model."""
    record = _records.get(id(model))
    if record is None:
        record = _records[id(model)] = _new_record(model)
        weakref.finalize(model, _records.pop, id(model), None).atexit = False
    return record


def _new_record(model: nn.Module) -> Record:
    conversion = _conversion_of(model)
    return Record(model, 0 if conversion is None else conversion.min_entries)


def iter_records(model: nn.Module) -> Iterator[tuple[str, Record]]:
    """Yield (path, record) for each module whose calls were searched for one-hots."""
    for path, module in model.named_modules():
        if id(module) in _records:
            yield path, _records[id(module)]


def convert_modules(model: nn.Module, direction: str, min_entries: int | None = None) -> None:
    """Replace the classes of the model's modules, so that their methods run under a mode.

    Products of one-hots with fewer than `min_entries` entries don't become lookups. If
    `min_entries` is None, a module that is already converted keeps its `min_entries`. Torch's own
    layers keep their class, because they don't create one-hots. The exception is a Sequential
    that contains your own modules, because it passes one-hots from one module to the next. A module
    whose class cannot be subclassed keeps its class, and `refusals` says why.

    Raises:
        HotrowError: the direction is "matmul", and a module's class cannot be subclassed.
    """
    _watch_parameters()
    changes = []
    refused: list[tuple[nn.Module, str]] = []
    for module in model.modules():
        if isinstance(module, torch.jit.ScriptModule):
            continue
        earlier = _conversion_of(module)
        is_kept = (
            earlier is not None
            and earlier.direction == direction
            and min_entries in (None, earlier.min_entries)
        )
        if is_kept:
            continue
        if _is_torch_layer(module) and not (direction == "matmul" and module is model):
            continue
        threshold = sampling.MIN_ENTRIES if min_entries is None else min_entries
        original = original_class(module)
        try:
            cls = _converted_class(original, direction, threshold)
        except TypeError as error:
            refused.append((module, f"{original.__name__} cannot be subclassed: {error}"))
        else:
            changes.append((module, cls))
    if refused and direction == "matmul":
        raise HotrowError(refused[0][1], fix="convert the modules inside it")
    for module, why in refused:
        refusals[module] = why
    for module, cls in changes:
        module.__class__ = cls
        if id(module) in _records:
            _records[id(module)] = _new_record(module)


@functools.cache
def _watch_parameters() -> None:
    """Store `nn.Parameter(x)` as an ordinary parameter if a converted method creates the one-hot x.

    A parameter that is a one-hot could not change its dtype or device.
    """
    register_module_parameter_registration_hook(_dense_parameter)  # type: ignore[arg-type]


def _dense_parameter(module: nn.Module, name: str, parameter: Any) -> nn.Parameter | None:
    if not isinstance(parameter, OneHot):
        return None
    if parameter.parameter is None:  # a tied parameter is registered more than once
        dense = parameter.materialize(permanent=True).detach()
        parameter.parameter = nn.Parameter(dense, requires_grad=parameter.requires_grad)
    return parameter.parameter


def _is_torch_layer(module: nn.Module) -> bool:
    if not original_class(module).__module__.startswith("torch.nn."):
        return False
    return not isinstance(module, nn.Sequential) or all(map(_is_torch_layer, module))


def _converted_class(
    original: type[nn.Module], direction: str, min_entries: int
) -> type[nn.Module]:
    """Return the subclass that runs the methods of the original class under a mode."""
    conversion = _Conversion(original, direction, min_entries)
    for cls in original.__subclasses__():
        if vars(cls).get("_hotrow") == conversion:
            return cls
    user_classes = original.__mro__[: original.__mro__.index(nn.Module)]
    attributes = {
        name: value for cls in reversed(user_classes) for name, value in vars(cls).items()
    }
    methods = {
        name: _wrap(original, name, value)
        for name, value in attributes.items()
        if inspect.isfunction(value)
        and not name.startswith("__")
        and not inspect.isgeneratorfunction(value)
        and not inspect.iscoroutinefunction(value)
    }
    members = {
        **methods,
        "__module__": original.__module__,
        "__qualname__": original.__qualname__,
        "__doc__": original.__doc__,
        "__annotations__": vars(original).get("__annotations__", {}),
        "__reduce_ex__": _reducer(conversion),
        "_hotrow": conversion,
    }
    has_hook = any("__init_subclass__" in vars(base) for base in original.__mro__[:-1])
    metaclass: Any = _metaclass(type(original), has_hook)  # type: ignore[arg-type]
    # The first base must be the original class. Otherwise, if that class inherits from `ABC` or
    # `Generic` before `nn.Module`, Python refuses to assign the new class to a module.
    bases = original, _Converted
    # Skip the user's metaclass, which may register each class or change its members.
    create: Any = next(each for each in metaclass.__mro__ if each in (abc.ABCMeta, type)).__new__
    converted: type[nn.Module] = create(metaclass, original.__name__, bases, members)
    return converted


@functools.cache
def _metaclass(base: Any, has_hook: bool) -> Any:
    """Return a metaclass whose classes can be pickled and share the original class's attributes.

    For example, `type(self).count += 1` sets the attribute of the original class, and
    `type(self).forward` is its method. Only instances find the methods of the converted class. The
    classes must be picklable because a module's state may contain `type(self)`.

    If the original class has an `__init_subclass__` hook (`has_hook`), the converted class must not
    run it. So the converted class looks up attributes in `_Converted` before its first base. Python
    doesn't cache attribute lookups in a class with a custom lookup order, so attribute access is
    slower.
    """

    def mro(cls: Any) -> list[type]:
        own, *others = base.mro(cls)
        others.remove(_Converted)
        return [own, _Converted, *others]

    def get_attribute(cls: Any, name: str) -> Any:
        return base.__getattribute__(_owner(cls, name), name)

    def set_attribute(cls: Any, name: str, value: Any) -> None:
        owner = _owner(cls, name)
        own = _own_attributes(cls)
        if owner is not cls and name in own and value is own[name]:
            value = value.__wrapped__  # code restores what it has read from the `__dict__`
        base.__setattr__(owner, name, value)

    def delete_attribute(cls: Any, name: str) -> None:
        base.__delattr__(_owner(cls, name), name)

    members: dict[str, Any] = {
        "__getattribute__": get_attribute,
        "__setattr__": set_attribute,
        "__delattr__": delete_attribute,
    }
    metaclass: Any = type(base.__name__, (base,), {**members, "mro": mro} if has_hook else members)
    copyreg.pickle(metaclass, _reduce_class)
    return metaclass


_own_attributes: Any = vars(type)["__dict__"].__get__


def _owner(cls: Any, name: str) -> Any:
    """Return the class that stores an attribute, usually the original class."""
    if name == "_hotrow" or name.startswith(("__", "_abc_")):
        return cls
    conversion = _own_attributes(cls).get("_hotrow")
    return cls if conversion is None else conversion.original  # cls may be a user's subclass


def _reduce_class(cls: type[_Converted]) -> Any:
    if "_hotrow" not in vars(cls):  # the user's own subclass
        return cls.__qualname__
    return _converted_class, tuple(cls._hotrow)


def _wrap(original: type[nn.Module], name: str, method: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a method so that it activates the mode, unless an outer method has already done so."""

    # Most calls skip the search. The overhead of such a call must be small even compared with the
    # torch operations of a small model, so this function does as little as possible before it
    # calls the method.
    @functools.wraps(method)
    def run(self: Any, *args: Any, **kwargs: Any) -> Any:
        current: Any = getattr(original, name)
        if current is not method:  # the user has replaced it
            current = _replaced(original, name)
        state, traced = call_states.current, is_traced()
        hook: Any = None if traced else top_hooks(True)  # as in `saved_tensor_hook`
        if hook is not None:
            hook = hook[0]
        outer_hook = state.saved_tensor_hook
        if hook is outer_hook:
            return current(self, *args, **kwargs)
        mode: Any = None
        if not state.is_searching:
            record: Any = None if traced else _records.get(id(self))
            # A module that is being copied or loaded has no `training` attribute yet.
            finder = record and record.finders.get((name, getattr(self, "training", True)))
            if finder is None:
                mode = _first_mode(self, name, hook, args, kwargs)
            # Recomputing a checkpointed function must find the same one-hots, so always search.
            # torch.jit.trace would record what is true only for the ids of the example.
            elif not (is_tracing() or finder.sampler.skips(args, kwargs, hook is not None)):
                mode = Finder() if is_compiling() else finder
        state.saved_tensor_hook = hook
        try:
            if mode is None:
                return current(self, *args, **kwargs)
            return _run_under(mode, current, self, args, kwargs)
        finally:
            state.saved_tensor_hook = outer_hook

    if not hasattr(method, "__wrapped__"):  # `inspect.getfullargspec` doesn't look at `__wrapped__`
        vars(run)["__signature__"] = inspect.signature(method)
    return run


def _replaced(original: type[nn.Module], name: str) -> Any:
    """Return what has replaced a method of the class, as a function of the module."""
    value = inspect.getattr_static(original, name)
    if inspect.isfunction(value):
        return value
    bind = getattr(type(value), "__get__", None)  # of a static method, for example

    def call(module: Any, *args: Any, **kwargs: Any) -> Any:
        function = value if bind is None else bind(value, module, type(module))
        return function(*args, **kwargs)

    return call


def _first_mode(module: Any, name: str, hook: Any, args: Any, kwargs: Any) -> Any:
    """Return the mode of a method that has no finder yet."""
    if direction_of(module) == "matmul":
        return MatmulMode()
    if is_compiling():
        return Finder()
    if is_tracing():
        return None
    record = record_of(module)
    finder: Any = Finder(record)
    record.finders[name, getattr(module, "training", True)] = finder
    finder.sampler.skips(args, kwargs, hook is not None)
    return finder


def _run_under(mode: Any, method: Any, module: Any, args: Any, kwargs: Any) -> Any:
    """Call a method under a mode, and materialize its outputs outside of the mode."""
    state, sampler = call_states.current, mode.sampler
    state.is_searching, state.sampler = True, sampler
    try:
        with mode:
            result = method(module, *args, **kwargs)
        return materialize_outputs(result)
    finally:
        state.is_searching, state.sampler = False, None
        if sampler is not None:
            sampler.end_search()
