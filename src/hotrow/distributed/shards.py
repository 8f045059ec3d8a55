"""Where the rows of a sharded table are, and how those that ids select come from there."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NoReturn

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hotrow.distributed.ranks import Ranks, Swap
from hotrow.distributed.tables import Through, check_wrapper
from hotrow.errors import HotrowError
from hotrow.ids import checked, checked_padding
from hotrow.table.functional import own_embedding
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table, trains


@dataclass(frozen=True)
class Shards:
    """Where the rows of one table are."""

    path: str
    ranks: Ranks
    mesh: DeviceMesh
    rows: int  # V

    @property
    def each(self) -> int:
        """C, the rows of a rank, but for the last ones."""
        return max(1, -(-self.rows // self.ranks.count))

    @property
    def own(self) -> slice:
        """The rows of this rank."""
        begin = self.ranks.rank * self.each
        return slice(min(begin, self.rows), min(begin + self.each, self.rows))

    def whole(self, rows: Tensor) -> Tensor:
        """The DTensor of which these rows are this rank's part; over the same memory."""
        shape = torch.Size((self.rows, *rows.shape[1:]))
        found: Tensor = DTensor.from_local(
            rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=rows.stride()
        )
        return found

    def part(self, value: Tensor) -> Tensor:
        """The rows of this rank, of a DTensor, or of a tensor with all of them."""
        if isinstance(value, DTensor):
            if value.device_mesh == self.mesh and tuple(value.placements) == (Shard(0),):
                return value.to_local()
            value = value.full_tensor()
        return value[self.own] if len(value) == self.rows else value

    def source(self, table: Tensor) -> Tensor:
        """Its gradient knows that there is more of it."""
        found: Tensor = Through.apply(table, self._marked)  # type: ignore[no-untyped-call]
        return found

    def _marked(self, gradient: RowGradient) -> RowGradient:
        """That of this rank's rows, which knows who has the others."""
        gradient.held.across = self.ranks
        return gradient

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise on every rank, in the place of a look-up."""
        _announce(self.ranks, _doing([self], table), [0] * self.ranks.count, [table], error)
        raise error

    def fetch(
        self,
        table: Table,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The distinct ids (R,), the place of each id among them, and their rows (R, D)."""
        return fetch([Request(table, ids, padding_idx, max_norm, norm_type)])[0]


@dataclass(frozen=True)
class Request:
    """Ids to be looked up in a sharded table, and the options of `F.embedding`."""

    table: Table
    ids: Tensor
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0

    @property
    def shards(self) -> Shards:
        """Where the rows are."""
        shards = self.table.shards
        assert isinstance(shards, Shards)
        return shards

    def own(self, ids: Tensor) -> Tensor:
        """The rows of this rank that ids, counted from its first row, select."""
        padding = self.padding_idx
        own, shards = self.shards.own, self.shards
        if padding is not None:
            padding = checked_padding(padding, shards.rows) - own.start
            padding = padding if 0 <= padding < own.stop - own.start else None
        return own_embedding(ids, self.table, padding, self.max_norm, self.norm_type)


def fetch(requests: Sequence[Request]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """The rows of several tables, in one exchange.

    Returns:
        For each request its distinct ids (R,), ascending; the place of each id among them; their
        rows (R, D), differentiable.
    """
    first = requests[0].shards
    ranks, every = first.ranks, [request.shards for request in requests]
    doing = _doing(every, *(request.table for request in requests))
    failure: HotrowError | None = None
    found: list[tuple[Tensor, Tensor]] = []
    for request in requests:
        check_wrapper(request.table, request.shards.path)
    counts = [[0] * ranks.count for _ in requests]  # ids for each rank, by table
    try:
        for i, request in enumerate(requests):
            ids = checked(request.ids, request.shards.rows, "input", mistakable="")
            rows, places = torch.unique(ids.long(), return_inverse=True)
            found.append((rows, places))
            owners = rows // request.shards.each
            counts[i] = owners.bincount(minlength=ranks.count).tolist()
    except HotrowError as error:
        failure = error
    totals = [sum(each) for each in zip(*counts, strict=True)]
    asked = _announce(ranks, doing, totals, [request.table for request in requests], failure)
    wanted, wishes = _send_ids(ranks, every, [rows for rows, _ in found], counts, asked)
    own = [request.own(ids) for request, ids in zip(requests, wanted, strict=True)]
    compact = Swap.apply(ranks, wishes, counts, *own)  # type: ignore[no-untyped-call]
    return [(*known, rows) for known, rows in zip(found, compact, strict=True)]


def _announce(
    ranks: Ranks,
    doing: str,
    numbers: Sequence[int],
    tables: Sequence[Table],
    failure: HotrowError | None,
) -> list[int]:
    """`Ranks.announce`, whose error the replicas of these shards get as well.

    They have the same rows of the tables, other ranks for the rest of them, and begin to look up.
    """
    try:
        return ranks.announce(doing, numbers, failure)
    except HotrowError as error:
        replicated = [table for table in tables if table.replicas is not None]
        # All ranks of these shards are here; their replicas wait if one of them was to train.
        if replicated and any(ranks.gather(doing, any(map(trains, replicated)))):
            assert replicated[0].replicas is not None
            replicated[0].replicas.begin(replicated[0], error)
        raise


def _doing(shards: Sequence[Shards], *tables: Table) -> str:
    """What an exchange is for, in words; the same on all ranks if they do the same."""
    names = ", ".join(each.path for each in shards)
    return f"look up in {names}{' to train' if any(map(trains, tables)) else ''}"


def _send_ids(
    ranks: Ranks,
    shards: Sequence[Shards],
    ids: Sequence[Tensor],
    counts: list[list[int]],
    asked: Sequence[int],
) -> tuple[list[Tensor], list[list[int]]]:
    """Send each rank the ids of its rows, counted from its first; what is asked of this one.

    Returns:
        For each table the ids that all ranks ask for, and how many each of them does.
    """
    short = torch.int32 if max(each.each for each in shards) < 2**31 else torch.int64
    if len(shards) == 1:
        wishes = [list(asked)]
    else:
        numbers = torch.tensor(counts, dtype=torch.int64, device=ranks.device).t().contiguous()
        one = [[1] * ranks.count]
        (received,) = ranks.swap([numbers], one, one)  # (W, tables)
        wishes = received.t().tolist()
    local = [(rows % each.each).to(short) for rows, each in zip(ids, shards, strict=True)]
    wanted = ranks.swap(local, counts, wishes)
    return [each.long() for each in wanted], wishes
