"""Indexing: operations that select rows, columns or entries of a one-hot."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling, is_transforming
from hotrow.onehot.gather import gather, gather_from_field
from hotrow.onehot.gradient import KeepInGraph
from hotrow.onehot.parts import MAX_PAIRS, DenseColumns, Field, Part, flatten
from hotrow.onehot.registry import USE_TORCH, overloads, rule
from hotrow.onehot.results import derive, derive_view, map_batch, meta_result, meta_tensor
from hotrow.onehot.rules.scatter import is_range
from hotrow.onehot.rules.selection import select
from hotrow.onehot.running_count import RunningCount
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import find_instances, map_instances


@rule(*overloads("select", "narrow", "index_select", "flip", "roll", "unbind", "split", "chunk"))
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    if func.__name__ != "index_select":
        args, kwargs = map_instances((args, kwargs), Tensor, _as_int)
    indices = list(find_instances((args, kwargs), Tensor))
    if _are_unreadable(indices) or (indices and func.__name__ != "index_select"):
        return NotImplemented
    meta_args, meta_kwargs = map_instances((args, kwargs), Tensor, lambda t: t.to("meta"))
    out = func(meta_tensor(x), *meta_args, **meta_kwargs)
    dims = kwargs.get("dim", kwargs.get("dims", _positional_dim(func.__name__, args)))
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    if not dims:
        return NotImplemented
    if any(dim is None or dim % len(x.sizes) == len(x.sizes) - 1 for dim in dims):
        return _slice_columns(x, func, args, kwargs, out)

    def transform(t: Tensor) -> Any:
        return func(t, *args, **kwargs)

    if isinstance(out, Tensor):
        return map_batch(x, out, transform, transform, indices)
    # Autograd doesn't allow in-place changes of the views that `unbind` and `split` return.
    pieces: list[OneHot] = []
    (dim,), start = dims, 0
    for piece in out:
        if piece.ndim < len(x.sizes):
            view: Callable[[Tensor], Tensor] = functools.partial(
                torch.select, dim=dim, index=len(pieces)
            )
        else:
            view = functools.partial(torch.narrow, dim=dim, start=start, length=piece.shape[dim])
            start += piece.shape[dim]
        pieces.append(map_batch(x, piece, view, view))
    return tuple(pieces)


_DIM_POSITIONS = {"select": 0, "narrow": 0, "index_select": 0, "flip": 0, "roll": 1, "unbind": 0}


def _positional_dim(name: str, args: Any) -> Any:
    """Return the axis from the positional arguments; None means all axes."""
    position = _DIM_POSITIONS.get(name, 1)
    if name == "flip" and len(args) > 1:
        return args
    if len(args) > position:
        return args[position]
    return None if name == "roll" else 0


def _slice_columns(x: OneHot, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """Slice along the class axis if x is a single field or every slice consists of whole parts."""
    if func.__name__ == "select":
        index = kwargs.get("index", args[1] if len(args) > 1 else None)
        return _column(x, index, out) if isinstance(index, int) else NotImplemented
    if func.__name__ == "flip":
        return _flip(x, func, args, kwargs, out)
    if func.__name__ not in ("narrow", "split", "chunk"):
        return NotImplemented
    widths = [each.shape[-1] for each in ([out] if isinstance(out, Tensor) else out)]
    start = 0
    if func.__name__ == "narrow":
        start = int(kwargs.get("start", args[1] if len(args) > 1 else 0)) % x.sizes[-1]
    slices = []
    for width in widths:
        piece = _column_slice(x, start, start + width)
        if piece is None:
            return NotImplemented
        slices.append(piece)
        start += width
    return slices[0] if isinstance(out, Tensor) else tuple(slices)


def _flip(x: OneHot, func: Any, args: Any, kwargs: Any, out: Tensor) -> Any:
    """Reverse the class axis (as for the complement of DNA), and possibly batch axes."""
    field = x.field
    if field is None or 0 in x.sizes or is_compiling():
        return NotImplemented

    def transform(t: Tensor) -> Tensor:
        flipped: Tensor = func(t, *args, **kwargs)
        return flipped

    reversed_ids = Field(field.width - 1 - field.ids, field.weights, field.width)
    return derive(x, [reversed_ids.map(transform)], out, transform)


def _column_slice(x: OneHot, start: int, stop: int) -> OneHot | None:
    """Return the columns from `start` to `stop - 1`, or None if this needs the dense tensor."""

    def transform(t: Tensor) -> Tensor:
        return t[..., start:stop]

    out = transform(meta_tensor(x))
    field = x.field
    if field is not None and 0 < out.shape[-1] < field.width and not is_compiling():
        return derive_view(x, [_slice_field(field, start, stop, x)], out, transform, transform)
    offset = 0
    chosen: list[Part] = []
    others: list[Part] = []
    for part in x.parts:
        if start <= offset and offset + part.width <= stop and part.width:
            chosen.append(part)
        elif offset < stop and start < offset + part.width:
            return None
        else:
            others.append(part)
        offset += part.width
    kept = keep_in_graph(chosen, others, x.cached_dtype) if chosen else None
    if kept is None:
        return None
    return derive_view(x, kept, out, transform, transform)


def keep_in_graph(
    parts: list[Part], omitted: Iterable[Part], dtype: torch.dtype
) -> list[Part] | None:
    """Return equal parts that pass zeros on to the omitted parts, as in torch, or None."""
    tensors = [tensor for tensor in flatten(tuple(omitted))[0] if tensor.requires_grad]
    if not tensors or not torch.is_grad_enabled() or is_transforming():
        return parts
    first, *others = parts
    if is_compiling() or (isinstance(first, DenseColumns) and not first.is_stored):
        return None
    if isinstance(first, Field):
        weights = KeepInGraph.apply(first.weights_or_ones(dtype), *tensors)  # type: ignore[no-untyped-call]
        return [Field(first.ids, weights, first.width), *others]
    return [first.map(lambda t: KeepInGraph.apply(t, *tensors)), *others]  # type: ignore[no-untyped-call]


def _column(x: OneHot, index: int, out: Tensor) -> Any:
    """Return a single column as a view of x, with values computed from the ids."""
    field, index = x.field, index % x.sizes[-1]
    if field is None or len(x.sizes) < 2 or x.grad_proxy is not None or is_compiling():
        return NotImplemented
    if is_too_small(x):
        return USE_TORCH
    if field.may_round_sums():
        return NotImplemented
    ids = torch.full((1,), index, device=x.cached_device)
    values = gather_from_field(field, 0, ids, x.cached_dtype).squeeze(-1)

    def view(t: Tensor) -> Tensor:
        return t.select(-1, index)

    record_use(x, torch.select)
    return derive_view(x, [DenseColumns(values)], out, view, view)


def _slice_field(field: Field, start: int, stop: int, x: OneHot) -> Field:
    """Return the field's columns from `start` to `stop - 1`; all other ids get weight 0."""
    is_inside = (field.ids >= start) & (field.ids < stop)
    weights = field.weights_or_ones(x.cached_dtype)
    weights = torch.where(is_inside, weights, weights.new_zeros(()))
    return Field(torch.where(is_inside, field.ids - start, 0), weights, stop - start)


@rule(Tensor.__getitem__)
def _(func: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, OneHot):
        return select(x, index)
    if any(True for _ in find_instances(index, OneHot)):
        return select(x, index)
    indices = tuple(map(_as_int, index)) if isinstance(index, tuple) else (_as_int(index),)
    if _are_unreadable(indices):
        return NotImplemented
    if len(indices) == len(x.sizes) == 2 and isinstance(indices[1], Tensor):
        rows, ids = indices
        if is_range(rows, x.sizes[0]) and ids.ndim == 1:  # x[arange(N), ids]
            entries = _entries_at(x, ids.unsqueeze(-1))
            return entries.squeeze(-1) if isinstance(entries, Tensor) else entries
    used = sum(_axis_count(each) for each in indices)
    count = len(x.sizes)
    if any(each is Ellipsis for each in indices):
        position = next(i for i, each in enumerate(indices) if each is Ellipsis)
        full_slices = (slice(None),) * (count - used)
        indices = indices[:position] + full_slices + indices[position + 1 :]
        used = count
    if used > count:
        return NotImplemented
    last: Any = slice(None)
    if used == count:
        *batch_indices, last = indices
        if isinstance(last, int) and all(isinstance(each, slice) for each in batch_indices):
            column = _column(x, last, meta_tensor(x)[..., last])
            return column[tuple(batch_indices)] if isinstance(column, OneHot) else column
        if not isinstance(last, slice) or any(each is None for each in batch_indices[-1:]):
            return NotImplemented
        indices = tuple(batch_indices)
    if last != slice(None):
        start, stop, step = last.indices(x.sizes[-1])
        piece = _column_slice(x, start, stop) if step == 1 and start < stop else None
        if piece is None:
            return NotImplemented
        return piece[indices] if indices else piece

    def transform(t: Tensor) -> Tensor:
        return t[indices]

    first = transform(x.parts[0].batch_tensor)
    out = torch.empty((*first.shape[:-1], x.sizes[-1]), dtype=x.cached_dtype, device="meta")
    if all(isinstance(each, int | slice) or each in (None, Ellipsis) for each in indices):
        out = meta_tensor(x)[indices]  # a view
    return map_batch(x, out, transform, transform, list(find_instances(indices, Tensor)))


@rule(*overloads("gather"))
def _(func: Any, input: Any, dim: Any, index: Any) -> Any:
    """Return the entries at ids along the class axis."""
    if not isinstance(input, OneHot) or isinstance(index, OneHot) or not isinstance(dim, int):
        return NotImplemented
    out = meta_result(func, (input, dim, index))
    return _entries_at(input, index) if dim % out.ndim == out.ndim - 1 else NotImplemented


def _entries_at(x: OneHot, ids: Tensor) -> Any:
    """Return the entries at (*batch, K) ids, or NotImplemented."""
    part = x.parts[0] if len(x.parts) == 1 else None
    if ids.dtype != torch.int64 or ids.shape[:-1] != x.sizes[:-1] or x.grad_proxy is not None:
        return NotImplemented
    if ids.device != x.cached_device or not ids.numel() or is_compiling():
        return NotImplemented
    if int(ids.min()) < 0 or int(ids.max()) >= x.sizes[-1]:
        return NotImplemented  # torch raises
    if is_too_small(x):
        return USE_TORCH
    if isinstance(part, Field) and part.ids.shape[-1] * ids.shape[-1] <= MAX_PAIRS:
        if part.may_round_sums():
            return NotImplemented
        record_use(x, torch.gather)
        return gather_from_field(part, 0, ids, x.cached_dtype)
    if isinstance(part, RunningCount):
        return gather(x, ids, x.axis_layout)
    return NotImplemented


def _are_unreadable(indices: Iterable[Any]) -> bool:
    """Return whether a `torch.func` transform, such as `vmap`, wraps an index."""
    is_wrapped = torch._C._functorch.is_functorch_wrapped_tensor
    return any(isinstance(each, Tensor) and is_wrapped(each) for each in indices)


def _as_int(index: Any) -> Any:
    """Convert a 0-D integer tensor to an int, as torch does; return other indices unchanged.

    While torch compiles or transforms the code, the value may be unknown.
    """
    if not isinstance(index, Tensor) or index.ndim:
        return index
    if index.dtype not in _INTEGERS or is_compiling():
        return index
    return index if torch._C._are_functorch_transforms_active() else int(index)


_INTEGERS = torch.int64, torch.int32, torch.int16, torch.int8


def _axis_count(index: Any) -> int:
    """Count the axes that an index consumes; 1024 means that torch must handle the index."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        return 1 << 10  # a bool index, which is rare, adds an axis
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.ndim or 1 << 10
    if isinstance(index, Tensor | int | slice):
        return 1
    return 1 << 10  # lists and arrays
