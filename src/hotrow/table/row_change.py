"""Keep, drop, move and add rows of a tensor, with spare memory for rows that are added later.

When a tensor grows, its storage is enlarged to twice as many rows. Until the storage is full,
adding rows only creates a longer view of it. So adding rows in a thousand small steps costs about
as much as adding them all at once. On the CPU, unwritten pages take no physical memory.

Other code must not see the spare memory (`torch.save` would write it to the file). So code that
reads a tensor gets an alias whose storage ends with the last row (`trim_storage`).
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from torch.utils.dlpack import from_dlpack

from hotrow.kernels import devices
from hotrow.table.storage_growth import fill_with_zeros, grow_storage

GROWTH = 2  # a growing tensor that needs new storage gets room for this many times its rows
MIN_USED = 4  # a tensor that shrinks below 1 / MIN_USED of its storage gets new storage


@dataclass(frozen=True)
class RowChange:
    """A change to the rows of tensors that have one row for each id.

    Attributes:
        old_count: V, the number of rows before the change.
        new_count: V', the number of rows after the change.
        sources: (V',) int64; for each new row, its old row, or -1 if it is added. If None, the
            first min(V, V') rows stay where they are.
    """

    old_count: int
    new_count: int
    sources: Tensor | None = None

    @property
    def added_count(self) -> int:
        """The number of added rows."""
        if self.sources is None:
            return max(0, self.new_count - self.old_count)
        return int((self.sources < 0).sum())

    @property
    def is_identity(self) -> bool:
        """Whether all rows stay where they are."""
        if self.new_count != self.old_count:
            return False
        ids = torch.arange(self.new_count, device="cpu")
        return self.sources is None or torch.equal(self.sources, ids.to(self.sources.device))

    def apply(self, rows: Tensor, added: float | Tensor, *, extend: bool = False) -> Tensor:
        """Return the changed rows, (V', ...), in row-major order.

        Arguments:
            rows: (V, ...). Not changed.
            added: one value for all added rows, or a tensor that contains the added rows in order.
            extend: whether the result may share the storage of `rows` and may have spare memory.
                In that case, the caller must stop using `rows`, and nothing else may share its
                storage.
        """
        if self.sources is None:
            result = (_extend if extend else _copy)(rows, self.new_count)
            new: slice | Tensor = slice(self.old_count, None)
        else:
            result = _allocate(rows, self.new_count, self.new_count)
            sources = self.sources.to(rows.device)
            kept, new = (sources >= 0).nonzero()[:, 0], (sources < 0).nonzero()[:, 0]
            result[kept] = rows[sources[kept]]
        if extend and self.sources is None and not isinstance(added, Tensor) and added == 0:
            fill_with_zeros(result[self.old_count :])
        elif self.added_count:
            result[new] = added
        return result

    def apply_to(
        self, tensor: Tensor, added: float | Tensor, *, columns: bool, extend: bool = False
    ) -> Tensor:
        """Call `apply` on a (V, ...) tensor, or with `columns`, on a (D, V) tensor.

        The added rows of a sparse tensor are 0.
        """
        if tensor.is_sparse:
            return self._apply_to_sparse(tensor, columns)
        if not columns:
            return self.apply(tensor, added, extend=extend)
        return self.apply(tensor.t(), added).t().contiguous().data

    def _apply_to_sparse(self, tensor: Tensor, columns: bool) -> Tensor:
        """Change the rows of a sparse tensor, such as the gradient of a sparse `nn.Embedding`."""
        axis = int(columns)
        if tensor.sparse_dim() <= axis:
            tensor = tensor.to_dense().to_sparse()
        indices = tensor._indices().clone()
        indices[axis] = self.new_ids(indices[axis])
        kept = indices[axis] >= 0
        shape = list(tensor.shape)
        shape[axis] = self.new_count
        return torch.sparse_coo_tensor(
            indices[:, kept],
            tensor._values()[kept],
            shape,
            device=tensor.device,
            check_invariants=False,
            is_coalesced=tensor.is_coalesced() and self.sources is None,
        )

    def new_ids(self, ids: Tensor) -> Tensor:
        """Return the new id of each old id (int64, same shape), or -1 if its row was dropped."""
        if self.sources is None:
            return torch.where(ids < self.new_count, ids, -1)
        result = torch.full((self.old_count,), -1, device=self.sources.device)
        new = (self.sources >= 0).nonzero()[:, 0]
        result[self.sources[new]] = new
        return result.to(ids.device)[ids]


def _allocate(like: Tensor, count: int, capacity: int) -> Tensor:
    """Return uninitialized rows (count, ...) with storage for `capacity` rows."""
    # A view would keep its base alive, and the base would count as another use of the storage.
    return like.new_empty((capacity, *like.shape[1:]))[:count].data


def _copy(rows: Tensor, count: int, capacity: int | None = None) -> Tensor:
    """Return `count` rows in new storage, starting with a copy of the given rows."""
    result, kept = _allocate(rows, count, capacity or count), min(len(rows), count)
    result[:kept] = rows[:kept]
    return result


def _extend(rows: Tensor, count: int) -> Tensor:
    """Shorten or extend the tensor to `count` rows, in the same storage if its size is suitable."""
    storage, size = rows.untyped_storage(), rows[:1].nbytes
    capacity = storage.nbytes() // size if size else 0
    is_used = 0 < capacity <= MIN_USED * count
    if is_used and rows.is_contiguous() and rows.storage_offset() == 0:
        if capacity < count and devices.is_on_cpu(rows) and storage.resizable():
            capacity = max(count, GROWTH * len(rows))
            grow_storage(storage, capacity * size)
        if capacity >= count:
            return rows.as_strided((count, *rows.shape[1:]), rows.stride()).data
    return _copy(rows, count, max(count, GROWTH * len(rows)) if count > len(rows) else count)


def trim_storage(tensor: Tensor) -> Tensor:
    """Return the tensor, or an alias without spare memory if its storage has any.

    The alias keeps the tensor's storage in use, so `StorageUses` counts the alias.
    """
    has_storage = tensor.layout == torch.strided and not tensor.is_meta
    if not has_storage or tensor.untyped_storage().nbytes() <= tensor.nbytes:
        return tensor
    return from_dlpack(tensor)


def address(tensor: Tensor) -> int:
    """Return the address of the tensor's values, or 0 if they are not in memory."""
    try:
        return Tensor.data_ptr(tensor)
    except RuntimeError:  # a row gradient, a one-hot, or such a class of another library
        return 0


def untrimmed(tensor: Tensor, current: Tensor) -> Tensor:
    """Return `current` if the tensor is an alias of it, such as a result of `trim_storage`.

    An alias with another storage would hide the other aliases from `StorageUses`.
    """
    is_alias = (
        tensor.layout == current.layout == torch.strided
        and (tensor.shape, tensor.dtype) == (current.shape, current.dtype)
        and tensor.device == current.device
        and not tensor.is_meta
        and address(tensor) == current.data_ptr()
        and tensor.stride() == current.stride()
    )
    return current if is_alias else tensor
