"""Matrix products: `matmul`, `mm`, `bmm`, `mv`, `dot`, `addmm` and `baddbmm`."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.registry import overloads, rule
from hotrow.onehot.results import empty_meta, meta_result, sizes_of
from hotrow.onehot.rules.contraction import (
    KEEP_DTYPES,
    contract,
    dtype_of,
    is_strided,
    product_dtype,
)
from hotrow.onehot.rules.products import autocast_dtype, look_up_product
from hotrow.onehot.tensor import OneHot


@rule(*overloads("matmul", "mm", "bmm", "mv", "dot"), Tensor.__matmul__, any_layout=True)
def _(func: Any, left: Any, right: Any) -> Any:
    if isinstance(left, OneHot) and left.is_plain and _is_dense(right):
        result = _multiply_from_right(func, left, right)
        if result is not NotImplemented:
            return result
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)) or is_compiling():
        return NotImplemented
    operands = left, right
    if not _have_checkable_dtypes(operands):
        return NotImplemented
    shapes = [sizes_of(t) for t in operands]
    if not all(shapes):
        return NotImplemented
    _check(func, operands)
    batch = max((shape[:-2] for shape in shapes), key=len)
    if any(len(shape) > 2 and shape[:-2] != batch for shape in shapes):
        return NotImplemented  # torch broadcasts the batch axes
    letters = string.ascii_letters[: len(batch)]
    # m, n: rows and columns of the result; k: the contracted axis
    k, m, n = "XYZ"
    labels = [
        k if len(shape) == 1 else letters[: len(shape) - 2] + axes
        for shape, axes in zip(shapes, (m + k, k + n), strict=True)
    ]
    output = letters + (m if len(shapes[0]) > 1 else "") + (n if len(shapes[1]) > 1 else "")
    return contract(func, operands, labels, output)


def _is_dense(t: Any) -> bool:
    return isinstance(t, Tensor) and not isinstance(t, OneHot)


def _multiply_from_right(func: Any, x: OneHot, weight: Tensor) -> Any:
    """Look up rows to multiply a plain one-hot by a weight on its right."""
    name = func.__name__
    if name in ("bmm", "dot") or (name in ("mm", "mv") and len(x.sizes) != 2):
        return NotImplemented
    if func in KEEP_DTYPES and autocast_dtype(x.cached_device, {x.cached_dtype}) is not None:
        return NotImplemented
    if weight.ndim == 1 and name != "mm":
        column = look_up_product(x, weight.unsqueeze(-1))
        return column.squeeze(-1) if isinstance(column, Tensor) else column
    return look_up_product(x, weight) if name != "mv" else NotImplemented


_MATRIX_PRODUCTS = {"addmm": torch.mm, "baddbmm": torch.bmm}


@rule(*overloads(*_MATRIX_PRODUCTS), any_layout=True)
def _(func: Any, input: Any, left: Any, right: Any, *, beta: Any = 1, alpha: Any = 1) -> Any:
    if isinstance(input, OneHot) or not all(isinstance(n, int | float) for n in (alpha, beta)):
        return NotImplemented
    if beta == 0:
        return NotImplemented  # torch ignores the input, even if it is NaN
    if not (isinstance(left, Tensor) and isinstance(right, Tensor)):
        return NotImplemented
    tensors = input, left, right
    if not _have_checkable_dtypes(tensors):
        return NotImplemented
    if not input.is_floating_point() and (alpha != 1 or beta != 1):
        return NotImplemented
    _check(func, tensors)
    product = _MATRIX_PRODUCTS[func.__name__](left, right)
    product = product if alpha == 1 else product * alpha
    input = input.to(product.dtype).expand(product.shape)
    return (input if beta == 1 else input * beta) + product


def _have_checkable_dtypes(tensors: Sequence[Any]) -> bool:
    """Return whether torch performs the same dtype checks on meta tensors as on these tensors.

    Torch doesn't compare the dtypes of empty matrices, and can't multiply bool matrices.
    """
    return all(
        is_strided(t) and dtype_of(t) != torch.bool and 0 not in sizes_of(t) for t in tensors
    )


def _check(func: Any, tensors: Sequence[Any]) -> None:
    """Raise torch's errors for these shapes and dtypes."""
    dtype = product_dtype(func, tensors)
    if dtype is not None:  # autocast doesn't apply to meta tensors
        tensors = [empty_meta(sizes_of(t), t.stride(), dtype) for t in tensors]
    meta_result(func, tensors)
