"""Check the dtype and range of ids, offsets and counts, and reject one-hots passed as ids.

Checks that read tensor values run inside two custom operators, `hotrow::check_ids` and
`hotrow::check_offsets`. This way, one implementation works in eager code, in `torch.compile`
(without a graph break), in `torch.export` and in `vmap`. Meta tensors have no values, so they
always pass.
"""

from __future__ import annotations

import hashlib
import math
import operator
from typing import Any, Literal

import torch
from torch import Tensor
from torch.utils._python_dispatch import _disable_current_modes

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.kernels.operators import take_bad_id
from hotrow.kernels.tracing import is_compiling, is_jit_tracing

ID_DTYPES = (torch.int64, torch.int32)
# Limits on the probability that random ids look like a one-hot or multi-hot. If the probability is
# above the limit, hotrow accepts the ids. The second limit applies to 1-D ids.
_MAX_CHANCE, _MAX_FLAT_CHANCE = 1 / 50, 1 / 10_000

_WRONG_DTYPE = {
    torch.bool: "for a one-hot or multi-hot, use {name}.float(); "
    "for the positions where a mask is True, use {name}.nonzero()",
    torch.uint8: "torch indexing treats uint8 as a mask; use {name}.long()",
}


def as_ids(values: Any, name: str = "ids", what: str = "ids") -> Tensor:
    """Convert a tensor, an array, a list (nested to any depth) or an int to a tensor of ids.

    Returns an int64 or int32 tensor of the same shape. Raises `HotrowError` for other values.
    To check the range of the ids, use `check_ids`.

    >>> as_ids([2, 3, 1])
    tensor([2, 3, 1])
    """
    if not isinstance(values, Tensor):
        try:
            values = torch.as_tensor(values)
        except (ValueError, TypeError, RuntimeError, OverflowError) as error:
            raise HotrowError(
                f"{name} cannot be converted to a tensor of ids ({error})",
                fix="pass an int, a list of ints, or an integer tensor",
            ) from None
        if values.numel() == 0:
            values = values.long()  # torch converts an empty list to float32
    ids: Tensor = values
    check_dtype(ids, name, what)
    return ids


def digest(ids: Tensor) -> str:
    """Return a short hash of int64 ids, so that processes can compare their ids."""
    return hashlib.sha256(ids.cpu().numpy().tobytes()).hexdigest()[:16]


def check_dtype(ids: Tensor, name: str = "ids", what: str = "ids") -> None:
    """Raise `HotrowError` unless `ids` is int64 or int32."""
    if not isinstance(ids, Tensor):
        raise HotrowError(
            f"{name} is a {type(ids).__name__}, but {what} must be a tensor",
            fix=f"use torch.tensor({name})",
        )
    check_layout(ids, name)
    if ids.dtype in ID_DTYPES:
        return
    remedy = _WRONG_DTYPE.get(ids.dtype, f"if these are {what}, use {{name}}.long()")
    raise HotrowError(
        f"{name} is {_dtype(ids)} of shape {tuple(ids.shape)}, but {what} must be int64 or int32",
        fix=remedy.format(name=name),
    )


def check_layout(tensor: Tensor, name: str) -> None:
    """Raise `HotrowError` unless the tensor is dense or jagged; torch can't look up others."""
    if tensor.is_nested and tensor.layout is not torch.jagged:
        kind, fix = "nested", "torch.nested.nested_tensor(..., layout=torch.jagged)"
    elif tensor.layout not in (torch.strided, torch.jagged):
        kind, fix = "sparse", f"{name}.to_dense()"
    else:
        return
    raise HotrowError(f"{name} is a {kind} tensor with layout {tensor.layout}", fix=f"use {fix}")


def check_device(tensor: Tensor, device: torch.device, name: str = "input") -> None:
    """Raise `HotrowError` if the tensor is not on the table's device, unless that is "meta"."""
    if tensor.device != device and device.type != "meta":
        raise HotrowError(
            f"{name} is on {tensor.device}, but the table is on {device}",
            fix=f"use {name}.to({str(device)!r})",
        )


def check_ids(
    ids: Tensor,
    rows: int,
    name: str = "ids",
    *,
    refused_encoding: Literal["one-hot", "multi-hot", ""] = "one-hot",
) -> Tensor:
    """Return the ids after checking that each is in 0..rows-1.

    Args:
        ids: int64 or int32, any shape, any device; may be empty.
        rows: V, the number of table rows.
        name: the argument's name, for error messages.
        refused_encoding: reject integers that look like this encoding: "one-hot" (a single 1, all
            others 0), "multi-hot" (only 0s and 1s, with at least one 1), or "" for none. This check
            runs only if the last dimension is V and V is at least 3. It accepts a batch if more
            than 1 in 50 uniformly random batches of its shape would also look like the encoding (1
            in 10,000 for 1-D ids).

    Raises:
        HotrowIndexError: an id is outside 0..rows-1. The message names the first such id.
        HotrowError: the dtype is wrong, or the ids look like the rejected encoding.

    Cost: one pass over the ids, and a synchronization on a GPU.
    """
    check_dtype(ids, name)
    if ids.is_nested:  # jagged layout: values() contains the ids
        check_ids(ids.values(), rows, name, refused_encoding="")
        return ids
    check = _check_ids if is_readable(ids) else torch.ops.hotrow.check_ids
    result: Tensor = check(ids, rows, name, refused_encoding)
    return result


def check_range(ids: Tensor, rows: int, name: str = "ids") -> None:
    """Check the dtype and range like `check_ids`, but don't copy the ids or reject encodings.

    Tracing doesn't record this check, so use it only in code that is never traced.
    """
    check_dtype(ids, name)
    if ids.is_nested or not is_readable(ids):
        check_ids(ids, rows, name, refused_encoding="")
    else:
        _check_range(ids, rows, name)


def is_readable(ids: Tensor) -> bool:
    """Return whether Python code can read the values of the ids.

    A meta tensor or a tensor subclass has no readable values. While a tracer, a transform or a
    dispatch mode is active, no tensor has readable values.
    """
    return (
        type(ids) is Tensor
        and not is_compiling()
        and not is_jit_tracing()
        and not torch._C._len_torch_dispatch_stack()
        and not torch._C._are_functorch_transforms_active()
        and not ids.is_meta
    )


def plain_ids(ids: Tensor) -> Tensor | None:
    """Return the ids as a plain tensor that Python code can read, or None if this is impossible.

    The result has the values of a tensor subclass that stores them itself, such as
    `nn.Parameter`, or of jagged ids. Dispatch modes don't prevent reading.
    """
    if is_readable(ids) and not ids.is_nested:
        return ids
    if is_compiling() or is_jit_tracing():
        return None
    if torch._C._are_functorch_transforms_active():
        return None
    with torch._C.DisableTorchFunctionSubclass(), _disable_current_modes():
        if ids.is_nested and ids.layout is torch.jagged:
            ids = ids.values()
        # A subclass with its own dispatch may store its values in other tensors.
        stores_values = type(ids).__torch_dispatch__ is Tensor.__torch_dispatch__
        if not stores_values or ids.layout is not torch.strided or ids.is_nested or ids.is_meta:
            return None
        return ids.detach().as_subclass(Tensor)


def check_offsets(offsets: Tensor, count: int, last: bool) -> Tensor:
    """Return the offsets after checking that they split `count` ids into bags.

    Valid offsets satisfy 0 = o[0] <= o[1] <= ... <= count.

    Args:
        offsets: int64 or int32, 1-D; the start of each bag.
        count: the number of ids.
        last: torch's `include_last_offset`. If true, the last entry is the end of the last bag and
            must equal `count`.
    """
    check_dtype(offsets, "offsets", "offsets")
    if offsets.ndim != 1:
        raise HotrowError(f"offsets must be 1-D, but has shape {tuple(offsets.shape)}")
    result: Tensor = torch.ops.hotrow.check_offsets(offsets, count, last)
    return result


def normalize_padding(padding_idx: int | None, rows: int) -> int:
    """Return the padding row as a non-negative index, or -1 if there is none."""
    if padding_idx is None:
        return -1
    if not -rows <= padding_idx < rows:
        raise HotrowIndexError(
            f"padding_idx = {padding_idx}, but the table has {rows} rows "
            f"(valid range: {-rows}..{rows - 1})"
        )
    return padding_idx % rows


def check_count(name: str, value: int) -> int:
    """Return the count as an int. Raise `HotrowError` unless it is a non-negative int."""
    try:
        count = operator.index(value)
    except TypeError:
        count = -1
    if isinstance(value, bool) or count < 0:
        raise HotrowError(f"{name} = {value!r}, but it must be a non-negative int")
    return count


def check_bag(
    shape: torch.Size,
    offsets: Tensor | None,
    weights: Tensor | None,
    *,
    mode: str,
    table: Tensor,
    last: bool,
) -> Tensor | None:
    """Check that offsets and weights match the shape of the ids, and return the offsets.

    Args:
        shape: the shape of the ids: (B, L), or (N,) with offsets.
        offsets: the start of each bag.
        weights: `per_sample_weights`, with the shape of the ids and the dtype of the table.
        mode: the bag's mode; only "sum" accepts weights.
        table: the rows that the bag adds up.
        last: torch's `include_last_offset`.
    """
    for name, value in (("offsets", offsets), ("per_sample_weights", weights)):
        if value is None:
            continue
        if not isinstance(value, Tensor):
            raise HotrowError(
                f"{name} is a {type(value).__name__}, but it must be a tensor",
                fix=f"use torch.tensor({name})",
            )
        check_layout(value, name)
        check_device(value, table.device, name)
    if len(shape) not in (1, 2) or (len(shape) == 1) != (offsets is not None):
        raise HotrowError(
            "a bag takes ids of shape (B, L) without offsets or (N,) with offsets, "
            f"but got {tuple(shape)} with{'' if offsets is not None else 'out'} offsets"
        )
    if weights is not None:
        if mode != "sum":
            raise HotrowError(
                f'per_sample_weights needs mode="sum", but the bag has mode={mode!r}',
                fix='build the bag with mode="sum", or leave out the weights',
            )
        if weights.shape != shape:
            raise HotrowError(
                f"per_sample_weights has shape {tuple(weights.shape)}, but the ids have shape "
                f"{tuple(shape)}"
            )
        if weights.dtype != table.dtype and not torch.is_autocast_enabled(weights.device.type):
            raise HotrowError(
                f"per_sample_weights is {_dtype(weights)}, but the table is {_dtype(table)}",
                fix=f"use per_sample_weights.to({table.dtype})",
            )
    return None if offsets is None else check_offsets(offsets, shape[0], last)


def check_soft(values: Tensor, rows: int, dtype: torch.dtype, name: str = "input") -> None:
    """Raise `HotrowError` unless `values` is valid one-hot or probability input for the table.

    Valid input is floating point, has the table's dtype, and has a last dimension of `rows`.
    """
    if not values.is_floating_point():
        check_dtype(values, name)
    if values.ndim == 0 or values.shape[-1] != rows:
        raise HotrowError(
            f"{name} is {_dtype(values)} of shape {tuple(values.shape)}, but one-hot or "
            f"probability input must have a last dimension of {rows}, the number of table rows",
            fix=f"if these are ids, use {name}.long()",
        )
    if values.dtype != dtype and not torch.is_autocast_enabled(values.device.type):
        raise HotrowError(
            f"{name} is {_dtype(values)}, but the table is {str(dtype).removeprefix('torch.')}",
            fix=f"use {name}.to({dtype})",
        )


def _dtype(tensor: Tensor) -> str:
    return str(tensor.dtype).removeprefix("torch.")


def _is_encoded(ids: Tensor, rows: int, encoding: str) -> bool:
    """Return whether the integers are almost certainly one-hot or multi-hot vectors, not ids."""
    if not encoding or rows < 3 or ids.ndim == 0 or ids.shape[-1] != rows:
        return False
    # Accept small batches for small tables, because real ids may look like an encoding by chance.
    chance = -(rows - 1) * math.log(rows) if encoding == "one-hot" else rows * math.log(2 / rows)
    max_chance = math.log(_MAX_FLAT_CHANCE if ids.ndim == 1 else _MAX_CHANCE)
    if ids.numel() // rows * chance > max_chance or not bool(((ids == 0) | (ids == 1)).all()):
        return False
    ones = ids.sum(-1)
    return bool((ones == 1).all() if encoding == "one-hot" else (ones > 0).all())


def _check_range(ids: Tensor, rows: int, name: str) -> None:
    if ids.numel():
        low, high = torch.aminmax(ids)
        if not ids.is_cpu:  # read both with one synchronization
            low, high = torch.stack([low, high]).tolist()
        if int(low) < 0 or int(high) >= rows:
            raise _range_error(ids, rows, name)


def raise_bad_id(device: torch.device, wait: bool = False) -> None:
    """Raise an error if an earlier GPU lookup found an invalid id. See `take_bad_id`."""
    bad_id = take_bad_id(device, wait)
    if bad_id is None:
        return
    position, shape, row_count, ids = bad_id
    if ids is not None and row_count is not None and _is_outside(ids, row_count).any():
        raise _range_error(ids, row_count, "input")
    index, table = f"{position}", "the table"
    if shape is not None:
        place = torch.unravel_index(torch.tensor(position, device="cpu"), shape)
        index, table = ", ".join(str(int(each)) for each in place), f"a table of {row_count} rows"
    raise HotrowIndexError(
        f"an earlier lookup in {table} had an id out of range: input[{index}]",
        fix="to find the batch with this id, check the ids on the CPU before each lookup",
    )


def _is_outside(ids: Tensor, rows: int) -> Tensor:
    return (ids < 0) | (ids >= rows)


def _check_ids(ids: Tensor, rows: int, name: str, refused_encoding: str) -> Tensor:
    _check_range(ids, rows, name)
    if _is_encoded(ids, rows, refused_encoding):
        raise HotrowError(
            f"{name} of shape {tuple(ids.shape)} looks like a {refused_encoding} in {_dtype(ids)}: "
            f"its last dimension is {rows}, the number of table rows, and all values are 0 or 1",
            fix=(
                "use {0}.argmax(-1) to get the ids, or {0}.float() where a one-hot is accepted"
                if refused_encoding == "one-hot"
                else "use {0}.float()"
            ).format(name)
            + f"; if these really are ids, reshape them so that their last dimension is not {rows}",
        )
    return ids.clone()


def _range_error(ids: Tensor, rows: int, name: str) -> HotrowIndexError:
    out_of_range = _is_outside(ids, rows)
    position = out_of_range.nonzero()[0].tolist()
    value = int(ids[tuple(position)])
    index = f"[{', '.join(map(str, position))}]" if position else ""
    valid = f"valid ids: 0..{rows - 1}" if rows else "no id is valid"
    other_count = int(out_of_range.sum()) - 1
    if value < 0:
        fix = "negative ids often mark padding or ignored positions; mask them or map them to a row"
    elif value == rows:
        fix = "ids start at 0; do yours start at 1, or does the table need one more row?"
    else:
        fix = "do these ids come from a larger vocabulary?"
    return HotrowIndexError(
        f"{name}{index} = {value}, but the table has {rows} rows ({valid})"
        + (f"; {other_count} more out of range" if other_count else ""),
        fix=fix,
    )


def _check_offsets(offsets: Tensor, count: int, last: bool) -> Tensor:
    if offsets.numel() == 0:
        if count or last:
            raise HotrowError(
                f"offsets is empty, but there are {count} ids"
                + (", and include_last_offset needs at least the last offset" if last else "")
            )
        return offsets.clone()
    if int(offsets[0]) != 0:
        raise HotrowError(f"offsets[0] = {int(offsets[0])}, but the first bag must start at 0")
    ends = torch.cat([offsets[1:], offsets.new_tensor([count])])
    backward = (offsets > ends).nonzero()
    if len(backward):
        i = int(backward[0])
        has_next = i + 1 < len(offsets)
        end = f"offsets[{i + 1}] = {int(ends[i])}" if has_next else f"there are {count} ids"
        raise HotrowError(
            f"offsets[{i}] = {int(offsets[i])}, but {end}",
            fix="offsets must contain the start of each bag, in ascending order",
        )
    if last and int(offsets[-1]) != count:
        raise HotrowError(
            f"offsets[-1] = {int(offsets[-1])}, but there are {count} ids",
            fix="with include_last_offset, the last offset must equal the number of ids",
        )
    return offsets.clone()


_library: Any = torch.library.Library("hotrow", "DEF")  # type: ignore[no-untyped-call]


def _define(name: str, arguments: str, implementation: Any) -> None:
    """Define an operator that copies its input, is opaque to tracers and works under vmap."""
    operator = f"hotrow::{name}"
    _library.define(f"{name}(Tensor {arguments}) -> Tensor")
    _library.impl(name, implementation, "CompositeExplicitAutograd")
    torch.library.register_fake(operator, lambda x, *_: torch.empty_like(x), lib=_library)
    torch.library.register_vmap(
        operator,
        lambda info, dims, x, *rest: (getattr(torch.ops.hotrow, name)(x, *rest), dims[0]),
        lib=_library,
    )


_define("check_ids", "ids, int rows, str name, str refused_encoding", _check_ids)
_define("check_offsets", "offsets, int count, bool last", _check_offsets)
