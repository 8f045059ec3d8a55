"""The table, a Parameter whose rows may be stale and are settled before they are read.

Settling a row applies its missed steps, which gives it the same value as in dense training. A
lookup with a gradient computes the settled values of its rows, and the next step stores them. Any
other lookup settles its rows first. Any other operation that reads values settles all rows.
"""

from __future__ import annotations

import sys
import threading
import weakref
from collections.abc import Callable
from contextlib import nullcontext
from copy import deepcopy
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn, TypeGuard

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError, is_on_all_ranks
from hotrow.ids import plain_ids
from hotrow.kernels import devices
from hotrow.kernels.tracing import (
    at_transform_level,
    is_compiling,
    is_jit_tracing,
    never_compile_alone,
    never_trace,
    transform_level,
)
from hotrow.table.autograd import (
    can_require_gradient,
    measure_engine_references,
    overlaps_itself,
    storage_use_count,
    stored_values,
)
from hotrow.table.backward import BACKWARD_FUNCTIONS, run_backward
from hotrow.table.metadata import METADATA_FUNCTIONS
from hotrow.table.nested import find_instances
from hotrow.table.overrides import (
    find_override,
    has_default_method,
    replaced_lookup,
    to_class,
)
from hotrow.table.protocols import Backing, Distribution, Lag, Replicas, Shards
from hotrow.table.row_change import trim_storage, untrimmed
from hotrow.table.stack import is_called_by, location_of


class Table(nn.Parameter):
    """A (V, D) parameter, or (D, V) with `columns`, whose rows are settled before they are read.

    `Table.adopt(parameter)` turns a Parameter into a Table in place, so that modules, optimizers
    and tied weights still refer to the same object. Without a lag, a table is a plain parameter
    whose lookups produce a `RowGradient`.

    With `columns`, ids select columns, as in the weight of a linear layer for one-hot input. The
    rest of the code refers to these columns as rows.

    Attributes:
        lag: the record of the steps that rows have missed, or None if all rows are up to date.
        steps_taken: the number of optimizer steps since the table was created, sharded or loaded.
        dense_step: the number of the first optimizer step with a dense gradient, or None.
        dense_use: (operation, location) of the latest non-lookup use in autograd, or None.
        was_copied: whether `convert` copied the values, because other code shared the storage.
        was_sent: whether the table's GPU memory was sent to another process.
        shards: the processes that store the other rows, or None if this process stores all rows.
        replicas: the processes that store the same rows, or None if there are none.
        equal_version: the version (`Tensor._version`) at which all replicas were known to be equal,
            or None.
        synchronized: whether DistributedDataParallel has synchronized a pass after the last lookup
            for training, or None if that lookup didn't run in `no_sync`.
        frozen_rows: (R,) int64 in ascending order, the frozen rows, or None.
        backing: the files that store the rows and the state, or None if both are in memory.
    """

    lag: Lag | None
    _last_optimizer: weakref.ref[torch.optim.Optimizer] | None = None
    steps_taken: int = 0
    dense_step: int | None = None
    dense_use: tuple[str, str] | None = None
    was_copied: bool = False
    was_sent: bool = False
    has_warned: bool = False  # whether `functional` has warned about DistributedDataParallel
    shards: Shards[Table] | None = None
    replicas: Replicas[Table] | None = None
    equal_version: int | None = None
    synchronized: threading.Event | None = None
    backing: Backing | None = None
    frozen_rows: Tensor | None = None

    @property
    def last_optimizer(self) -> torch.optim.Optimizer | None:
        """The optimizer from `hotrow.optim` that last took a step or loaded its state, or None."""
        return None if self._last_optimizer is None else self._last_optimizer()

    def record_optimizer(self, optimizer: torch.optim.Optimizer) -> None:
        """Record which optimizer from `hotrow.optim` takes a step or loads its state."""
        self._last_optimizer = weakref.ref(optimizer)

    # These two properties depend only on the class, because torch.compile can't read the attributes
    # of a table.

    @property
    def columns(self) -> bool:
        """Whether ids select columns."""
        return False

    @property
    def spans_processes(self) -> bool:
        """Whether other processes participate in the lookups or the gradient."""
        return False

    def distribute(
        self, shards: Shards[Table] | None = None, replicas: Replicas[Table] | None = None
    ) -> None:
        """Set the processes that store the other rows, or the same rows."""
        self.shards, self.replicas = shards or self.shards, replicas or self.replicas
        is_distributed = self.shards is not None or self.replicas is not None
        if is_distributed and not self.spans_processes and can_require_gradient(self):
            self._register_hooks()
        self.__class__ = _CLASSES[self.columns, is_distributed]

    def _register_hooks(self) -> None:
        """Check the gradient before the user's tensor hooks run, and mark their result.

        These hooks may return a dense gradient, which autograd stores without the setter. The
        user's post-accumulate hooks, which may read its norm, run after it is marked.
        """
        requires_grad = self.requires_grad
        self.requires_grad_().register_hook(_refuse_gradient_of_one_rank)  # type: ignore[no-untyped-call]
        self.register_post_accumulate_grad_hook(_mark_gradient)  # type: ignore[no-untyped-call]
        self.requires_grad_(requires_grad)
        for hooks in (self._backward_hooks or {}, self._post_accumulate_grad_hooks):
            *earlier, own = hooks.items()
            hooks.clear()
            hooks.update([own, *earlier])

    @staticmethod
    def adopt(parameter: nn.Parameter, columns: bool = False) -> Table:
        """Turn a Parameter into a Table in place, and return it.

        The parameter is (V, D), or (D, V) with `columns`.

        Raises:
            HotrowError: the parameter is already a Table with a different value of `columns`, or
                has an attribute whose name a Table uses.
        """
        if not isinstance(parameter, Table):
            if name := find_taken_name(parameter):
                raise HotrowError(
                    f"the parameter of shape {tuple(parameter.shape)} has an attribute {name!r}, "
                    "which is also the name of an attribute of hotrow's tables",
                    fix="rename this attribute",
                )
            measure_engine_references(parameter.device)
            # A numpy array that owns the storage wouldn't count as an alias. Autograd would copy a
            # row gradient to the strides of a weight that isn't contiguous.
            is_owned_elsewhere = not parameter.untyped_storage().resizable()
            is_strided = not (parameter.is_contiguous() or overlaps_itself(parameter))
            if (is_owned_elsewhere or is_strided) and storage_use_count(parameter) == 1:
                parameter.data = parameter.data.clone(memory_format=torch.contiguous_format)
            parameter.__class__ = _CLASSES[columns, False]
            table: Table = parameter  # type: ignore[assignment]
            table.lag = None
            _tables[id(table)] = table
        assert isinstance(parameter, Table)
        if parameter.columns != columns:
            raise HotrowError(
                f"ids already select the {'columns' if parameter.columns else 'rows'} of the table "
                f"of shape {tuple(parameter.shape)}, so they cannot select its "
                f"{'rows' if parameter.columns else 'columns'}",
                fix="use a copy of the parameter in one of the two places",
            )
        return parameter

    @never_trace
    def settle(self, rows: Tensor | None = None) -> None:
        """Apply all missed steps to the given distinct rows, or to all rows if `rows` is None."""
        self.check_files(rows)
        lag = self.__dict__.get("lag")
        if lag is None or not lag.has_stale_rows:
            return
        trace = torch._C._get_tracing_state()
        set_trace: Any = torch._C._set_tracing_state  # type: ignore[attr-defined]
        set_trace(None)  # torch.jit.trace would record the operations
        try:
            # A transform of `torch.func` would wrap the tensors that the kernels use.
            with at_transform_level(0) if transform_level() else nullcontext():
                lag.settle(rows)
        finally:
            set_trace(trace)

    def close_lag(self) -> None:
        """Settle all rows, so that the next step starts a new lag."""
        lag = self.lag
        if lag is not None:  # another thread may close it at any time
            lag.close()

    def check_files(self, rows: Tensor | None = None) -> None:
        """Check that the files of these rows, or of all rows if `rows` is None, are undamaged.

        If Python code can't read `rows`, for example in a tensor subclass, check all rows.
        """
        backing = self.__dict__.get("backing")
        if backing is not None:
            backing.check_rows(None if rows is None else plain_ids(rows))

    @property
    def has_stale_rows(self) -> bool:
        """Return whether any row may have missed a step that would have changed it."""
        return self.lag is not None and self.lag.has_stale_rows

    @property
    def has_equal_replicas(self) -> bool:
        """Whether no code has written to this replica since all replicas were equal."""
        return self.equal_version is not None and self.equal_version == self._version

    def to_dtensor(self, value: Tensor) -> Tensor:
        """If this table is sharded, convert a `value` of the table's shape to a DTensor."""
        has_shape = self.shards is not None and value.shape == self.shape
        return self.shards.to_dtensor(value) if self.shards is not None and has_shape else value

    def from_dtensor(self, value: Tensor) -> Tensor:
        """Return this process's rows from a saved table or a saved optimizer state tensor."""
        return value if self.shards is None or not value.ndim else self.shards.from_dtensor(value)

    @property
    def raw_data(self) -> Tensor:
        """The storage as a plain tensor, without settling rows."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.data

    @property
    def raw_rows(self) -> Tensor:
        """The storage as a plain (V, D) tensor, without settling rows."""
        return self.raw_data.t() if self.columns else self.raw_data

    def as_subclass(self, cls: type[Any]) -> Any:
        """Settle all rows, then call `Tensor.as_subclass`."""
        self.settle()
        return super().as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.settle()
        copy = nn.Parameter(self.raw_data.clone(), self.requires_grad)
        memo[id(self)] = copy
        table = Table.adopt(copy, self.columns)
        table.distribute(deepcopy(self.shards), deepcopy(self.replicas))
        table.frozen_rows = self.frozen_rows
        return table

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Pickle the table as a plain parameter."""
        if self.shards is not None:
            raise HotrowError(
                "a sharded table cannot be pickled, because this process has only part of it",
                fix="save the model's state_dict() with torch.distributed.checkpoint",
            )
        self.settle()
        plain = self._to_plain(trim_storage(self.raw_data))
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    def _to_plain(self, values: Tensor) -> nn.Parameter:
        """Return a plain parameter with the attributes that other code has set on this table."""
        plain = nn.Parameter(values, self.requires_grad)
        own = {*Table.__annotations__, "lookup_axis"}
        vars(plain).update({k: value for k, value in vars(self).items() if k not in own})
        return plain

    @classmethod
    @never_compile_alone
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in METADATA_FUNCTIONS:
            if func is _SIZE and not is_compiling() and sys._getframe(1).f_code is _MAKE_GRADS:
                args[0].settle()  # a cotangent, which the backward pass reads
            # In a mode, torch.compile would call this method again for an attribute, without end.
            with torch._C.DisableTorchFunction():
                return func(*args, **kwargs)
        if func in BACKWARD_FUNCTIONS:
            return run_backward(func, args, kwargs, Table)
        lookup = LOOKUP_FUNCTIONS.get(func)
        if lookup is not None:
            weight = kwargs.get("weight", args[1:] and args[1])
            if can_look_up_rows(weight, False):
                if len(types) == 1 or (override := find_override(types)) is None:
                    return lookup(*args, **kwargs)
                if has_default_method(override):
                    return to_class(lookup(*args, **kwargs), override)
                if weight.spans_processes:
                    raise_on_all_ranks(weight, replaced_lookup(override))
        tables = list(find_instances((args, kwargs), Table))
        for table in tables:
            table.settle()
            if func in (_SET_DATA, _GET_DATA):
                table.equal_version = None  # `table.data` has its own version
                if table.shards is not None:
                    table.shards.refuse_averaging()
            if func == _SET_DATA:
                table.close_lag()  # the next step starts from the new storage
                args = table, untrimmed(stored_values(args[1]), table.raw_data)
        override = find_override(types) if len(types) > 1 else None
        with torch._C.DisableTorchFunctionSubclass() if override is None else nullcontext():
            versions = [
                (lag, table, table._version) for table in tables if (lag := table.lag) is not None
            ]
            if override is None:
                result = func(*args, **kwargs)
            else:  # `types` would not contain the class of a plain parameter
                types = tuple(each for each in types if not issubclass(each, Table))
                result = override.__torch_function__(func, types, args, kwargs)
            for lag, table, version in versions:
                lag.was_written |= table._version != version
        if func == _DETACH and is_called_by(_NEW_PARAMETER, sys._getframe(1)):
            # `nn.Parameter(table)` requires a tensor of the same class.
            return Table.adopt(nn.Parameter(result), args[0].columns)
        if func == _DETACH and args[0].shards is not None and is_called_by(_SAVE, sys._getframe(1)):
            return args[0].to_dtensor(result)  # a layer may be tied to the table after `shard`
        if func in _ALIASES:
            return trim_storage(result) if not result.requires_grad else result
        if torch.is_grad_enabled() and any(
            each.grad_fn is not None for each in find_instances(result, Tensor)
        ):
            _record_dense_use(func, tables)
        return result


class _ColumnTable(Table):
    """A (D, V) table in which ids select columns."""

    @property
    def columns(self) -> bool:
        """Whether ids select columns."""
        return True


class _DistributedTable(Table):
    """A table whose lookups or gradient involve other processes."""

    @property
    def spans_processes(self) -> bool:
        """Whether other processes participate in the lookups or the gradient."""
        return True

    @property
    def grad(self) -> Any:
        """The gradient; that of a sharded table is a `RowGradient` that stores its `shards`.

        Otherwise, the norm of a dense gradient, for example, would include only this rank's rows.
        """
        return _GRAD.__get__(self)

    @grad.setter
    def grad(self, value: Any) -> None:
        has_rows = isinstance(value, Tensor) and value.shape == self.shape
        if self.shards is not None and has_rows and value.layout == torch.strided:
            value = self.shards.mark_gradient(value)
        _GRAD.__set__(self, value)

    @grad.deleter
    def grad(self) -> None:
        _GRAD.__delete__(self)


class _DistributedColumnTable(_ColumnTable, _DistributedTable):
    """A (D, V) table whose lookups or gradient involve other processes."""


_CLASSES: dict[tuple[bool, bool], type[Table]] = {
    (False, False): Table,
    (True, False): _ColumnTable,
    (False, True): _DistributedTable,
    (True, True): _DistributedColumnTable,
}
# `type(x) in TABLE_CLASSES` is three times as fast as isinstance, which calls Parameter's
# metaclass.
TABLE_CLASSES = frozenset(_CLASSES.values())


_NAMES = {*dir(Table), *Table.__annotations__} - {*dir(nn.Parameter)}


def find_taken_name(parameter: nn.Parameter) -> str | None:
    """Return an attribute that other code has set and whose name a table uses, or None."""
    return min(_NAMES.intersection(vars(parameter)), default=None)


# All tables, for `find_table`.
_tables: weakref.WeakValueDictionary[int, Table] = weakref.WeakValueDictionary()


def _record_dense_use(func: Any, tables: list[Table]) -> None:
    """Record an operation whose gradient is dense.

    Raises:
        HotrowError: a table is sharded or replicated.
    """
    name = getattr(func, "__name__", str(func))
    if name == "__get__":  # an attribute such as `weight.T`
        name = func.__self__.__name__
    if any(table.spans_processes for table in tables):
        raise HotrowError(
            f"{name} with a sharded or replicated table as an argument cannot be differentiated: "
            "the table's gradient would not reach the other processes",
            fix="use the table only in lookups, or leave it out of shard and replicate",
        )
    if is_compiling():
        return
    location = location_of(sys._getframe(2))
    for table in tables:
        table.dense_use = name.strip("_"), location


def _refuse_gradient_of_one_rank(gradient: Tensor | None) -> None:
    """Raise an error if a distributed table's gradient includes another operation than lookups.

    `_record_dense_use` doesn't see the functions of `torch.autograd.Function`, for example.
    """
    storage = getattr(gradient, "row_storage", None)
    if gradient is not None and not (storage is not None and storage.includes_all_ranks):
        raise HotrowError(
            "the gradient of a sharded or replicated table includes an operation that is not a "
            "lookup, such as a torch.autograd.Function or a checkpoint with the table as an "
            "argument: this part of the gradient would not reach the other processes",
            fix="use the table only in lookups, or leave it out of shard and replicate",
        )


def _mark_gradient(table: Table) -> None:
    """Store the shards in the gradient, which a hook may have replaced."""
    table.grad = table.grad


def _reduce_for_sharing(table: Table) -> Any:
    """Pickle a table for another process that will share its storage."""
    table.settle()
    table.was_sent |= not devices.is_on_cpu(table)
    return table._to_plain(table.raw_data).__reduce_ex__(2)  # type: ignore[no-untyped-call]


for _class in TABLE_CLASSES:
    ForkingPickler.register(_class, _reduce_for_sharing)

# Maps each torch function to the lookup that replaces it for tables; `functional.py` fills this
# dict.
LOOKUP_FUNCTIONS: dict[Any, Callable[..., Tensor]] = {}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_GET_DATA = Tensor.data.__get__  # type: ignore[attr-defined]
_GRAD: Any = Tensor.grad
_DETACH = Tensor.detach
_ALIASES = {_GET_DATA, _DETACH}  # code that saves a table calls these functions
_NEW_PARAMETER = nn.Parameter.__new__.__code__
_SAVE = nn.Module._save_to_state_dict.__code__
_SIZE = Tensor.size
_MAKE_GRADS = torch.autograd._make_grads.__code__


def can_look_up_rows(weight: Tensor, columns: bool) -> TypeGuard[Table]:
    """Return whether `weight` is a table in which ids select rows, or columns if `columns`."""
    if type(weight) not in TABLE_CLASSES:  # faster than isinstance
        return False
    table: Table = weight  # type: ignore[assignment]
    # torch.jit.trace records torch's own lookup in the settled table.
    if torch._C._are_functorch_transforms_active() or is_jit_tracing():
        is_sharded = table.shards is not None
        if is_sharded or (table.spans_processes and needs_gradient(table)):
            raise HotrowError(
                f"a {'sharded' if is_sharded else 'replicated'} table cannot be looked up inside a "
                "torch.func transform or torch.jit.trace: the other ranks would not take part",
                fix="look up the rows first, and pass them to the function"
                + ("" if is_sharded else ", or turn off gradients with torch.no_grad()"),
            )
        return False
    return table.columns == columns


def needs_gradient(weight: Tensor) -> bool:
    """Return whether autograd would record a lookup in this tensor now."""
    return weight.requires_grad and torch.is_grad_enabled()


def find_table(tensor: Tensor) -> Table | None:
    """Return the tensor if it is a table, else the table that shares its storage, or None."""
    if isinstance(tensor, Table):
        return tensor
    pointer = tensor.data_ptr()
    matches = (table for table in all_tables() if table.raw_data.data_ptr() == pointer)
    return next(matches, None) if pointer else None


def all_tables() -> list[Table]:
    """Return all tables in this process."""
    # Another thread may add a table, which `_tables.values()` doesn't allow.
    return [table for reference in _tables.valuerefs() if (table := reference()) is not None]


def table_count() -> int:
    """Return the number of tables in this process."""
    return len(_tables)


def table_row_count(weight: Tensor) -> int:
    """Return the number of rows that ids can select, including rows in other processes."""
    shards = weight.shards if isinstance(weight, Table) else None
    return len(weight) if shards is None else shards.rows


def raise_on_all_ranks(weight: Tensor, error: HotrowError) -> NoReturn:
    """Raise a lookup's error in every process that participates in the lookup."""
    if isinstance(weight, Table) and not is_on_all_ranks(error):
        distributions: tuple[Distribution[Table] | None, ...] = weight.shards, weight.replicas
        for distribution in distributions:
            if distribution is not None:
                distribution.fail(weight, error)
    raise error
