"""A table whose unread rows may lag: a Parameter that settles before it is read.

A look-up that trains reads its rows as they are when settled, any other settles them first, and
whatever else reads values settles all.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._compile import _disable_dynamo

from hotrow.errors import HotrowIndexError
from hotrow.gradient import RowGradient
from hotrow.ids import checked
from hotrow.kernels.grouping import Places, distinct

# What a row has missed is known when the code runs, not when `torch.compile` traces it: these end
# a graph. (`torch.compiler.disable` is the same, but imports the compiler at once.)


def uses(tensor: Tensor) -> int:
    """How many hold the storage of a tensor: tensors, arrays of numpy, the storage's own object.

    Storage that another process shares is held by more than can be counted.
    """
    storage = tensor.untyped_storage()
    if tensor.is_shared():  # type: ignore[no-untyped-call]
        return sys.maxsize
    # Less the object made here, and the references to it: its name, this call, the storage.
    return torch._C._storage_Use_Count(storage._cdata) - 1 + sys.getrefcount(storage) - 3


class Lag(Protocol):
    """What knows the steps that rows have missed; an optimizer."""

    @property
    def behind(self) -> bool:
        """Whether any row may have missed a step that would have moved it."""

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, to where dense training would have them now."""

    def look_up(self, at: Places) -> Tensor:
        """(..., D): the rows of now at `at`; settled only where that is needed to know them."""

    def close(self) -> None:
        """Settle all, and let go of the table."""


class Table(nn.Parameter):
    """A (V, D) parameter whose rows settle before they are read.

    Made of a Parameter in place, by `Table.adopt(parameter)`, so that modules, optimizers and
    ties that hold it keep holding it. Without a lag it is a plain parameter whose look-ups leave
    a `RowGradient`.

    Attributes:
        lag: what its optimizer knows of its rows; None while they are all up to date.
        was_dense: whether a step has met a gradient that was not of look-ups only.
    """

    lag: Lag | None
    was_dense: bool

    @staticmethod
    def adopt(parameter: nn.Parameter) -> Table:
        """Make a Parameter a Table; the same object."""
        if not isinstance(parameter, Table):
            _learn_engines_own()
            if not parameter.untyped_storage().resizable() and uses(parameter) == 1:
                # An array of numpy's may own it, and could not be noticed as an alias.
                parameter.data = parameter.data.clone()
            parameter.__class__ = Table
            parameter.lag, parameter.was_dense = None, False  # type: ignore[attr-defined]
        assert isinstance(parameter, Table)
        return parameter

    @_disable_dynamo
    def settle(self, rows: Tensor | None = None) -> None:
        """Bring the given distinct rows, or all, to their value of now."""
        lag = self.__dict__.get("lag")
        if lag is not None and lag.behind:
            lag.settle(rows)

    @property
    def stored(self) -> Tensor:
        """The storage as a plain tensor, settled or not."""
        with torch._C.DisableTorchFunctionSubclass():
            return self.data

    def as_subclass(self, cls: type[Any]) -> Any:
        """As torch's, of settled rows."""
        self.settle()
        return super().as_subclass(cls)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.settle()
        copy = nn.Parameter(self.stored.clone(), self.requires_grad)
        memo[id(self)] = copy
        return Table.adopt(copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain parameter that it is for everybody else."""
        self.settle()
        plain = nn.Parameter(self.stored, self.requires_grad)
        return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        look_up = _LOOK_UPS.get(func)
        if look_up is not None and not torch._C._are_functorch_transforms_active():
            return look_up(*args, **kwargs)
        if func not in _NO_VALUES:
            for table in _tables((args, kwargs)):
                table.settle()
                if func == _SET_DATA and table.lag is not None:
                    table.lag.close()  # the next step begins with the storage that is there then
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


_SET_DATA = Tensor.data.__set__  # type: ignore[attr-defined]

# Reading or setting these reads no value of the table.
_NO_VALUES = {
    getattr(getattr(Tensor, name), accessor)
    for name in (
        "shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "layout", "ndim",
        "grad_fn", "is_sparse", "is_cuda", "is_meta", "is_quantized", "names", "itemsize", "nbytes",
        "_version", "_backward_hooks", "output_nr", "retains_grad", "is_cpu", "is_nested",
        "_grad", "_base", "_post_accumulate_grad_hooks", "is_sparse_csr", "is_mkldnn",
    )
    for accessor in ("__get__", "__set__", "__delete__")
    if hasattr(getattr(Tensor, name, None), accessor)
} | {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous",
        "is_floating_point", "is_complex", "requires_grad_", "register_hook", "retain_grad",
        "register_post_accumulate_grad_hook", "storage_offset", "__len__", "get_device",
        "is_shared", "is_pinned",
    )
}  # fmt: skip


def _tables(value: Any) -> Iterator[Table]:
    if isinstance(value, Table):
        yield value
    elif isinstance(value, dict):
        yield from _tables(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tables(each)


class _LookUp(torch.autograd.Function):
    """table[ids], whose gradient is a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        ids: Tensor,
        at: Places | None,  # of the ids, if they are known
        read: Callable[[], Tensor],
        padding_idx: int,
        by_frequency: bool,
    ) -> Tensor:
        if ctx.needs_input_grad[0]:  # the caller may fill the same ids with the next batch
            ctx.save_for_backward(ids.to(torch.int64, copy=True))
        ctx.shape, ctx.at = table.shape, at
        ctx.padding_idx, ctx.by_frequency = padding_idx, by_frequency
        return read()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None, None, None]:
        ids, at = ctx.saved_tensors[0].reshape(-1), ctx.at
        holders = sys.getrefcount(gradient), gradient._use_count(), uses(gradient)  # type: ignore[attr-defined]
        if not _engines_own:
            _engines_own.append(holders)
        mine = all(map(operator.le, holders, _engines_own[0]))
        rows = gradient.reshape(len(ids), ctx.shape[1])
        if ctx.by_frequency:
            at = at or distinct(ids, ctx.shape[0])
            places = at.places.reshape(-1)
            rows = rows / places.bincount()[places].unsqueeze(-1)
        if ctx.padding_idx >= 0:
            kept = (ids != ctx.padding_idx).nonzero()[:, 0]
            ids, rows, at = ids[kept], rows[kept], None
        found = RowGradient(ids, rows, ctx.shape, at=at)
        # Someone else may write into it before the step: then it is added up now.
        return found if mine else found.merge(), None, None, None, None, None


# How many hold a gradient in `_LookUp.backward` if nobody but the engine does: its Python object,
# the tensor, the storage.
_engines_own: list[tuple[int, int, int]] = []


@torch.enable_grad()
def _learn_engines_own() -> None:
    if not _engines_own:
        table, ids = torch.zeros(1, 1, requires_grad=True), torch.zeros(1, dtype=torch.int64)
        read = functools.partial(F.embedding, ids, table)
        _LookUp.apply(table, ids, None, read, -1, False).mul(1).sum().backward()  # type: ignore[no-untyped-call]


class _Rows(torch.autograd.Function):
    """table[rows] of distinct rows, whose gradient is a `RowGradient`."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, rows: Tensor, read: Callable[[], Tensor]) -> Tensor:
        ctx.save_for_backward(rows)
        ctx.shape = table.shape
        return read()

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None]:
        (rows,) = ctx.saved_tensors
        return RowGradient(rows, gradient.clone(), ctx.shape, merged=True), None, None


def _renorm(table: Tensor, ids: Tensor, max_norm: float | None, norm_type: float) -> None:
    """Shorten the settled rows that `ids` select, as torch does."""
    if max_norm is not None:
        with torch.no_grad(), torch._C.DisableTorchFunctionSubclass():
            torch.embedding_renorm_(table, ids.long(), max_norm, norm_type)


def _behind(table: Tensor) -> bool:
    return isinstance(table, Table) and table.lag is not None and table.lag.behind


def _current(table: Tensor, at: Places, writes: bool) -> Callable[[], Tensor] | None:
    """How to read the rows of a table that is behind; None if they are settled now.

    Rows that are trained next are not, unless someone `writes` to them before.
    """
    assert isinstance(table, Table)
    if table.lag is not None and table.requires_grad and torch.is_grad_enabled() and not writes:
        return functools.partial(table.lag.look_up, at)
    table.settle(at.rows)
    return None


def _padding(table: Tensor, padding_idx: int | None) -> int:
    """The row that gets no gradient, -1 for none."""
    if padding_idx is None:
        return -1
    count = len(table)
    if not -count <= padding_idx < count:
        raise HotrowIndexError(
            f"padding_idx = {padding_idx}, but the table has {count} rows "
            f"(valid {-count}..{count - 1})"
        )
    return padding_idx % count


@_disable_dynamo
def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    """`torch.nn.functional.embedding` for a table."""
    padding = _padding(weight, padding_idx)
    checked(input, len(weight), "input", mistakable="")
    at = distinct(input, len(weight)) if _behind(weight) else None
    read: Callable[[], Tensor] = functools.partial(F.embedding, input, weight)
    if at is not None:
        read = _current(weight, at, max_norm is not None) or read
    _renorm(weight, input, max_norm, norm_type)
    with torch._C.DisableTorchFunctionSubclass():
        output: Tensor = _LookUp.apply(  # type: ignore[no-untyped-call]
            weight, input, at, read, padding, scale_grad_by_freq
        )
        return output


@_disable_dynamo
def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    """`torch.nn.functional.embedding_bag` for a table: torch's own, over the rows in the batch."""
    padding = _padding(weight, padding_idx)
    checked(input, len(weight), "input", mistakable="")
    at = distinct(input, len(weight))
    rows, places = at.rows, at.places
    read: Callable[[], Tensor] = functools.partial(weight.index_select, 0, rows)
    if _behind(weight):
        each = Places(rows, torch.arange(len(rows), device=rows.device))
        read = _current(weight, each, max_norm is not None) or read
    _renorm(weight, input, max_norm, norm_type)
    found = [] if weight.is_meta else (rows == padding).nonzero().tolist()
    with torch._C.DisableTorchFunctionSubclass():
        compact = _Rows.apply(weight, rows, read)  # type: ignore[no-untyped-call]
        return F.embedding_bag(
            places,
            compact,
            None if offsets is None else offsets.long(),
            scale_grad_by_freq=scale_grad_by_freq,
            mode=mode,
            per_sample_weights=per_sample_weights,
            include_last_offset=include_last_offset,
            padding_idx=found[0][0] if found else None,
        )


_LOOK_UPS: dict[Any, Callable[..., Tensor]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
}
