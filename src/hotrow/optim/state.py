"""The optimizer's state of a table: it settles before it is read, as the table does."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from torch import Tensor


class Lagging(Protocol):
    """What leaves the state behind, and can bring it up to date."""

    def refresh(self) -> None:
        """Make the state what torch's would be now."""

    def close(self) -> None:
        """The same, and let go of it."""


class RowState(dict[str, Any]):
    """The state of one table, a dict under torch's names.

    Reading brings it up to date, and writing ends the lag: the next step begins with what is there
    then. The tensors that it gives away are aliases, by which whoever holds one can be noticed.
    The one that the rows lag behind reads and writes with `dict`'s own methods.
    """

    _lag: weakref.ref[Lagging] | None = None  # the table holds it; a cycle would keep both

    @property
    def lag(self) -> Lagging | None:
        """What the state is behind with; None while it is up to date."""
        return None if self._lag is None else self._lag()

    @lag.setter
    def lag(self, lag: Lagging | None) -> None:
        self._lag = None if lag is None else weakref.ref(lag)

    def __getitem__(self, name: str) -> Any:
        lag = self.lag
        if lag is not None:
            lag.refresh()
        value = dict.__getitem__(self, name)
        return value.detach() if isinstance(value, Tensor) and value.ndim else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._let_go()
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        self._let_go()
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:  # of its own, so that dict(state) asks __getitem__
        return dict.__iter__(self)

    def __ior__(self, other: Any) -> RowState:  # type: ignore[misc, override]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _let_go(self) -> None:
        lag = self.lag
        if lag is not None:
            lag.close()


# The rest of a dict, by way of the methods above.
for _name in ("get", "items", "values", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(RowState, _name, getattr(MutableMapping, _name))
RowState.copy = lambda self: dict(self)  # type: ignore[method-assign]
