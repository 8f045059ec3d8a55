"""Let tables take part in the operations of torch's jagged tensors.

For `F.linear(jagged, table)`, torch calls only the `__torch_function__` of the first argument's
class. The one of `NestedTensor` would read the stored rows without settling them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nested._internal.nested_tensor import NestedTensor

from hotrow.errors import HotrowError
from hotrow.ids import check_bag
from hotrow.kernels.tracing import is_compiling
from hotrow.table.parameter import TABLE_CLASSES, Table, raise_on_all_ranks

_torch_function: Any = NestedTensor.__torch_function__.__func__  # type: ignore[attr-defined]


def call_tables_first() -> None:
    """Make jagged tensors call the method of a table, which settles rows and calls theirs."""
    NestedTensor.__torch_function__ = classmethod(_call_tables_first)  # type: ignore[assignment]


def _call_tables_first(cls: Any, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
    if is_compiling() or TABLE_CLASSES.isdisjoint(types):
        return _torch_function(cls, func, types, args, kwargs)
    look_up = _LOOKUPS.get(func)
    if look_up is not None and _is_jagged(args[0]) and isinstance(args[1], Table):
        return look_up(*args, **kwargs or {})
    return Table.__torch_function__(func, types, args, kwargs)


def _embedding(ids: Any, table: Table, *args: Any, **options: Any) -> Tensor:
    return restore_parts(F.embedding(values_of(ids), table, *args, **options), ids)


def values_of(ids: Any) -> Any:
    """Return the ids of all parts of jagged ids in one tensor, and other ids unchanged."""
    return ids.values() if _is_jagged(ids) else ids


def _is_jagged(ids: Any) -> bool:
    return isinstance(ids, NestedTensor)


def restore_parts(rows: Tensor, ids: Any) -> Tensor:
    """Divide the rows at `values_of(ids)` into the parts of the ids, if these are jagged."""
    if not _is_jagged(ids):
        return rows
    result = torch.nested.nested_tensor_from_jagged(
        rows, ids.offsets(), ids.lengths(), jagged_dim=ids._ragged_idx
    )
    assert isinstance(result, NestedTensor)
    result._metadata_cache = ids._metadata_cache or {}  # the length of the longest part
    return result


def _embedding_bag(ids: Any, table: Table, **options: Any) -> Tensor:
    weights, mode = options["per_sample_weights"], options["mode"]
    try:
        check_bag(ids.size(), None, weights, mode=mode, table=table, last=False)
    except HotrowError as error:
        raise_on_all_ranks(table, error)
    options |= {
        "per_sample_weights": None if weights is None else weights.values().reshape(-1),
        "offsets": ids.offsets(),
        "include_last_offset": True,
    }
    return F.embedding_bag(ids.values().reshape(-1), table, **options)


_LOOKUPS: dict[Any, Any] = {F.embedding: _embedding, F.embedding_bag: _embedding_bag}
