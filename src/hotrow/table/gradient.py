"""The row gradient, which stores only the touched rows of a table's gradient.

The backward pass of a lookup stores a row gradient in `table.grad`. The optimizer groups the rows
of this gradient by id.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._pytree import tree_map

from hotrow.errors import HotrowError
from hotrow.kernels import devices
from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.grouping import group
from hotrow.kernels.operators import merge_rows
from hotrow.kernels.tracing import never_compile_alone
from hotrow.kernels.triton.batch import DeviceIds
from hotrow.table.protocols import GradientShards, StepKind

aten = torch.ops.aten


def _version(rows: Tensor) -> int:
    return 0 if rows.is_inference() else rows._version  # inference tensors don't count changes


@dataclass
class _RowStorage:
    """The rows of a gradient. Aliases of the gradient, such as `grad.data`, share these rows."""

    batch: Tensor | DistinctIds  # the ids, or their `DistinctIds` (only before the merge)
    rows: Tensor
    is_merged: bool
    columns: bool = False  # whether each stored row is a column of the gradient
    shards: GradientShards | None = None  # the processes that store the other rows
    includes_all_ranks: bool = False  # whether all processes have exchanged their gradients
    touched: Tensor | None = None  # the ids before `store_all_rows`, which added rows of zeros

    def __post_init__(self) -> None:
        if self.rows.requires_grad:  # with create_graph, the rows have a grad_fn
            self.rows = self.rows.detach()
        self.version = _version(self.rows)

    @property
    def ids(self) -> Tensor:
        """The ids, (N,) int64. On a GPU, an id of -1 selects no row."""
        return self.batch.ids() if isinstance(self.batch, DistinctIds) else self.batch

    def drop_empty(self) -> _RowStorage:
        """Drop the rows whose id is -1. On a GPU, this waits for the device."""
        if isinstance(self.batch, DeviceIds):
            indices = (self.batch.flat >= 0).nonzero()[:, 0]
            self.batch, self.rows = self.batch.ids()[indices], self.rows[indices]
            self.version = _version(self.rows)
        return self

    def has_all_rows(self, count: int) -> bool:
        """Return whether all `count` rows are stored, in order."""
        is_known = self.is_merged and not isinstance(self.batch, DeviceIds)
        return is_known and len(self.ids) == count

    def touched_rows(self) -> tuple[Tensor, Tensor]:
        """Return the stored ids and their rows, without the zeros that `store_all_rows` has added.

        A process that only reads the gradient must use the same rows as the processes that don't.
        If the processes haven't exchanged their gradients, the touched rows differ between them,
        and other code may average the gradients later. In that case, return all stored rows.
        """
        touched = self.touched
        if touched is None or not self.includes_all_ranks:
            return self.ids, self.rows
        is_row = touched >= 0
        if self.rows.index_fill(0, touched[is_row], 0).any():  # other code has written to the rows
            return self.ids, self.rows
        return touched, self.rows[touched.clamp(min=0)].masked_fill(~is_row[:, None], 0)

    def transpose_if_columns(self, dense: Tensor) -> Tensor:
        """Convert between (V, D) and the gradient's shape; the result is a view."""
        return dense.t() if self.columns else dense


class RowGradient(Tensor):
    """A (V, D) gradient that stores only touched rows.

    `rows[i]` is added to row `ids[i]`; all other rows are 0. With `columns`, the gradient is
    (D, V), stored as a transposed (V, D) tensor, and `rows[i]` is added to column `ids[i]`.

    Some operations use only the stored rows: elementwise operations that map zero to zero (scaling,
    clamping around zero), norms, accumulation, and a gradient scaler's checks. All other operations
    receive the dense V x D gradient and return a plain tensor. After an operation that writes to
    the gradient or returns a view of it, the gradient stores all V rows.

    Arguments:
        ids: (N,) int64, in range, or the `DistinctIds` of such ids.
        rows: (N, D), in the gradient's dtype. They are stored without a copy.
        shape: (V, D); (D, V) with `columns`.
        is_merged: whether the ids are distinct (and in ascending order if all V are present).
        columns: whether the stored rows are the gradient's columns.
    """

    row_storage: _RowStorage

    @staticmethod
    def __new__(
        cls,
        ids: Tensor | DistinctIds,
        rows: Tensor,
        shape: Sequence[int],
        is_merged: bool = False,
        columns: bool = False,
    ) -> RowGradient:
        """Wrap the rows, without allocating memory proportional to V."""
        return cls._wrap(_RowStorage(ids, rows, is_merged, columns), shape)

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__()

    @classmethod
    def _wrap(cls, storage: _RowStorage, shape: Sequence[int]) -> RowGradient:
        result: RowGradient = Tensor._make_wrapper_subclass(
            cls, tuple(shape), dtype=storage.rows.dtype, device=storage.rows.device
        )
        # Code that bypasses the dispatch, such as torch.distributed.scatter with a list of tensors,
        # would otherwise read from a null pointer.
        torch._C._set_throw_on_mutable_data_ptr(result)
        result.row_storage = storage
        return result

    def __repr__(self, *, tensor_contents: Any = None) -> str:  # type: ignore[override]
        shape = " x ".join(map(str, self.shape))
        return f"RowGradient({shape}, {len(self.rows)} rows, {self.rows.dtype})"

    @property
    def ids(self) -> Tensor:
        """The ids, (N,) int64; distinct once `merge` has been called."""
        return self.row_storage.drop_empty().ids

    @property
    def rows(self) -> Tensor:
        """The rows, (N, D), in the gradient's dtype."""
        return self.row_storage.drop_empty().rows

    @property
    def count(self) -> int:
        """V, the number of rows that ids can select."""
        return self.shape[int(self.row_storage.columns)]

    def merge(self, scale_by_frequency: bool = False) -> RowGradient:
        """Sum rows that have the same id, in place and in batch order; see `merge_rows`."""
        storage = self.row_storage
        if not storage.is_merged:
            merged = merge_rows(self.group(), scale_by_frequency)
            ids: Tensor | DistinctIds = merged.ids
            rows = merged.values
            if not isinstance(ids, DeviceIds):
                ids = merged.ids.rows
                if len(ids) == self.count:  # all rows are present, so sort them
                    ids, places = ids.sort()
                    rows = rows[places]
            storage.batch, storage.rows, storage.is_merged = ids, rows, True
        return self

    def group(self) -> GroupedGradients:
        """Return the rows grouped by id, whether or not they have been summed."""
        storage = self.row_storage
        if storage.is_merged and not isinstance(storage.batch, DeviceIds):
            ids, rows = storage.touched_rows()
            inverse = torch.arange(len(ids), device=ids.device)
            return GroupedGradients(DistinctIds(ids, inverse), rows)
        if _version(storage.rows) != storage.version and not storage.is_merged:
            raise HotrowError(
                "the gradient of a lookup's output was changed in place after backward, but it "
                "shares memory with the table's gradient",
                fix="change the gradient in a hook (output.register_hook), or change a clone",
            )
        if isinstance(storage.batch, DistinctIds):
            return GroupedGradients(storage.batch, storage.rows)
        return group(storage.batch, storage.rows, self.count)

    def append(self, ids: Tensor, rows: Tensor) -> None:
        """Add the gradient of a later batch in place; its ids must be distinct except for -1.

        As in torch, each batch is summed before it is added to the earlier batches.
        """
        storage = self.merge().row_storage
        if storage.has_all_rows(self.count):  # add in place, which also updates views
            if storage.touched is not None:
                touched = torch.cat([storage.touched, ids])
                counted = RowGradient(touched, rows.new_zeros(len(touched), 1), (self.count, 1))
                storage.touched = counted.merge().row_storage.ids
            if devices.is_on_gpu(ids):
                indices = (ids >= 0).nonzero()[:, 0]
                ids, rows = ids[indices], rows[indices]
            if rows.untyped_storage().data_ptr() == storage.rows.untyped_storage().data_ptr():
                rows = rows.clone()  # the gradient is added to itself
            storage.rows.index_add_(0, ids, rows)
            return
        storage.batch, storage.rows = torch.cat([storage.ids, ids]), torch.cat([storage.rows, rows])
        storage.is_merged, storage.version = False, 0

    def as_dense(self) -> Tensor:
        """Return the dense gradient as a plain tensor."""
        storage = self.merge().row_storage.drop_empty()
        dense = storage.rows.new_zeros(self.shape)
        storage.transpose_if_columns(dense)[storage.ids] = storage.rows
        return dense

    def store_all_rows(self) -> Tensor:
        """Store all V rows and return them; writing to them changes the gradient.

        Other code may only read them, so a later step or norm compares them; see `touched_rows`.
        """
        storage = self.merge().row_storage
        if not storage.has_all_rows(self.count):
            storage.touched = storage.ids
            storage.drop_empty()
            storage.rows = storage.transpose_if_columns(self.as_dense())
            storage.batch = torch.arange(self.count, device=storage.rows.device)
        dense = storage.transpose_if_columns(storage.rows)
        if not dense.is_contiguous():  # for example, if the batch contains all ids
            storage.rows = storage.transpose_if_columns(dense.contiguous())
        return storage.rows

    @property
    def step_kind(self) -> StepKind:
        """Whether a step uses the touched rows or all V rows."""
        storage = self.row_storage
        uses_all = storage.has_all_rows(self.count) and storage.touched_rows()[1] is storage.rows
        return StepKind.ALL_ROWS if uses_all else StepKind.TOUCHED_ROWS

    def step_all_rows(self) -> None:
        """Make the next step use all V rows."""
        self.store_all_rows()
        self.row_storage.touched = None

    def with_rows(self, rows: Tensor) -> RowGradient:
        """Return a gradient with the same ids and different rows."""
        storage = self.row_storage
        ids = storage.batch
        if isinstance(ids, Tensor):
            ids = ids.to(rows.device)
        result = RowGradient(ids, rows, self.shape, storage.is_merged, columns=storage.columns)
        result.row_storage.shards = storage.shards
        result.row_storage.includes_all_ranks = storage.includes_all_ranks
        if storage.touched is not None:
            result.row_storage.touched = storage.touched.to(rows.device)
        return result

    def alias(self) -> RowGradient:
        """Return another `RowGradient` that shares the rows."""
        return RowGradient._wrap(self.row_storage, self.shape)

    @classmethod
    @never_compile_alone
    def __torch_dispatch__(  # type: ignore[override]
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        rule = RULES.get(func)
        if rule is not None:
            result = rule(func, args, kwargs)
            if result is not NotImplemented:
                return result
        # Check whether the operation writes to an argument or returns a view. The schemas of
        # collectives omit this information, so assume that collectives write to their arguments.
        is_collective = func.namespace in ("c10d", "_c10d_functional")
        may_alias = is_collective or any(
            argument.alias_info is not None for argument in func._schema.arguments
        )
        combines_ranks = is_collective and any(
            each in func.__name__ for each in ("reduce", "broadcast")
        )
        written: list[tuple[Tensor, RowGradient]] = []

        def dense(value: Any) -> Any:
            if not isinstance(value, cls):
                return value
            if combines_ranks and value.row_storage.shards is not None:
                name = func.__name__.split(".")[0].strip("_")
                raise HotrowError(
                    f"{name} would combine different rows of a sharded table's gradient, because "
                    "each rank has the gradient of other rows",
                    fix="leave the gradients of sharded tables out; they are averaged already",
                )
            if not may_alias:
                return value.as_dense()
            written.append((value._stored().detach(), value))
            return written[-1][0]

        def restore(value: Any) -> Any:  # in-place operations must return the gradient itself
            return next((gradient for rows, gradient in written if rows is value), value)

        result = func(*tree_map(dense, args), **tree_map(dense, kwargs))
        for rows, gradient in written:
            gradient._adopt(rows, func)
        return tree_map(restore, result)

    @property
    def data(self) -> Any:
        """Another `RowGradient` that shares the rows; assigning to `data` replaces the rows."""
        return self.alias()

    @data.setter
    def data(self, value: Tensor) -> None:
        if not isinstance(value, RowGradient):
            rows = self.row_storage.transpose_if_columns(value)
            ids = torch.arange(len(rows), device=value.device)
            value = RowGradient(ids, rows, value.shape, True, columns=self.row_storage.columns)
            value.row_storage.shards = self.row_storage.shards
        Tensor.data.__set__(self, value)  # type: ignore[attr-defined]
        self.row_storage = value.row_storage

    def numpy(self, *, force: bool = False) -> Any:
        """Store all V rows, and return a numpy array that shares their memory."""
        return self._stored().numpy(force=force)

    def __array__(self, dtype: Any = None) -> Any:
        return self._stored().__array__(dtype)  # type: ignore[no-untyped-call]

    def __dlpack__(self, **options: Any) -> Any:
        return self._stored().__dlpack__(**options)

    def _stored(self) -> Tensor:
        """Store all V rows, and return a view of them with the gradient's shape."""
        return self.row_storage.transpose_if_columns(self.store_all_rows())

    def _adopt(self, rows: Tensor, func: Any) -> None:
        """Adopt the view of `_stored` after an operation, which may have given it other memory."""
        stored = self._stored()
        if (rows.shape, rows.stride()) != (stored.shape, stored.stride()):
            raise HotrowError(
                f"{func.__name__.split('.')[0]} would change the shape or the strides of a table's "
                "gradient in place",
                fix="change those of a clone",
            )
        if not rows.is_set_to(stored):
            self.row_storage.rows = self.row_storage.transpose_if_columns(rows)

    def share_memory_(self) -> RowGradient:
        """Store all V rows in shared memory."""
        self.store_all_rows().share_memory_()  # type: ignore[no-untyped-call]
        return self

    def untyped_storage(self) -> torch.UntypedStorage:
        """Store all V rows, and return their storage."""
        return self.store_all_rows().untyped_storage()

    def data_ptr(self) -> int:
        """Store all V rows, and return their address."""
        return self._stored().data_ptr()

    const_data_ptr = data_ptr

    def tolist(self) -> Any:
        """Return the dense gradient as nested lists."""
        return self.as_dense().tolist()

    def __deepcopy__(self, memo: dict[int, Any]) -> RowGradient:
        copy = self.with_rows(self.merge().row_storage.rows.clone())
        memo[id(self)] = copy
        return copy

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.as_dense().__reduce_ex__(protocol)  # type: ignore[no-untyped-call]


def _keeps_zero(func: Any, args: Any, kwargs: Any) -> bool:
    """Return whether an elementwise operation with these arguments maps zero to zero.

    Only an infinite or NaN factor maps zero to NaN. Reading a factor from a GPU would make the CPU
    wait, so a factor on a GPU is assumed to be finite.
    """
    others = [*args[1:], *kwargs.values()]
    tensors = [other for other in others if isinstance(other, Tensor)]
    if any(tensor.ndim for tensor in tensors):
        return False
    if _IN_PLACE.get(func, func) in _SCALINGS and not all(map(devices.is_on_cpu, tensors)):
        return True
    return bool(_IN_PLACE.get(func, func)(torch.zeros((), device="cpu"), *others) == 0)


def _elementwise(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    if not isinstance(gradient, RowGradient) or not _keeps_zero(func, args, kwargs):
        return NotImplemented
    rows = func(gradient.merge().row_storage.rows, *args[1:], **kwargs)
    return gradient if func in _IN_PLACE else gradient.with_rows(rows)


def _norm(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    order = args[1] if len(args) > 1 else 2
    shards = gradient.row_storage.shards
    if (len(args) > 2 and args[2] is not None) or float(order) <= 0:
        if shards is not None:
            raise HotrowError(
                f"this norm (order {order}) is not supported for a sharded gradient, because it "
                "needs the rows of all ranks",
                fix="use a positive order and no dimension",
            )
        return NotImplemented
    _, rows = gradient.merge().row_storage.touched_rows()
    if rows.numel():
        result = func(rows.reshape(-1), order, **kwargs)
    else:  # torch raises an error for the infinity norm of an empty tensor
        result = rows.new_zeros((), dtype=kwargs.get("dtype"))
    if len(args) > 3 and args[3]:  # keepdim
        result = result.reshape(1, 1)
    return result if shards is None else shards.norm(result, float(order))


def _vector_norm(gradient: Tensor, order: Any = 2, dtype: torch.dtype | None = None) -> Tensor:
    result: Tensor = torch.linalg.vector_norm(gradient, order, dtype=dtype)
    return result


def _any(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    if gradient.row_storage.shards is not None:
        return NotImplemented  # only this rank's rows are known here
    return func(gradient.merge().row_storage.rows)


def _foreach(function: Any) -> Callable[..., Any]:
    def run(func: Any, args: Any, kwargs: Any) -> Any:
        results = [function(tensor, *args[1:], **kwargs) for tensor in args[0]]
        return None if func._schema.is_mutable else results

    return run


def _add(func: Any, args: Any, kwargs: Any) -> Any:
    gradient, other = args[:2]
    is_compatible = isinstance(other, Tensor) and (other.shape, other.dtype) == (
        gradient.shape,
        gradient.dtype,
    )
    if kwargs.get("alpha", 1) != 1 or not is_compatible:
        return NotImplemented
    if not isinstance(gradient, RowGradient):  # add the rows to a dense gradient
        assert isinstance(other, RowGradient)
        target = gradient if func is aten.add_.Tensor else gradient.clone()
        storage = other.merge().row_storage.drop_empty()
        storage.transpose_if_columns(target).index_add_(0, storage.ids, storage.rows)
        return target
    if func is aten.add.Tensor:
        if not isinstance(other, RowGradient):
            return NotImplemented
        storage = gradient.merge().row_storage
        # `append` changes the rows in place if all rows are stored.
        is_full = storage.has_all_rows(gradient.count)
        gradient = gradient.with_rows(storage.rows.clone() if is_full else storage.rows)
    if isinstance(other, RowGradient) and other.row_storage.columns == gradient.row_storage.columns:
        gradient.append(*other.merge().row_storage.touched_rows())
    else:  # another use of the table, such as a tied output head, has a gradient for all rows
        dense = other.as_dense() if isinstance(other, RowGradient) else other
        rows = gradient.row_storage.transpose_if_columns(dense)
        gradient.append(torch.arange(len(rows), device=rows.device), rows)
    gradient.row_storage.includes_all_ranks &= (
        isinstance(other, RowGradient) and other.row_storage.includes_all_ranks
    )
    return gradient


def _copy(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0].merge()
    return gradient.with_rows(gradient.row_storage.rows.clone())


def _alias(func: Any, args: Any, kwargs: Any) -> Any:
    return args[0].alias()


def _to(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0].merge()
    if kwargs.get("device") is not None:
        gradient.row_storage.drop_empty()
    rows = gradient.row_storage.rows.to(
        dtype=kwargs.get("dtype"), device=kwargs.get("device"), copy=True
    )
    return gradient.with_rows(rows)


def _zero(func: Any, args: Any, kwargs: Any) -> Any:
    gradient = args[0]
    storage = gradient.row_storage
    if storage.has_all_rows(gradient.count):  # write in place, which also updates views
        storage.rows.zero_()
        storage.touched = storage.ids[:0]
        return gradient
    storage.batch, storage.rows, storage.is_merged = storage.ids[:0], storage.rows[:0], True
    return gradient


def _unscale(func: Any, args: Any, kwargs: Any) -> Any:
    plain = [g.merge().row_storage.rows if isinstance(g, RowGradient) else g for g in args[0]]
    func(plain, *args[1:], **kwargs)
    for gradient in args[0]:
        if isinstance(gradient, RowGradient) and gradient.row_storage.shards is not None:
            gradient.row_storage.shards.all_reduce_max(args[1])


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
_SCALINGS = aten.mul.Tensor, aten.div.Tensor
# Functions that compute an operation's result without building the dense gradient, or return
# NotImplemented.
RULES: dict[Any, Callable[..., Any]] = {
    **dict.fromkeys(_IN_PLACE, _elementwise),
    **dict.fromkeys(_IN_PLACE.values(), _elementwise),
    aten.abs.default: _elementwise,
    aten.sign.default: _elementwise,
    aten.isnan.default: _elementwise,
    aten.isinf.default: _elementwise,
    aten._is_any_true.default: _any,  # anomaly mode calls this on `isnan(gradient)`
    aten.any.default: _any,
    aten.linalg_vector_norm.default: _norm,
    aten._foreach_norm.Scalar: _foreach(_vector_norm),
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
