"""Shapes and cuts: what moves rows of a one-hot, or puts them side by side."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.parts import Field, Part, held, merged
from hotrow.onehot.registry import along_batch, meta, methods, rule, viewed
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import mapped, within

MOST_COPIES = 64  # of dense columns, along an axis that joins them


def _reshaped(x: OneHot, out: Tensor, view: Callable[[Tensor], Tensor]) -> Any:
    """The same values in the same order, in the shape of `out`."""
    if not out.numel() or not out.ndim or out.dtype != x.kind:
        return NotImplemented
    batch, columns, width = tuple(out.shape[:-1]), out.shape[-1], x.sizes[-1]
    if columns == width:
        return along_batch(x, out, lambda t: t.reshape(*batch, t.shape[-1]), view)
    if columns % width:
        return NotImplemented
    return _joined(x, out, columns // width, view)


def _joined(x: OneHot, out: Tensor, copies: int, view: Callable[[Tensor], Tensor]) -> Any:
    """Several rows side by side become one: fields of their own, one after the other."""
    batch, width = tuple(out.shape[:-1]), x.sizes[-1]

    def side_by_side(t: Tensor) -> Tensor:
        return t.reshape(*batch, copies, t.shape[-1])

    parts = x.parts
    if len(parts) == 1 and isinstance(parts[0], Field):
        field = parts[0].map(side_by_side)
        starts = width * torch.arange(copies, device=field.ids.device).unsqueeze(-1)
        weights = None if field.weights is None else field.weights.flatten(-2)
        joined: list[Part] = [Field((field.ids + starts).flatten(-2), weights, copies * width)]
    elif copies <= MOST_COPIES:
        several = [part.map(side_by_side) for part in parts]
        joined = []
        for i in range(copies):
            joined += [part.map(lambda t, i=i: t.select(-2, i)) for part in several]  # type: ignore[misc]
        joined = merged(joined)
    else:
        return NotImplemented
    return viewed(x, joined, out, lambda t: t.reshape(out.shape), view)


@rule(
    *methods("reshape", "flatten", "unflatten", "squeeze", "unsqueeze", "ravel"),
    *(Tensor.view, Tensor.view_as, Tensor.reshape_as),
)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):  # the shape is taken of a one-hot
        return NotImplemented
    args = mapped(args, OneHot, meta)
    model = meta(x)
    out = func(model, *args, **kwargs)
    if out is model:
        return x
    return _reshaped(x, out, lambda t: func(t, *args, **kwargs))


@rule(*methods("permute", "transpose", "movedim", "moveaxis", "swapaxes", "swapdims"))
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    out = func(meta(x), *args, **kwargs)
    count = len(x.sizes)
    marked = torch.empty_strided([1] * count, [*range(count)], device="meta")
    order = func(marked, *args, **kwargs).stride()
    if order[-1] != count - 1:
        return NotImplemented

    def change(t: Tensor) -> Tensor:
        return t.permute(*order)

    return along_batch(x, out, change, change)


@rule(Tensor.expand, Tensor.expand_as, *methods("broadcast_to"))
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):
        return NotImplemented
    args = mapped(args, OneHot, meta)
    out = func(meta(x), *args, **kwargs)
    if out.shape[-1] != x.sizes[-1]:
        return NotImplemented
    shape = out.shape

    def change(t: Tensor) -> Tensor:
        return t.expand(*shape[:-1], t.shape[-1])

    return along_batch(x, out, change, change)


@rule(*methods("select", "narrow", "index_select", "flip", "roll", "unbind", "split", "chunk"))
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    if func.__name__ == "narrow":
        args = tuple(int(a) if isinstance(a, Tensor) else a for a in args)
    like, named = mapped((args, kwargs), Tensor, lambda t: t.to("meta"))
    out = func(meta(x), *like, **named)
    dims = kwargs.get("dim", kwargs.get("dims", _dim_in(func.__name__, args)))
    dims = dims if isinstance(dims, tuple | list) else (dims,)
    if any(dim is None or dim % len(x.sizes) == len(x.sizes) - 1 for dim in dims):
        return _columns(x, func, args, kwargs, out)

    def change(t: Tensor) -> Any:
        return func(t, *args, **kwargs)

    if isinstance(out, Tensor):
        return along_batch(x, out, change, change)
    # One more pass for each result; the ids are few.
    return tuple(
        along_batch(x, each, lambda t, i=i: change(t)[i], lambda t, i=i: change(t)[i])  # type: ignore[misc]
        for i, each in enumerate(out)
    )


_DIM_AT = {"select": 0, "narrow": 0, "index_select": 0, "flip": 0, "roll": 1, "unbind": 0}


def _dim_in(name: str, args: Any) -> Any:
    """The axis among positional arguments; None for all of them."""
    at = _DIM_AT.get(name, 1)
    if name == "flip" and len(args) > 1:
        return args
    if len(args) > at:
        return args[at]
    return None if name == "roll" else 0


def _columns(x: OneHot, func: Any, args: Any, kwargs: Any, out: Any) -> Any:
    """A cut along the class axis, at the edges of parts."""
    if func.__name__ not in ("narrow", "split", "chunk"):
        return NotImplemented
    widths = [each.shape[-1] for each in ([out] if isinstance(out, Tensor) else out)]
    start = 0
    if func.__name__ == "narrow":
        start = int(kwargs.get("start", args[1] if len(args) > 1 else 0)) % x.sizes[-1]
    cuts = []
    for width in widths:
        piece = _cut(x, start, start + width)
        if piece is None:
            return NotImplemented
        cuts.append(piece)
        start += width
    return cuts[0] if isinstance(out, Tensor) else tuple(cuts)


def _cut(x: OneHot, start: int, stop: int) -> OneHot | None:
    """Columns start..stop-1, if no part is cut in two."""
    at, chosen = 0, []
    for part in x.parts:
        if start <= at and at + part.width <= stop and part.width:
            chosen.append(part)
        elif at < stop and start < at + part.width:
            return None
        at += part.width
    if not chosen:
        return None

    def change(t: Tensor) -> Tensor:
        return t[..., start:stop]

    return viewed(x, chosen, change(meta(x)), change, change)


@rule(Tensor.__getitem__)
def _(func: Any, x: Any, index: Any) -> Any:
    if not isinstance(x, OneHot) or any(True for _ in within(index, OneHot)):
        return NotImplemented
    given = index if isinstance(index, tuple) else (index,)
    used = sum(_axes(each) for each in given)
    count = len(x.sizes)
    if any(each is Ellipsis for each in given):
        place = next(i for i, each in enumerate(given) if each is Ellipsis)
        whole = (slice(None),) * (count - used)
        given, used = given[:place] + whole + given[place + 1 :], count
    if used > count:
        return NotImplemented
    last: Any = slice(None)
    if used == count:
        *rest, last = given
        if not isinstance(last, slice) or any(each is None for each in rest[-1:]):
            return NotImplemented
        given = tuple(rest)
    if last != slice(None):
        start, stop, step = last.indices(x.sizes[-1])
        piece = _cut(x, start, stop) if step == 1 and start < stop else None
        if piece is None:
            return NotImplemented
        return piece[given] if given else piece

    def change(t: Tensor) -> Tensor:
        return t[given]

    first = change(held(x.parts[0]))
    out = torch.empty((*first.shape[:-1], x.sizes[-1]), dtype=x.kind, device="meta")
    if all(isinstance(each, int | slice) or each in (None, Ellipsis) for each in given):
        out = meta(x)[given]  # a view
    return along_batch(x, out, change, change)


def _axes(index: Any) -> int:
    """How many axes an index takes up."""
    if index is None or index is Ellipsis:
        return 0
    if isinstance(index, bool):
        return 1 << 10  # adds an axis, and is rare
    if isinstance(index, Tensor) and index.dtype in (torch.bool, torch.uint8):
        return index.ndim or 1 << 10
    if isinstance(index, Tensor | int | slice):
        return 1
    return 1 << 10  # lists and arrays: torch knows
