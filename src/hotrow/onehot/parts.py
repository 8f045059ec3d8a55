"""What a one-hot is made of: fields of few ones, and dense columns, side by side."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


@dataclass(frozen=True)
class Field:
    """Columns in which a row is a sum of few one-hots.

    Attributes:
        ids: (*batch, K) int64, in 0..width-1; K = 1 for a one-hot, more for a bag, 0 for zeros.
        weights: (*batch, K), what each is multiplied with; None for ones.
        width: how many columns.
    """

    ids: Tensor
    weights: Tensor | None
    width: int

    def map(self, change: Callable[[Tensor], Tensor]) -> Field:
        """Changed along the batch; the last axis stays."""
        weights = None if self.weights is None else change(self.weights)
        return Field(change(self.ids), weights, self.width)

    def to(self, dtype: torch.dtype, device: torch.device | None) -> Field:
        """With weights of this dtype."""
        if self.weights is None and device is None:
            return self
        weights = None if self.weights is None else self.weights.to(device=device, dtype=dtype)
        return Field(self.ids.to(device=device), weights, self.width)

    def scales(self, dtype: torch.dtype) -> Tensor:
        """(*batch, K): the weights; ones of this dtype if there are none."""
        if self.weights is not None:
            return self.weights
        return torch.ones((), dtype=dtype, device=self.ids.device).expand(self.ids.shape)

    def write(self, dtype: torch.dtype) -> Tensor:
        """(*batch, width)."""
        shape = (*self.ids.shape[:-1], self.width)
        counted = torch.uint8 if dtype == torch.bool else dtype
        zeros = torch.zeros(shape, dtype=counted, device=self.ids.device)
        return zeros.scatter_add_(-1, self.ids, self.scales(counted).to(counted)).to(dtype)


@dataclass(frozen=True)
class Columns:
    """Columns that are written out.

    Attributes:
        values: (*batch, width).
    """

    values: Tensor

    @property
    def width(self) -> int:
        """How many columns."""
        return self.values.shape[-1]

    def map(self, change: Callable[[Tensor], Tensor]) -> Columns:
        """Changed along the batch."""
        return Columns(change(self.values))

    def to(self, dtype: torch.dtype, device: torch.device | None) -> Columns:
        """With values of this dtype."""
        return Columns(self.values.to(device=device, dtype=dtype))

    def write(self, dtype: torch.dtype) -> Tensor:
        """(*batch, width)."""
        return self.values.to(dtype)


Part = Field | Columns


def held(part: Part) -> Tensor:
    """A tensor over the batch."""
    return part.ids if isinstance(part, Field) else part.values


def flatten(parts: tuple[Part, ...]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """The tensors in parts, and how they are put together."""
    tensors: list[Tensor] = []
    layout: list[tuple[int, bool] | None] = []
    for part in parts:
        if isinstance(part, Columns):
            tensors.append(part.values)
            layout.append(None)
        else:
            tensors += [part.ids] if part.weights is None else [part.ids, part.weights]
            layout.append((part.width, part.weights is not None))
    return tensors, tuple(layout)


def unflatten(tensors: Iterable[Tensor], layout: tuple[Any, ...]) -> list[Part]:
    """The inverse of `flatten`."""
    rest = iter(tensors)
    parts: list[Part] = []
    for each in layout:
        if each is None:
            parts.append(Columns(next(rest)))
        else:
            width, weighted = each
            parts.append(Field(next(rest), next(rest) if weighted else None, width))
    return parts


def merged(parts: Iterable[Part]) -> list[Part]:
    """Neighbouring fields as one: a bag, of ids that each count from their field's start."""
    result: list[Part] = []
    for part in parts:
        before = result[-1] if result else None
        if isinstance(part, Field) and isinstance(before, Field):
            several = all_weights([before, part])
            weights = None if several is None else torch.cat(several, -1)
            ids = torch.cat([before.ids, part.ids + before.width], -1)
            result[-1] = Field(ids, weights, before.width + part.width)
        else:
            result.append(part)
    return result


def all_weights(fields: Sequence[Field]) -> list[Tensor] | None:
    """The weights of each, ones for those that have none; None if none of them has any."""
    weighted = next((field.weights for field in fields if field.weights is not None), None)
    return None if weighted is None else [field.scales(weighted.dtype) for field in fields]
