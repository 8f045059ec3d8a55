"""Products with a one-hot: look up rows for its fields, and multiply its dense columns."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.parts import Field, all_weights
from hotrow.onehot.registry import USE_TORCH, rule
from hotrow.onehot.rules.dtypes import cast
from hotrow.onehot.size_limits import is_too_small_to_look_up
from hotrow.onehot.tensor import OneHot
from hotrow.table.lookup import look_up, look_up_bags

_AUTOCAST_DTYPES = {torch.float32, torch.float16, torch.bfloat16}  # the dtypes that autocast casts


class _AddProxyProduct(torch.autograd.Function):
    """Compute rows + proxy @ weight. The forward pass skips the product, which is zero."""

    @staticmethod
    def forward(
        ctx: Any, rows: Tensor, proxy: Tensor, weight: Tensor, columns: bool, is_plain: bool
    ) -> Tensor:
        ctx.save_for_backward(proxy, weight)
        ctx.columns, ctx.is_plain = columns, is_plain
        return rows.detach()  # unlike a view, autograd allows in-place changes of it

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients.

        The lookup computes the weight's gradient. This function adds only a differentiable zero.
        """
        proxy, weight = ctx.saved_tensors
        if torch.is_grad_enabled() and not ctx.is_plain:
            raise NotImplementedError(
                "second derivatives are not supported for a one-hot that requires grad if its rows "
                "have weights or several ids, as after x * 2, x.mean(1) or x.flatten(1); make the "
                "one-hot dense first: x = x.to_dense()"
            )
        dense = gradient @ (weight if ctx.columns else weight.t()).to(gradient.dtype)
        zero = None
        if torch.is_grad_enabled() and ctx.needs_input_grad[2]:
            zero = gradient.reshape(-1, gradient.shape[-1]).t() @ proxy.reshape(-1, proxy.shape[-1])
            zero = zero if ctx.columns else zero.t()
        return gradient, dense, zero, None, None


def product(x: OneHot, weight: Tensor, columns: bool = False) -> Tensor:
    """Multiply x, (*batch, C), by a (C, D) weight or, if `columns`, by a transposed (D, C) weight.

    Returns (*batch, D). The function looks up rows for fields, and multiplies only dense columns.
    """
    ids, fields, total, start = [], [], None, 0
    for part in x.parts:
        if isinstance(part, Field):
            ids.append(part.ids + start if start else part.ids)
            fields.append(part)
        elif part.width:
            rows = _row_slice(weight, start, part.width, columns)
            dense = part.values @ rows
            total = dense if total is None else total + dense
        start += part.width
    if ids:
        rows = _sum_rows(ids, fields, weight, columns)
        total = rows if total is None else total + rows
    assert total is not None
    proxy = x.grad_proxy
    if proxy is not None:
        only_part = x.parts[0] if len(x.parts) == 1 else None
        is_plain = (
            isinstance(only_part, Field) and only_part.weights is None and only_part.has_one_id
        )
        total = _AddProxyProduct.apply(total, proxy, weight, columns, is_plain)  # type: ignore[no-untyped-call]
    return total


def _sum_rows(ids: list[Tensor], fields: list[Field], weight: Tensor, columns: bool) -> Tensor:
    """Sum the weight rows that the ids of all fields select."""
    flat = ids[0] if len(ids) == 1 else torch.cat(ids, -1)
    weights = all_weights(fields)
    if flat.shape[-1] == 1 and weights is None:
        return look_up(weight, flat.select(-1, 0), columns)
    scale = None
    if weights is not None:
        scale = torch.cat(weights, -1)
        scale = scale.to(weight.dtype).reshape(-1, scale.shape[-1])
    batch = flat.shape[:-1]
    if scale is not None and scale.shape[-1] == 1:
        return look_up(weight, flat.select(-1, 0), columns) * scale.reshape(*batch, 1)
    sums = look_up_bags(weight, flat.reshape(-1, flat.shape[-1]), scale, columns)
    return sums.reshape(*batch, sums.shape[-1])


def _row_slice(weight: Tensor, start: int, width: int, columns: bool) -> Tensor:
    """Return the (width, D) weight rows by which dense columns are multiplied."""
    row_count = weight.shape[1 if columns else 0]
    if start == 0 and width == row_count:
        return weight.t() if columns else weight
    return look_up(weight, torch.arange(start, start + width, device=weight.device), columns)


def autocast_dtype(device: torch.device, dtypes: set[torch.dtype]) -> torch.dtype | None:
    """Return the dtype in which autocast computes a product of these dtypes, or None."""
    if device.type == "meta" or not torch.is_autocast_enabled(device.type):
        return None
    return torch.get_autocast_dtype(device.type) if dtypes <= _AUTOCAST_DTYPES else None


def look_up_product(
    x: Any,
    weight: Any,
    columns: bool = False,
    bias: Tensor | None = None,
    name: str | None = None,
) -> Any:
    """Return `product` plus the bias, or NotImplemented to leave the operation to torch.

    `name` describes the product in the report, for example "linear(300, 12)".
    """
    if not isinstance(x, OneHot) or isinstance(weight, OneHot) or not isinstance(weight, Tensor):
        return NotImplemented
    device = x.cached_device
    dtypes = {x.cached_dtype, weight.dtype} | ({bias.dtype} if bias is not None else set())
    autocast = autocast_dtype(device, dtypes)
    fits = weight.ndim == 2 and weight.shape[1 if columns else 0] == x.sizes[-1]
    if not fits or weight.layout != torch.strided or not weight.is_floating_point():
        return NotImplemented
    if weight.device != device or x.is_modified or not x.is_plain:
        return NotImplemented
    if bias is not None and bias.shape != (weight.shape[0],):
        return NotImplemented
    if len(dtypes) > 1 and autocast is None:
        return NotImplemented
    if not any(isinstance(part, Field) and part.ids.shape[-1] for part in x.parts):
        return NotImplemented  # nothing to look up
    if x.origins and not is_compiling():
        if name is None:
            inputs, outputs = reversed(weight.shape) if columns else weight.shape
            name = f"{'linear' if columns else 'matmul'}({inputs}, {outputs})"
        if is_too_small_to_look_up(x):
            for origin in x.origins:
                origin.record_small_product(name)
            return USE_TORCH
        for origin in x.origins:
            origin.record_product(name, x.entries)
    if x.cached_dtype != weight.dtype:
        x = cast(x, weight.dtype, None, copy=False)
        if x is NotImplemented:
            return NotImplemented
    rows = product(x, weight, columns)
    if autocast is not None:
        rows, bias = rows.to(autocast), None if bias is None else bias.to(autocast)
    return rows if bias is None else rows + bias


@rule(F.linear)
def _(func: Any, input: Any, weight: Any, bias: Tensor | None = None) -> Any:
    return look_up_product(input, weight, columns=True, bias=bias)


@rule(F.bilinear)
def _(func: Any, input1: Any, input2: Any, weight: Tensor, bias: Tensor | None = None) -> Any:
    if weight.ndim != 3:
        return NotImplemented
    swapped = not isinstance(input1, OneHot)
    x, other = (input2, input1) if swapped else (input1, input2)
    if isinstance(other, OneHot) or other.ndim != len(x.sizes) or other.dtype != x.cached_dtype:
        return NotImplemented
    # (O, I, J) -> (I, O * J), with one row for each id of the one-hot
    by_id = weight.permute(2, 0, 1) if swapped else weight.permute(1, 0, 2)
    count, outputs, inner = by_id.shape
    if other.shape != (*x.sizes[:-1], inner) or (bias is not None and bias.shape != (outputs,)):
        return NotImplemented
    name = f"bilinear({weight.shape[1]}, {weight.shape[2]}, {outputs})"
    rows = look_up_product(x, by_id.reshape(count, outputs * inner), name=name)
    if not isinstance(rows, Tensor):
        return rows
    if rows.dtype != other.dtype:
        return NotImplemented
    result = (rows.reshape(*other.shape[:-1], outputs, inner) @ other.unsqueeze(-1)).squeeze(-1)
    return result if bias is None else result + bias
