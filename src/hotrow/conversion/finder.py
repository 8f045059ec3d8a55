"""Find the one-hots that a model's own code creates with common patterns.

`Finder` is a torch function mode. While it is active, an operation that matches a pattern returns a
`OneHot`. All other operations run in torch.
"""

from __future__ import annotations

import dis
import functools
import math
import sys
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._device import DeviceContext

from hotrow.conversion.origins import Record
from hotrow.conversion.sampling import (
    MIN_ENTRIES,
    CallSampler,
    call_outside,
    call_states,
    saved_tensor_hook,
)
from hotrow.kernels.tracing import (
    has_derivative,
    has_tangent,
    is_compiling,
    is_tracing,
    never_compile_alone,
)
from hotrow.onehot.encoding import ClassIndexError, encode, encode_or_none
from hotrow.onehot.gradient import ZerosProxy
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import materialize
from hotrow.onehot.results import meta_tensor, number_of_dtype
from hotrow.onehot.tensor import OneHot
from hotrow.table.backward import BACKWARD_FUNCTIONS
from hotrow.table.nested import map_instances


class Finder(TorchFunctionMode):
    """A torch function mode that finds one-hots while a method of a converted model runs.

    Args:
        record: stores the origin of each one-hot found; None under `torch.compile`.

    Attributes:
        sampler: chooses which method calls to search for one-hots; None under `torch.compile`.
    """

    def __init__(self, record: Record | None = None) -> None:
        super().__init__()
        self.record = record
        self.sampler = None if record is None else CallSampler()

    @never_compile_alone
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Return torch's result, or a `OneHot` with the same values."""
        pattern = _PATTERNS.get(func)
        if pattern is None:
            return func(*args, **kwargs) if kwargs else func(*args)
        kwargs = kwargs or {}
        if torch._C._are_functorch_transforms_active():
            return func(*args, **kwargs)
        if is_compiling():
            return pattern(func, *args, **kwargs) if func is F.one_hot else func(*args, **kwargs)
        if is_tracing():  # as in `_wrap` of `modules.py`
            return func(*args, **kwargs)
        if pattern is call_outside:
            return call_outside(func, *args, **kwargs)
        if _other_mode_is_active():
            return func(*args, **kwargs)
        frame = sys._getframe(1)
        if pattern in _CONSTANTS and not _CONSTANTS[pattern](frame.f_code):
            return func(*args, **kwargs)
        # Don't search in a checkpointed function, because torch recomputes it outside this mode.
        if call_states.current.saved_tensor_hook is not saved_tensor_hook():
            return func(*args, **kwargs)
        try:
            result = pattern(func, *args, **kwargs)
        except ClassIndexError as error:
            if self.record is None:
                raise
            location = self.record.origin_in(frame, func).location
            raise ClassIndexError(f"at {location}, {error.problem}", fix=error.fix) from None
        if result is None:
            return func(*args, **kwargs)
        if self.record is not None and isinstance(result, OneHot):
            self.record.origin_in(frame, func).record_one_hot(result)
        return result


def _other_mode_is_active() -> bool:
    """Return whether the caller runs the model in another mode, which must see torch's calls."""
    modes = map(torch._C._get_function_stack_at, range(torch._C._len_torch_function_stack()))
    return any(
        not (isinstance(mode, DeviceContext) or type(mode).__module__.startswith("hotrow."))
        for mode in modes
    )


def _one_hot(
    func: Any, ids: Any = None, num_classes: int = -1, **kwargs: Any
) -> OneHot | Tensor | None:
    for name in ("tensor", "input"):
        ids = kwargs.pop(name, ids)
    if is_compiling():
        if isinstance(num_classes, int) and num_classes > 0 and ids.dtype == torch.int64:
            return encode(ids, num_classes, torch.int64)
        return F.one_hot(ids, num_classes)
    if kwargs or type(ids) is not Tensor or not isinstance(num_classes, int):
        return None
    return encode_or_none(ids, num_classes)


_MAX_ROWS_PER_ID = 16  # for a few ids, checking a large matrix costs too much


def _is_identity(matrix: Tensor, ids: Tensor) -> bool:
    """Return whether the matrix is an identity matrix.

    The result is not cached, because torch's version counter misses some writes.
    """
    count, limit = len(matrix), _MAX_ROWS_PER_ID * ids.numel()
    if has_derivative(matrix) or matrix.device.type != "cpu" or not 1 < count <= limit:
        return False
    if matrix[0, 0] != 1 or matrix[0, 1] != 0:
        return False
    return int(matrix.count_nonzero()) == count and bool((matrix.diagonal() == 1).all())


def _is_square(matrix: Any) -> bool:
    if not isinstance(matrix, Tensor) or isinstance(matrix, OneHot) or matrix.ndim != 2:
        return False
    return bool(matrix.shape[0] == matrix.shape[1])


def _identity_rows(func: Any, matrix: Any, index: Any) -> OneHot | None:
    """Match an operation that selects rows of an identity matrix."""
    if type(index) is not Tensor or index.dtype not in (torch.int64, torch.int32):
        return None
    if not _is_square(matrix) or not _is_identity(matrix, index):
        return None
    ids = torch.arange(len(matrix), device=index.device)
    rows = ids[index.long()]  # indexing resolves negative ids
    return OneHot([Field(rows.unsqueeze(-1), None, len(matrix))], matrix.dtype)


def _indexed(func: Any, matrix: Any, index: Any) -> OneHot | None:
    """Match `eye[ids]`. A 0-D index selects a view, whose writes must change the matrix."""
    if isinstance(index, Tensor) and not index.ndim:
        return None
    return _identity_rows(func, matrix, index)


def _embedding(func: Any, input: Any, weight: Any, *args: Any, **kwargs: Any) -> OneHot | None:
    if any(args) or any(value not in (None, 2.0, False) for value in kwargs.values()):
        return None
    if type(input) is not Tensor or not _is_square(weight):
        return None
    if input.numel() and int(input.min()) < 0:
        return None  # torch raises an error for negative ids
    return _identity_rows(func, weight, input)


def _index_select(func: Any, input: Any, dim: Any, index: Any, out: Any = None) -> OneHot | None:
    if dim not in (0, -2) or not _is_square(input) or index.ndim != 1 or out is not None:
        return None
    if index.numel() and int(index.min()) < 0:
        return None  # torch raises an error for negative ids
    return _identity_rows(func, input, index)


def _equal(func: Any, input: Any, other: Any, out: Any = None) -> OneHot | None:
    """Match ids[..., None] == arange(V), in either order; an invalid id becomes a row of zeros.

    Both tensors may be expanded to the shape of the result.
    """
    left = input
    if type(left) is not Tensor or type(other) is not Tensor or out is not None:
        return None
    if not (left.ndim and other.ndim):
        return None
    if left.shape == other.shape:
        shape = left.shape
        left, other = (_without_expanded_axes(t) for t in (left, other))
        sizes = zip(left.shape, other.shape, strict=True)
        if tuple(max(pair) for pair in sizes) != tuple(shape):
            return None
    ids, classes = (other, left) if left.ndim < other.ndim else (left, other)
    if ids.shape[-1] != 1:
        ids, classes = classes, ids
    if classes.numel() != classes.shape[-1] or ids.shape[-1] != 1:
        return None
    count = classes.numel()
    if count < 2 or torch.bool in (ids.dtype, classes.dtype) or classes.ndim > ids.ndim:
        return None
    dtype = torch.result_type(ids, classes)  # torch compares in this dtype
    if dtype.is_complex or (dtype.is_floating_point and count > 2 / torch.finfo(dtype).eps):
        return None  # the dtype can't represent every class index
    classes = classes.reshape(-1)
    if classes[0] != 0 or classes[-1] != count - 1 or ids.device != classes.device:
        return None
    if not torch.equal(classes, torch.arange(count, dtype=classes.dtype, device=classes.device)):
        return None
    ids = ids.to(dtype)
    inside = (ids >= 0) & (ids < count) & (ids == ids.floor())
    ids = ids.nan_to_num().clamp(0, count - 1).long()
    weights = None if bool(inside.all()) else inside
    return OneHot([Field(ids, weights, count)], torch.bool)


def _not_equal(func: Any, input: Any, other: Any, out: Any = None) -> OneHot | None:
    """Match ids[..., None] != arange(V), the complement of a one-hot."""
    x = _equal(func, input, other, out)
    if x is None:
        return None
    (field,) = x.parts
    assert isinstance(field, Field)
    outside = field.weights_or_ones(torch.bool).logical_not()
    return OneHot([Field(field.ids, outside, field.width)], torch.bool, fill=True)


def _without_expanded_axes(t: Tensor) -> Tensor:
    """Return a view of the tensor in which each expanded axis (stride 0) has size 1."""
    for axis, stride in enumerate(t.stride()):
        if stride == 0:
            t = t.narrow(axis, 0, min(t.shape[axis], 1))
    return t


def _eye(func: Any, n: Any = None, m: Any = None, **kwargs: Any) -> OneHot | None:
    """Match a large identity matrix, because the calling code may select rows of it."""
    if not set(kwargs) <= {"dtype", "device"} or not isinstance(n, int) or m not in (None, n):
        return None
    if n * n < MIN_ENTRIES:
        return None
    rows = torch.arange(n, device=kwargs.get("device"))
    if rows.is_meta:
        return None
    dtype = kwargs.get("dtype") or torch.get_default_dtype()
    return OneHot([Field(rows.unsqueeze(-1), None, n)], dtype)


def _gumbel_softmax(
    func: Any, logits: Any, tau: float = 1, hard: bool = False, eps: float = 1e-10, dim: int = -1
) -> OneHot | Tensor | None:
    """Match a hard sample, a one-hot whose gradient flows to the soft sample."""
    if (
        not hard
        or type(logits) is not Tensor
        or logits.ndim == 0
        or dim % logits.ndim != logits.ndim - 1
    ):
        return None
    if not logits.is_floating_point() or logits.shape[-1] < 2:
        return None
    soft = func(logits, tau, False, eps, dim)
    # Torch's own sample would not be finite either. A one-hot has no tangent in forward mode.
    if not bool(soft.isfinite().all()) or has_tangent(soft):
        hard_sample = torch.zeros_like(soft).scatter_(-1, soft.max(-1, keepdim=True)[1], 1.0)
        sample: Tensor = hard_sample - soft.detach() + soft
        return sample
    proxy = None
    if soft.requires_grad:
        proxy = ZerosProxy.apply(soft)  # type: ignore[no-untyped-call]
    ids = soft.detach().max(-1, keepdim=True)[1]
    return OneHot([Field(ids, None, logits.shape[-1])], soft.dtype, proxy)


def _l1_loss(func: Any, *args: Any, **kwargs: Any) -> Tensor | None:
    """Call `l1_loss` with its weight, because torch doesn't pass the weight to the mode."""
    frame = sys._getframe(1)
    while frame is not None and frame.f_code is not F.l1_loss.__code__:
        frame = frame.f_back  # type: ignore[assignment]
    weight = None if frame is None else frame.f_locals.get("weight")
    if weight is None or "weight" in kwargs:
        return None
    loss: Tensor = func(*map(_to_dense, args), weight=weight, **kwargs)
    return loss


def _set_data(func: Any, tensor: Any, values: Any) -> Tensor | None:
    """Materialize a one-hot that is assigned to `tensor.data`.

    If only the values are a tensor subclass, torch calls no `__torch_function__` but the mode's.
    """
    if not isinstance(values, OneHot):
        return None
    dense = values.materialize(permanent=True)
    func(tensor, dense)
    return dense


def _to_dense(value: Any) -> Any:
    return materialize(value) if isinstance(value, OneHot) else value


_FULL = torch.full, torch.full_like, Tensor.new_full
_ONES = torch.ones, torch.ones_like, Tensor.new_ones


def _constant(func: Any, *args: Any, **kwargs: Any) -> OneHot | None:
    """Return a constant tensor as a `OneHot` that the calling code can scatter into."""
    if not set(kwargs) <= {"size", "dtype", "device", "input", "fill_value"}:
        return None
    number: Any = int(func in _ONES)
    if func in _FULL:
        number = kwargs.get("fill_value", args[-1] if args else None)
    if type(number) not in (int, float) or not math.isfinite(number):
        return None
    like = args[0] if args and isinstance(args[0], Tensor) else kwargs.get("input")
    device = kwargs.get("device", like.device if isinstance(like, Tensor) else None)
    if isinstance(like, OneHot):
        args, kwargs = map_instances((args, kwargs), OneHot, meta_tensor)
    out = func(*args, **{**kwargs, "device": "meta"})
    if out.ndim < 2 or out.shape[-1] < 2 or not out.is_contiguous():
        return None
    ids = torch.empty((*out.shape[:-1], 0), dtype=torch.int64, device=device)
    if ids.is_meta:
        return None
    fill = number_of_dtype(number, out.dtype).real.item()
    return OneHot([Field(ids, None, out.shape[-1])], out.dtype, fill=fill)


# scatter_add is not included: it usually adds up rows, for example along the edges of a graph.
_SCATTERS = {"scatter", "scatter_", "index_fill", "index_fill_", "index_put", "index_put_"}


@functools.lru_cache(4096)
def _makes_no_parameter(code: Any) -> bool:
    """Return whether the function creates no `nn.Parameter`, which must be an ordinary tensor."""
    return "Parameter" not in code.co_names


@functools.lru_cache(4096)
def _scatters(code: Any) -> bool:
    """Return whether the function that creates the tensor also writes to a tensor by index."""
    names = code.co_names
    if not _makes_no_parameter(code):
        return False
    if not _SCATTERS.isdisjoint(names):
        return True
    # `zeros[arange(N), ids] = 1` creates a tuple and stores an item. A loop that stores single
    # entries is faster on a plain tensor.
    instructions = list(dis.get_instructions(code))
    loops = [(each.offset, each.argval) for each in instructions if each.opname == "FOR_ITER"]
    stores = [each.offset for each in instructions if each.opname == "STORE_SUBSCR"]
    once = any(not any(start < each < end for start, end in loops) for each in stores)
    makes_tuple = any(each.opname == "BUILD_TUPLE" for each in instructions)
    return once and makes_tuple and not {"arange", "range"}.isdisjoint(names)


# Patterns that match constants, with the functions in which they are searched for.
_CONSTANTS: dict[Any, Callable[[Any], bool]] = {_constant: _scatters, _eye: _makes_no_parameter}

_PATTERNS: dict[Any, Callable[..., OneHot | Tensor | None]] = {
    F.one_hot: _one_hot,
    Tensor.__getitem__: _indexed,
    F.gumbel_softmax: _gumbel_softmax,
    F.l1_loss: _l1_loss,
    Tensor.data.__set__: _set_data,  # type: ignore[attr-defined]
    F.embedding: _embedding,
    torch.index_select: _index_select,
    Tensor.index_select: _index_select,
    Tensor.__eq__: _equal,
    Tensor.eq: _equal,
    torch.eq: _equal,
    **dict.fromkeys(
        (Tensor.__ne__, Tensor.ne, torch.ne, Tensor.not_equal, torch.not_equal), _not_equal
    ),
    torch.eye: _eye,
    **dict.fromkeys(BACKWARD_FUNCTIONS, call_outside),
    **dict.fromkeys((torch.zeros, torch.zeros_like, Tensor.new_zeros, *_ONES, *_FULL), _constant),
}
