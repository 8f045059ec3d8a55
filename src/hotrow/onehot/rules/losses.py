"""Losses whose target is a one-hot."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.tracing import has_derivative, is_compiling, is_transforming
from hotrow.onehot.gather import broadcast_parts, gather
from hotrow.onehot.parts import Field
from hotrow.onehot.registry import USE_TORCH, rule
from hotrow.onehot.results import meta_result, meta_tensor, with_strides_of
from hotrow.onehot.rules.elementwise import elementwise
from hotrow.onehot.scaling import scale_at_ids
from hotrow.onehot.size_limits import is_too_small, record_use
from hotrow.onehot.tensor import OneHot

# Losses that depend only on the difference between the input and the target.
_OF_DIFFERENCE = F.mse_loss, F.smooth_l1_loss, F.huber_loss
_REDUCTIONS = "none", "mean", "sum", "batchmean"


def _pointwise(func: Callable[..., Tensor], options: dict[str, Any]) -> Callable[..., Tensor]:
    """Return the loss function as an elementwise function of its tensors."""

    def loss(input: Tensor, target: Tensor, *weights: Tensor | None) -> Tensor:
        names = ("weight", "pos_weight")[: len(weights)]
        named = dict(zip(names, weights, strict=True))
        target = target.expand_as(input)
        losses = func(input, target, **named, **options, reduction="none")
        if func is F.binary_cross_entropy and losses.is_meta:
            # On other devices, torch gives the losses the strides of the input.
            return torch.empty_like(input, dtype=losses.dtype)
        return losses

    loss.__name__ = func.__name__
    key = func, tuple(options.items())
    return _LOSSES.setdefault(key, loss)


_LOSSES: dict[Any, Callable[..., Tensor]] = {}  # losses with equal options share a function


@rule(
    *(F.mse_loss, F.smooth_l1_loss, F.huber_loss, F.kl_div),
    *(F.binary_cross_entropy, F.binary_cross_entropy_with_logits),
    any_layout=True,
)
def _(
    func: Any,
    input: Any,
    target: Any,
    *weights: Any,
    size_average: Any = None,
    reduce: Any = None,
    reduction: str = "mean",
    weight: Any = None,
    pos_weight: Any = None,
    **options: Any,
) -> Any:
    if weights or not isinstance(target, OneHot) or isinstance(input, OneHot):
        return NotImplemented
    if size_average is not None or reduce is not None or reduction not in _REDUCTIONS:
        return NotImplemented
    if tuple(input.shape) != target.sizes or input.dtype != target.cached_dtype:
        return NotImplemented
    if _is_autocast_to_float32(input):
        return NotImplemented
    if is_too_small(target):
        return USE_TORCH
    if func in _OF_DIFFERENCE and (weight is not None or not input.is_floating_point()):
        return NotImplemented
    if reduction == "batchmean" and func is not F.kl_div:
        return NotImplemented  # torch raises an error
    if func in _OF_DIFFERENCE:
        difference = input - target
        zeros = difference.new_zeros(()).expand_as(difference)
        return func(difference, zeros, reduction=reduction, **options)
    tensors = [input, target]
    if pos_weight is not None or weight is not None:
        tensors += [weight, pos_weight] if pos_weight is not None else [weight]
    absorbs = func is F.kl_div and not options.get("log_target", False)
    if func is F.kl_div and reduction == "mean":
        func(meta_tensor(target), meta_tensor(target))  # issues torch's warning
    if func is F.binary_cross_entropy_with_logits and len(tensors) == 2:
        logit_losses = _logit_losses(input, target)
        if logit_losses is not None:
            if reduction == "none":
                return with_strides_of(logit_losses, torch.empty_like(meta_tensor(target)))
            return _reduced(logit_losses, reduction)
    losses = elementwise(_pointwise(func, options), tuple(tensors), {}, absorbs=absorbs)
    if losses is NotImplemented or losses is USE_TORCH or reduction == "none":
        return losses
    if reduction == "batchmean":
        return losses.sum() / len(input)
    return _reduced(losses, reduction)


def _is_autocast_to_float32(input: Tensor) -> bool:
    """Return whether autocast may run the loss in float32, but not the operations of its rule."""
    device = input.device.type
    return input.dtype.itemsize < 4 and device != "meta" and torch.is_autocast_enabled(device)


_SOFTPLUS_LIMIT = 50  # softplus(x) equals x for larger x, even in float64


class _LogitLosses(torch.autograd.Function):
    """softplus(l) for each logit l, but softplus(-l) at the ids; each row's ids must be distinct.

    Both passes write the entries at the ids into a newly computed tensor, so they never copy the
    logits.
    """

    @staticmethod
    def forward(ctx: Any, logits: Tensor, ids: Tensor, axis: int) -> Tensor:
        ctx.save_for_backward(logits, ids)
        ctx.axis = axis
        at_ids = F.softplus(-logits.gather(axis, ids), threshold=_SOFTPLUS_LIMIT)
        return F.softplus(logits, threshold=_SOFTPLUS_LIMIT).scatter_(axis, ids, at_ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        (logits, ids), axis = ctx.saved_tensors, ctx.axis
        if torch.is_grad_enabled():  # for second derivatives
            signs = -torch.ones_like(ids, dtype=logits.dtype)
            margins = scale_at_ids(logits, axis, ids, signs, 1)
            slopes = scale_at_ids(gradient * margins.sigmoid(), axis, ids, signs, 1)
            return slopes, None, None

        def softplus_backward(gradient: Tensor, values: Tensor) -> Tensor:
            slopes: Tensor = torch.ops.aten.softplus_backward(gradient, values, 1, _SOFTPLUS_LIMIT)
            return slopes

        at_ids = -softplus_backward(gradient.gather(axis, ids), -logits.gather(axis, ids))
        return softplus_backward(gradient, logits).scatter_(axis, ids, at_ids), None, None


def _logit_losses(input: Tensor, target: OneHot) -> Tensor | None:
    """Return the binary cross entropy of each logit, or None if the rule does not apply.

    The loss of a logit l is softplus(-l) for the target 1, and softplus(l) for the target 0.
    """
    field, layout = target.field, target.axis_layout
    if field is None or field.weights is not None or target.fill != 0:
        return None
    if not field.ids.shape[-1] or (not field.has_one_id and field.has_repeats()):
        return None
    if target.grad_proxy is not None or target.is_modified or len(layout.classes) > 1:
        return None
    if is_too_small(target) or is_compiling() or is_transforming() or not input.numel():
        return None
    record_use(target, F.binary_cross_entropy_with_logits)
    losses: Tensor = _LogitLosses.apply(  # type: ignore[no-untyped-call]
        input, field.ids.permute(layout.order), layout.class_axes[0]
    )
    return losses


@rule(F.cross_entropy, any_layout=True)
def _(
    func: Any,
    input: Any,
    target: Any,
    weight: Tensor | None = None,
    size_average: Any = None,
    ignore_index: int = -100,
    reduce: Any = None,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compute the cross entropy, which is the sum of -target * weight * log_softmax(input)."""
    if not isinstance(target, OneHot) or isinstance(input, OneHot) or is_compiling():
        return NotImplemented
    if size_average is not None or reduce is not None or reduction not in _REDUCTIONS[:3]:
        return NotImplemented
    if tuple(input.shape) != target.sizes or input.dtype != target.cached_dtype:
        return NotImplemented
    if _is_autocast_to_float32(input):
        return NotImplemented
    if ignore_index >= 0:
        return NotImplemented  # torch raises an error
    if target.field is None or not input.numel() or target.grad_proxy is not None:
        return NotImplemented
    axis = 0 if input.ndim == 1 else 1
    if target.axis_layout.class_axes != [axis] or not input.is_floating_point():
        return NotImplemented
    if is_too_small(target):
        return USE_TORCH
    meta_result(func, (input, input, weight))  # raises torch's errors
    record_use(target, func)
    if label_smoothing > 0:
        smoothed = target * (1 - label_smoothing) + label_smoothing / target.width
        if not isinstance(smoothed, OneHot):
            return NotImplemented
        target = smoothed
    field = target.field
    is_plain = label_smoothing == 0 and target.fill == 0 and field.weights is None
    # If the target consists of ids, torch does not compute the gradient of the weight.
    needs_weight_grad = weight is not None and has_derivative(weight)
    if is_plain and field.has_one_id and not needs_weight_grad:
        total = F.cross_entropy(input, field.ids[..., 0], weight, reduction="none")
        return _reduced(total, reduction)
    log_p = F.log_softmax(input, axis)
    if weight is not None:
        log_p = log_p * weight.reshape(-1, *(1,) * (input.ndim - axis - 1))
    return _reduced(-_sum_of_products(target, log_p, axis), reduction)


def _reduced(losses: Tensor, reduction: str) -> Tensor:
    if reduction == "none":
        return losses
    return losses.mean() if reduction == "mean" else losses.sum()


def _sum_of_products(target: OneHot, values: Tensor, axis: int) -> Tensor:
    """Return `(target * values).sum(axis)`, where `axis` is the class axis."""
    expanded = broadcast_parts(target, values.shape)
    assert expanded is not None
    parts, layout = expanded
    field = parts[0]
    assert isinstance(field, Field)
    weights = field.weights_or_ones(target.cached_dtype)
    total = (gather(values, field.ids, layout) * (weights - target.fill)).sum(-1)
    if target.fill != 0:
        # The batch axes of the layout are in order, so the sum has the same axes as `total`.
        total = total + target.fill * values.sum(axis)
    return total
