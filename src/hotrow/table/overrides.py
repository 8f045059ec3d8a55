"""Find tensor classes of other libraries, whose `__torch_function__` methods must run.

Such a method can replace torch's functions, or give their results the same class. In dense
training, torch calls it, so it must also run if the other argument is a table or a one-hot.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor

from hotrow.errors import HotrowError


def find_override(types: Iterable[type]) -> Any:
    """Return the first class with such a method that is not torch's or hotrow's, or None."""
    return next(filter(_has_method, types), None)


def has_default_method(cls: Any) -> bool:
    """Return whether the class's method is that of `Tensor`, which only converts the results."""
    return cls.__torch_function__.__func__ is Tensor.__torch_function__.__func__  # type: ignore[attr-defined]


def replaced_lookup(cls: type) -> HotrowError:
    """Return the error for a distributed lookup that the class's method may replace."""
    return HotrowError(
        f"a sharded or replicated table cannot be looked up with a {cls.__qualname__}, whose "
        "__torch_function__ may replace the lookup",
        fix="convert it with as_subclass(torch.Tensor)",
    )


def to_class(result: Tensor, cls: Any) -> Tensor:
    """Convert a result as the default method does, unless the class stores other tensors."""
    stores_values = cls.__torch_dispatch__ is Tensor.__torch_dispatch__
    return result.as_subclass(cls) if stores_values else result


@functools.cache
def _has_method(cls: Any) -> bool:
    if cls is Tensor or cls.__module__.partition(".")[0] == "hotrow":
        return False
    # nn.Parameter's method is a built-in function, which does nothing.
    return hasattr(cls.__torch_function__, "__func__")
