"""A way over idle steps for rules that are linear without a gradient: one small matrix product.

With g = 0 the update of SGD, ASGD, RMSprop and Adadelta (the last two without decay) is a matrix
times (w, *slots), the same for every element. The matrix of a step is read off the rule itself,
from its values at the unit vectors in rational numbers; a step at which the rule turns out not to
be linear is replayed. Products over aligned blocks of 1, 2, 4, ... steps are kept, so that any
stretch of K steps, under any schedule, is a product of at most 2 log2 K of them, in float64.

Squaring 1 - e doubles its relative error, so a product of K would be off by K roundings, all in
one direction. So the distance of the diagonal from 1 is kept beside each product, and the
diagonal made of it until it is far from 1: what is left is a rounding or two a block.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.optim.closed_form.rational import Exact
from hotrow.optim.closed_form.shortcut import Memo, columns

FEW = 8  # so few steps are replayed where that is compiled
NEAR = 0.5  # to 1: the diagonal is 1 and its distance


def jump(w: Any, slots: Any, t: Any, upto: Any, memo: Any) -> Any:
    """Bring a row from step t to `upto`, or leave it."""
    blocks, ends, first = memo
    if upto - t < FEW or t < first:
        return t
    n = len(slots) + 1
    width = len(w)
    product, work = np.zeros((n, n + 1)), np.empty((n, n + 1))
    for a in range(n):
        product[a, a] = 1
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
                    if not a == b == c:
                        total += block[a, c] * product[c, b]
                if a == b:
                    e, f = block[a, n], product[a, n]
                    work[a, n] = total + (e + f + e * f)
                    total += block[a, a] * product[a, a]
                    if abs(work[a, n]) < NEAR:
                        total = 1 + work[a, n]
                work[a, b] = total
        product[:, :] = work
    old, new = np.empty((n, width)), np.zeros((n, width))
    for j in range(width):
        old[0, j] = w[j]
    if len(slots) > 0:  # an empty tuple cannot be indexed, not even never
        for b in range(n - 1):
            for j in range(width):
                old[b + 1, j] = slots[b][j]
    for a in range(n):
        for b in range(n):
            scale = product[a, b]
            if scale != 0:  # 0 * inf is not what the rule does
                for j in range(width):
                    new[a, j] += scale * old[b, j]
    for j in range(width):
        w[j] = new[0, j]
    if len(slots) > 0:
        for b in range(n - 1):
            for j in range(width):
                slots[b][j] = new[b + 1, j]
    return upto


def after(second: NDArray[np.float64], first: NDArray[np.float64]) -> NDArray[np.float64]:
    """The product of two blocks, or of stacks of them: (..., n, n), and the diagonal less 1."""
    n = first.shape[-2]
    diagonal = np.arange(n)
    product = np.empty_like(first)
    with np.errstate(all="ignore"):
        product[..., :n] = second[..., :n] @ first[..., :n]
        others = second[..., :n] * np.swapaxes(first[..., :n], -1, -2)
        others[..., diagonal, diagonal] = 0
        e, f = second[..., n], first[..., n]
        off = others.sum(-1) + (e + f + e * f)
    product[..., n] = off
    product[..., diagonal, diagonal] = np.where(
        np.abs(off) < NEAR, 1 + off, product[..., diagonal, diagonal]
    )
    return product


class Linear:
    """The matrices of every step of a ledger, and their products over aligned blocks."""

    def __init__(self, update: Callable[..., Any], flags: tuple[bool, ...], slots: int) -> None:
        self.jump = jump
        self.update, self.flags, self.size = update, flags, slots + 1
        self.first = 0  # steps before it are replayed
        self.unit = np.eye(self.size, self.size + 1)
        self.blocks = np.empty((128, self.size, self.size + 1))
        self.ends = np.empty(64, np.int64)  # where the blocks that end with a step begin
        self.done, self.used = 0, 0
        self.entry: tuple[float, ...] = ()
        self.matrix: NDArray[np.float64] | None = None

    def advance(self, entries: NDArray[np.float64], upto: int, dtype: torch.dtype) -> Memo | None:
        """The memo for jumps to step `upto`."""
        for i in range(self.done, upto):
            self._add(i, tuple(entries[i].tolist()))
        self.done = max(self.done, upto)
        return self.blocks, self.ends, self.first

    def leap(
        self, w: Tensor, slots: tuple[Tensor, ...], at: NDArray[np.int64], upto: int, memo: Memo
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """The jumps of many rows, in plain torch."""
        blocks, ends, first = memo
        able = at >= first
        t = np.where(able, at, upto)
        product = np.repeat(self.unit[None], len(t), axis=0)
        while (left := np.flatnonzero(t < upto)).size:
            now = t[left]
            # Blocks of 2^level begin where 2^level divides t, and have to end by `upto`.
            level = np.bitwise_count((now ^ (now - 1)) >> 1).astype(np.int64)
            room = np.frexp(upto - now)[1] - 1
            level = np.minimum(np.where(now == 0, room, level), room)
            t[left] = now + (1 << level)
            product[left] = after(blocks[ends[t[left] - 1] + level], product[left])
        every = w, *slots
        new = [torch.zeros_like(w) for _ in every]
        for a, b in np.argwhere((product[..., : self.size] != 0).any(0)).tolist():
            (scale,) = columns(product[:, a, b, None], w)
            # 0 * inf is not what the rule does
            new[a] += torch.where(scale == 0, 0, scale * every[b])
        return new[0], tuple(new[1:]), torch.from_numpy(able).to(w.device)

    def _add(self, i: int, entry: tuple[float, ...]) -> None:
        if entry != self.entry:
            self.entry, self.matrix = entry, self._read(entry)
        if self.matrix is None:
            self.first = i + 1
        block = self.unit if self.matrix is None else self.matrix
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
            block = after(block, self.blocks[self.ends[i - (1 << level)] + level])
            self.blocks[self.used] = block
            self.used += 1
            level += 1

    def _read(self, entry: tuple[float, ...]) -> NDArray[np.float64] | None:
        """The matrix of a step and its diagonal less 1; None if it has none."""
        n = self.size
        try:
            given = tuple(map(Exact, entry))
            images = [self._image(given, [int(a == b) for a in range(n)]) for b in range(n)]
            # One more vector: is its image the sum that it should be?
            mixed = self._image(given, list(range(2, 2 + n)))
        except (ArithmeticError, ValueError):  # infinite, NaN or 0 / 0
            return None
        for a in range(n):
            if mixed[a].value != sum((2 + b) * images[b][a].value for b in range(n)):
                return None
        found = [[float(images[b][a].value) for b in range(n)] for a in range(n)]
        off = [float(images[a][a].value - 1) for a in range(n)]
        return np.array([[*row, e] for row, e in zip(found, off, strict=True)])

    def _image(self, entry: tuple[Exact, ...], vector: list[int]) -> list[Exact]:
        w, *slots = map(Exact, vector)
        w, slots = self.update(w, Exact(0), tuple(slots), entry, self.flags)
        return [w, *slots]
