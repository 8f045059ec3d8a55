"""A table whose unread rows may lag: a Parameter that settles before it is read.

A look-up that trains reads its rows as they are when settled, any other settles them first, and
whatever else reads values settles all.
"""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, TypeGuard

import torch
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from hotrow.errors import HotrowError
from hotrow.kernels.grouping import Places
from hotrow.table.autograd import learn_engines_own, put_in_order, uses
from hotrow.table.metadata import NO_VALUES as NO_VALUES
from hotrow.table.nested import within

if TYPE_CHECKING:
    from hotrow.table.protocols import Backing, Replicas, Shards

# What a row has missed is known when the code runs, not when `torch.compile` traces it: these end
# a graph. (`torch.compiler.disable` is the same, but imports the compiler at once.)


class Lag(Protocol):
    """What knows the steps that rows have missed; an optimizer."""

    @property
    def behind(self) -> bool:
        """Whether any row may have missed a step that would have moved it."""

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, to where dense training would have them now."""

    def look_up(self, at: Places) -> Tensor:
        """(..., D): the rows of now at `at`; settled only where that is needed to know them."""

    def peek(self, at: Places) -> Tensor:
        """(..., D): the rows of now at `at`; none is settled."""

    def close(self) -> None:
        """Settle all, and let go of the table."""


class Table(nn.Parameter):
    """A (V, D) parameter whose rows settle before they are read, or a (D, V) of such columns.

    Made of a Parameter in place, by `Table.adopt(parameter)`, so that modules, optimizers and
    ties that hold it keep holding it. Without a lag it is a plain parameter whose look-ups leave
    a `RowGradient`.

    With `columns`, as the weight of a linear layer for one-hot input is used, its memory is that
    of a (V, D) transposed. While it is not, as when someone else holds it, its gradient is dense.

    Attributes:
        lag: what its optimizer knows of its rows; None while they are all up to date.
        was_dense: whether a step has met a gradient that was not of look-ups only.
        columns: whether its columns are what ids select, and what is called its rows.
        shards: where the rows are that this process does not have; None while it has all.
        replicas: who else has the same rows; None if nobody that is to have the same gradient.
        backing: the files that its rows and state are mapped from; None for memory.
    """

    lag: Lag | None
    was_dense: bool
    columns: bool
    shards: Shards | None = None
    replicas: Replicas | None = None
    backing: Backing | None = None

    @staticmethod
    def adopt(parameter: nn.Parameter, columns: bool = False) -> Table:
        """Make a Parameter a Table, (V, D) or with `columns` (D, V); the same object.

        Raises:
            HotrowError: it is a Table of the other kind.
        """
        if not isinstance(parameter, Table):
            learn_engines_own()
            if not parameter.untyped_storage().resizable() and uses(parameter) == 1:
                # An array of numpy's may own it, and could not be noticed as an alias.
                parameter.data = parameter.data.clone()
            parameter.__class__ = Table
            table: Table = parameter  # type: ignore[assignment]
            table.lag, table.was_dense, table.columns = None, False, columns
            if columns:
                table.lay_out()
        assert isinstance(parameter, Table)
        if parameter.columns != columns:
            raise HotrowError(
                f"the parameter of shape {tuple(parameter.shape)} is a table by its "
                f"{'columns' if parameter.columns else 'rows'} already",
                fix="let ids select one of the two, or look up in a copy",
            )
        return parameter

    @_disable_dynamo
    def lay_out(self, by_columns: bool = True) -> None:
        """Bring the memory of a table by columns into their order, or torch's, if it is not held.

        A dense gradient goes along, as autograd wants it.
        """
        strides = (1, len(self)) if by_columns else (self.shape[1], 1)
        if self.stride() != strides:
            if self.lag is not None:
                self.lag.close()
            with torch._C.DisableTorchFunctionSubclass():
                put_in_order(self, strides)
                if type(self.grad) is Tensor:
                    put_in_order(self.grad, self.stride())

    @_disable_dynamo
    def settle(self, rows: Tensor | None = None) -> None:
        """Bring the given distinct rows, or all, to their value of now."""
        lag = self.__dict__.get("lag")
        if lag is not None and lag.behind:
            lag.settle(rows)

    @property
    def behind(self) -> bool:
        """Whether any row may not be what it is now when settled."""
        return self.lag is not None and self.lag.behind

    @property
    def is_spread(self) -> bool:
        """Whether other processes take part in its look-ups or its gradient."""
        return self.shards is not None or self.replicas is not None

    def whole(self, value: Tensor) -> Tensor:
        """What is shaped as the table, to be saved: as a part, where the table is one."""
        fits = self.shards is not None and value.shape == self.shape
        return self.shards.whole(value) if self.shards is not None and fits else value

    def part(self, value: Tensor) -> Tensor:
        """Of what was saved of a table, or of its optimizer, what belongs to this one."""
        return value if self.shards is None or not value.ndim else self.shards.part(value)

    @property
    def stored(self) -> Tensor:
        """The storage as a plain tensor, settled or not."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.data

    @property
    def by_rows(self) -> Tensor:
        """(V, D), the storage as a plain tensor, settled or not."""
        return self.stored.t() if self.columns else self.stored

    def as_subclass(self, cls: type[Any]) -> Any:
        """As torch's, of settled rows."""
        self.settle()
        return super().as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.settle()
        copy = nn.Parameter(self.stored.clone(), self.requires_grad)
        memo[id(self)] = copy
        table = Table.adopt(copy, self.columns)
        table.shards, table.replicas = self.shards, self.replicas
        return table

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain parameter that it is for everybody else, laid out as torch does."""
        if self.shards is not None:
            raise HotrowError(
                "a sharded table was to be pickled, and would come back as a part of one",
                fix="save the model's state_dict() with torch.distributed.checkpoint",
            )
        self.settle()
        plain = nn.Parameter(self.stored.contiguous(), self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in NO_VALUES:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        own = LOOK_UPS.get(func)
        if own is not None and takes_rows(kwargs.get("weight", args[1:] and args[1]), False):
            return own(*args, **kwargs)
        if func in _VIEWS and isinstance(args[0], Table) and args[0].columns:
            args[0].lay_out(by_columns=False)
        spread = False
        for table in within((args, kwargs), Table):
            table.settle()
            spread = spread or table.is_spread
            if func == _SET_DATA and table.lag is not None:
                table.lag.close()  # the next step begins with the storage that is there then
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*args, **kwargs)
        if spread and any(each.grad_fn is not None for each in within(result, Tensor)):
            raise HotrowError(
                f"{getattr(func, '__name__', func)} of a table that is sharded or replicated was "
                "to be differentiated, and its gradient would stay in this process",
                fix="use look-ups of it only, or leave this table out of shard and replicate",
            )
        return result


def _hand_over(table: Table) -> Any:
    """To another process goes the storage itself, to be shared."""
    table.settle()
    plain = nn.Parameter(table.stored, table.requires_grad)
    return plain.__reduce_ex__(2)  # type: ignore[no-untyped-call]


ForkingPickler.register(Table, _hand_over)

# How torch's functions look rows of a table up, which `embedding.py` fills in.
LOOK_UPS: dict[Any, Callable[..., Tensor]] = {}
_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]
_VIEWS = {Tensor.view, Tensor.view_as}  # possible in torch's order, as `parameters_to_vector` needs


def takes_rows(weight: Tensor, columns: bool) -> TypeGuard[Table]:
    """Whether its rows, or its columns, can be looked up one by one."""
    if not isinstance(weight, Table):
        return False
    if torch._C._are_functorch_transforms_active():
        if weight.shards is not None:
            raise HotrowError(
                "a sharded table cannot be looked up in a transform of torch.func, which would see "
                "this rank's rows only",
                fix="look up before, and transform what follows",
            )
        return False
    return weight.columns == columns


def trains(weight: Tensor) -> bool:
    """Whether a look-up in it now is to be differentiated."""
    return weight.requires_grad and torch.is_grad_enabled()


def count_of(weight: Tensor) -> int:
    """The rows that ids may select, those of other processes included."""
    shards = weight.shards if isinstance(weight, Table) else None
    return len(weight) if shards is None else shards.rows


def raise_everywhere(weight: Tensor, error: HotrowError) -> NoReturn:
    """Raise an error of a look-up, in all processes that take part in it."""
    if isinstance(weight, Table) and not error.everywhere:
        for spread in (weight.shards, weight.replicas):
            if spread is not None:
                spread.fail(weight, error)
    raise error
