"""Find and replace instances of a class in nested dicts, lists and tuples."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


def find_instances(value: Any, cls: type[_T]) -> Iterator[_T]:
    """Yield the instances of a class in order."""
    if isinstance(value, cls):
        yield value
    elif isinstance(value, dict):
        yield from find_instances(list(value.values()), cls)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from find_instances(each, cls)


def map_instances(value: Any, cls: type[_T], change: Callable[[_T], Any]) -> Any:
    """Return a copy of `value` in which `change(instance)` replaces each instance of a class."""
    if isinstance(value, cls):
        return change(value)
    if isinstance(value, dict):
        return {key: map_instances(each, cls, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        items = [map_instances(each, cls, change) for each in value]
        return type(value)(*items) if hasattr(value, "_fields") else type(value)(items)
    return value
