"""Hash gradients, rows and optimizer states, so that ranks can compare them."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from hotrow.distributed.ranks import as_bytes
from hotrow.table.autograd import stored_values
from hotrow.table.gradient import RowGradient

HASHED_VALUES = 1 << 20  # the number of values that are hashed at a time

_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
# Large odd numbers; products modulo 2^64 mix their bits.
_FACTORS = 0x4F1BBCDCBFA53E0B, 0x27D4EB2F165667C5


def hash_gradient(gradient: Tensor, columns: bool) -> int:
    """Return a 64-bit hash of a gradient's rows and their ids, in any order.

    The hash of each row depends on its values and its id. A row of zeros has the hash 0, so a row
    gradient and its dense copy have the same sum. All NaN count as equal: their bits depend on the
    order of the operands.
    """
    if isinstance(gradient, RowGradient):
        ids, rows = gradient.merge().row_storage.drop_empty().touched_rows()
    else:
        rows = stored_values(gradient.to_dense())
        rows = rows.t() if columns else rows
        ids = torch.arange(len(rows), device=rows.device)
    row_bytes = rows.shape[1] * rows.itemsize
    integer = torch.int64 if row_bytes % 8 == 0 else _INTEGERS[rows.itemsize]  # int64 is faster
    factors = _factors_of(torch.arange(row_bytes // integer.itemsize, device=rows.device), 0)
    total, count = torch.zeros((), dtype=torch.int64, device=rows.device), _rows_per_block(rows)
    for block, block_ids in zip(torch.split(rows, count), torch.split(ids, count), strict=True):
        block = (block + 0.0).contiguous()  # + 0.0 replaces -0.0 and copies
        if block.sum().isnan():
            block.masked_fill_(block.isnan(), math.nan)
        bits = block.view(integer).long()
        hashes = (_mix(bits) * factors).sum(1)
        total += (_mix(hashes) * _factors_of(block_ids, 1)).sum()
    return int(total) % 2**64


def _factors_of(numbers: Tensor, level: int) -> Tensor:
    return _mix((2 * numbers + 1) * _FACTORS[level])


def _mix(numbers: Tensor) -> Tensor:
    """Let the upper half of each int64 change the lower half too, in place."""
    return numbers.bitwise_xor_(numbers >> 32)


def _rows_per_block(rows: Tensor) -> int:
    return max(1, HASHED_VALUES // max(1, rows.shape[1]))


def hash_values(values: Mapping[str, Any]) -> bytes:
    """Return a hash of named values. Tensors are read in blocks, to limit the memory for copies."""
    result = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        result.update(name.encode())
        if isinstance(value, Tensor) and value.layout == torch.strided:
            rows = value if value.ndim == 2 else value.reshape(-1, 1)
            for block in torch.split(rows, _rows_per_block(rows)):
                result.update(as_bytes(block).cpu().numpy().data)
        else:
            result.update(repr(value).encode())
    return result.digest()
