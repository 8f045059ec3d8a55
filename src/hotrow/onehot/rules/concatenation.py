"""Concatenation of one-hots and dense tensors, along the class axis or a batch axis."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.gradient import expanded_zeros, transform_proxy
from hotrow.onehot.parts import DenseColumns, Field, Part, all_weights, merge_fields
from hotrow.onehot.registry import rule
from hotrow.onehot.results import meta_tensor, sizes_of
from hotrow.onehot.rules.dtypes import cast, casts_exactly
from hotrow.onehot.rules.indexing import keep_in_graph
from hotrow.onehot.tensor import OneHot


@rule(torch.cat, torch.concat, torch.concatenate)
def _(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    axis = kwargs.pop("axis", dim)
    tensors = list(tensors)
    if kwargs or not isinstance(axis, int):
        return NotImplemented
    out = func([meta_tensor(t) if isinstance(t, OneHot) else t.to("meta") for t in tensors], axis)
    if any(t.ndim != out.ndim for t in tensors):  # torch skips empty 1-D tensors
        return NotImplemented
    one_hots = [t for t in tensors if isinstance(t, OneHot)]
    if not all(
        casts_exactly(part, x.cached_dtype, out.dtype) for x in one_hots for part in x.parts
    ):
        return NotImplemented
    if axis % out.ndim == out.ndim - 1:
        parts: list[Part] = []
        for t in tensors:
            if isinstance(t, OneHot):
                parts += cast(t, out.dtype, None, True).parts
            else:
                parts.append(DenseColumns(t.to(out.dtype, copy=True)))
        # Products skip parts without columns, and their gradient is zeros.
        empty = [part for part in parts if not part.width]
        wide = merge_fields(part for part in parts if part.width) or parts[:1]
        kept = keep_in_graph(wide, empty, out.dtype)
        return NotImplemented if kept is None else _concatenated(kept, out, tensors, axis)
    if len(one_hots) < len(tensors):
        return NotImplemented
    same_dtype_one_hots = [
        x if x.cached_dtype == out.dtype else cast(x, out.dtype, None, True) for x in one_hots
    ]
    part_lists = _matching_parts(same_dtype_one_hots)
    if part_lists is None:
        return NotImplemented
    parts = [_concatenate_parts(rows, axis) for rows in zip(*part_lists, strict=True)]
    return _concatenated(parts, out, tensors, axis)


def _concatenated(parts: list[Part], out: Tensor, tensors: list[Tensor], axis: int) -> OneHot:
    """Return a one-hot with these parts that passes its gradient on to `tensors`."""
    one_hots = [t for t in tensors if isinstance(t, OneHot)]
    proxies = [t.grad_proxy if isinstance(t, OneHot) else None for t in tensors]

    def transform(*inputs: Tensor) -> Tensor:
        remaining = iter(inputs)
        pieces = [
            expanded_zeros(sizes_of(t), out.dtype, one_hots[0].cached_device)
            if proxy is None
            else next(remaining)
            for t, proxy in zip(tensors, proxies, strict=True)
        ]
        return torch.cat(pieces, axis)

    origins = frozenset().union(*(x.origins for x in one_hots))
    proxy = transform_proxy(transform, out, *proxies)
    return OneHot(parts, out.dtype, proxy, None, origins, out.stride())


def _matching_parts(one_hots: list[OneHot]) -> list[tuple[Part, ...]] | None:
    """Return the parts of each one-hot, or None if the parts differ in type or size."""
    part_lists = [x.parts for x in one_hots]

    def layout(part: Part) -> tuple[int, int]:
        return part.width, part.ids.shape[-1] if isinstance(part, Field) else -1

    layouts = {tuple(map(layout, parts)) for parts in part_lists}
    return part_lists if len(layouts) == 1 else None


def _concatenate_parts(parts: tuple[Any, ...], axis: int) -> Part:
    if isinstance(parts[0], DenseColumns):
        return DenseColumns(torch.cat([part.values for part in parts], axis))
    ids = torch.cat([part.ids for part in parts], axis)
    weights = all_weights(parts)
    return Field(ids, None if weights is None else torch.cat(weights, axis), parts[0].width)


@rule(torch.stack)
def _(func: Any, tensors: Any, dim: int = 0, **kwargs: Any) -> Any:
    tensors = list(tensors)
    if kwargs or not all(isinstance(t, OneHot) for t in tensors):
        return NotImplemented
    func([meta_tensor(t) for t in tensors], dim)  # raises torch's errors
    count = len(tensors[0].sizes) + 1
    if dim % count == count - 1:
        return NotImplemented
    return torch.cat([t.unsqueeze(dim) for t in tensors], dim % count)
