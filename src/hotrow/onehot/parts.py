"""The parts of a one-hot: fields, which have a few ones per row, and dense columns."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MAX_PAIRS = 64  # the maximum number of pairs of ids to compare in each row


@dataclass(frozen=True)
class Field:
    """Columns in which each row is the sum of a few one-hots.

    Attributes:
        ids: (*batch, K) int64, from 0 to width - 1. K is 1 for a one-hot, larger for a bag, and 0
            for zeros.
        weights: (*batch, K), the factor of each one-hot; None if all factors are 1.
        width: the number of columns.
    """

    ids: Tensor
    weights: Tensor | None
    width: int

    @property
    def batch_tensor(self) -> Tensor:
        """A tensor whose leading axes are the batch axes."""
        return self.ids

    @property
    def has_one_id(self) -> bool:
        """True if each row has exactly one id."""
        return self.ids.shape[-1] == 1

    def map(self, transform: Callable[[Tensor], Tensor]) -> Field:
        """Apply `transform`, which must keep the last axis, to the ids and the weights."""
        weights = None if self.weights is None else transform(self.weights)
        return Field(transform(self.ids), weights, self.width)

    def to(self, dtype: torch.dtype, device: torch.device | None, copy: bool = False) -> Field:
        """Convert the weights to this dtype, and move the field to this device.

        The ids and weights are never modified in place, so they don't need to be copied.
        """
        if self.weights is None and device is None:
            return self
        weights = None if self.weights is None else self.weights.to(device=device, dtype=dtype)
        return Field(self.ids.to(device=device), weights, self.width)

    @property
    def is_short(self) -> bool:
        """True if each row has so few ids that all pairs of them can be compared."""
        return self.ids.shape[-1] ** 2 <= MAX_PAIRS

    def weights_or_ones(self, dtype: torch.dtype) -> Tensor:
        """Return the (*batch, K) weights, or ones of this dtype if there are none."""
        if self.weights is not None:
            return self.weights
        return self.ids.new_ones((), dtype=dtype).expand(self.ids.shape)

    def has_repeats(self) -> bool:
        """Return whether any row has two equal ids."""
        ids = self.ids.sort(-1).values
        return bool((ids[..., 1:] == ids[..., :-1]).any())

    def without_repeats(self, dtype: torch.dtype) -> Field:
        """Return an equal field in which repeats of an id within a row have weight 0."""
        columns = self.ids.unbind(-1)
        sums = list(self.weights_or_ones(dtype).unbind(-1))
        for j in range(1, len(columns)):
            for i in range(j):
                is_equal = columns[i] == columns[j]
                repeated = sums[j].masked_fill(~is_equal, 0)
                sums[i] = sums[i] | repeated if dtype == torch.bool else sums[i] + repeated
                sums[j] = sums[j].masked_fill(is_equal, 0)
        weights = torch.stack(sums, -1) if sums else self.weights_or_ones(dtype)
        return Field(self.ids, weights, self.width)

    def may_round_sums(self) -> bool:
        """Return whether torch may round the sum of the weights of equal ids differently."""
        weights = self.weights
        if weights is None or not (weights.is_floating_point() or weights.is_complex()):
            return False
        if not self.is_short:
            return True
        if weights.is_floating_point() and bool((weights == weights.round()).all()):
            largest_exact = 2 / torch.finfo(weights.dtype).eps
            if bool(weights.double().abs().sum(-1).le(largest_exact).all()):
                return False
        merged = self.without_repeats(weights.dtype).weights
        return merged is not None and bool(weights.count_nonzero() > merged.count_nonzero())

    def to_dense(self, dtype: torch.dtype, fill: float = 0) -> Tensor:
        """Return the dense columns, (*batch, width), with `fill` in entries that no id selects."""
        shape = (*self.ids.shape[:-1], self.width)
        if fill != 0:
            result = self.ids.new_full(shape, fill, dtype=dtype)
            return result.scatter_(-1, self.ids, self.weights_or_ones(dtype))
        if self.weights is None and self.has_one_id:
            return self.ids.new_zeros(shape, dtype=dtype).scatter_(-1, self.ids, 1)
        sum_dtype = torch.uint8 if dtype == torch.bool else dtype
        if self.weights is not None and dtype.is_floating_point and self.ids.shape[-1] > 2:
            # Sums in float64 are rounded only by the final conversion, whatever the order of terms.
            sum_dtype = torch.float64
        zeros = self.ids.new_zeros(shape, dtype=sum_dtype)
        weights = self.weights_or_ones(sum_dtype).to(sum_dtype)
        return zeros.scatter_add_(-1, self.ids, weights).to(dtype)


@dataclass(frozen=True)
class DenseColumns:
    """Columns that store all their values.

    Attributes:
        values: (*batch, width).
    """

    values: Tensor

    @property
    def batch_tensor(self) -> Tensor:
        """A tensor whose leading axes are the batch axes."""
        return self.values

    @property
    def is_stored(self) -> bool:
        """Whether the values exist in memory."""
        return True

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.values.shape[-1]

    def map(self, transform: Callable[[Tensor], Tensor]) -> DenseColumns:
        """Apply `transform`, which must keep the last axis, to the values."""
        return DenseColumns(transform(self.values))

    def to(
        self, dtype: torch.dtype, device: torch.device | None, copy: bool = False
    ) -> DenseColumns:
        """Convert the values to this dtype, and move them to this device."""
        return DenseColumns(self.values.to(device=device, dtype=dtype, copy=copy))

    def to_dense(self, dtype: torch.dtype, fill: float = 0) -> Tensor:
        """Return the values, (*batch, width)."""
        return self.values.to(dtype)


Part = Field | DenseColumns


def flatten(parts: tuple[Part, ...]) -> tuple[list[Tensor], tuple[Any, ...]]:
    """Return the tensors that the parts store, and the structure that `unflatten` needs."""
    tensors: list[Tensor] = []
    layout: list[tuple[int, bool] | None] = []
    for part in parts:
        if isinstance(part, DenseColumns):
            tensors += [part.values] if part.is_stored else []
            layout.append(None)
        else:
            tensors += [part.ids] if part.weights is None else [part.ids, part.weights]
            width = int(part.width)  # in compiled code, a SymInt would keep the value of one call
            layout.append((width, part.weights is not None))
    return tensors, tuple(layout)


def unflatten(tensors: Iterable[Tensor], layout: tuple[Any, ...]) -> list[Part]:
    """Rebuild the parts from the tensors and the structure that `flatten` returned."""
    remaining = iter(tensors)
    parts: list[Part] = []
    for field_layout in layout:
        if field_layout is None:
            parts.append(DenseColumns(next(remaining)))
        else:
            width, has_weights = field_layout
            ids = next(remaining)
            parts.append(Field(ids, next(remaining) if has_weights else None, width))
    return parts


def split_gradient(parts: Iterable[Part], gradient: Tensor) -> list[Tensor | None]:
    """Return the gradient of each tensor that `flatten` returns; None for ids.

    Args:
        parts: the parts of a one-hot.
        gradient: the gradient of the dense tensor, (*batch, C).
    """
    result: list[Tensor | None] = []
    start = 0
    for part in parts:
        block = gradient[..., start : start + part.width]
        start += part.width
        if isinstance(part, DenseColumns):
            result += [block.to(part.values.dtype)] if part.is_stored else []
        elif part.weights is None:
            result.append(None)
        else:
            result += [None, block.gather(-1, part.ids).to(part.weights.dtype)]
    return result


def merge_fields(parts: Iterable[Part]) -> list[Part]:
    """Merge neighboring fields into one field, with ids relative to its first column."""
    result: list[Part] = []
    for part in parts:
        previous = result[-1] if result else None
        if isinstance(part, Field) and isinstance(previous, Field):
            weight_list = all_weights([previous, part])
            weights = None if weight_list is None else torch.cat(weight_list, -1)
            ids = torch.cat([previous.ids, part.ids + previous.width], -1)
            result[-1] = Field(ids, weights, previous.width + part.width)
        else:
            result.append(part)
    return result


def all_weights(fields: Sequence[Field]) -> list[Tensor] | None:
    """Return each field's weights (ones if it has none), or None if no field has weights."""
    first = next((field.weights for field in fields if field.weights is not None), None)
    return None if first is None else [field.weights_or_ones(first.dtype) for field in fields]


def keeps_sums(source: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether the sum of a few weights is the same before and after casting the weights.

    In bool, equal ids count once. In a small integer dtype, the sum can overflow. Casting to a
    smaller integer dtype keeps the sum, because both wrap around, except for 8-bit dtypes.
    """
    if source == dtype:
        return True
    if min(source.itemsize, dtype.itemsize) == 1:
        return False
    if source == torch.int64 or source.is_floating_point or source.is_complex:
        return True
    is_integer = not (dtype.is_floating_point or dtype.is_complex)
    return is_integer and dtype.itemsize <= source.itemsize


def have_same_memory(one: Tensor, other: Tensor) -> bool:
    """Return whether two tensors show the same memory in the same way, so they are equal."""
    return one is other or (
        one.dtype == other.dtype
        and one.data_ptr() == other.data_ptr()
        and one.shape == other.shape
        and one.stride() == other.stride()
        and one.is_neg() == other.is_neg()
        and one.is_conj() == other.is_conj()
    )
