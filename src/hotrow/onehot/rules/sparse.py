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
    places = (weights != 0).nonzero().unbind(-1)  # torch stores no zeros
    indices = torch.stack([*places, ids[places]])
    values = weights[places]
    make = _MakeSparse.apply if values.requires_grad else _make_sparse
    return make(values, indices, x.sizes)


def _make_sparse(values: Tensor, indices: Tensor, sizes: tuple[int, ...]) -> Tensor:
    return torch.sparse_coo_tensor(
        indices, values, sizes, is_coalesced=True, check_invariants=False
    )


class _MakeSparse(torch.autograd.Function):
    """`torch.sparse_coo_tensor`, whose own gradient can't be differentiated again."""

    @staticmethod
    def forward(values: Tensor, indices: Tensor, sizes: tuple[int, ...]) -> Tensor:
        return _make_sparse(values, indices, sizes)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Tensor) -> None:
        values, indices, ctx.sizes = inputs
        ctx.save_for_backward(values, indices)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        values, indices = ctx.saved_tensors
        if torch.is_grad_enabled():  # dense, as the gradient of torch's `to_sparse`
            return grad.to_dense()[tuple(indices)], None, None
        with torch.enable_grad():
            values = values.detach().requires_grad_()
            sparse = _make_sparse(values, indices, ctx.sizes)
        return *torch.autograd.grad(sparse, values, grad), None, None


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
