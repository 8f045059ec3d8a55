"""Several one-hots to one: fields and dense columns side by side, or rows below each other."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.gradient import link, zeros
from hotrow.onehot.parts import Columns, Field, Part, all_weights, merged
from hotrow.onehot.registry import meta, rule
from hotrow.onehot.rules.dtypes import casts, to
from hotrow.onehot.tensor import OneHot


@rule(torch.cat, torch.concat, torch.concatenate)
def _(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    axis = kwargs.pop("axis", dim)
    tensors = list(tensors)
    if kwargs or not isinstance(axis, int):
        return NotImplemented
    out = func([meta(t) if isinstance(t, OneHot) else t.to("meta") for t in tensors], axis)
    if any(t.ndim != out.ndim for t in tensors):  # torch passes over empty ones
        return NotImplemented
    found = [t for t in tensors if isinstance(t, OneHot)]
    if not all(
        casts(part, x.kind, out.dtype) or x.kind == out.dtype for x in found for part in x.parts
    ):
        return NotImplemented
    if axis % out.ndim == out.ndim - 1:
        parts: list[Part] = []
        for t in tensors:
            if isinstance(t, OneHot):
                parts += t.parts if t.kind == out.dtype else to(t, out.dtype, None, True).parts
            elif t.shape[-1]:
                parts.append(Columns(t.to(out.dtype)))
        return _joined(merged(parts), out, tensors, axis)
    if len(found) < len(tensors):
        return NotImplemented
    same = [t if t.kind == out.dtype else to(t, out.dtype, None, True) for t in found]
    alike = _alike(same)
    if alike is None:
        return NotImplemented
    parts = [_cat_part(several, axis) for several in zip(*alike, strict=True)]
    return _joined(parts, out, tensors, axis)


def _joined(parts: list[Part], out: Tensor, tensors: list[Tensor], axis: int) -> OneHot:
    """Of these parts; its gradient goes to those that it is made of."""
    found = [t for t in tensors if isinstance(t, OneHot)]
    shadows = [t.shadow if isinstance(t, OneHot) else None for t in tensors]

    def change(*given: Tensor) -> Tensor:
        rest = iter(given)
        each = [
            zeros(_sizes(t), out.dtype, found[0].place) if shadow is None else next(rest)
            for t, shadow in zip(tensors, shadows, strict=True)
        ]
        return torch.cat(each, axis)

    origins = frozenset().union(*(x.origins for x in found))
    return OneHot(parts, out.dtype, link(change, out, *shadows), None, origins, out.stride())


def _sizes(t: Tensor) -> tuple[int, ...]:
    return t.sizes if isinstance(t, OneHot) else tuple(t.shape)


def _alike(found: list[OneHot]) -> list[tuple[Part, ...]] | None:
    """The parts of each, if they are of the same kinds and widths."""
    every = [x.parts for x in found]

    def layout(part: Part) -> tuple[int, int]:
        return part.width, part.ids.shape[-1] if isinstance(part, Field) else -1

    return every if len({tuple(map(layout, parts)) for parts in every}) == 1 else None


def _cat_part(several: tuple[Any, ...], axis: int) -> Part:
    if isinstance(several[0], Columns):
        return Columns(torch.cat([part.values for part in several], axis))
    ids = torch.cat([part.ids for part in several], axis)
    weights = all_weights(several)
    return Field(ids, None if weights is None else torch.cat(weights, axis), several[0].width)


@rule(torch.stack)
def _(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    tensors = list(tensors)
    if kwargs or not all(isinstance(t, OneHot) for t in tensors):
        return NotImplemented
    func([meta(t) for t in tensors], dim)  # torch's errors
    count = len(tensors[0].sizes) + 1
    if dim % count == count - 1:
        return NotImplemented
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim % count)
