"""The cumulative sum of a one-hot along a batch axis, computed only for the entries in use."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable

import torch
from torch import Tensor

from hotrow.onehot.parts import DenseColumns, Field

# Returns the entries of an operand that correspond to the entries of a running count.
Pick = Callable[[Tensor], Tensor]
Change = Callable[[Tensor, Pick], Tensor]


class RunningCount(DenseColumns):
    """Columns that count ids: entry (row, c) is the number of ids equal to c up to this row.

    Mixture-of-experts models use such counts to compute the position of a token within its expert.
    These models need only the entries at the ids, which `gather` finds by binary search. `values`
    computes all entries.

    Rows that differ only in their position along the axis of the sum form a group. A row's number
    is `group * length + position`. Sorting the ids by group, id and position puts the ids that an
    entry counts next to each other.

    Attributes:
        field: the one-hot.
        axis: the batch axis of the sum.
        dtype: the dtype of the sum.
        keys: (M,), the sorted keys of the ids: `(group * width + id) * length + position`.
        order: (M,), the positions of the sorted keys among the field's ids.
        totals: (M + 1,), the cumulative sums of the weights, starting at 0; None if all
            weights are 1.
        rows: (*batch, 1), the row numbers, in any order.
        is_moved: whether `rows` are in a different order than in the field.
        is_exclusive: whether to exclude a row's own ids from its counts.
        change: an elementwise function that is applied to the counts, or None.
        has_operands: whether `change` also reads tensors with rows that correspond to `rows`.

    Args:
        field: the one-hot; its weights must be integers with sums that are exact in the dtype.
        axis: the batch axis of the sum.
        dtype: the dtype of the sum.
    """

    field: Field
    axis: int
    dtype: torch.dtype
    keys: Tensor
    order: Tensor
    totals: Tensor | None
    rows: Tensor
    is_moved: bool
    is_exclusive: bool
    change: Change | None
    has_operands: bool

    def __init__(self, field: Field, axis: int, dtype: torch.dtype) -> None:
        batch, device = field.ids.shape[:-1], field.ids.device
        length, groups = batch[axis], math.prod(batch) // max(batch[axis], 1)
        others = [size for i, size in enumerate(batch) if i != axis]
        rows = torch.arange(groups * length, device=device).reshape(*others, length, 1)
        rows = rows.movedim(-2, axis)
        keys, order = _keys(rows, field.ids, length, field.width).flatten().sort()
        totals = None
        if field.weights is not None:
            sums = field.weights.expand(field.ids.shape).flatten()[order].double().cumsum(0)
            totals = torch.cat([sums.new_zeros(1), sums])
        self._set(
            field=field, axis=axis, dtype=dtype, keys=keys, order=order, totals=totals, rows=rows,
            is_moved=False, is_exclusive=False, change=None, has_operands=False,
        )  # fmt: skip

    def _set(self, **attributes: object) -> None:
        vars(self).update(attributes)  # the base class is frozen

    @property
    def batch_tensor(self) -> Tensor:
        """A tensor whose leading axes are the batch axes."""
        return self.rows

    @property
    def is_stored(self) -> bool:
        """False, because `values` is computed on first use."""
        return False

    @property
    def width(self) -> int:
        """The number of columns."""
        return self.field.width

    @functools.cached_property
    def values(self) -> Tensor:
        """All entries, (*batch, width)."""
        values = self.field.to_dense(self.dtype).cumsum_(self.axis)
        if self.is_exclusive:
            weights = self.field.weights_or_ones(self.dtype).to(self.dtype)
            values.scatter_add_(-1, self.field.ids, -weights)
        if self.is_moved:
            values = values.movedim(self.axis, -2).reshape(-1, self.width)[self.rows[..., 0]]
        return values if self.change is None else self.change(values, lambda t: t)

    def gather(self, ids: Tensor, pick: Pick) -> Tensor:
        """Return the entries at (*batch, K) ids; `pick` does the same for an operand."""
        is_own = ids is self.field.ids and self.field.has_one_id and not self.is_moved
        start, stop = self._own_ranges() if is_own else self._find_ranges(ids)
        counts = stop - start if self.totals is None else self.totals[stop] - self.totals[start]
        counts = counts.to(self.dtype)
        return counts if self.change is None else self.change(counts, pick)

    def _find_ranges(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """For each entry at the ids, return the start and stop of the sorted keys to count."""
        length = self.field.ids.shape[self.axis]
        last = _keys(self.rows, ids, length, self.width).contiguous()
        first = (last - self.rows % length).contiguous()
        start = torch.searchsorted(self.keys, first)
        return start, torch.searchsorted(self.keys, last, right=not self.is_exclusive)

    def _own_ranges(self) -> tuple[Tensor, Tensor]:
        """Return the ranges for the field's own ids, without a binary search."""
        shape, length = self.field.ids.shape, self.field.ids.shape[self.axis]
        places = torch.arange(len(self.keys), device=self.keys.device)
        first = self.keys - self.keys % length
        is_first = torch.ones_like(first, dtype=torch.bool)
        is_first[1:] = first[1:] != first[:-1]
        starts = torch.where(is_first, places, 0).cummax(0).values
        stops = places if self.is_exclusive else places + 1
        start = torch.empty_like(places).scatter_(0, self.order, starts)
        stop = torch.empty_like(places).scatter_(0, self.order, stops)
        return start.reshape(shape), stop.reshape(shape)

    def apply(self, function: Callable[..., Tensor], *operands: Tensor) -> RunningCount:
        """Apply an elementwise function to the entries and to tensors of the same shape."""
        before = self.change

        def change(entries: Tensor, pick: Pick) -> Tensor:
            entries = entries if before is None else before(entries, pick)
            return function(entries, *map(pick, operands))

        return self._replace(change=change, has_operands=self.has_operands or bool(operands))

    def exclusive(self) -> RunningCount:
        """Return the running count that excludes each row's own ids."""
        return self._replace(is_exclusive=True)

    def map(self, transform: Callable[[Tensor], Tensor]) -> DenseColumns:
        """Apply `transform`, which must keep the last axis, to the rows."""
        rows = transform(self.rows)
        if self.has_operands and rows is not self.rows:
            return super().map(transform)
        return self._replace(rows=rows, is_moved=self.is_moved or rows is not self.rows)

    def to(
        self, dtype: torch.dtype, device: torch.device | None, copy: bool = False
    ) -> DenseColumns:
        """Convert the entries to this dtype, and move them to this device."""
        if device is not None and device != self.keys.device:
            return super().to(dtype, device, copy)
        return self.apply(lambda t: t.to(dtype))

    def _replace(self, **changes: object) -> RunningCount:
        other = RunningCount.__new__(RunningCount)
        other._set(**{k: v for k, v in vars(self).items() if k != "values"} | changes)
        return other


def _keys(rows: Tensor, ids: Tensor, length: int, width: int) -> Tensor:
    """Return the sort keys of the ids in these rows."""
    return (rows // length * width + ids) * length + rows % length
