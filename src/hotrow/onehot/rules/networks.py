"""Recurrent layers, 1-D convolutions and dropout with a one-hot as input."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.registry import USE_TORCH, overloads, rule
from hotrow.onehot.results import meta_result, meta_tensor
from hotrow.onehot.rules.products import look_up_product
from hotrow.onehot.tensor import OneHot

# If the input has C classes, a layer of width G multiplies by a (G, G) identity matrix instead of a
# (C, G) weight. This pays off only if C is at least twice G.
_MIN_CLASSES_PER_GATE = 2


@rule(*overloads("lstm", "gru", "rnn_tanh", "rnn_relu"))
def _(func: Any, input: Any, hidden: Any, weights: Any, *options: Any) -> Any:
    """Look up the rows of the first layer's input weights; torch computes the rest.

    Instead of the one-hot, the first layer gets these rows as its input, and an identity matrix as
    its input weight. Multiplying by the identity matrix is exact.
    """
    if len(options) != 6 or not isinstance(weights, list | tuple) or is_compiling():
        return NotImplemented  # a packed sequence has other arguments
    _, layers, _, _, bidirectional, _ = options
    directions = 2 if bidirectional else 1
    per_direction, remainder = divmod(len(weights), layers * directions)
    if not isinstance(input, OneHot) or remainder or input.grad_proxy is not None:
        return NotImplemented
    first = [i * per_direction for i in range(directions)]
    width = weights[0].shape[0]
    if input.width < _MIN_CLASSES_PER_GATE * width * directions:
        return USE_TORCH if input.origins else NotImplemented
    name = f"{func.__name__}({input.width}, {weights[1].shape[1]})"
    rows = [look_up_product(input, weights[i], columns=True, name=name) for i in first]
    if not all(isinstance(each, Tensor) for each in rows):
        return rows[0]
    changed = list(weights)
    identity = torch.eye(width * directions, dtype=rows[0].dtype, device=rows[0].device)
    for i, block in zip(first, identity.chunk(directions), strict=True):
        changed[i] = block
    return func(torch.cat(rows, -1), hidden, changed, *options)


_MIN_CHANNELS = 256  # with fewer classes, torch's convolution is as fast as the lookups


@rule(F.conv1d, any_layout=True)
def _(
    func: Any,
    input: Any,
    weight: Any,
    bias: Any = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    """Look up what each id contributes at each kernel offset, and add up the contributions."""
    if not isinstance(input, OneHot) or isinstance(weight, OneHot) or is_compiling():
        return NotImplemented
    stride, padding, dilation = (_only(each) for each in (stride, padding, dilation))
    if groups != 1 or None in (stride, padding, dilation) or len(input.sizes) != 3:
        return NotImplemented
    if input.axis_layout.class_axes != [1] or input.fill != 0 or input.width < _MIN_CHANNELS:
        return NotImplemented
    out = meta_result(func, (input, weight, bias, stride, padding, dilation))
    outputs, classes, size = weight.shape
    table = weight.permute(1, 2, 0).reshape(classes, size * outputs)
    name = f"conv1d({classes}, {outputs}, {size})"
    rows = look_up_product(input.transpose(1, 2), table, name=name)  # (N, L, size * outputs)
    if not isinstance(rows, Tensor):
        return rows
    rows = F.pad(rows, (0, 0, padding, padding))
    rows = rows.reshape(*rows.shape[:-1], size, outputs)
    length = out.shape[-1]
    total: Tensor | None = None
    for offset in range(size):
        start = offset * dilation
        piece = rows[:, start : start + stride * (length - 1) + 1 : stride, offset]
        total = piece if total is None else total + piece
    assert total is not None
    total = total if bias is None else total + bias.to(total.dtype)
    return total.transpose(1, 2).contiguous()


def _only(value: Any) -> int | None:
    """Return an int, or the int in a sequence of length 1; None for anything else."""
    if isinstance(value, tuple | list) and len(value) == 1:
        value = value[0]
    return value if isinstance(value, int) else None


@rule(F.dropout)
def _(
    func: Any, input: OneHot, p: float = 0.5, training: bool = True, inplace: bool = False
) -> Any:
    if training and p != 0:
        return NotImplemented
    func(meta_tensor(input), p, training)  # raises torch's errors
    return input
