"""The optimizer state of a table: its rows settle before it is read, as the table's do."""

from __future__ import annotations

import weakref
from collections.abc import Iterator, MutableMapping
from typing import Any, Protocol

from torch import Tensor


class StateLag(Protocol):
    """The lag of a state's rows, which can end."""

    def settle_all(self) -> None:
        """Settle all rows: the state becomes torch's."""

    def close(self) -> None:
        """Settle all rows, and drop the references to the state and its table."""


class RowState(dict[str, Any]):
    """The state of one table, a dict under torch's names.

    Reading settles all rows. Writing ends the lag: the next step starts from the new values.
    Reading returns aliases of the tensors, so that the use counts of their memory show whether
    somebody holds one. The lag itself reads and writes with the methods of `dict`.
    """

    _lag: weakref.ref[StateLag] | None = None  # the table owns the lag; avoids a reference cycle

    @property
    def lag(self) -> StateLag | None:
        """The lag of the state's rows; None while all are up to date."""
        return None if self._lag is None else self._lag()

    @lag.setter
    def lag(self, lag: StateLag | None) -> None:
        self._lag = None if lag is None else weakref.ref(lag)

    def __getitem__(self, name: str) -> Any:
        lag = self.lag
        if lag is not None:
            lag.settle_all()
        value = dict.__getitem__(self, name)
        return value.detach() if isinstance(value, Tensor) and value.ndim else value

    def __setitem__(self, name: str, value: Any) -> None:
        self._close_lag()
        dict.__setitem__(self, name, value)

    def __delitem__(self, name: str) -> None:
        self._close_lag()
        dict.__delitem__(self, name)

    def __iter__(self) -> Iterator[str]:  # defined here so that dict(state) calls __getitem__
        return dict.__iter__(self)

    def __ior__(self, other: Any) -> RowState:  # type: ignore[misc, override]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def __reduce__(self) -> Any:
        return dict, (dict(self),)

    def _close_lag(self) -> None:
        lag = self.lag
        if lag is not None:
            lag.close()


# The other methods of a dict, implemented with the ones above.
for _name in ("get", "items", "values", "pop", "popitem", "clear", "update", "setdefault"):
    setattr(RowState, _name, getattr(MutableMapping, _name))
RowState.copy = lambda self: dict(self)  # type: ignore[method-assign]
