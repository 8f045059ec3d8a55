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
    return torch.sparse_coo_tensor(
        indices, weights[places], x.sizes, is_coalesced=True, check_invariants=False
    )


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
