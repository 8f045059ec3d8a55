"""Copy a one-hot, or change its dtype or device."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.parts import DenseColumns, Field, Part
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import derive, empty_meta, map_batch, meta_tensor
from hotrow.onehot.tensor import OneHot

_EXACT_COUNTS = 256  # even bfloat16 represents the integers up to 256 exactly


@rule(Tensor.contiguous, Tensor.detach, *overloads("clone", "detach"), any_layout=True)
def _(func: Any, x: OneHot, **kwargs: Any) -> Any:
    out = func(meta_tensor(x), **kwargs)
    if func is Tensor.contiguous and x.strides == out.stride():
        return x
    if func.__name__ != "detach":
        return map_batch(x, out, lambda t: t.clone(), lambda t: t)
    with torch.no_grad():  # after a write, torch can't record uses of a view from `no_grad`
        parts = x.current_parts
    parts = tuple(part.map(Tensor.detach) for part in parts)
    result = OneHot(
        parts, x.cached_dtype, None, (x, Tensor.detach), x.origins, x.strides,
        fill=x.fill, layout=x._axis_layout,
    )  # fmt: skip
    x.add_view(result)
    result.difference = x.difference
    return result


@rule(Tensor.to, any_layout=True)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    if not isinstance(x, OneHot):  # dense.to(one_hot)
        return NotImplemented
    copy = kwargs.pop("copy", False)
    if any(isinstance(a, OneHot) for a in args) or sum(isinstance(a, bool) for a in args) > 1:
        return NotImplemented
    device, dtype, _, memory_format = torch._C._nn._parse_to(*args, **kwargs)
    if memory_format is not None:
        return NotImplemented
    return cast(x, dtype or x.cached_dtype, device, copy)


@rule(
    *(Tensor.float, Tensor.double, Tensor.half, Tensor.bfloat16),
    *(Tensor.long, Tensor.int, Tensor.short, Tensor.char, Tensor.byte, Tensor.bool),
    any_layout=True,
)
def _(func: Any, x: OneHot, **kwargs: Any) -> Any:
    if kwargs:
        return NotImplemented
    return cast(x, func(torch.empty(0, device="meta")).dtype, None, copy=False)


@rule(Tensor.type_as, any_layout=True)
def _(func: Any, x: Any, other: Tensor) -> Any:
    if not isinstance(x, OneHot) or isinstance(other, OneHot):
        return NotImplemented
    return cast(x, other.dtype, other.device, copy=False)


@rule(Tensor.type, any_layout=True)
def _(func: Any, x: OneHot, dtype: Any = None, **kwargs: Any) -> Any:
    if dtype is None or kwargs or x.cached_device.type != "cpu":
        return NotImplemented
    like = torch.empty(0, dtype=x.cached_dtype, device="cpu")
    like = like.type(dtype)  # a dtype, its name or a tensor class
    return cast(x, like.dtype, like.device, copy=False)


def cast(x: OneHot, dtype: torch.dtype, device: torch.device | None, copy: bool) -> Any:
    """Cast like `Tensor.to`, or return NotImplemented if casting the parts is not equivalent."""
    moves = device is not None and device != x.cached_device
    if device is not None and device.type == "meta":
        return NotImplemented  # rules can't read ids on the meta device
    if not moves and dtype == x.cached_dtype and not copy:
        return x
    parts: list[Part] = []
    for part in x.parts:
        castable = _castable(part, x.cached_dtype, dtype)
        if castable is None:
            return NotImplemented
        parts.append(castable.to(dtype, device, copy))
    out, fill = empty_meta(x.sizes, x.strides, dtype), x.fill
    if fill or fill is False:  # torch can't subtract False from a number
        fill = torch.tensor(fill, dtype=x.cached_dtype, device="cpu").to(dtype).real.item()
    return derive(
        x,
        parts,
        out if out.is_contiguous() else meta_tensor(x).to(dtype, copy=True),
        lambda t: t.to(device=device, dtype=dtype),
        fill=fill,
    )


def _castable(part: Part, source: torch.dtype, dtype: torch.dtype) -> Part | None:
    """Return an equal part whose tensors can be cast, or None."""
    if casts_exactly(part, source, dtype):
        return part
    if not isinstance(part, Field) or not part.is_short or is_compiling():
        return None
    if source.is_floating_point or source.is_complex or dtype.is_complex:
        return None  # the sums of the weights may be rounded differently than in torch
    return part.without_repeats(source)


def casts_exactly(part: Part, source: torch.dtype, dtype: torch.dtype) -> bool:
    """Return whether casting the part's tensors gives the same values as casting its columns."""
    if source == dtype:
        return True
    if dtype.is_complex:
        return False
    if isinstance(part, DenseColumns) or part.ids.shape[-1] <= 1:
        return True
    weights, count = part.weights, part.ids.shape[-1]
    if weights is not None:
        if source != torch.int64 or is_compiling():
            return False
        count = int(weights.abs().sum(-1).max()) if weights.numel() else 0
        if dtype == torch.bool and bool((weights < 0).any()):
            return False  # the sum of the weights may be 0
    if dtype == torch.bool:
        return count < _EXACT_COUNTS
    return count <= _EXACT_COUNTS and min(source.itemsize, dtype.itemsize) > 1
