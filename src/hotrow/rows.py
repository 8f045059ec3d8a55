"""A table whose unread rows may lag: a Parameter that settles before it is read.

A look-up settles the rows it reads, and anything else that reads values settles all.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.gradient import RowGradient


class Lag(Protocol):
    """What knows the steps that rows have missed; an optimizer."""

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, to where dense training would have them now."""


class Table(nn.Parameter):
    """A (V, D) parameter whose rows settle before they are read.

    Made of a Parameter in place, by `Table.adopt(parameter)`, so that modules, optimizers and
    ties that hold it keep holding it. Without a lag it is a plain parameter whose look-ups leave
    a `RowGradient`.
    """

    lag: Lag | None

    @staticmethod
    def adopt(parameter: nn.Parameter) -> Table:
        """Make a Parameter a Table; the same object."""
        if not isinstance(parameter, Table):
            parameter.__class__ = Table
            parameter.lag = None  # type: ignore[attr-defined]
        assert isinstance(parameter, Table)
        return parameter

    def settle(self, rows: Tensor | None = None) -> None:
        """Bring the given distinct rows, or all, to their value of now."""
        lag = self.__dict__.get("lag")
        if lag is not None:
            lag.settle(rows)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.settle()
        with torch._C.DisableTorchFunctionSubclass():
            copy = nn.Parameter(self.data.clone(), self.requires_grad)
        memo[id(self)] = copy
        return Table.adopt(copy)

    def __reduce_ex__(self, protocol: Any) -> Any:
        """Saved as the plain parameter that it is for everybody else."""
        self.settle()
        with torch._C.DisableTorchFunctionSubclass():
            plain = nn.Parameter(self.data, self.requires_grad)
            return plain.__reduce_ex__(protocol)  # type: ignore[no-untyped-call]

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        look_up = _LOOK_UPS.get(func)
        if look_up is not None:
            return look_up(*args, **kwargs)
        if func not in _NO_VALUES:
            for table in _tables((args, kwargs)):
                table.settle()
        with torch._C.DisableTorchFunctionSubclass():
            return func(*args, **kwargs)


# Reading or setting these reads no value of the table.
_NO_VALUES = {
    getattr(getattr(Tensor, name), accessor)
    for name in (
        "shape", "dtype", "device", "grad", "requires_grad", "is_leaf", "layout", "ndim",
        "grad_fn", "is_sparse", "is_cuda", "is_meta", "is_quantized", "names", "itemsize", "nbytes",
        "_version", "_backward_hooks", "output_nr", "retains_grad", "is_cpu", "is_nested",
        "_grad", "_base", "_post_accumulate_grad_hooks", "is_sparse_csr", "is_mkldnn",
    )
    for accessor in ("__get__", "__set__", "__delete__")
    if hasattr(getattr(Tensor, name, None), accessor)
} | {
    getattr(Tensor, name)
    for name in (
        "size", "dim", "numel", "nelement", "element_size", "stride", "is_contiguous",
        "is_floating_point", "is_complex", "requires_grad_", "register_hook", "retain_grad",
        "register_post_accumulate_grad_hook", "storage_offset", "__len__", "get_device",
        "is_shared", "is_pinned",
    )
}  # fmt: skip


def _tables(value: Any) -> Iterator[Table]:
    if isinstance(value, Table):
        yield value
    elif isinstance(value, dict):
        yield from _tables(list(value.values()))
    elif isinstance(value, list | tuple):
        for each in value:
            yield from _tables(each)


class _LookUp(torch.autograd.Function):
    """table[ids], whose gradient is a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, ids: Tensor, padding_idx: int, by_frequency: bool
    ) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.shape, ctx.padding_idx, ctx.by_frequency = table.shape, padding_idx, by_frequency
        return F.embedding(ids, table)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, None, None, None]:
        ids = ctx.saved_tensors[0].reshape(-1).long()
        # A copy: the gradient's storage may be another's, and clipping writes into the rows.
        rows = gradient.reshape(len(ids), ctx.shape[1]).clone()
        if ctx.by_frequency:
            _, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
            rows = rows / counts[inverse].unsqueeze(-1)
        if ctx.padding_idx >= 0:
            kept = ids != ctx.padding_idx
            ids, rows = ids[kept], rows[kept]
        return RowGradient(ids, rows, ctx.shape), None, None, None


def _embedding(
    input: Tensor,
    weight: Tensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    if not isinstance(weight, Table):
        raise HotrowError("the ids of a look-up are a table")
    weight.settle(torch.unique(input))
    with torch._C.DisableTorchFunctionSubclass():
        if max_norm is not None:
            with torch.no_grad():
                torch.embedding_renorm_(weight, input.long(), max_norm, norm_type)
        padding = -1 if padding_idx is None else padding_idx % len(weight)
        output: Tensor = _LookUp.apply(  # type: ignore[no-untyped-call]
            weight, input, padding, scale_grad_by_freq
        )
        return output


_LOOK_UPS: dict[Any, Callable[..., Tensor]] = {F.embedding: _embedding}
