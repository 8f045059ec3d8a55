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

HASHED_VALUES = 1 << 18  # the number of values that are hashed at a time

_LOWER_HALF = (1 << 32) - 1


def hash_gradient(gradient: Tensor, columns: bool) -> int:
    """Return a 64-bit hash of a gradient's rows and their ids, in any order.

    Each row is read as words w of 32 bits (16, if the row's size is not a multiple of 4 bytes).
    With pseudorandom keys of 64 bits, k for the words and a, b for the ids, the hash is

        h = sum over ids i of  a[i] * upper(r[i]) + b[i] * lower(r[i])   mod 2^64
        r[i] = sum over words c of  k[c] * w[i, c]                       mod 2^64

    where upper and lower are the halves of r. This is multilinear hashing, applied twice. If the
    keys were random, two different gradients would have the same hash with a probability of at most
    2^-32. A row of zeros adds nothing, so a row gradient and its dense copy have the same hash. So
    do 0.0 and -0.0, and NaN with different bits, which depend on the order of the operands.

    Arguments:
        gradient: (V, D), dense or a `RowGradient`; (D, V) if dense and `columns`.
        columns: whether ids select columns.

    Source: D. Lemire, O. Kaser, Strongly universal string hashing is fast, 2014, arXiv:1202.4961
    """
    if isinstance(gradient, RowGradient):
        ids, rows = gradient.merge().row_storage.drop_empty().touched_rows()
    else:
        rows = stored_values(gradient.to_dense())
        rows = rows.t() if columns else rows
        ids = torch.arange(len(rows), device=rows.device)
    word = torch.int32 if rows.shape[1] * rows.itemsize % 4 == 0 else torch.int16
    word_count = rows.shape[1] * rows.itemsize // word.itemsize
    word_keys = _keys(-1 - torch.arange(word_count, device=rows.device))
    total, count = torch.zeros((), dtype=torch.int64, device=rows.device), _rows_per_block(rows)
    for block, block_ids in zip(torch.split(rows, count), torch.split(ids, count), strict=True):
        words = as_bytes(_normalize(block)).view(word).view(len(block), word_count)
        sums = words.long().mul_(word_keys).sum(1)
        halves = torch.stack([sums >> 32, sums & _LOWER_HALF])
        total += _keys(torch.stack([2 * block_ids + 1, 2 * block_ids + 2])).mul_(halves).sum()
    return int(total) % 2**64


def _keys(numbers: Tensor) -> Tensor:
    """Return the values of the SplitMix64 generator at these positions, as int64; 0 at 0.

    Source: G. Steele et al., Fast splittable pseudorandom number generators, OOPSLA 2014
    """
    values = numbers * -0x61C8864680B583EB
    values = values.bitwise_xor_((values >> 30) & ((1 << 34) - 1)).mul_(-0x40A7B892E31B1A47)
    values = values.bitwise_xor_((values >> 27) & ((1 << 37) - 1)).mul_(-0x6B2FB644ECCEEE15)
    return values.bitwise_xor_((values >> 31) & ((1 << 33) - 1))


def _normalize(block: Tensor) -> Tensor:
    """Return a contiguous copy in which -0.0 is 0.0, and all NaN have the same bits."""
    if not block.is_floating_point():
        return block.contiguous()
    block = (block + 0.0).contiguous()
    if block.sum().isnan():
        block.masked_fill_(block.isnan(), math.nan)
    return block


def _rows_per_block(rows: Tensor) -> int:
    return max(1, HASHED_VALUES // max(1, rows.shape[1]))


def hash_values(values: Mapping[str, Any]) -> bytes:
    """Return a hash of named values, with 0.0 and -0.0 as equal, and all NaN.

    Tensors are read in blocks, to limit the memory for copies.
    """
    result = hashlib.sha256()
    for name in sorted(values):
        value = values[name]
        result.update(name.encode())
        if isinstance(value, Tensor) and value.layout == torch.strided:
            rows = value if value.ndim == 2 else value.reshape(-1, 1)
            for block in torch.split(rows, _rows_per_block(rows)):
                result.update(as_bytes(_normalize(block)).cpu().numpy().data)
        else:
            result.update(repr(value).encode())
    return result.digest()
