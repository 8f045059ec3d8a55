"""The order of a one-hot's axes. The class axis need not be the last axis."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from torch import Tensor


@dataclass(frozen=True)
class Layout:
    """The order of a tensor's axes, relative to the order (*batch, *classes).

    The parts of a one-hot always have the axes (*batch, C). A layout splits C into one or more
    class axes, and permutes all axes.

    Attributes:
        classes: the sizes of the class axes; their product is C.
        order: axis i of the tensor is axis order[i] of (*batch, *classes).
    """

    classes: tuple[int, ...]
    order: tuple[int, ...]

    @cached_property
    def batch_count(self) -> int:
        """The number of batch axes."""
        return len(self.order) - len(self.classes)

    @cached_property
    def class_axes(self) -> list[int]:
        """The tensor's class axes, in the order of `classes`."""
        return [self.order.index(self.batch_count + i) for i in range(len(self.classes))]

    @cached_property
    def batch_axes(self) -> list[int]:
        """The tensor's batch axes, in order."""
        return [self.order.index(i) for i in range(self.batch_count)]

    @cached_property
    def is_plain(self) -> bool:
        """True if there is one class axis, and no axis is permuted."""
        return len(self.classes) == 1 and self.order == tuple(range(len(self.order)))

    def batch_sizes(self, sizes: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the batch axes, given the sizes of the tensor."""
        return tuple(sizes[axis] for axis in self.batch_axes)

    def sizes(self, batch: Sequence[int]) -> tuple[int, ...]:
        """Return the sizes of the tensor, given the sizes of the batch axes."""
        all_sizes = (*batch, *self.classes)
        return tuple(all_sizes[axis] for axis in self.order)

    def arrange(self, values: Tensor) -> Tensor:
        """Arrange (*batch, C) values in this layout.

        If the values are (*batch, 1), every class axis gets size 1.
        """
        ones = (1,) * len(self.classes)
        classes = ones if values.shape[-1] == 1 else self.classes
        if len(classes) > 1:
            values = values.reshape(*values.shape[:-1], *classes)
        return values.permute(self.order)

    def restore(self, values: Tensor) -> Tensor:
        """Return the (*batch, C) values of a tensor in this layout; the inverse of `arrange`."""
        axes = self.batch_axes + self.class_axes
        values = values.permute(axes)
        return values.flatten(self.batch_count) if len(self.classes) > 1 else values

    def permuted(self, order: Sequence[int]) -> tuple[Layout, list[int]]:
        """Permute the tensor's axes.

        Returns:
            the new layout, and the permutation to apply to the batch axes of the ids and weights.
        """
        count = self.batch_count
        new_order = [self.order[axis] for axis in order]
        batch = [axis for axis in new_order if axis < count]
        renamed = (batch.index(axis) if axis < count else axis for axis in new_order)
        return Layout(self.classes, tuple(renamed)), batch


def plain_layout(batch_count: int, width: int) -> Layout:
    """Return the layout of a one-hot whose class axis is the last axis."""
    return Layout((width,), tuple(range(batch_count + 1)))


def split_layout(shape: Sequence[int], width: int) -> Layout | None:
    """Return the layout whose class axes are the last axes that together have size `width`.

    Returns None if there are no such axes.
    """
    for first in range(len(shape) - 1, -1, -1):
        if math.prod(shape[first:]) == width:
            return Layout(tuple(shape[first:]), tuple(range(len(shape))))
    return None


def contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the strides of a contiguous tensor."""
    strides = [1]
    for size in sizes[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1])
