"""How a gradient reaches a one-hot itself: through a proxy, zeros of its shape without memory.

A one-hot whose gradient is wanted has such a proxy, and every one-hot derived from it has a proxy
that is connected to it: an operation is linear, so its backward does for the zeros what it does for
the values. Nothing of size V is allocated before backward, whose result is (..., V).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def expanded_zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros of these sizes that take the memory of one entry."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(sizes))


class LeafProxy(torch.autograd.Function):
    """The proxy of a leaf: zeros whose gradient is the leaf's."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        """(*x.shape)."""
        return expanded_zeros(x.shape, x.dtype, x.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """The gradient, unchanged."""
        return gradient


class _TransformedProxy(torch.autograd.Function):
    """`transform` of zeros, which is zeros; its backward is that of `transform`."""

    @staticmethod
    def forward(
        ctx: Any, transform: Callable[..., Tensor], sizes: Any, dtype: torch.dtype, *proxies: Tensor
    ) -> Tensor:
        ctx.transform = transform
        ctx.input_metadata = [(proxy.shape, proxy.dtype, proxy.device) for proxy in proxies]
        return expanded_zeros(sizes, dtype, proxies[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        inputs = [expanded_zeros(*metadata).requires_grad_() for metadata in ctx.input_metadata]
        with torch.enable_grad():
            output = ctx.transform(*inputs)
        gradients = torch.autograd.grad(
            output, inputs, gradient.to(output.dtype), create_graph=torch.is_grad_enabled()
        )
        return None, None, None, *gradients


def transform_proxy(
    transform: Callable[..., Tensor], out: Tensor, *proxies: Tensor | None
) -> Tensor | None:
    """The proxy of the result of `transform`; None if no input has one.

    Arguments:
        transform: linear; takes as many tensors as there are proxies that are not None.
        out: of the shape and dtype of the result.
        proxies: of the inputs.
    """
    present = [proxy for proxy in proxies if proxy is not None]
    if not present or not out.is_floating_point():
        return None
    result: Tensor = _TransformedProxy.apply(transform, out.shape, out.dtype, *present)  # type: ignore[no-untyped-call]
    return result
