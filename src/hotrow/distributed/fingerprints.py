"""Find shards that other code has overwritten with the same rows.

torch doesn't count the writes of its collectives, and `torch.distributed.broadcast(weight.data)`
calls no method of a table. But after it, the ranks have the same rows.
"""

from __future__ import annotations

import zlib
from collections import Counter
from collections.abc import Sequence

from torch import Tensor

from hotrow.errors import HotrowError

SAMPLED_ROWS, _SAMPLED_COLUMNS = 8, 4
# A step after the write can change some of the sampled rows before they are compared. And one row
# can be the same by chance.
_MIN_EQUAL_ROWS = 4


def fingerprint(rows: Tensor) -> list[int]:
    """Return a 15-bit hash of each sampled row of a shard, or 0 if it equals another sampled row.

    Shards can have equal rows, such as zeros, without such a write. For the same reason, all hashes
    are 0 if the rows have only a few different values, as after the first step of Adam from zeros.

    Args:
        rows: (R, D), the rows of the shard.
    """
    row_step, column_step = (
        max(1, size // count)
        for size, count in zip(rows.shape, (SAMPLED_ROWS, _SAMPLED_COLUMNS), strict=True)
    )
    sample = rows[::row_step, ::column_step][:SAMPLED_ROWS, :_SAMPLED_COLUMNS]
    values = sample.tolist()
    texts = [repr(row) for row in values]  # NaN doesn't equal itself, but its text does
    if 2 * len({value for row in values for value in row}) <= sample.numel():
        return [0] * SAMPLED_ROWS
    hashes = [zlib.crc32(text.encode()) & 0x7FFF if texts.count(text) == 1 else 0 for text in texts]
    return hashes + [0] * (SAMPLED_ROWS - len(hashes))


def find_same_rows(
    tables: Sequence[str], ranks: Sequence[str], fingerprints: Sequence[Sequence[Sequence[int]]]
) -> HotrowError | None:
    """Return the error for the first table that has the same rows on two ranks, or None.

    Args:
        tables: the names of the tables.
        ranks: the names of the ranks.
        fingerprints: the fingerprint of each table, for each rank.
    """
    for table, by_rank in zip(tables, zip(*fingerprints, strict=True), strict=True):
        equal_rows: Counter[tuple[int, int]] = Counter()
        for hashes in zip(*by_rank, strict=True):
            first_rank: dict[int, int] = {}
            for rank, value in enumerate(hashes):
                if value and first_rank.setdefault(value, rank) != rank:
                    equal_rows[first_rank[value], rank] += 1
        for (first, second), count in equal_rows.items():
            if count >= _MIN_EQUAL_ROWS:
                return HotrowError(
                    f"{ranks[first]} and {ranks[second]} have the same rows of {table}, but each "
                    "rank of a sharded table has different rows",
                    fix="leave sharded tables out of code that writes to parameters on several "
                    "ranks, such as torch.distributed.broadcast or all_reduce, and load the table "
                    "again; if the rows were initialized with the same seed, use different seeds",
                )
    return None
