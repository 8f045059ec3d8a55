"""The one-hot that stores only ids, weights and column ranges, and stands for a dense tensor.

`OneHot` is the tensor; what operations do with it is in `rules/`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.errors import HotrowIndexError
from hotrow.ids import as_ids, check_ids
from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.gradient import LeafProxy
from hotrow.onehot.parts import DenseColumns, Field, Part, batch_tensor, flatten, unflatten
from hotrow.onehot.registry import RuleTensor


class ClassIndexError(HotrowIndexError, RuntimeError):
    """A class that a one-hot has no column for; also what `F.one_hot` raises, a RuntimeError."""


class OneHot(RuleTensor):
    """A (*batch, C) tensor made of parts, side by side along the class axis.

    Operations that have a rule work on the parts. Any other operation materializes the dense
    tensor, once. An in-place write to that is seen here, and here through views, as in torch.

    Attributes:
        sizes: its shape; cached, as `shape` of a tensor subclass is slow to read.
        strides: its stride, cached.
        cached_dtype: its dtype.
        cached_device: its device.
        is_grad_leaf: whether its own gradient was asked for.
        has_views: whether there may be a view of it.

    Arguments:
        parts: in the order of their columns.
        dtype: of the tensor that this stands for.
        grad_proxy: zeros of its shape, by which a gradient reaches the one-hot that it came from.
        parent: what it is a view of, and how that view is taken.
        origins: the lines of code that made its one-hots, for a report.
        stride: of the tensor that this stands for; of a contiguous one unless given.
        dense_fn: computes the dense tensor, where the parts would round differently.
    """

    _parts: tuple[Part, ...]
    _grad_proxy: Tensor | None
    _parent: tuple[OneHot, Callable[[Tensor], Tensor]] | None
    _dense_fn: Callable[[], Tensor] | None
    _dense_version: int | None  # of `_dense` while the parts stand for it; None if they do not
    has_views: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    cached_dtype: torch.dtype
    cached_device: torch.device

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        parts: Sequence[Part],
        dtype: torch.dtype,
        grad_proxy: Tensor | None = None,
        parent: tuple[OneHot, Callable[[Tensor], Tensor]] | None = None,
        origins: frozenset[Any] = frozenset(),
        stride: tuple[int, ...] | None = None,
        dense_fn: Callable[[], Tensor] | None = None,
    ) -> OneHot:
        first = batch_tensor(parts[0])
        width = parts[0].width if len(parts) == 1 else sum(part.width for part in parts)
        sizes = (*first.shape[:-1], width)
        self: OneHot = Tensor._make_wrapper_subclass(
            cls, sizes, strides=stride, dtype=dtype, device=first.device
        )
        self.is_grad_leaf = False
        self._parts, self._grad_proxy = tuple(parts), grad_proxy
        self._parent, self.origins, self._dense_fn = parent, origins, dense_fn
        # Read often; a tensor subclass is slow to give its own.
        self.sizes, self.cached_dtype, self.cached_device = sizes, dtype, first.device
        self.strides = _contiguous_strides(sizes) if stride is None else stride
        self.has_views = False
        self._dense, self._dense_version = None, 0
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Do nothing; `__new__` has set everything."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it is made of now; one part of dense columns if something was written into it."""
        return (DenseColumns(self.materialize()),) if self.is_modified else self._parts

    @property
    def grad_proxy(self) -> Tensor | None:
        """Zeros of this shape, if a gradient is to reach the one-hot itself, else None."""
        if self.is_modified:
            return None
        if self.is_grad_leaf:
            return LeafProxy.apply(self) if torch.is_grad_enabled() else None  # type: ignore[no-untyped-call]
        return self._grad_proxy

    @property
    def entries(self) -> int:
        """The number of entries of the dense tensor."""
        return math.prod(self.sizes)

    @property
    def is_modified(self) -> bool:
        """Whether something was written into it, so that it may no longer be a one-hot."""
        dense = self._dense
        if dense is not None and (
            self._dense_version is None or dense._version != self._dense_version
        ):
            return True
        return self._parent is not None and self._parent[0].is_modified

    @property
    def needs_grad(self) -> bool:
        """Whether its gradient, or that of what scales it, is wanted."""
        if self.is_grad_leaf:
            return True
        tensors = flatten(self._parts)[0]
        if self._grad_proxy is not None:
            tensors.append(self._grad_proxy)
        return any(tensor.requires_grad for tensor in tensors)

    def materialize(self, permanent: bool = False) -> Tensor:
        """The dense tensor that this stands for; the same one each time.

        A write to it is a write to this, and to what this is a view of. `permanent`: from now on
        the dense tensor replaces the parts, whether or not something is written into it.
        """
        if is_compiling():
            return self._compute_dense()
        if self._dense is None:
            is_modified = self.is_modified
            with torch.enable_grad():
                if self._parent is None:
                    self._dense = self._compute_dense()
                else:
                    parent, view = self._parent
                    self._dense = view(parent.materialize())
            has_version = not (is_modified or self._dense.is_inference())
            self._dense_version = self._dense._version if has_version else None
        if permanent:
            self._dense_version = None
            if self._parent is not None:
                self._parent[0].materialize(permanent=True)
        return self._dense

    def _compute_dense(self) -> Tensor:
        if self._dense_fn is not None:
            return self._dense_fn()
        blocks = [part.to_dense(self.cached_dtype) for part in self._parts]
        values = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
        proxy = self.grad_proxy
        return values if proxy is None else values + proxy

    def snapshot(self) -> OneHot:
        """A copy of it as it is now, which later in-place writes do not change."""
        return OneHot(
            self.parts, self.cached_dtype, self.grad_proxy, None, self.origins, self.strides
        )

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        tensors, layout = flatten(self._parts)
        if self._grad_proxy is not None:
            tensors.append(self._grad_proxy)
        names = [f"_tensor_{i}" for i in range(len(tensors))]
        for name, tensor in zip(names, tensors, strict=True):
            setattr(self, name, tensor)
        return names, (self.cached_dtype, layout, self._grad_proxy is not None)

    @staticmethod
    def __tensor_unflatten__(
        inner: dict[str, Tensor], context: Any, size: Any, stride: Any
    ) -> OneHot:
        dtype, layout, has_proxy = context
        tensors = list(inner.values())
        proxy = tensors.pop() if has_proxy else None
        return OneHot(unflatten(tensors, layout), dtype, proxy)


def _contiguous_strides(sizes: tuple[int, ...]) -> tuple[int, ...]:
    strides = [1]
    for size in sizes[:0:-1]:
        strides.append(strides[-1] * max(size, 1))
    return tuple(strides[::-1])


def one_hot(
    ids: Any,
    num_classes: int = -1,
    dtype: torch.dtype | None = None,
    *,
    requires_grad: bool = False,
) -> Tensor:
    """The one-hot of ids, equal to that of `F.one_hot`, of which only the ids are stored.

    output[..., c] = 1 where ids[...] = c, else 0. Taking another dtype, `cat` of fields (with
    each other and with dense columns), reshaping, indexing and stacking along the batch, sums over
    a batch axis, scaling, `@`, `linear`, plain `einsum`s, `bilinear` and `argmax` are done on ids;
    a product is a look-up of rows. Any other operation materializes the dense tensor, and the
    result is torch's. Where a sum of several rows is looked up, it is within rounding of the
    product's; an inf or NaN in a row that no id selects stays where it is; a zero may have
    the other sign. Inside `torch.func` transforms it is materialized at once.

    Args:
        ids: integers of any shape.
        num_classes: C; -1 for one more than the largest id.
        dtype: of the one-hot; int64 unless given, as in torch.
        requires_grad: whether to compute the gradient of the one-hot itself, (..., C), as for a
            search over tokens. The forward pass looks up all the same.

    Returns:
        A tensor of shape (*ids.shape, num_classes) on the ids' device.

    Raises:
        HotrowIndexError: an id is not in 0..num_classes-1; a `RuntimeError` as well.
        HotrowError: not ids.

    Cost: one pass over the ids.

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
    if num_classes == -1 and ids.numel():
        num_classes = max(int(ids.max()) + 1, 1)
    if torch._C._are_functorch_transforms_active():  # which do not see the parts
        result = F.one_hot(check_ids(ids, num_classes, refused_encoding=""), num_classes)
        result = result.to(dtype or torch.int64)
    else:
        result = encode(ids, num_classes, dtype or torch.int64)
    return result.requires_grad_() if requires_grad else result


def encode(ids: Tensor, classes: int, dtype: torch.dtype) -> OneHot:
    """The one-hot of int64 ids."""
    if classes <= 0:
        raise ClassIndexError(
            f"a one-hot of {classes} classes has no column",
            fix="give num_classes, at least 1; it is counted only where there is an id",
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
    """The one-hot that `F.one_hot(ids, classes)` gives; None where torch raises or takes over."""
    if ids.dtype != torch.int64 or ids.is_meta or ids.is_nested:
        return None
    if classes == -1:
        if not ids.numel():
            return None
        classes = int(ids.max()) + 1
    return encode(ids, classes, torch.int64) if classes > 0 else None
