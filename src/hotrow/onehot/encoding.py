"""Encode ids as one-hot tensors."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.errors import HotrowIndexError
from hotrow.ids import as_ids, check_ids
from hotrow.kernels.tracing import is_tracing
from hotrow.onehot.parts import Field
from hotrow.onehot.tensor import OneHot


class ClassIndexError(HotrowIndexError, RuntimeError):
    """Raised for an id out of range; also a `RuntimeError`, which is what `F.one_hot` raises."""


def one_hot(
    ids: Any,
    num_classes: int = -1,
    dtype: torch.dtype | None = None,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """Encode ids as a one-hot tensor that stores only the ids.

    The result equals that of `torch.nn.functional.one_hot`: output[..., c] = 1 if ids[...] = c,
    otherwise 0. Multiplying the one-hot by a table looks up the table's rows.

    These operations work on the ids: casting, `cat` (with other one-hots and with dense columns),
    reshaping, permuting, indexing and stacking along the batch, sums, elementwise functions with
    numbers or dense tensors, comparisons, `where`, masks, products, `einsum`, losses with a one-hot
    target, `bilinear`, recurrent layers and `argmax`. All other operations and all `torch.func`
    transforms fall back to the dense one-hot and give torch's result.

    A product differs from the dense product in three cases. A sum of several rows or weights is
    equal only within rounding. An inf or NaN in an entry that no id selects does not affect the
    product. A zero may have the opposite sign.

    Args:
        ids: integers of any shape.
        num_classes: C, the number of classes; -1 means the largest id plus 1.
        dtype: the dtype of the one-hot; int64 by default, as in torch.
        requires_grad: whether to compute the gradient of the one-hot itself, (..., C), for example
            to search over tokens. The forward pass still looks up rows.

    Returns:
        A tensor of shape `(*ids.shape, num_classes)` on the device of the ids.

    Raises:
        HotrowIndexError: an id is not in 0..num_classes-1. As in torch, the error is also a
            `RuntimeError`.
        HotrowError: `ids` does not contain integers.

    Cost: one pass over the ids. The one-hot stores only the ids, until an operation falls back to
    the dense one-hot.

    >>> x = one_hot([2, 0], 3, torch.float32)
    >>> x
    tensor([[0., 0., 1.],
            [1., 0., 0.]])
    >>> x @ torch.tensor([[1.0, 2.0], [3.0, 4.0], [5.0, 6.0]])
    tensor([[5., 6.],
            [1., 2.]])

    Source: `torch.nn.functional.one_hot`.
    """
    ids = as_ids(ids).long()
    if is_tracing():
        result = F.one_hot(ids, num_classes).to(dtype or torch.int64)
        return result.requires_grad_() if requires_grad else result
    if num_classes == -1 and ids.numel():
        num_classes = max(int(ids.max()) + 1, 1)
    # torch.func can't transform a one-hot's parts, and rules can't read ids on the meta device.
    if torch._C._are_functorch_transforms_active() or ids.is_meta:
        result = F.one_hot(check_ids(ids, num_classes, refused_encoding=""), num_classes)
        result = result.to(dtype or torch.int64)
    else:
        result = encode(ids, num_classes, dtype or torch.int64)
    return result.requires_grad_() if requires_grad else result


def encode(ids: Tensor, classes: int, dtype: torch.dtype) -> OneHot:
    """Return the one-hot of int64 ids."""
    if classes <= 0:
        raise ClassIndexError(
            f"num_classes = {classes}, but a one-hot needs at least 1 class",
            fix="pass num_classes; it is inferred only if there is at least one id",
        )
    try:
        ids = check_ids(ids, classes, refused_encoding="")
    except HotrowIndexError as error:
        problem = error.problem.replace(
            f"the table has {classes} rows", f"the one-hot has {classes} classes"
        )
        raise ClassIndexError(problem, fix=error.fix) from None
    return OneHot([Field(ids.unsqueeze(-1), None, classes)], dtype)


def encode_or_none(ids: Tensor, classes: int) -> OneHot | None:
    """Return `F.one_hot(ids, classes)` as a `OneHot`, or None to leave the call to torch."""
    if ids.dtype != torch.int64 or ids.is_meta or ids.is_nested:
        return None
    if classes == -1:
        if not ids.numel():
            return None
        classes = int(ids.max()) + 1
    return encode(ids, classes, torch.int64) if classes > 0 else None
