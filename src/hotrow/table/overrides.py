"""Find tensor classes of other libraries that replace torch's functions with their own.

A class does so with a `__torch_function__` method. Such a class would get a plain tensor in dense
training, so its method must also run if the other argument is a table or a one-hot.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable
from typing import Any

from torch import Tensor


def find_override(types: Iterable[type]) -> Any:
    """Return the first class that is not torch's or hotrow's and has its own method, or None."""
    return next(filter(_has_own_method, types), None)


@functools.cache
def _has_own_method(cls: Any) -> bool:
    if cls.__module__.partition(".")[0] == "hotrow":
        return False
    # nn.Parameter's method is a built-in function, which does nothing.
    method = getattr(cls.__torch_function__, "__func__", None)
    return method not in (None, Tensor.__torch_function__.__func__)  # type: ignore[attr-defined]
