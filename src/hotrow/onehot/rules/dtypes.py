"""Copies, dtypes, devices, and whose gradient is wanted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.compilation import is_compiling
from hotrow.onehot.parts import Columns, Part
from hotrow.onehot.registry import (
    along_batch,
    derived,
    meta,
    meta_of,
    methods,
    needs_grad,
    rule,
)
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import mapped, within

_EXACT_COUNTS = 256  # that every floating dtype has


@rule(Tensor.contiguous, Tensor.detach, *methods("clone", "detach"))
def _(func: Any, x: OneHot, **kwargs: Any) -> Any:
    out = func(meta(x), **kwargs)
    if func is Tensor.contiguous and x.strides == out.stride():
        return x
    if func.__name__ != "detach":
        return along_batch(x, out, lambda t: t.clone(), lambda t: t)
    parts = [part.map(Tensor.detach) for part in x.parts]
    x.viewed = True
    return OneHot(parts, x.kind, None, (x, Tensor.detach), x.origins, x.strides)


@rule(Tensor.to)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):  # like a one-hot
        return NotImplemented
    copy = kwargs.pop("copy", False)
    if any(isinstance(a, OneHot) for a in args) or sum(isinstance(a, bool) for a in args) > 1:
        return NotImplemented
    device, dtype, _, form = torch._C._nn._parse_to(*args, **kwargs)
    if form is not None:
        return NotImplemented
    return to(x, dtype or x.kind, device, copy)


@rule(
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.long, Tensor.int, Tensor.short, Tensor.char, Tensor.byte),
)
def _(func: Any, x: OneHot, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    return to(x, func(torch.empty(0, device="meta")).dtype, None, copy=False)


@rule(Tensor.type_as)
def _(func: Any, x: Any, other: Tensor) -> Any:
    if not isinstance(x, OneHot) or isinstance(other, OneHot):
        return NotImplemented
    return to(x, other.dtype, other.device, copy=False)


@rule(Tensor.type)
def _(func: Any, x: OneHot, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None or kwargs or x.place.type != "cpu":
        return NotImplemented
    like = torch.empty(0, dtype=x.kind).type(dtype)  # also by the name or the class of one
    return to(x, like.dtype, like.device, copy=False)


def to(x: OneHot, dtype: torch.dtype, device: torch.device | None, copy: bool) -> Any:
    """As `Tensor.to`; NotImplemented where casting the parts is not casting the tensor."""
    moved = device is not None and device != x.place
    if not moved and dtype == x.kind and not copy:
        return x
    if not all(casts(part, x.kind, dtype) for part in x.parts):
        return NotImplemented

    parts = [part.to(dtype, device) for part in x.parts]
    out = meta_of(x.sizes, x.strides, dtype)
    return derived(
        x,
        parts,
        out if out.is_contiguous() else meta(x).to(dtype, copy=True),
        lambda t: t.to(device=device, dtype=dtype),
    )


def casts(part: Part, before: torch.dtype, dtype: torch.dtype) -> bool:
    """Whether casting the parts is casting the tensor."""
    if dtype == torch.bool or dtype.is_complex:
        return False
    if isinstance(part, Columns) or part.ids.shape[-1] == 1:
        return True
    # Repeated ids are counted: where a bool would not, and where a count has another value.
    counts = part.weights is None and part.ids.shape[-1] <= _EXACT_COUNTS
    return counts and before != torch.bool and dtype not in (torch.uint8, torch.int8)


# What hands out the memory itself, or takes another: torch does not count what is written there.
@rule(
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.set_),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_),
    *(Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for each in within((x, args), OneHot):
        each.write_out(for_good=not is_compiling())
    return NotImplemented


@rule(Tensor.__repr__, Tensor.__deepcopy__, Tensor.__reduce_ex__)
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    return func(_leaf_like(x), *args, **kwargs) if x.leaf else NotImplemented


def _leaf_like(x: OneHot) -> Tensor:
    """The plain leaf that torch has in place of this one."""
    plain = x.write_out().detach().requires_grad_()
    plain.grad = x.grad
    return plain


@rule(torch.autograd.grad, torch.autograd.backward, Tensor.backward)
def _(func: Any, *args: Any, **kwargs: Any) -> Any:
    # A leaf is in the graph, and anything else as written out.
    seen, named = mapped((args, kwargs), OneHot, lambda x: x if x.leaf else x.write_out())
    with torch._C.DisableTorchFunctionSubclass():
        return func(*seen, **named)


@rule(Tensor.requires_grad.__get__)  # type: ignore[attr-defined]
def _(func: Any, x: OneHot) -> Any:
    return needs_grad(x) if x.leaf or not x.changed else x.write_out().requires_grad


@rule(Tensor.is_leaf.__get__)  # type: ignore[attr-defined]
def _(func: Any, x: OneHot) -> Any:
    return x.leaf or not (x.changed or needs_grad(x)) or NotImplemented


@rule(Tensor.grad_fn.__get__)  # type: ignore[union-attr]
def _(func: Any, x: OneHot) -> Any:
    return None if x.leaf or not (x.changed or needs_grad(x)) else NotImplemented


@rule(Tensor.requires_grad_, Tensor.requires_grad.__set__)  # type: ignore[attr-defined]
def _(func: Any, x: OneHot, asked: bool = True) -> Any:
    if x.changed or (needs_grad(x) and not x.leaf):
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        result = func(x, asked)
    x.leaf = asked
    return result


@rule(Tensor.retain_grad, Tensor.register_hook)
def _(func: Any, x: OneHot, *args: Any) -> Any:
    if x.leaf:
        with torch._C.DisableTorchFunctionSubclass():
            return func(x, *args)
    x.write_out(for_good=True)
    return NotImplemented
