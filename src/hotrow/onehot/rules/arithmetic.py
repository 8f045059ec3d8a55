"""Arithmetic: sums over the batch, scaling, argmax, dropout."""

from __future__ import annotations

import math
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.parts import DenseColumns, Field, Part
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import derive, meta_tensor
from hotrow.onehot.tensor import OneHot


@rule(*overloads("sum", "mean"))
def _(func: Any, x: OneHot, dim: Any = None, keepdim: bool = False, **kwargs: Any) -> Any:
    dims = (dim,) if isinstance(dim, int) else dim
    if kwargs or not dims or not all(isinstance(d, int) for d in dims):
        return NotImplemented
    if func.__name__ == "mean" and not (
        x.cached_dtype.is_floating_point or x.cached_dtype.is_complex
    ):
        return NotImplemented  # on the meta device, torch would raise a different error
    out = func(meta_tensor(x), dim, keepdim)
    count = len(x.sizes)
    dims = sorted(d % count for d in dims)
    terms = math.prod(x.sizes[d] for d in dims)
    if dims[-1] == count - 1 or not terms or x.cached_dtype == torch.bool:
        return NotImplemented
    if out.dtype in (torch.float16, torch.bfloat16):  # torch rounds after each addition
        return NotImplemented

    def merge_axes(t: Tensor) -> Tensor:
        """Flatten the summed axes and the last axis into a single last axis."""
        kept = [d for d in range(count - 1) if d not in dims]
        merged = t.permute(*kept, *dims, count - 1).flatten(len(kept))
        for d in dims if keepdim else ():
            merged = merged.unsqueeze(d)
        return merged

    def reduce(t: Tensor) -> Tensor:
        result: Tensor = func(t, dim, keepdim)
        return result

    parts: list[Part] = []
    for part in x.parts:
        if isinstance(part, DenseColumns):
            parts.append(DenseColumns(reduce(part.values)))
            continue
        weights = part.weights
        if func.__name__ == "mean":
            weights = part.weights_or_ones(x.cached_dtype) / terms
        weights = None if weights is None else merge_axes(weights)
        parts.append(Field(merge_axes(part.ids), weights, part.width))
    rounds_differently = any(isinstance(part, Field) and part.weights is not None for part in parts)
    return derive(x, parts, out, reduce, rounds_differently)


@rule(
    *overloads("mul", "multiply", "div", "divide", "true_divide", "neg", "negative"),
    *(Tensor.__mul__, Tensor.__rmul__, Tensor.__truediv__, Tensor.__neg__),
)
def _(func: Any, x: Any, other: Any = -1, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    if not isinstance(x, OneHot):
        if "div" in func.__name__:
            return NotImplemented
        x, other = other, x
    if isinstance(other, OneHot) or x.cached_dtype == torch.bool:
        return NotImplemented
    divides = "div" in func.__name__
    if not isinstance(other, Tensor | int | float):
        return NotImplemented
    if isinstance(other, Tensor) and other.ndim and other.shape[-1] != 1:
        return NotImplemented
    factor = other.to("meta") if isinstance(other, Tensor) else other
    out = torch.div(meta_tensor(x), factor) if divides else torch.mul(meta_tensor(x), factor)
    if out.shape[-1] != x.sizes[-1] or not out.dtype.is_floating_point:
        return NotImplemented
    if not _keeps_zeros(other, out.dtype, divides):
        return NotImplemented

    def scale(t: Tensor) -> Tensor:
        result: Tensor = t / other if divides else t * other
        return result

    batch = out.shape[:-1]
    parts: list[Part] = []
    for part in x.parts:
        if isinstance(part, DenseColumns):
            parts.append(DenseColumns(scale(part.values)))
            continue
        ids = part.ids.expand(*batch, part.ids.shape[-1])
        parts.append(
            Field(ids, scale(part.weights_or_ones(x.cached_dtype)).expand(ids.shape), part.width)
        )
    rounds_differently = any(isinstance(part, Field) and part.ids.shape[-1] > 1 for part in parts)
    return derive(x, parts, out, scale, rounds_differently)


def _keeps_zeros(other: Any, dtype: torch.dtype, divides: bool) -> bool:
    """Return whether scaling by `other` keeps zeros zero; assume so under `torch.compile`."""
    if not isinstance(other, Tensor):
        other = torch.tensor(other, dtype=dtype)
    elif is_compiling():
        return True
    factors = other.detach()
    return bool(((factors != 0) & ~factors.isnan() if divides else factors.isfinite()).all())


@rule(*overloads("argmax"))
def _(func: Any, x: OneHot, dim: int | None = None, keepdim: bool = False) -> Any:
    parts = x.parts
    count = len(x.sizes)
    if dim is None or dim % count != count - 1 or len(parts) != 1 or x.cached_dtype == torch.bool:
        return NotImplemented
    field = parts[0]
    if isinstance(field, DenseColumns) or field.weights is not None or field.ids.shape[-1] != 1:
        return NotImplemented
    return field.ids.clone() if keepdim else field.ids[..., 0].clone()


@rule(F.dropout)
def _(
    func: Any, input: OneHot, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training:
        return NotImplemented
    func(meta_tensor(input), p, training)  # raises torch's errors
    return input
