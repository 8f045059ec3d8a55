"""Conversion to a sparse tensor, which also stores only the ids, and to an ordinary tensor."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.registry import USE_TORCH, rule
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot


@rule(Tensor.to_sparse)
def _(func: Any, x: OneHot) -> Any:
    field = x.field
    if field is None or not field.has_one_id or len(x.sizes) < 2 or is_compiling():
        return NotImplemented
    if x.grad_proxy is not None or x.is_modified or 0 in x.sizes:
        return NotImplemented
    if is_too_small(x):
        return USE_TORCH
    record_use(x, func)
    ids = field.ids[..., 0]
    weights = field.weights_or_ones(x.cached_dtype)[..., 0]
    make = _MakeSparse.apply if weights.requires_grad else _make_sparse
    return make(weights, ids, x.sizes)


def _make_sparse(weights: Tensor, ids: Tensor, sizes: tuple[int, ...]) -> Tensor:
    places = (weights != 0).nonzero().unbind(-1)  # torch stores no zeros
    indices = torch.stack([*places, ids[places]])
    return torch.sparse_coo_tensor(
        indices,
        weights[places],
        sizes,
        device=weights.device,
        is_coalesced=True,
        check_invariants=False,
    )


class _MakeSparse(torch.autograd.Function):
    """Make a sparse tensor whose gradient is that of torch's `to_sparse`.

    The gradient of `torch.sparse_coo_tensor` can't be differentiated again, and doesn't reach
    weights that are zero.
    """

    @staticmethod
    def forward(weights: Tensor, ids: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return _make_sparse(weights, ids, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        weights, ids, ctx.sizes = inputs
        ctx.save_for_backward(weights, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        weights, ids = ctx.saved_tensors
        if gradient.layout is torch.strided or torch.is_grad_enabled() or not weights.all():
            dense = gradient.to_dense()
            return dense.gather(-1, ids.long()[..., None])[..., 0], None, None
        with torch.enable_grad():  # without a dense gradient
            weights = weights.detach().requires_grad_()
            sparse = _make_sparse(weights, ids, ctx.sizes)
        return *torch.autograd.grad(sparse, weights, gradient), None, None


@rule(Tensor.to_dense, any_layout=True)
def _(func: Any, x: OneHot, dtype: torch.dtype | None = None, masked_grad: Any = None) -> Tensor:
    """Return an ordinary tensor; without a new dtype, it shares the memory of the one-hot.

    The ids stay in use. They notice in-place operations on this tensor, but not writes to its
    memory, as in `x.to_dense().numpy().fill(0)`.
    """
    for origin in x.origins:
        origin.record_dense(x.entries)
        origin.record_fallback(func, False, x.has_many_zeros)
    dense = x.materialize()
    return dense if dtype is None else dense.to(dtype)
