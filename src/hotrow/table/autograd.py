"""Autograd functions for lookups, with a `RowGradient` as the gradient.

This module also counts the references to a tensor's storage. The counts show whether other code can
still write to a gradient.
"""

from __future__ import annotations

import functools
import operator
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C import _storage_Use_Count

from hotrow.errors import HotrowError
from hotrow.kernels import devices
from hotrow.kernels.batch import DistinctIds
from hotrow.kernels.grouping import find_distinct
from hotrow.kernels.triton.batch import DeviceIds
from hotrow.table.gradient import RowGradient
from hotrow.table.row_change import address


class StorageUses:
    """Count the tensors, numpy arrays and storage objects that refer to a tensor's storage."""

    __slots__ = ("_is_on_cpu", "_storage")

    def __init__(self, tensor: Tensor) -> None:
        self._storage, self._is_on_cpu = tensor.untyped_storage(), devices.is_on_cpu(tensor)

    def count(self) -> int:
        """Return the number of uses, or `sys.maxsize` for CPU memory shared with another process.

        For GPU storage, `is_shared` is always true, so it doesn't show whether another
        process uses the memory; see `Table.was_sent`.
        """
        storage = self._storage
        if self._is_on_cpu and storage.is_shared():
            return sys.maxsize
        return _storage_Use_Count(storage._cdata) + sys.getrefcount(storage) - _own_uses

    def owns_memory(self) -> bool:
        """Return whether the memory is torch's own. Other owners, such as numpy, aren't counted."""
        return self._storage.resizable()


# The number of references that `count` itself creates. It depends on the Python version.
_own_uses = 0
_tensor = torch.empty(1, device="cpu")
_own_uses = StorageUses(_tensor).count() - 1
del _tensor


def storage_use_count(tensor: Tensor) -> int:
    """Return `StorageUses(tensor).count()`."""
    return StorageUses(tensor).count()


def overlaps_itself(matrix: Tensor) -> bool:
    """Return whether several entries are in the same memory, for example after `expand`."""
    if matrix.is_contiguous():
        return False
    strides = sorted(zip(matrix.stride(), matrix.shape, strict=True))
    (step, count), (outer_step, outer_count) = strides
    return (count > 1 and not step) or (outer_count > 1 and outer_step <= (count - 1) * step)


def with_strides(tensor: Tensor, strides: tuple[int, ...]) -> Tensor:
    """Return the tensor if it has these strides, or else a copy that has them."""
    if tensor.layout != torch.strided or tensor.stride() == strides:
        return tensor
    values = torch.empty_strided(tensor.shape, strides, dtype=tensor.dtype, device=tensor.device)
    return values.copy_(tensor.detach())


def stored_values(tensor: Tensor) -> Tensor:
    """Return the tensor, or a copy if its memory doesn't contain its values.

    This is so for row gradients and one-hots, and for tensors that torch negates when it reads
    them. The kernels read the memory.
    """
    if tensor.layout != torch.strided:
        return tensor  # no rule uses it
    with torch._C.DisableTorchFunctionSubclass():  # a one-hot's own methods create its dense tensor
        if not tensor.is_neg() and (address(tensor) or not tensor.numel() or tensor.is_meta):
            return tensor
    with torch.no_grad():
        return torch.empty(tensor.shape, dtype=tensor.dtype, device=tensor.device).copy_(tensor)


def set_strides(tensor: Tensor, strides: tuple[int, ...], force: bool = False) -> None:
    """Change the strides in place; without `force`, only if nothing else uses the storage."""
    ordered = with_strides(tensor, strides)
    if ordered is not tensor and (force or storage_use_count(tensor) == 1):
        tensor.data = ordered


def can_require_gradient(tensor: Tensor) -> bool:
    """Return whether `requires_grad_` accepts the tensor."""
    has_dtype = tensor.is_floating_point() or tensor.is_complex()
    return has_dtype and not tensor.is_inference()


def leave_inference_mode() -> AbstractContextManager[Any]:
    """Turn off inference mode, in which new rows would be tensors that can't be trained."""
    # Outside inference mode, `inference_mode(False)` would turn on gradients.
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else nullcontext()


def replace_data(parameter: nn.Parameter, values: Tensor, gradient: Tensor | None) -> None:
    """Replace a parameter's values and gradient in place; their shape may change.

    Backpropagating through an earlier forward pass then raises an error, because the gradient would
    be for the old rows.
    """
    with torch._C.DisableTorchFunctionSubclass():
        parameter.grad = None
        if can_require_gradient(parameter):
            _refuse_old_graph(parameter)
            # Assigning a different dtype makes autograd drop the node for the old shape.
            dtype = torch.float64 if values.dtype != torch.float64 else torch.float32
            parameter.data = values.new_empty(0, dtype=dtype)
        parameter.data = values
        parameter.grad = gradient


def _refuse_old_graph(parameter: nn.Parameter) -> None:
    """Make the backward passes of earlier forward passes raise an error.

    The parameter may not require a gradient now, but it may have during the forward pass.
    """
    requires_grad = parameter.requires_grad
    parameter.requires_grad_()
    with torch.enable_grad():
        graph: Any = parameter.expand_as(parameter).grad_fn
    graph.next_functions[0][0].register_prehook(_refuse_old_gradient)
    parameter.requires_grad_(requires_grad)


def _refuse_old_gradient(gradients: Any) -> None:
    raise HotrowError(
        "the rows of the vocabulary changed after the forward pass, so this backward pass would "
        "compute a gradient for the old rows",
        fix="call backward() before the change, or run the forward pass again",
    )


class LookUpOptions(NamedTuple):
    """Lookup options that affect the gradient.

    Attributes:
        shape: the table's shape.
        padding_idx: the id whose row gets no gradient, or -1.
        scale_by_frequency: whether to divide each row by the number of times its id occurs.
        columns: whether ids select columns.
    """

    shape: Sequence[int]
    padding_idx: int = -1
    scale_by_frequency: bool = False
    columns: bool = False


def row_gradient(
    ids: Tensor | DistinctIds, gradient: Tensor, options: LookUpOptions
) -> RowGradient:
    """Return the row gradient of a lookup; copy the ids and the rows only if an option needs it.

    Arguments:
        ids: (N,) int64, or the `DistinctIds` of such ids.
        gradient: the gradient of the lookup's output, (..., D), with N rows in total.
        options: the options of the lookup.
    """
    shape, columns = options.shape, options.columns
    if isinstance(ids, Tensor) and devices.is_on_gpu(ids):
        ids = find_distinct(ids, shape[1 if columns else 0])
    rows = gradient
    if rows.ndim != 2:
        rows = rows.reshape(rows.shape[:-1].numel(), rows.shape[-1])  # -1 refuses 0 columns
    if options.padding_idx >= 0 and isinstance(ids, DeviceIds):
        ids = ids.without(options.padding_idx)
    elif options.padding_idx >= 0:
        ids = ids.ids() if isinstance(ids, DistinctIds) else ids
        indices = (ids != options.padding_idx).nonzero()[:, 0]
        ids, rows = ids[indices], rows[indices]
    result = RowGradient(ids, rows, shape, columns=columns)
    return result.merge(scale_by_frequency=True) if options.scale_by_frequency else result


class _DifferentiableRowGradient(torch.autograd.Function):
    """Return a row gradient that can be differentiated again, for `create_graph=True`."""

    @staticmethod
    def forward(ctx: Any, gradient: Tensor, ids: Tensor, options: LookUpOptions) -> Tensor:
        """Return the gradient, with a copy of the rows."""
        ctx.save_for_backward(ids)
        ctx.shape, ctx.options = gradient.shape, options
        return row_gradient(ids, gradient.clone(), options)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Look up the rows of `gradient`, the gradient with respect to the row gradient."""
        (ids,), options = ctx.saved_tensors, ctx.options
        # Like torch, ignore `scale_by_frequency`.
        rows = F.embedding(ids, gradient.t() if options.columns else gradient)
        if options.padding_idx >= 0:
            rows = rows * (ids != options.padding_idx).unsqueeze(-1)
        return rows.reshape(ctx.shape), None, None


def _needs_graph(gradient: Tensor) -> bool:
    """Return whether autograd records the backward pass, as it does with `create_graph=True`."""
    return torch.is_grad_enabled() and gradient.requires_grad


class LookUp(torch.autograd.Function):
    """Look up rows, or columns with `options.columns`; the gradient is a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any,
        table: Tensor,
        reader: tuple[Callable[[], Tensor], Tensor | DistinctIds],
        options: LookUpOptions,
    ) -> Tensor:
        """Return the result of the reader's function, (..., D).

        The reader is a tuple with the ids, because hooks see the gradients of all tensors that are
        arguments.
        """
        ctx.materialize_grads = False
        read, ids = reader
        if isinstance(ids, Tensor):  # copy, because the caller may write the next batch to `ids`
            ids = ids.to(torch.int64, copy=True).reshape(-1)
        ctx.ids, ctx.options = ids, options
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a row gradient that assigns one row of `gradient` to each id."""
        if gradient is None:
            return None, None, None
        ids, options = ctx.ids, ctx.options
        if _needs_graph(gradient):
            ids = ids.ids() if isinstance(ids, DistinctIds) else ids
            result = _DifferentiableRowGradient.apply(gradient, ids, options)  # type: ignore[no-untyped-call]
            return result, None, None
        uses = StorageUses(gradient)
        reference_counts = (
            sys.getrefcount(gradient),
            gradient._use_count(),  # type: ignore[attr-defined]
            uses.count(),
        )
        expected_counts = _engine_reference_counts.setdefault(
            gradient.device.type, reference_counts
        )
        is_exclusive = uses.owns_memory() and all(
            map(operator.le, reference_counts, expected_counts)
        )
        if not is_exclusive and not gradient.is_contiguous():
            # For example, `gradient` may be a slice of the gradient of `torch.cat`. The step would
            # need a contiguous copy anyway.
            gradient, is_exclusive = gradient.contiguous(), True
        result = row_gradient(ids, gradient, options)
        # If other code has a reference to `gradient`, sum the rows before that code can change
        # them.
        return result if is_exclusive else result.merge(), None, None


# For each device type: the number of references to a gradient's Python object, tensor and storage
# in `LookUp.backward` if only the autograd engine uses the gradient.
_engine_reference_counts: dict[str, tuple[int, int, int]] = {}


@torch.inference_mode(False)
@torch.enable_grad()
def measure_engine_references(device: torch.device) -> None:
    """Measure the reference counts of a gradient that only the autograd engine uses."""
    if device.type not in _engine_reference_counts and device.type != "meta":
        table = torch.zeros(1, 1, requires_grad=True, device=device)
        ids = torch.zeros(1, dtype=torch.int64, device=device)
        reader = functools.partial(F.embedding, ids, table), ids
        output: Tensor = LookUp.apply(table, reader, LookUpOptions(table.shape))  # type: ignore[no-untyped-call]
        output.mul(1).sum().backward()  # type: ignore[no-untyped-call]


# `LookUp.apply` without its check for functorch transforms. Under a transform, torch's own lookup
# runs instead.
look_up = super(torch.autograd.Function, LookUp).apply


class SelectRows(torch.autograd.Function):
    """Select distinct rows, or columns with `columns`; the gradient is a `RowGradient`."""

    @staticmethod
    def forward(
        ctx: Any, table: Tensor, rows: Tensor, read: Callable[[], Tensor], columns: bool
    ) -> Tensor:
        """Return the result of `read`, (R, D)."""
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(rows)
        ctx.shape, ctx.columns = table.shape, columns
        return read()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor | None) -> tuple[Tensor | None, ...]:
        """Return a row gradient with the distinct ids and the rows of `gradient`."""
        if gradient is None:
            return (None,) * 4
        (rows,) = ctx.saved_tensors
        if _needs_graph(gradient):
            options = LookUpOptions(ctx.shape, columns=ctx.columns)
            result = _DifferentiableRowGradient.apply(gradient, rows, options)  # type: ignore[no-untyped-call]
            return result, None, None, None
        result = RowGradient(rows, gradient.clone(), ctx.shape, True, columns=ctx.columns)
        return result, None, None, None
