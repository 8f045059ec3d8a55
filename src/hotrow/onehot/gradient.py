"""Proxies, which carry the gradient of the one-hot itself.

A proxy is a tensor of zeros that has the one-hot's shape but takes almost no memory. A one-hot that
requires grad has a proxy, and so does every one-hot derived from it. Autograd connects the derived
proxies to the original one. Every rule that supports proxies applies a linear function, so its
backward pass is the same for the zeros as for the actual values. No tensor of size V is allocated
before the backward pass, which returns a (..., V) gradient.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor


def expanded_zeros(sizes: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Return zeros of these sizes that use the memory of only a single entry."""
    return torch.zeros((), dtype=dtype, device=device).expand(tuple(sizes))


class ZerosProxy(torch.autograd.Function):
    """Zeros that pass their gradient on to a tensor: a leaf one-hot or a dense tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor) -> Tensor:
        """Return zeros with the shape of the tensor."""
        return expanded_zeros(values.shape, values.dtype, values.device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        """Return the gradient unchanged."""
        return gradient


class KeepInGraph(torch.autograd.Function):
    """Return a tensor unchanged, and pass a gradient of zeros on to the other tensors.

    A slice of a concatenation has this gradient with respect to the tensors that it omits.
    """

    @staticmethod
    def forward(ctx: Any, values: Tensor, *omitted: Tensor) -> Tensor:
        """Return a view of the values."""
        ctx.input_metadata = [(each.shape, each.dtype, each.device) for each in omitted]
        return values.view_as(values)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, ...]:
        """Return the gradient, and zeros for the omitted tensors."""
        return gradient, *(expanded_zeros(*metadata) for metadata in ctx.input_metadata)


class ConnectLeaf(torch.autograd.Function):
    """Make the gradient of dense values flow to a leaf one-hot, or to another dense tensor."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, source: Tensor, refuses_writes: bool) -> Tensor:
        """Return a tensor that shares the memory and the version counter of `values`."""
        # Autograd forbids in-place changes of a view that a function returns, and of its views.
        return values.view_as(values) if refuses_writes else values.detach()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[None, Tensor, None]:
        """Return the gradient unchanged."""
        return None, gradient, None


class Connect(torch.autograd.Function):
    """Make autograd pass a one-hot's gradient on to the tensors that make up the one-hot.

    Rules use these tensors instead of the one-hot. Functions without a rule, such as
    `torch.autograd.Function.apply`, use the one-hot itself.
    """

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, split: Callable[[Tensor], Sequence[Tensor | None]], *tensors: Tensor
    ) -> Tensor:
        """Return x itself; autograd records it as the result of an in-place operation."""
        ctx.split, ctx.count, ctx.materialize_grads = split, len(tensors), False
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Any, ...]:
        """Return the gradient of each tensor."""
        if gradient is None:
            count: int = ctx.count
            return (None,) * (2 + count)
        gradients: Sequence[Tensor | None] = ctx.split(gradient)
        return None, None, *gradients


class _TransformedProxy(torch.autograd.Function):
    """Zeros in place of the result of `transform`, with the same backward pass."""

    @staticmethod
    def forward(
        ctx: Any,
        transform: Callable[..., Tensor],
        sizes: Any,
        dtype: torch.dtype,
        factors: Sequence[Tensor],
        *proxies: Tensor,
    ) -> Tensor:
        ctx.transform = transform
        ctx.has_factors = bool(factors)
        ctx.save_for_backward(*factors)
        ctx.input_metadata = [(proxy.shape, proxy.dtype, proxy.device) for proxy in proxies]
        return expanded_zeros(sizes, dtype, proxies[0].device)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Any, ...]:
        if ctx.has_factors:  # otherwise, torch allows a second backward pass
            ctx.saved_tensors  # noqa: B018 raises torch's error if a factor was modified
        inputs = [expanded_zeros(*metadata).requires_grad_() for metadata in ctx.input_metadata]
        with torch.enable_grad():
            output = ctx.transform(*inputs)
        gradients = torch.autograd.grad(
            output, inputs, gradient.to(output.dtype), create_graph=torch.is_grad_enabled()
        )
        return None, None, None, None, *gradients


def transform_proxy(
    transform: Callable[..., Tensor],
    out: Tensor,
    *proxies: Tensor | None,
    factors: Sequence[Tensor] = (),
) -> Tensor | None:
    """Return a proxy for the result of `transform`, or None if no input has a proxy.

    Args:
        transform: a linear function that takes one tensor for each proxy that is not None.
        out: a tensor with the shape and dtype of the result.
        proxies: the proxy of each input, or None if the input has no proxy.
        factors: the tensors that `transform` reads. As in torch, the backward pass raises an error
            if one of them has been modified since.
    """
    present = [proxy for proxy in proxies if proxy is not None]
    if not present or not (out.is_floating_point() or out.is_complex()):
        return None
    result: Tensor = _TransformedProxy.apply(  # type: ignore[no-untyped-call]
        transform, out.shape, out.dtype, factors, *present
    )
    return result
