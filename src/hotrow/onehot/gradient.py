"""How a gradient reaches a one-hot itself: by zeros of its shape that take no memory.

A one-hot whose gradient is wanted has such a shadow, and what is made of it has one that is linked
to it: an operation is linear, so that its own backward does for the zeros what it does for the
values. Nothing V-sized is made before backward, whose result is (..., V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros in the memory of one."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(sizes))


class Shadow(torch.autograd.Function):
    """The shadow of a leaf: zeros whose gradient is the leaf's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """(*x.shape)."""
        return zeros(x.shape, x.dtype, x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """As it is."""
        return gradient


class _Link(torch.autograd.Function):
    """`change` of zeros, which is zeros; its backward is that of `change`."""

    @staticmethod
    def forward(
        ctx: Any, change: Callable[..., Tensor], sizes: Any, dtype: torch.dtype, *shadows: Tensor
    ) -> Tensor:
        ctx.change = change
        ctx.kinds = [(shadow.shape, shadow.dtype, shadow.device) for shadow in shadows]
        return zeros(sizes, dtype, shadows[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        wanted = [zeros(*kind).requires_grad_() for kind in ctx.kinds]
        with torch.enable_grad():
            changed = ctx.change(*wanted)
        again = torch.is_grad_enabled()
        found = torch.autograd.grad(changed, wanted, gradient.to(changed.dtype), create_graph=again)
        return None, None, None, *found


def link(change: Callable[..., Tensor], out: Tensor, *shadows: Tensor | None) -> Tensor | None:
    """The shadow of what `change` makes of several; None if none of them has one.

    Arguments:
        change: linear; takes as many tensors as there are shadows that are not None.
        out: of the shape and dtype of the result.
        shadows: theirs.
    """
    there = [shadow for shadow in shadows if shadow is not None]
    if not there or not out.is_floating_point():
        return None
    linked: Tensor = _Link.apply(change, out.shape, out.dtype, *there)  # type: ignore[no-untyped-call]
    return linked
