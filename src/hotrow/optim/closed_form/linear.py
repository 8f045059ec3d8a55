"""The closed form of rules that are linear when the gradient is zero: a product of small matrices.

With g = 0, the updates of SGD and ASGD multiply (w, *slots) by a matrix that is the same for every
element. So do the updates of RMSprop and Adadelta without decay. To find the columns of this
matrix, hotrow applies the update to the unit vectors in rational arithmetic. If the rule is not
linear at a step, that step is replayed. The matrix products over aligned blocks of 1, 2, 4, ...
steps are stored in float64. So the matrix of any K consecutive steps, under any schedule, is a
product of at most 2 log2 K blocks.

Squaring 1 - e doubles its relative error, so a product of K matrices would accumulate K rounding
errors, all in the same direction. To avoid that, each product also stores how far its diagonal is
from 1. While this distance is small, the diagonal is computed from it. This leaves only one or two
rounding errors per block.

Infinite and NaN values need four rules. A diagonal that would underflow keeps a magnitude of at
least `MIN_SHRINK`, because 0 would turn an infinite mean square into 0. If the product overflows,
one step is replayed, and the next product is shorter. Steps of a row with an infinite or NaN weight
are replayed too, because torch may compute inf - inf or 0 * NaN. So are the steps of a row whose
state is not usable: torch divides the zero gradient by the root of a mean square, so the weight
becomes NaN if the mean square is NaN or negative. Once the weight and its whole state are NaN, the
matrices apply again. Only the first slot may be infinite, if it is a mean square.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.program import FastForward
from hotrow.optim.closed_form.base import Coefficients, to_columns
from hotrow.optim.closed_form.rational import Rational

MIN_STEPS = 8  # compiled code replays up to seven missed steps one by one
NEAR_ONE = 0.5  # below this distance from 1, the diagonal is computed as 1 plus the distance
MIN_SHRINK = 2.0**-1022  # the smallest normal number; a smaller product of a diagonal is not exact


def compute_factors(t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """Set `factors` to the product of the step matrices from t to `end_step - 1`."""
    blocks, block_starts, first_step, _, _ = coefficients
    if end_step - t < MIN_STEPS or t < first_step:
        return
    n = blocks.shape[1]
    product, work = np.zeros((n, n + 1)), np.empty((n, n + 1))
    for a in range(n):
        product[a, a] = 1
    while t < end_step:
        level = 0
        while t & (1 << level) == 0 and t + (2 << level) <= end_step:
            level += 1
        t += 1 << level
        block = blocks[block_starts[t - 1] + level]
        for a in range(n):
            for b in range(n):
                total = 0.0
                for c in range(n):
                    if not a == b == c:
                        total += block[a, c] * product[c, b]
                if a == b:
                    e, f = block[a, n], product[a, n]
                    work[a, n] = total + (e + f + e * f)
                    total += block[a, a] * product[a, a]
                    if abs(work[a, n]) < NEAR_ONE:
                        total = 1 + work[a, n]
                    elif abs(total) < MIN_SHRINK and block[a, a] != 0 and product[a, a] != 0:
                        total = math.copysign(MIN_SHRINK, total)
                work[a, b] = total
        product, work = work, product
    is_finite = True
    for a in range(n):
        for b in range(n):
            factors[a * n + b] = product[a, b]
            is_finite = is_finite and math.isfinite(product[a, b])
    if not is_finite:
        factors[0] = np.nan  # `fast_forward` checks only this factor


def fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """Advance a row from step t to `end_step`, or leave it unchanged."""
    _, _, first_step, root_count, is_centered = coefficients
    if end_step - t < MIN_STEPS or t < first_step or math.isnan(factors[0]):
        return t
    n, width = len(slots) + 1, len(w)
    old, new = np.empty((n, width)), np.zeros((n, width))
    unusual = 0  # counting without an early exit lets LLVM vectorize the loops
    for j in range(width):
        old[0, j] = w[j]
        unusual += not abs(w[j]) < np.inf
    if len(slots) > 0:  # numba can't compile indexing into an empty tuple
        for b in range(n - 1):
            for j in range(width):
                old[b + 1, j] = slots[b][j]
            if b < root_count:
                for j in range(width):
                    unusual += not slots[b][j] >= 0
            if b >= min(root_count, 1):
                for j in range(width):
                    unusual += not abs(slots[b][j]) < np.inf
        if is_centered:
            for j in range(width):
                unusual += old[1, j] < old[2, j] * old[2, j]
    if unusual:
        for j in range(width):
            numbers = 0
            for a in range(n):
                numbers += old[a, j] == old[a, j]
            if numbers == 0:  # the loops above have counted the weight and each slot
                unusual -= root_count + n - min(root_count, 1)
        if unusual:
            return t
    for a in range(n):
        for b in range(n):
            scale = factors[a * n + b]
            # Skip 0 * inf outside the diagonal, because a replay would not produce this NaN.
            if a == b or scale != 0:
                for j in range(width):
                    new[a, j] += scale * old[b, j]
    for j in range(width):
        w[j] = new[0, j]
    if len(slots) > 0:
        for b in range(n - 1):
            for j in range(width):
                slots[b][j] = new[b + 1, j]
    return end_step


def multiply_blocks(second: NDArray[np.float64], first: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the product of two blocks, or of two stacks of blocks.

    Each block has shape (..., n, n + 1): an (n, n) matrix followed by a column that contains the
    diagonal minus 1.
    """
    n = first.shape[-2]
    diagonal = np.arange(n)
    product = np.empty_like(first)
    with np.errstate(all="ignore"):
        product[..., :n] = second[..., :n] @ first[..., :n]
        others = second[..., :n] * np.swapaxes(first[..., :n], -1, -2)
        others[..., diagonal, diagonal] = 0
        e, f = second[..., n], first[..., n]
        distance = others.sum(-1) + (e + f + e * f)
    product[..., n] = distance
    shrinks = product[..., diagonal, diagonal]
    if np.abs(shrinks).min(initial=1) < MIN_SHRINK:
        is_zero = (second[..., diagonal, diagonal] == 0) | (first[..., diagonal, diagonal] == 0)
        shrinks = np.where(is_zero, shrinks, raise_magnitude(shrinks, MIN_SHRINK))
    product[..., diagonal, diagonal] = np.where(np.abs(distance) < NEAR_ONE, 1 + distance, shrinks)
    return product


def raise_magnitude(numbers: NDArray[np.float64], least: Any) -> NDArray[np.float64]:
    """Return the numbers with a magnitude of at least `least`; their signs don't change."""
    raised: NDArray[np.float64] = np.copysign(np.maximum(np.abs(numbers), least), numbers)
    return raised


class LinearRecurrence:
    """The matrix of every step in a ledger, and the products over aligned blocks of steps.

    Arguments:
        update: see `Rule`.
        flags: see `Rule`.
        slot_count: the number of slots.
        root_count: how many of the first slots are mean squares, of which the rule takes the root.
        is_centered: whether the rule subtracts the square of the second slot from the first slot
            before it takes the root.
    """

    def __init__(
        self,
        update: Callable[..., Any],
        flags: tuple[bool, ...],
        slot_count: int,
        root_count: int = 0,
        is_centered: bool = False,
    ) -> None:
        self.update, self.flags, self.size = update, flags, slot_count + 1
        self.roots = root_count, int(is_centered)
        self.first_step = 0  # steps before `first_step` are replayed one by one
        self.identity = np.eye(self.size, self.size + 1)
        self.blocks = np.empty((128, self.size, self.size + 1))
        self.block_starts = np.empty(64, np.int64)  # the first block that ends at each step
        self.entry_count, self.block_count = 0, 0
        self.entry: tuple[float, ...] = ()
        self.matrix: NDArray[np.float64] | None = None

    @functools.cached_property
    def fast_forward(self) -> FastForward:
        """See `ClosedForm.fast_forward`."""
        return FastForward(
            fast_forward,
            self.fast_forward_batch,
            compute_factors,
            self.size**2,
            "linear",
            changed_since=self.changed_since,
        )

    def changed_since(self, step: int) -> tuple[slice, ...]:
        """See `FastForward.changed_since`."""
        is_old = step < self.entry_count
        first_block = int(self.block_starts[step]) if is_old else self.block_count
        return slice(first_block, self.block_count), slice(step, self.entry_count)

    def compute_coefficients(
        self, entries: NDArray[np.float64], end_step: int, dtype: torch.dtype
    ) -> Coefficients | None:
        """Return the coefficients up to `end_step`."""
        for i in range(self.entry_count, end_step):
            self._add_entry(i, tuple(entries[i].tolist()))
        self.entry_count = max(self.entry_count, end_step)
        return self.blocks, self.block_starts, self.first_step, *self.roots

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Fast-forward many rows in plain torch."""
        blocks, block_starts, first_step, root_count, is_centered = coefficients
        in_range = steps >= first_step
        t = np.where(in_range, steps, end_step)
        product = np.repeat(self.identity[None], len(t), axis=0)
        while (remaining := np.flatnonzero(t < end_step)).size:
            begin = t[remaining]
            # A block of 2^level steps must start at a multiple of 2^level and end by `end_step`.
            level = np.bitwise_count((begin ^ (begin - 1)) >> 1).astype(np.int64)
            max_level = np.frexp(end_step - begin)[1] - 1
            level = np.minimum(np.where(begin == 0, max_level, level), max_level)
            t[remaining] = begin + (1 << level)
            product[remaining] = multiply_blocks(
                blocks[block_starts[t[remaining] - 1] + level], product[remaining]
            )
        old = w, *slots
        new = [torch.zeros_like(w) for _ in old]
        unusual = ~w.isfinite()
        for b, slot in enumerate(slots):
            if b < root_count:
                unusual |= ~(slot >= 0)
            if b >= min(root_count, 1):
                unusual |= ~slot.isfinite()
        if is_centered:
            unusual |= slots[0] < slots[1] * slots[1]
        unusual &= ~torch.stack(old).isnan().all(0)
        reached = torch.from_numpy(in_range).to(w.device) & ~unusual.any(1)
        is_used = (product[..., : self.size] != 0).any(0) | np.eye(self.size, dtype=bool)
        for a, b in np.argwhere(is_used).tolist():
            factors = product[:, a, b, None]
            if a == b and torch.finfo(w.dtype).tiny > MIN_SHRINK:
                least = np.where(factors == 0, 0, torch.finfo(w.dtype).tiny)
                factors = raise_magnitude(factors, least)
            (scale,) = to_columns(factors, w)
            reached &= scale[:, 0].isfinite()
            # Skip 0 * inf outside the diagonal, because a replay would not produce this NaN.
            new[a] += scale * old[b] if a == b else torch.where(scale == 0, 0, scale * old[b])
        return new[0], tuple(new[1:]), reached

    def _add_entry(self, i: int, entry: tuple[float, ...]) -> None:
        if entry != self.entry:
            self.entry, self.matrix = entry, self._step_matrix(entry)
        if self.matrix is None:
            self.first_step = i + 1
        block = self.identity if self.matrix is None else self.matrix
        if i == len(self.block_starts):
            self.block_starts = np.concatenate(
                [self.block_starts, np.empty_like(self.block_starts)]
            )
        if self.block_count + 64 > len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.empty_like(self.blocks)])
        self.block_starts[i] = self.block_count
        self.blocks[self.block_count] = block
        self.block_count += 1
        # Each block of 2^(l+1) steps that ends at step i is the product of two blocks of 2^l steps.
        level, before = 0, i
        while before & (1 << level):
            block = multiply_blocks(block, self.blocks[self.block_starts[i - (1 << level)] + level])
            self.blocks[self.block_count] = block
            self.block_count += 1
            level += 1

    def _step_matrix(self, entry: tuple[float, ...]) -> NDArray[np.float64] | None:
        """Return a step's matrix and its diagonal minus 1, or None if the rule is not linear."""
        n = self.size
        try:
            scalars = tuple(map(Rational, entry))
            images = [self._image(scalars, [int(a == b) for a in range(n)]) for b in range(n)]
            # Apply the update to one more vector to check that the rule is linear.
            mixed = self._image(scalars, list(range(2, 2 + n)))
        except (ArithmeticError, ValueError):  # raised for inf, NaN or 0 / 0
            return None
        for a in range(n):
            if mixed[a].value != sum((2 + b) * images[b][a].value for b in range(n)):
                return None
        matrix = [[float(images[b][a].value) for b in range(n)] for a in range(n)]
        if any(matrix[a][a] == 0 for a in range(1, 1 + self.roots[0])):
            return None  # torch's step turns an infinite mean square into 0 * inf = NaN
        distances = [float(images[a][a].value - 1) for a in range(n)]
        return np.array([[*row, e] for row, e in zip(matrix, distances, strict=True)])

    def _image(self, entry: tuple[Rational, ...], vector: list[int]) -> list[Rational]:
        """Return the values of `(w, *slots)` after a step with a zero gradient."""
        w, *slots = map(Rational, vector)
        w, slots = self.update(w, Rational(0), tuple(slots), entry, self.flags)
        return [w, *slots]
