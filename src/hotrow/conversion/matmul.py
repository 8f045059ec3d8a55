"""The "matmul" conversion: compute every lookup as the product of a one-hot and the table.

Use this conversion on backends where a product is cheaper than a lookup, such as hardware with
matrix units, or encrypted computation.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from hotrow.conversion.sampling import call_outside, call_states, saved_tensor_hook
from hotrow.errors import HotrowError
from hotrow.ids import check_ids, normalize_padding
from hotrow.kernels.tracing import never_compile_alone
from hotrow.layers.embedding_bag import pool_rows
from hotrow.table.backward import BACKWARD_FUNCTIONS


class MatmulMode(TorchFunctionMode):
    """A mode that computes `F.embedding` and `F.embedding_bag` as products with one-hots."""

    sampler = None  # this mode is active in every call

    @never_compile_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Compute an embedding as a product, and call any other function unchanged."""
        product = _PRODUCTS.get(func)
        if func in BACKWARD_FUNCTIONS:
            return call_outside(func, *args, **(kwargs or {}))
        # As in `Finder`, torch recomputes a checkpointed function outside this mode.
        if product is None or call_states.current.saved_tensor_hook is not saved_tensor_hook():
            return func(*args, **(kwargs or {}))
        table = args[1] if len(args) > 1 else (kwargs or {})["weight"]
        with torch.autocast(table.device.type, enabled=False):  # torch doesn't autocast lookups
            return product(*args, **(kwargs or {}))


def _encode(ids: Tensor, weight: Tensor) -> Tensor:
    """Check the ids and return their one-hot, of shape (..., V), in the table's dtype."""
    ids = check_ids(ids, len(weight), "input", refused_encoding="").long()
    return F.one_hot(ids, len(weight)).to(weight.dtype)


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    _check_options(max_norm, scale_grad_by_freq)
    one_hot = _encode(input, weight)
    if padding_idx is None:
        return one_hot @ weight
    # A lookup reads the padding row like any other row, but gives it no gradient.
    padding = (input == normalize_padding(padding_idx, len(weight))).unsqueeze(-1)
    return torch.where(padding, one_hot @ weight.detach(), one_hot @ weight)


def _embedding_bag(
    input: Tensor,
    weight: Tensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    _check_options(max_norm, scale_grad_by_freq)
    rows = _encode(input, weight).flatten(0, -2) @ weight
    is_padding = None
    if padding_idx is not None:
        is_padding = input.flatten() == normalize_padding(padding_idx, len(weight))
    return pool_rows(
        rows,
        input.shape,
        is_padding,
        None if offsets is None else offsets.long(),
        mode=mode,
        per_sample_weights=per_sample_weights,
        include_last_offset=include_last_offset,
    )


def _check_options(max_norm: float | None, scale_grad_by_freq: bool) -> None:
    for name, value in (("max_norm", max_norm), ("scale_grad_by_freq", scale_grad_by_freq)):
        if value is not None and value is not False:
            raise HotrowError(
                f"an embedding has {name}={value}, which a one-hot product does not support",
                fix=f"build the embedding without {name}, or keep the lookup",
            )


_PRODUCTS: dict[Any, Callable[..., Tensor]] = {
    F.embedding: _embedding,
    F.embedding_bag: _embedding_bag,
}
