"""A gradient that holds touched rows only: what a table's look-ups leave in `.grad`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hotrow.errors import HotrowError
from hotrow.kernels.grouping import Grouped, Places, group

aten = torch.ops.aten


class Across(Protocol):
    """The processes that have the other rows of a gradient."""

    def norm(self, own: Tensor, order: float) -> Tensor:
        """The norm of all rows, from that of those here."""

    def any(self, found: Tensor) -> None:
        """Make `found` 1.0 if it is in any process; in place."""


@dataclass
class _Held:
    """The rows of a gradient, and of its aliases: `grad.data` writes where `grad` does."""

    ids: Tensor
    rows: Tensor
    merged: bool
    at: Places | None = None  # of ids not merged yet, where they are known
    columns: bool = False  # whether they are the columns of the gradient
    across: Across | None = None  # who has other rows of it

    def __post_init__(self) -> None:
        self.rows = self.rows.detach()  # with create_graph they would have a history
        self.version = self.rows._version

    def turn(self, dense: Tensor) -> Tensor:
        """The gradient written out as (V, D), or that in the gradient's shape; a view."""
        return dense.t() if self.columns else dense


class RowGradient(Tensor):
    """A (V, D) gradient: row ids[i] has rows[i] added to it, and all other entries are zero.

    With `columns` it is (D, V), laid out as a (V, D) transposed, and column ids[i] has rows[i].

    Elementwise operations that leave zero at zero (scaling, clamping around zero), norms,
    accumulation and the checks of a gradient scaler work on the rows that there are. Any other
    operation gets the gradient written out, V x D, and gives a plain tensor; one that writes, or
    that gives a view, has it written out for good.

    Arguments:
        ids: (N,) int64, in range.
        rows: (N, D), of the gradient's dtype; the gradient's own from now on.
        shape: (V, D); (D, V) with `columns`.
        merged: whether the ids are distinct.
        at: the places of the ids, where they are known.
        columns: whether the rows are the gradient's columns.
    """

    held: _Held

    @staticmethod
    def __new__(
        cls,
        ids: Tensor,
        rows: Tensor,
        shape: Sequence[int],
        merged: bool = False,
        at: Places | None = None,
        columns: bool = False,
    ) -> RowGradient:
        """Around existing rows; nothing V-sized is allocated."""
        return cls._around(_Held(ids, rows, merged, at, columns), shape)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def _around(cls, held: _Held, shape: Sequence[int]) -> RowGradient:
        # As the parameter is laid out, or autograd would make a dense copy that is.
        strides = (1, shape[0]) if held.columns else None
        result: RowGradient = Tensor._make_wrapper_subclass(
            cls, tuple(shape), strides, dtype=held.rows.dtype, device=held.rows.device
        )
        result.held = held
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = " x ".join(map(str, self.shape))
        return f"RowGradient({shape}, {len(self.ids)} rows, {self.rows.dtype})"

    @property
    def ids(self) -> Tensor:
        """(N,) int64; distinct once `merge` has been called."""
        return self.held.ids

    @property
    def rows(self) -> Tensor:
        """(N, D), of the gradient's dtype."""
        return self.held.rows

    @property
    def count(self) -> int:
        """V, the rows that ids may select."""
        return self.shape[int(self.held.columns)]

    def merge(self) -> RowGradient:
        """Give each row once, repeated ids added in order; in place."""
        held = self.held
        if not held.merged:
            grouped = self.group()
            held.ids, held.rows, held.merged = grouped.at.rows, grouped.sums(), True
        return self

    def group(self) -> Grouped:
        """The rows with the gradients of each, added up or not yet."""
        held = self.held
        if held.merged:
            places = torch.arange(len(held.ids), device=held.ids.device)
            return Grouped(Places(held.ids, places), held.rows)
        if held.rows._version != held.version:
            raise HotrowError(
                "the gradient of a look-up's output was written to after backward, and is the "
                "table's gradient too",
                fix="change it in a hook (output.register_hook), or write to a clone",
            )
        if held.at is not None:
            return Grouped(held.at, held.rows)
        return group(held.ids, held.rows, self.count)

    def append(self, ids: Tensor, rows: Tensor) -> None:
        """Accumulate the gradient of a later batch, distinct ids; in place.

        Each batch is added up before it is added to the others, as torch does.
        """
        held = self.merge().held
        if len(held.ids) == self.count:  # written out: views of it are to see the sum
            held.rows.index_add_(0, ids, rows)
            return
        held.ids, held.rows = torch.cat([held.ids, ids]), torch.cat([held.rows, rows])
        held.merged, held.version, held.at = False, 0, None

    def dense(self) -> Tensor:
        """Written out, V x D."""
        held = self.merge().held
        zeros = held.rows.new_zeros(self.count, held.rows.shape[1])
        zeros[held.ids] = held.rows
        return held.turn(zeros)

    def write_out(self) -> Tensor:
        """Its rows, written out for good: what is written into them is in the gradient."""
        held = self.merge().held
        if len(held.ids) < self.count:
            held.rows = held.turn(self.dense().contiguous())  # or it could not be viewed as flat
            held.ids = torch.arange(self.count, device=held.rows.device)
        return held.rows

    def like(self, rows: Tensor) -> RowGradient:
        """The same ids with other rows."""
        ids, held = self.ids.to(rows.device), self.held
        result = RowGradient(ids, rows, self.shape, held.merged, columns=held.columns)
        result.held.across = held.across
        return result

    def alias(self) -> RowGradient:
        """Another tensor over the same rows."""
        return RowGradient._around(self.held, self.shape)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = _RULES.get(func)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        # Into what it writes, and of what it may give a view. Collectives do not say.
        touches = func.namespace in ("c10d", "_c10d_functional") or any(
            argument.alias_info is not None for argument in func._schema.arguments
        )
        written: list[tuple[Tensor, RowGradient]] = []

        def dense(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            if not touches:
                return value.dense()
            written.append((value.held.turn(value.write_out()), value))
            return written[-1][0]

        def back(value: Any) -> Any:  # what works in place gives what it was given
            return next((gradient for rows, gradient in written if rows is value), value)

        return tree_map(back, func(*tree_map(dense, args), **tree_map(dense, kwargs)))

    @property
    def data(self) -> Any:
        """Another tensor over the same rows; may be replaced."""
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, RowGradient):
            rows = self.held.turn(value)
            every = torch.arange(len(rows), device=value.device)
            value = RowGradient(every, rows, value.shape, True, columns=self.held.columns)
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.held = value.held

    def numpy(self, *, force: bool = False) -> Any:
        """Written out."""
        return self.dense().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self.dense().__array__(dtype)  # type: ignore[no-untyped-call]

    def share_memory_(self) -> RowGradient:
        """Written out for good, in memory that processes share."""
        self.write_out().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """Of the gradient written out for good."""
        return self.write_out().untyped_storage()

    def tolist(self) -> Any:
        """Written out."""
        return self.dense().tolist()

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _zero_stays(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an elementwise operation leaves zero at zero, with these other arguments."""
    others = [*args[1:], *kwargs.values()]
    if any(isinstance(other, Tensor) and other.ndim for other in others):
        return False
    return bool(_IN_PLACE.get(func, func)(torch.zeros(()), *others) == 0)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    if not isinstance(gradient, RowGradient) or not _zero_stays(func, args, kwargs):
        return NotImplemented
    rows = func(gradient.merge().rows, *args[1:], **kwargs)
    return gradient if func in _IN_PLACE else gradient.like(rows)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    order = args[1] if len(args) > 1 else 2
    across = gradient.held.across
    if (len(args) > 2 and args[2] is not None) or float(order) <= 0:
        if across is not None:
            raise HotrowError(
                f"a norm of order {order} of a sharded gradient needs the rows of all ranks",
                fix="use a positive order, and no dimension",
            )
        return NotImplemented
    rows = gradient.merge().rows
    if rows.numel():
        result = func(rows.reshape(-1), *args[1:], **kwargs)
    else:  # infinity has no largest of none
        result = rows.new_zeros((), dtype=kwargs.get("dtype"))
    return result if across is None else across.norm(result, float(order))


def _foreach(one: Any) -> Callable[..., Any]:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        results = [one(tensor, *args[1:], **kwargs) for tensor in args[0]]
        return None if func._schema.is_mutable else results

    return run


def _add(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, other = args[:2]
    same = isinstance(other, Tensor) and (other.shape, other.dtype) == (
        gradient.shape,
        gradient.dtype,
    )
    if kwargs.get("alpha", 1) != 1 or not same:
        return NotImplemented
    if not isinstance(gradient, RowGradient):  # a dense gradient takes the rows up
        assert isinstance(other, RowGradient)
        target = gradient if func is aten.add_.Tensor else gradient.clone()
        held = other.merge().held
        held.turn(target).index_add_(0, held.ids, held.rows)
        return target
    if func is aten.add.Tensor:
        if not isinstance(other, RowGradient):
            return NotImplemented
        gradient = gradient.merge().like(gradient.rows)
    if isinstance(other, RowGradient) and other.held.columns == gradient.held.columns:
        other.merge()
        gradient.append(other.ids, other.rows)
    else:  # used densely as well, as by a tied head: every row is touched
        dense = other.dense() if isinstance(other, RowGradient) else other
        rows = gradient.held.turn(dense)
        gradient.append(torch.arange(len(rows), device=rows.device), rows)
    return gradient


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0].merge()
    return gradient.like(gradient.rows.clone())


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].alias()


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0].merge()
    rows = gradient.rows.to(dtype=kwargs.get("dtype"), device=kwargs.get("device"), copy=True)
    return gradient.like(rows)


def _zero(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    held = gradient.held
    if len(held.ids) == gradient.count:  # written out: views of it are to see the zeros
        return NotImplemented
    held.ids, held.rows, held.merged = held.ids[:0], held.rows[:0], True
    return gradient


def _unscale(func: Any, args: Any, kwargs: Any) -> Any:
    plain = [g.merge().rows if isinstance(g, RowGradient) else g for g in args[0]]
    func(plain, *args[1:], **kwargs)
    for gradient in args[0]:
        if isinstance(gradient, RowGradient) and gradient.held.across is not None:
            gradient.held.across.any(args[1])


_IN_PLACE = {
    aten.mul_.Tensor: aten.mul.Tensor,
    aten.mul_.Scalar: aten.mul.Scalar,
    aten.div_.Tensor: aten.div.Tensor,
    aten.div_.Scalar: aten.div.Scalar,
    aten.clamp_.default: aten.clamp.default,
    aten.clamp_min_.default: aten.clamp_min.default,
    aten.clamp_max_.default: aten.clamp_max.default,
    aten.neg_.default: aten.neg.default,
    aten.nan_to_num_.default: aten.nan_to_num.default,
}
_RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_IN_PLACE, _elementwise),
    **dict.fromkeys(_IN_PLACE.values(), _elementwise),
    aten.abs.default: _elementwise,
    aten.sign.default: _elementwise,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach(torch.linalg.vector_norm),
    aten._foreach_zero_.default: _foreach(Tensor.zero_),
    aten._foreach_mul_.Tensor: _foreach(Tensor.mul_),
    aten._foreach_mul_.Scalar: _foreach(Tensor.mul_),
    aten._foreach_clamp_min_.Scalar: _foreach(Tensor.clamp_min_),
    aten._foreach_clamp_max_.Scalar: _foreach(Tensor.clamp_max_),
    aten.add.Tensor: _add,
    aten.add_.Tensor: _add,
    aten.detach.default: _alias,
    aten.alias.default: _alias,
    aten.clone.default: _copy,
    aten._to_copy.default: _to,
    aten.zero_.default: _zero,
    aten._amp_foreach_non_finite_check_and_unscale_.default: _unscale,
}
