"""The Kronecker product of a one-hot with a dense matrix."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import USE_TORCH, overloads, rule
from hotrow.onehot.results import meta_result
from hotrow.onehot.size_limits import is_too_small_to_scatter, record_use
from hotrow.onehot.tensor import OneHot


@rule(*overloads("kron"))
def _(func: Any, input: Any, other: Any) -> Any:
    """Return a one-hot with one id per row for each column of the dense matrix.

    Row n of the one-hot X and row m of the dense Y become row n * M + m of the result. That row
    contains row m of Y, starting at column i * D, where i is the id in row n. `kron(Y, X)`
    interleaves the rows instead.
    """
    is_first = isinstance(input, OneHot)
    x, dense = (input, other) if is_first else (other, input)
    if isinstance(dense, OneHot) or not isinstance(dense, Tensor) or is_compiling():
        return NotImplemented
    field = x.field
    if field is None or not field.has_one_id or len(x.sizes) != 2 or dense.ndim != 2:
        return NotImplemented
    if dense.layout != torch.strided or dense.device != x.cached_device or 0 in dense.shape:
        return NotImplemented
    if x.grad_proxy is not None or x.is_modified or not len(field.ids):
        return NotImplemented
    if is_too_small_to_scatter(x):
        return USE_TORCH
    out = meta_result(func, (input, other))
    columns = torch.arange(dense.shape[1], device=dense.device)
    ids = field.ids * dense.shape[1] + columns if is_first else columns * field.width + field.ids
    weights = field.weights_or_ones(x.cached_dtype)  # (N, 1)
    if is_first:
        ids, weights = ids.unsqueeze(1), (weights.unsqueeze(1) * dense)
        ids = ids.expand(weights.shape)
    else:
        weights = dense.unsqueeze(1) * weights
        ids = ids.expand(weights.shape)
    part = Field(ids.flatten(0, 1), weights.flatten(0, 1).to(out.dtype), out.shape[1])
    record_use(x, func)
    return OneHot([part], out.dtype, None, None, x.origins, out.stride())
