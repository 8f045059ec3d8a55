"""The hidden class of a converted module, whose methods run under a torch function mode.

A converted module stays the same object, but its class becomes a subclass of the original class.
The subclass has the same name as the original class, and is rebuilt when the module is copied or
loaded.
"""

from __future__ import annotations

import abc
import copyreg
import functools
import inspect
from collections.abc import Callable
from typing import Any, ClassVar

from torch import nn

from hotrow.conversion.calls import Conversion, wrap


class _Converted:
    """The base class of all converted modules."""

    _hotrow: ClassVar[Conversion]  # the only name that isn't the user's

    def __init_subclass__(cls, **kwargs: Any) -> None:
        """Skip the original class's `__init_subclass__`, which is meant for users' subclasses."""
        if "_hotrow" not in vars(cls):  # a user's subclass of a converted class
            super().__init_subclass__(**kwargs)


def _reducer(conversion: Conversion) -> Callable[[Any, Any], Any]:
    """Return a class's `__reduce_ex__`, which tells Python how to copy or pickle its objects."""

    def reduce(module: Any, protocol: Any) -> Any:
        reduced = conversion.original.__reduce_ex__(module, protocol)
        # A string is the name of a global variable, which pickle stores.
        if isinstance(reduced, str) or vars(type(module)).get("_hotrow") is not conversion:
            return reduced  # in the second case, the object's class is a subclass
        constructor, arguments, *state = reduced
        if arguments and arguments[0] is type(module):  # the class of the new object
            constructor, arguments = _rebuild, (constructor, conversion, *arguments[1:])
        return constructor, arguments, *state

    return reduce


def _rebuild(constructor: Callable[..., Any], conversion: Conversion, *arguments: Any) -> Any:
    return constructor(converted_class(conversion), *arguments)


def conversion_of(module: nn.Module) -> Conversion | None:
    """Return how a module was converted, or None if it is not converted."""
    cls: Any = type(module)  # may be the user's subclass of a converted class
    return cls._hotrow if issubclass(cls, _Converted) else None


def direction_of(module: nn.Module) -> str | None:
    """Return the direction of the conversion, or None if the module is not converted."""
    conversion = conversion_of(module)
    return None if conversion is None else conversion.direction


def original_class(module: nn.Module) -> type[nn.Module]:
    """Return the class that the module had before conversion."""
    conversion = vars(type(module)).get("_hotrow")
    return type(module) if conversion is None else conversion.original


def converted_class(conversion: Conversion) -> type[nn.Module]:
    """Return the subclass that runs the methods of the original class under a mode.

    Raises:
        TypeError: the original class cannot be subclassed.
    """
    original = conversion.original
    for cls in original.__subclasses__():
        if vars(cls).get("_hotrow") == conversion:
            return cls
    user_classes = original.__mro__[: original.__mro__.index(nn.Module)]
    attributes = {
        name: value for cls in reversed(user_classes) for name, value in vars(cls).items()
    }
    methods = {
        name: wrap(conversion, name, value)
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
    return converted_class, (cls._hotrow,)
