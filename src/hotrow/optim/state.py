"""The optimizer state of a table. Its rows are settled before they are read."""

from __future__ import annotations

import sys
from collections import OrderedDict, defaultdict
from collections.abc import Iterable, Iterator, Mapping, MutableMapping
from copy import deepcopy
from types import MappingProxyType
from typing import Any, Protocol, TypeGuard

import torch
from torch import Tensor
from torch.nn import Parameter
from torch.utils._pytree import register_pytree_node

from hotrow.optim import exclusive_access
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from hotrow.table.row_change import trim_storage, untrimmed

_NO_STATES: Mapping[Any, Any] = MappingProxyType({})


class StateLag(Protocol):
    """The part of `RowLag` that `RowState` uses."""

    was_written: bool

    def raise_pending_error(self) -> None:
        """Wait for the table's GPU, and raise the error of an earlier lookup."""

    def settle_all(self) -> None:
        """Settle all rows, so that the state equals torch's."""

    def is_unset(self, name: str) -> bool:
        """Return whether a slot is None in torch, because there was no step yet."""

    def close(self) -> None:
        """Settle all rows, then detach the lag from the state and its table."""


class RowState(dict[str, Any]):
    """The optimizer state of one table, as a dict with torch's names.

    A read settles all rows and returns aliases of the tensors. An alias kept by other code shows up
    in the storage's use count. A write closes the lag, so that the next step starts from the new
    values. So does an assignment to the `data` of an alias, which `adopt_data` notices before the
    next read, step or save. The lag itself calls `dict`'s methods directly, which neither settle
    rows nor close the lag.
    """

    # The `RowLag` that tracks the missed steps of these rows, or None. It refers to this state
    # weakly. If code keeps the state, but not the table, the rows can still be settled.
    lag: StateLag | None = None
    # The tensor that the last read of each name has returned, while other code may still use it.
    aliases: dict[str, _Alias] | None = None
    # What the ranks agreed on in the last step of a replicated table. None if code has assigned to
    # this state since then, so that the ranks must compare its values.
    agreement: str | None = None
    is_old: bool = False  # whether `hotrow.vocabulary` changed the table's rows, but not these

    def __init__(self, state: Mapping[str, Any] | Iterable[tuple[str, Any]] = ()) -> None:
        """Copy a state, whose tensors other code may keep."""
        super().__init__()
        for name, value in dict(state).items():
            if _has_rows(value):
                self._store(name, value)
            else:
                dict.__setitem__(self, name, value)

    @property
    def has_old_rows(self) -> bool:
        """Whether this state has rows that belong to the table before a change of its rows."""
        return self.is_old and any(map(_has_rows, dict.values(self)))

    def adopt_data(self) -> None:
        """Store what other code has assigned to the `data` of tensors that it has read.

        Forget the tensors that no other code uses, because they would count as aliases in a step.
        """
        with exclusive_access.lock:
            aliases, self.aliases = self.aliases or {}, None
            for name, alias in aliases.items():
                if not alias.belongs_to(dict.get(self, name)):
                    continue
                if alias.was_assigned:
                    self[name] = alias.tensor
                elif sys.getrefcount(alias.tensor) > 2:  # this call and `alias` itself
                    self.aliases = {**(self.aliases or {}), name: alias}

    def _keep_alias(self, name: str, tensor: Tensor, data: Tensor) -> None:
        """Keep a tensor that other code uses, and its data, which that code may replace."""
        if type(tensor) in (Tensor, Parameter) and tensor.layout == torch.strided:
            alias = _Alias(tensor, data, dict.__getitem__(self, name))
            self.aliases = {**(self.aliases or {}), name: alias}

    def __getitem__(self, name: str) -> Any:
        with exclusive_access.lock:  # other threads may read too
            return self._read(name)

    def _read(self, name: str) -> Any:
        if self.aliases:
            self.adopt_data()
        lag = self.lag
        if lag is not None:
            lag.raise_pending_error()
            lag.settle_all()
        value = dict.__getitem__(self, name)
        if not _has_rows(value):
            return value
        if lag is not None:
            if lag.is_unset(name):
                return None
            lag.was_written = True  # the caller may write to the alias
        alias = (self.aliases or {}).get(name)
        if alias is not None:
            return alias.tensor
        tensor = trim_storage(value.detach())
        self._keep_alias(name, tensor, tensor)
        return tensor

    def __setitem__(self, name: str, value: Any) -> None:
        with exclusive_access.lock:
            self._forget_alias(name)
            self.close_lag()
            self.agreement = None
            if not _has_rows(value):
                dict.__setitem__(self, name, value)
                return
            self.is_old = False  # the caller knows the table's current rows
            self._store(name, value)

    def _store(self, name: str, value: Tensor) -> None:
        # An alias, so that the use count of the storage shows whether other code keeps the tensor.
        # But torch's SGD stores its first gradient, which can be a row gradient.
        data = value.as_dense() if isinstance(value, RowGradient) else value.detach()
        current = dict.get(self, name)
        stored = untrimmed(data, current) if _has_rows(current) else data
        dict.__setitem__(self, name, stored)
        self._keep_alias(name, value, data)

    def __delitem__(self, name: str) -> None:
        self._forget_alias(name)
        self.close_lag()
        self.agreement = None
        dict.__delitem__(self, name)

    def _forget_alias(self, name: str) -> None:
        if self.aliases:
            self.adopt_data()
            self.aliases = {
                key: alias for key, alias in (self.aliases or {}).items() if key != name
            }

    def pop(self, name: Any, *default: Any) -> Any:  # noqa: D102
        if name not in self:
            return dict.pop(self, name, *default)  # returns the default, or raises the error
        value = self[name]
        del self[name]
        return value

    def popitem(self) -> tuple[str, Any]:  # noqa: D102
        for name in reversed(self):
            return name, self.pop(name)
        return dict.popitem(self)  # raises the error

    def __iter__(self) -> Iterator[str]:  # with this method, dict(state) calls __getitem__
        return dict.__iter__(self)

    def __ior__(self, other: Any) -> RowState:  # type: ignore[misc, override]
        self.update(other)
        return self

    def __repr__(self) -> str:
        return repr(dict(self))

    def __deepcopy__(self, memo: dict[int, Any]) -> dict[str, Any]:
        return deepcopy(dict(self), memo)

    def __reduce__(self) -> Any:
        # `torch.load(weights_only=True)` accepts this class, but not a call of `dict`.
        return OrderedDict, (), None, None, iter(dict(self).items())

    def close_lag(self) -> None:
        """Settle the state's rows, and detach the lag."""
        lag = self.lag
        if lag is not None:
            lag.close()


class States(defaultdict[Any, dict[str, Any]]):
    """torch's `Optimizer.state`, in which the state of a table is a `RowState` from the start.

    So other code can keep the dict before the first step. A read converts the states that other
    code has assigned, and those of parameters that have become tables. The state of a table on
    disk is in its folder until the first step.
    """

    def __init__(self, factory: Any = dict, states: Mapping[Any, Any] = _NO_STATES) -> None:
        """Copy states. The arguments are those of defaultdict, because `|` passes its factory."""
        super().__init__(factory, states.items())
        self.convert()

    def __missing__(self, parameter: Any) -> dict[str, Any]:
        state = self[parameter] = RowState() if _is_in_memory(parameter) else {}
        return state

    def __getitem__(self, parameter: Any) -> dict[str, Any]:
        state = defaultdict.__getitem__(self, parameter)
        if type(state) is dict and _is_in_memory(parameter):
            state = self[parameter] = RowState(state)
        return state

    def get(self, parameter: Any, default: Any = None) -> Any:  # noqa: D102
        state = dict.get(self, parameter)  # each step calls this method, so it should be fast
        if type(state) is dict:
            return self[parameter]
        return default if state is None else state

    def setdefault(self, parameter: Any, default: Any = None) -> Any:  # noqa: D102
        super().setdefault(parameter, default)
        return self[parameter]

    def items(self) -> Any:  # noqa: D102
        self.convert()
        return super().items()

    def values(self) -> Any:  # noqa: D102
        self.convert()
        return super().values()

    def convert(self) -> None:
        """Convert the states that a read would convert."""
        for parameter in self:
            self[parameter]

    def copy(self) -> States:  # noqa: D102
        return States(dict, self)

    __copy__ = copy

    def __reduce__(self) -> Any:
        return States, (dict, dict(self))


def sort_new_states(
    states: dict[Any, Any], earlier_count: int, groups: Iterable[Mapping[str, Any]]
) -> None:
    """Move the states after the first `earlier_count` into the order of the parameters.

    A step creates the states of tables before those of other parameters.
    """
    new = set(list(states)[earlier_count:])
    with exclusive_access.lock:  # a save in another thread must not miss the state that moves
        for group in groups:
            for parameter in group["params"]:
                if parameter in new:
                    dict.__setitem__(states, parameter, dict.pop(states, parameter))


def _is_in_memory(parameter: Any) -> bool:
    return isinstance(parameter, Table) and parameter.backing is None


class _Alias:
    """A tensor that a read has returned, and what it and the state's tensor referred to then.

    The references to the storages prevent others from getting the same addresses.
    """

    def __init__(self, tensor: Tensor, data: Tensor, source: Tensor) -> None:
        self.tensor = tensor
        self._storage, self._source = data.untyped_storage(), source.untyped_storage()
        self._view = _view(data)

    @property
    def was_assigned(self) -> bool:
        """Whether other code has assigned to the `data` of the tensor."""
        storage = self.tensor.untyped_storage()
        return storage._cdata != self._storage._cdata or _view(self.tensor) != self._view

    def belongs_to(self, value: Any) -> bool:
        """Return whether the state still contains the tensor that was read."""
        if not isinstance(value, Tensor) or value.layout != torch.strided:
            return False
        return bool(value.untyped_storage()._cdata == self._source._cdata)


def _view(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.shape, tensor.stride(), tensor.storage_offset(), tensor.dtype


def _has_rows(value: Any) -> TypeGuard[Tensor]:
    return isinstance(value, Tensor) and value.ndim > 0


# Implement dict's other methods with the methods above.
for _name in ("get", "items", "values", "clear", "update", "setdefault"):
    setattr(RowState, _name, getattr(MutableMapping, _name))
RowState.copy = lambda self: dict(self)  # type: ignore[method-assign]

# `tree_map` treats a state like a dict, as in torch, and not like a single value.
register_pytree_node(
    RowState,
    lambda state: (list(state.values()), list(state)),
    lambda values, names: dict(zip(names, values, strict=True)),
)
