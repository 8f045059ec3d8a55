"""Sums over the batch, scaling, argmax."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.compilation import is_compiling
from hotrow.onehot.parts import Columns, Field, Part
from hotrow.onehot.registry import derived, meta, methods, rule
from hotrow.onehot.tensor import OneHot


@rule(*methods("sum", "mean"))
def _(func: Any, x: OneHot, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = (dim,) if isinstance(dim, int) else dim
    if kwargs or not dims or not all(isinstance(d, int) for d in dims):
        return NotImplemented
    if func.__name__ == "mean" and not (x.kind.is_floating_point or x.kind.is_complex):
        return NotImplemented  # torch's error, which is of another type on the meta device
    out = func(meta(x), dim, keepdim)
    count = len(x.sizes)
    dims = sorted(d % count for d in dims)
    summed = math.prod(x.sizes[d] for d in dims)
    if dims[-1] == count - 1 or not summed or x.kind == torch.bool:
        return NotImplemented
    if out.dtype in (torch.float16, torch.bfloat16):  # which round while they add
        return NotImplemented

    def bag(t: Tensor) -> Tensor:  # those axes, and then its own last, become the last
        kept = [d for d in range(count - 1) if d not in dims]
        moved = t.permute(*kept, *dims, count - 1).flatten(len(kept))
        for d in dims if keepdim else ():
            moved = moved.unsqueeze(d)
        return moved

    def total(t: Tensor) -> Tensor:
        result: Tensor = func(t, dim, keepdim)
        return result

    parts: list[Part] = []
    for part in x.parts:
        if isinstance(part, Columns):
            parts.append(Columns(total(part.values)))
            continue
        weights = part.weights
        if func.__name__ == "mean":
            weights = part.scales(x.kind) / summed
        parts.append(Field(bag(part.ids), None if weights is None else bag(weights), part.width))
    rounds = any(isinstance(part, Field) and part.weights is not None for part in parts)
    return derived(x, parts, out, total, rounds)


@rule(
    *methods("mul", "multiply", "div", "divide", "true_divide", "neg", "negative"),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__),
)
def _(func: Any, x: Any, other: Any = -1, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if not isinstance(x, OneHot):
        if "div" in func.__name__:
            return NotImplemented
        x, other = other, x
    if isinstance(other, OneHot) or x.kind == torch.bool:
        return NotImplemented
    divides = "div" in func.__name__
    if not isinstance(other, Tensor | int | float):
        return NotImplemented
    if isinstance(other, Tensor) and other.ndim and other.shape[-1] != 1:
        return NotImplemented
    by = other.to("meta") if isinstance(other, Tensor) else other
    out = torch.div(meta(x), by) if divides else torch.mul(meta(x), by)
    if out.shape[-1] != x.sizes[-1] or not out.dtype.is_floating_point:
        return NotImplemented
    if not _keeps_zeros(other, out.dtype, divides):
        return NotImplemented

    def scaled(t: Tensor) -> Tensor:
        result: Tensor = t / other if divides else t * other
        return result

    batch = out.shape[:-1]
    parts: list[Part] = []
    for part in x.parts:
        if isinstance(part, Columns):
            parts.append(Columns(scaled(part.values)))
            continue
        ids = part.ids.expand(*batch, part.ids.shape[-1])
        parts.append(Field(ids, scaled(part.scales(x.kind)).expand(ids.shape), part.width))
    rounds = any(isinstance(part, Field) and part.ids.shape[-1] > 1 for part in parts)
    return derived(x, parts, out, scaled, rounds)


def _keeps_zeros(other: Any, dtype: torch.dtype, divides: bool) -> bool:
    """Whether zero times (or by) each of these is zero, and not NaN; `torch.compile` trusts so."""
    if not isinstance(other, Tensor):
        other = torch.tensor(other, dtype=dtype)
    elif is_compiling():
        return True
    known = other.detach()
    return bool(((known != 0) & ~known.isnan() if divides else known.isfinite()).all())


@rule(*methods("argmax"))
def _(func: Any, x: OneHot, dim: int | None = None, keepdim: bool = False) -> Any:
    parts = x.parts
    count = len(x.sizes)
    if dim is None or dim % count != count - 1 or len(parts) != 1 or x.kind == torch.bool:
        return NotImplemented
    only = parts[0]
    if isinstance(only, Columns) or only.weights is not None or only.ids.shape[-1] != 1:
        return NotImplemented
    return only.ids.clone() if keepdim else only.ids[..., 0].clone()


@rule(F.dropout)
def _(
    func: Any, input: OneHot, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training:
        return NotImplemented
    func(meta(input), p, training)  # torch's errors
    return input
