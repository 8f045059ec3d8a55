"""Tensors in the arguments of a call, however nested."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, TypeVar

_T = TypeVar("_T")


def within(value: Any, kind: type[_T]) -> Iterator[_T]:
    """Those of a kind, in order."""
    if isinstance(value, kind):
        yield value
    elif isinstance(value, dict):
        yield from within(list(value.values()), kind)
    elif isinstance(value, list | tuple):
        for each in value:
            yield from within(each, kind)


def mapped(value: Any, kind: type[_T], change: Callable[[_T], Any]) -> Any:
    """The same with `change` of each of a kind."""
    if isinstance(value, kind):
        return change(value)
    if isinstance(value, dict):
        return {key: mapped(each, kind, change) for key, each in value.items()}
    if isinstance(value, list | tuple):
        several = [mapped(each, kind, change) for each in value]
        return type(value)(*several) if hasattr(value, "_fields") else type(value)(several)
    return value
