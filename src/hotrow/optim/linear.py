"""A way over idle steps for rules that are linear without a gradient: one small matrix product.

With g = 0 the update of SGD, ASGD, RMSprop and Adadelta (the last two without decay) is a matrix
times (w, *slots), the same for every element. The matrix of a step is read off the rule itself,
from its values at the unit vectors; a step at which the rule turns out not to be linear is
replayed. Products over aligned blocks of 1, 2, 4, ... steps are kept, so that any stretch of K
steps, under any schedule, is a product of at most 2 log2 K of them, in float64.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray


def jump(table: Any, slots: Any, r: Any, t: Any, upto: Any, memo: Any) -> Any:
    """Bring row r from step t to `upto`, or leave it."""
    blocks, ends, first = memo
    if upto - t < 8 or t < first:
        return t
    n = len(slots) + 1
    columns = table.shape[1]
    product, work = np.eye(n), np.empty((n, n))
    while t < upto:
        level = 0
        while t & (1 << level) == 0 and t + (2 << level) <= upto:
            level += 1
        t += 1 << level
        block = blocks[ends[t - 1] + level]
        for a in range(n):
            for b in range(n):
                total = 0.0
                for c in range(n):
                    total += block[a, c] * product[c, b]
                work[a, b] = total
        product[:, :] = work
    old, new = np.empty((n, columns)), np.zeros((n, columns))
    for j in range(columns):
        old[0, j] = table[r, j]
    if len(slots) > 0:  # an empty tuple cannot be indexed, not even never
        for b in range(n - 1):
            for j in range(columns):
                old[b + 1, j] = slots[b][r, j]
    for a in range(n):
        for b in range(n):
            scale = product[a, b]
            if scale != 0:  # 0 * inf is not what the rule does
                for j in range(columns):
                    new[a, j] += scale * old[b, j]
    for j in range(columns):
        table[r, j] = new[0, j]
    if len(slots) > 0:
        for b in range(n - 1):
            for j in range(columns):
                slots[b][r, j] = new[b + 1, j]
    return upto


class Linear:
    """The matrices of every step of a ledger, and their products over aligned blocks."""

    def __init__(self, update: Callable[..., Any], flags: tuple[bool, ...], slots: int) -> None:
        self.jump = jump
        self.update, self.flags, self.size = update, flags, slots + 1
        self.first = 0  # steps before it are replayed
        self.blocks = np.empty((128, self.size, self.size))
        self.ends = np.empty(64, np.int64)  # where the blocks that end with a step begin
        self.done, self.used = 0, 0
        # The unit vectors, and one more vector: is its image the sum that it should be?
        self.mix = np.arange(2.0, 2.0 + self.size)
        inputs = np.concatenate([np.eye(self.size), self.mix[:, None]], axis=1)
        self.inputs = torch.from_numpy(inputs)
        self.entry: tuple[float, ...] = ()
        self.matrix: NDArray[np.float64] | None = None

    def advance(self, entries: NDArray[np.float64], upto: int) -> tuple[Any, ...] | None:
        """The memo for jumps to step `upto`."""
        for i in range(self.done, upto):
            self._add(i, tuple(entries[i].tolist()))
        self.done = max(self.done, upto)
        return (self.blocks, self.ends, self.first) if self.done else None

    def _add(self, i: int, entry: tuple[float, ...]) -> None:
        if entry != self.entry:
            self.entry, self.matrix = entry, self._read(entry)
        if self.matrix is None:
            self.first = i + 1
        block = np.eye(self.size) if self.matrix is None else self.matrix
        if i == len(self.ends):
            self.ends = np.concatenate([self.ends, np.empty_like(self.ends)])
        if self.used + 64 > len(self.blocks):
            self.blocks = np.concatenate([self.blocks, np.empty_like(self.blocks)])
        self.ends[i] = self.used
        self.blocks[self.used] = block
        self.used += 1
        # Block 2^(l+1) that ends here is the block 2^l that ends here after the one before it.
        level, before = 0, i
        while before & (1 << level):
            left = self.blocks[self.ends[i - (1 << level)] + level]
            with np.errstate(all="ignore"):
                block = block @ left
            self.blocks[self.used] = block
            self.used += 1
            level += 1

    def _read(self, entry: tuple[float, ...]) -> NDArray[np.float64] | None:
        """The matrix of a step; None if it has none."""
        w, *slots = self.inputs
        image = self.update(w, torch.zeros_like(w), tuple(slots), entry, self.flags)
        found = torch.stack([image[0], *image[1]]).numpy()
        matrix, mixed = found[:, :-1], found[:, -1]
        expected = matrix @ self.mix
        same = np.abs(mixed - expected) <= 1e-13 * (np.abs(matrix) @ self.mix)
        return matrix.copy() if bool(same.all()) and bool(np.isfinite(found).all()) else None
