"""The one-hot that is never written out: ids, weights and column ranges that stand for a tensor.

`OneHot` is the tensor and what it holds; what operations do with it is in `algebra.py`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.compilation import is_compiling
from hotrow.errors import HotrowIndexError
from hotrow.ids import as_ids, checked
from hotrow.onehot.gradient import Shadow
from hotrow.onehot.parts import Columns, Field, Part, flatten, held, unflatten


class ClassIndexError(HotrowIndexError, RuntimeError):
    """A class that a one-hot has no column for; also what `F.one_hot` raises, a RuntimeError."""


class OneHot(Tensor):
    """A (*batch, C) tensor held as parts, side by side along the class axis.

    What an operation has a rule for is done on the parts. Anything else gets the tensor written
    out, once; what is written into that is seen here, and here by others' views, as in torch.

    Attributes:
        sizes, strides, kind, place: shape, stride, dtype and device, at hand.
        leaf: whether someone asked for its own gradient.
        viewed: whether there may be a view of it.

    Arguments:
        parts: in the order of their columns.
        dtype: of the tensor that this stands for.
        shadow: zeros of its shape, by which a gradient reaches the one-hot that it came from.
        parent: what it is a view of, and how that view is taken.
        origins: where its one-hots were made, for a report.
        recipe: how it is written out, where the parts would round otherwise.
        stride: of the tensor that this stands for; of a contiguous one unless given.
    """

    _parts: tuple[Part, ...]
    _shadow: Tensor | None
    _parent: tuple[OneHot, Callable[[Tensor], Tensor]] | None
    origins: frozenset[Any]
    _recipe: Callable[[], Tensor] | None
    _written: Tensor | None
    _as_written: int | None  # the version that the parts stand for; None if they do no longer
    leaf: bool
    viewed: bool
    sizes: tuple[int, ...]
    strides: tuple[int, ...]
    kind: torch.dtype
    place: torch.device

    @staticmethod
    def __new__(  # noqa: D102
        cls,
        parts: Sequence[Part],
        dtype: torch.dtype,
        shadow: Tensor | None = None,
        parent: tuple[OneHot, Callable[[Tensor], Tensor]] | None = None,
        origins: frozenset[Any] = frozenset(),
        stride: tuple[int, ...] | None = None,
        recipe: Callable[[], Tensor] | None = None,
    ) -> OneHot:
        first = held(parts[0])
        width = parts[0].width if len(parts) == 1 else sum(part.width for part in parts)
        sizes = (*first.shape[:-1], width)
        self: OneHot = Tensor._make_wrapper_subclass(
            cls, sizes, strides=stride, dtype=dtype, device=first.device
        )
        self.leaf = False
        self._parts, self._shadow = tuple(parts), shadow
        self._parent, self.origins, self._recipe = parent, origins, recipe
        # Asked often, and as attributes of a tensor slowly.
        self.sizes, self.kind, self.place = sizes, dtype, first.device
        self.strides = _contiguous(sizes) if stride is None else stride
        self.viewed = False
        self._written, self._as_written = None, 0
        return self

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """All is done by then."""

    @property
    def parts(self) -> tuple[Part, ...]:
        """What it is made of by now."""
        return (Columns(self.write_out()),) if self.changed else self._parts

    @property
    def shadow(self) -> Tensor | None:
        """Zeros of this shape, if a gradient is to reach the one-hot itself, else None."""
        if self.changed:
            return None
        if self.leaf:
            return Shadow.apply(self) if torch.is_grad_enabled() else None  # type: ignore[no-untyped-call]
        return self._shadow

    @property
    def entries(self) -> int:
        """How many numbers it would be, written out."""
        return math.prod(self.sizes)

    @property
    def changed(self) -> bool:
        """Whether someone wrote into it, so that it is no one-hot any more."""
        written = self._written
        if written is not None and (
            self._as_written is None or written._version != self._as_written
        ):
            return True
        return self._parent is not None and self._parent[0].changed

    def write_out(self, for_good: bool = False) -> Tensor:
        """The plain tensor that this stands for; the same one each time.

        What is written into it is written into this, and into what it is a view of. `for_good`
        goes on with it in place of the parts, whatever happens.
        """
        if is_compiling():
            return self._write()
        if self._written is None:
            changed = self.changed
            with torch.enable_grad():
                if self._parent is None:
                    self._written = self._write()
                else:
                    parent, view = self._parent
                    self._written = view(parent.write_out())
            countable = not (changed or self._written.is_inference())
            self._as_written = self._written._version if countable else None
        if for_good:
            self._as_written = None
            if self._parent is not None:
                self._parent[0].write_out(for_good=True)
        return self._written

    def _write(self) -> Tensor:
        if self._recipe is not None:
            return self._recipe()
        blocks = [part.write(self.kind) for part in self._parts]
        values = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
        shadow = self.shadow
        return values if shadow is None else values + shadow

    def frozen(self) -> OneHot:
        """As it is now, whatever is written into it later."""
        return OneHot(self.parts, self.kind, self.shadow, None, self.origins, self.strides)

    def __tensor_flatten__(self) -> tuple[list[str], Any]:
        tensors, layout = flatten(self._parts)
        if self._shadow is not None:
            tensors.append(self._shadow)
        names = [f"_tensor_{i}" for i in range(len(tensors))]
        for name, tensor in zip(names, tensors, strict=True):
            setattr(self, name, tensor)
        return names, (self.kind, layout, self._shadow is not None)

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], kind: Any, size: Any, stride: Any) -> OneHot:
        dtype, layout, shadowed = kind
        tensors = list(inner.values())
        shadow = tensors.pop() if shadowed else None
        return OneHot(unflatten(tensors, layout), dtype, shadow)

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        from hotrow.onehot.rules import (
            apply,  # the rules know the tensor, and not the other way round
        )

        return apply(func, args, kwargs or {})

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Below autograd: what torch's own code does with the tensor."""
        from hotrow.onehot.rules import dispatch

        return dispatch(func, args, kwargs or {})


def _contiguous(sizes: tuple[int, ...]) -> tuple[int, ...]:
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
    """The one-hot of ids as `F.one_hot` gives it, of which only the ids are held.

    output[..., c] = 1 where ids[...] = c, else 0. Taking another dtype, `cat` of fields (with
    each other and with dense columns), reshaping, indexing and stacking along the batch, sums over
    a batch axis, scaling, `@`, `linear`, plain `einsum`s, `bilinear` and `argmax` are done on ids;
    a product is a look-up of rows. For any other operation the tensor is written out, and the
    result is torch's. Where a sum of several rows is looked up, it is within rounding of the
    product's; an inf or NaN in a row that no id selects stays where it is; a zero may have
    the other sign. Inside `torch.func` transforms it is written out at once.

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
    if torch._C._are_functorch_transforms_active():  # which do not see what it holds
        result = F.one_hot(checked(ids, num_classes, mistakable=""), num_classes)
        result = result.to(dtype or torch.int64)
    else:
        result = make(ids, num_classes, dtype or torch.int64)
    return result.requires_grad_() if requires_grad else result


def make(ids: Tensor, classes: int, dtype: torch.dtype) -> OneHot:
    """The one-hot of int64 ids."""
    if classes <= 0:
        raise ClassIndexError(
            f"a one-hot of {classes} classes has no column",
            fix="give num_classes, at least 1; it is counted only where there is an id",
        )
    try:
        known = checked(ids, classes, mistakable="")
    except HotrowIndexError as error:
        problem = error.problem.replace(
            f"the table has {classes} rows", f"the one-hot has {classes} classes"
        )
        raise ClassIndexError(problem, fix=error.fix) from None
    return OneHot([Field(known.unsqueeze(-1), None, classes)], dtype)


def as_one_hot(ids: Tensor, classes: int) -> OneHot | None:
    """`F.one_hot(ids, classes)` if that is one, None where torch is to say what it is."""
    if ids.dtype != torch.int64 or ids.is_meta or ids.is_nested:
        return None
    if classes == -1:
        if not ids.numel():
            return None
        classes = int(ids.max()) + 1
    return make(ids, classes, torch.int64) if classes > 0 else None
