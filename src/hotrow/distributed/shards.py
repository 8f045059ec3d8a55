"""The shards of a table, and the exchange of ids and rows in a lookup."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.algorithms.model_averaging.utils import average_parameters
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

from hotrow.distributed.fingerprints import find_same_rows, fingerprint
from hotrow.distributed.ranks import AllToAll, Ranks, do_replicas_wait
from hotrow.distributed.tables import MapGradient, check_ddp, copy_name
from hotrow.errors import HotrowError
from hotrow.ids import check_device, check_ids, normalize_padding
from hotrow.table.autograd import stored_values
from hotrow.table.functional import local_embedding
from hotrow.table.gradient import RowGradient
from hotrow.table.overrides import find_override, has_default_method, replaced_lookup
from hotrow.table.parameter import Table, needs_gradient
from hotrow.table.row_change import RowChange
from hotrow.table.stack import is_called_by


@dataclass(frozen=True)
class Shards:
    """A table whose rows are split over the ranks."""

    name: str  # the table's name in the model, such as "embedding.weight"
    ranks: Ranks
    mesh: DeviceMesh
    rows: int  # V

    def __deepcopy__(self, memo: dict[int, Any]) -> Shards:
        """Return the shards of a copy of the table."""
        return replace(self, name=copy_name(self.name))

    @property
    def rows_per_rank(self) -> int:
        """C, the number of rows on each rank; the last ranks may have fewer rows."""
        return max(1, -(-self.rows // self.ranks.count))

    @property
    def local_slice(self) -> slice:
        """The rows of this rank as a slice of all rows."""
        return self.slice_of(self.ranks.rank)

    def slice_of(self, rank: int) -> slice:
        """Return the rows of a rank as a slice of all rows."""
        begin = rank * self.rows_per_rank
        return slice(min(begin, self.rows), min(begin + self.rows_per_rank, self.rows))

    def change_rows(self, change: RowChange) -> tuple[Shards, RowChange]:
        """Return the table's shards after `change`, and the `ShardedRowChange` that moves rows."""
        new = replace(self, rows=change.new_count)
        return new, ShardedRowChange(
            change.old_count, change.new_count, change.sources, old=self, new=new
        )

    def agree_on_rows(
        self, operation: str, rows: Tensor | None, failure: Exception | None = None
    ) -> Tensor:
        """Return the first rank's rows; raise an error on every rank if the operations differ."""
        return self.ranks.agree_on_rows(f"{operation} of {self.name}", rows, failure)

    def agree(self, operation: str, failure: Exception | None) -> None:
        """Raise an error of any rank on all ranks, unless all of them run the operation."""
        self.ranks.agree(operation, 0, failure)

    def all_equal(self, values: Sequence[int]) -> bool:
        """Return whether these values are the same on all ranks."""
        bounds = torch.tensor([*values, *(-value for value in values)], device=self.ranks.device)
        self.ranks.all_reduce_max(bounds)
        highest, lowest = bounds.chunk(2)
        return torch.equal(highest, -lowest)

    def to_dtensor(self, rows: Tensor) -> Tensor:
        """Return the DTensor whose local part is `rows`, in the same memory."""
        shape = torch.Size((self.rows, *rows.shape[1:]))
        result: Tensor = DTensor.from_local(
            rows, self.mesh, [Shard(0)], run_check=False, shape=shape, stride=rows.stride()
        )
        return result

    def from_dtensor(self, value: Tensor) -> Tensor:
        """Return the rows of this rank, from a DTensor or from a tensor with all rows."""
        if isinstance(value, DTensor):
            self._check_saving_rank(value.device_mesh)
            if value.device_mesh == self.mesh and tuple(value.placements) == (Shard(0),):
                return value.to_local()
            value = value.full_tensor()
        return value[self.local_slice] if len(value) == self.rows else value

    def _check_saving_rank(self, mesh: DeviceMesh) -> None:
        """Raise an error if a file contains another rank's rows, or the mesh of another run."""
        coordinate, rank = mesh.get_coordinate(), dist.get_rank()
        if coordinate is None or mesh.size() == 1:
            return
        is_same_rank = (mesh.mesh == rank).nonzero().tolist() == [[*coordinate]]
        if not (is_same_rank and _has_same_groups(mesh, coordinate)):
            raise HotrowError(
                f"the state dict of {self.name} has only the rows of the rank that saved "
                f"it, but rank {rank} needs other rows",
                fix="save and load with torch.distributed.checkpoint, or save the whole table with "
                "weight.full_tensor() on all ranks",
            )

    def source(self, table: Tensor) -> Tensor:
        """Return a stand-in for the table; its backward pass stores the ranks in the gradient."""
        source: Tensor = MapGradient.apply(table, self.mark_gradient)  # type: ignore[no-untyped-call]
        return source

    def mark_gradient(self, gradient: Tensor) -> RowGradient:
        """Store the ranks in this rank's gradient, so that its norm can include all rows.

        A dense gradient becomes a `RowGradient` of all rows, in the same memory.
        """
        if not isinstance(gradient, RowGradient):
            ids = torch.arange(len(gradient), device=gradient.device)
            gradient = RowGradient(ids, stored_values(gradient), gradient.shape, is_merged=True)
        gradient.row_storage.shards = self.ranks
        return gradient

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise a lookup's error on every rank."""
        _exchange_counts(
            self.ranks, _describe_operation([self], table), [0] * self.ranks.count, [table], error
        )
        raise error

    def refuse_averaging(self) -> None:
        """Raise an error if torch's model averaging is about to replace this rank's rows."""
        if is_called_by(average_parameters.__code__, sys._getframe(1)):
            raise HotrowError(
                f"torch's model averaging would average the rows of {self.name} with other rows, "
                "because each rank has different rows of a sharded table",
                fix="average only the other parameters, or use hotrow.distributed.replicate",
            )

    def fetch(
        self,
        table: Table,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct ids (R,), each id's position among them, and their rows (R, D)."""
        return fetch([LookUpRequest(table, ids, padding_idx, max_norm, norm_type)])[0]


def _has_same_groups(mesh: DeviceMesh, coordinate: Sequence[int]) -> bool:
    """Return whether the process groups of a mesh still consist of the mesh's ranks.

    A mesh from a file has the names of its groups. In another run, such a group may be missing, or
    it may have other ranks.
    """
    for dim in range(mesh.ndim):
        place: list[Any] = [*coordinate]
        place[dim] = slice(None)
        try:
            members = dist.get_process_group_ranks(mesh.get_group(dim))
        except RuntimeError:  # there is no group of this name
            return False
        if sorted(members) != sorted(mesh.mesh[tuple(place)].tolist()):
            return False
    return True


@dataclass(frozen=True, kw_only=True)
class ShardedRowChange(RowChange):
    """A change to the rows of a sharded table; the ranks exchange rows.

    Attributes:
        old_count: see `RowChange`; the counts refer to the rows of all ranks.
        new_count: see `RowChange`.
        old: the shards before the change.
        new: the shards after the change.
    """

    old: Shards
    new: Shards

    def apply(self, rows: Tensor, added: float | Tensor, *, extend: bool = False) -> Tensor:
        """Return the new rows of this rank, given its old rows and all added rows."""
        ranks, first = self.old.ranks, self.old.local_slice.start
        sources = self._sources_of(self.new.local_slice)
        send_counts = [0] * ranks.count
        failure: Exception | None = None
        try:
            sent = []
            for rank in range(ranks.count):
                theirs = self._sources_of(self.new.slice_of(rank))
                sent.append(theirs[self._owners(theirs) == ranks.rank] - first)
            result = rows.new_empty((len(sources), *rows.shape[1:]))
            moved, send_counts = rows[torch.cat(sent)], list(map(len, sent))
        except Exception as error:  # for example, if there is too little memory
            failure = error
        operation = f"move rows of {self.old.name}"
        try:
            with ranks.exchange():
                receive_counts = ranks.exchange_counts(operation, send_counts, failure)
                (kept,) = ranks.all_to_all([moved], [send_counts], [receive_counts])
        finally:
            failure = None  # drop the error, whose traceback refers to the rows
        # The kept rows arrive in the order of their old ranks, and then of their new ids.
        order = self._owners(sources).sort(stable=True).indices
        result[order[len(sources) - len(kept) :]] = kept
        new = (sources < 0).nonzero()[:, 0]
        if isinstance(added, Tensor):
            begin = self._added_before(self.new.local_slice.start)
            added = added[begin : begin + len(new)]
        result[new] = added
        return result

    def _sources_of(self, rows: slice) -> Tensor:
        """Return the old index of each new row in a slice, or -1 for an added row."""
        if self.sources is not None:
            return self.sources[rows]
        ids = torch.arange(rows.start, rows.stop, device="cpu")
        return torch.where(ids < self.old_count, ids, -1)

    def _owners(self, sources: Tensor) -> Tensor:
        """For each source, return the rank that has the old row, or -1 if the source is -1."""
        return sources.div(self.old.rows_per_rank, rounding_mode="floor")

    def _added_before(self, row: int) -> int:
        """Return the number of added rows before a new row."""
        if self.sources is not None:
            return int((self.sources[:row] < 0).sum())
        return max(0, row - self.old_count)


@dataclass(frozen=True)
class LookUpRequest:
    """The ids to look up in a sharded table, and the options of `F.embedding`."""

    table: Table
    ids: Tensor
    padding_idx: int | None = None
    max_norm: float | None = None
    norm_type: float = 2.0

    @property
    def shards(self) -> Shards:
        """The shards of the table."""
        shards = self.table.shards
        assert isinstance(shards, Shards)
        return shards

    def look_up_locally(self, ids: Tensor) -> Tensor:
        """Return this rank's rows at `ids`, counted from the rank's first row."""
        padding, shards = self.padding_idx, self.shards
        local = shards.local_slice
        if padding is not None:
            padding = normalize_padding(padding, shards.rows) - local.start
            padding = padding if 0 <= padding < local.stop - local.start else None
        return local_embedding(ids, self.table, padding, self.max_norm, self.norm_type)


def fetch(requests: Sequence[LookUpRequest]) -> list[tuple[Tensor, Tensor, Tensor]]:
    """Fetch the rows of several tables in one exchange.

    Returns:
        For each request, the sorted distinct ids (R,), the position of each requested id among
        them, and their differentiable rows (R, D).
    """
    first = requests[0].shards
    ranks, shards = first.ranks, [request.shards for request in requests]
    operation = _describe_operation(shards, *(request.table for request in requests))
    failure: Exception | None = None
    distinct_ids: list[tuple[Tensor, Tensor]] = []
    for request in requests:
        check_ddp(request.table, request.shards.name)
    send_counts = [[0] * ranks.count for _ in requests]  # counts of distinct ids by table and rank
    try:
        for i, request in enumerate(requests):
            ids = check_ids(request.ids, request.shards.rows, "input", refused_encoding="")
            check_device(ids, request.table.device)
            override = find_override([type(ids)])
            if override is not None and not has_default_method(override):
                raise replaced_lookup(override)
            rows, inverse = torch.unique(ids.long(), return_inverse=True)
            distinct_ids.append((rows, inverse))
            owners = rows // request.shards.rows_per_rank
            send_counts[i] = owners.bincount(minlength=ranks.count).tolist()
    except Exception as error:  # also torch's errors, for which the other ranks would wait
        failure = error
    totals = [sum(counts) for counts in zip(*send_counts, strict=True)]
    tables = [request.table for request in requests]
    with ranks.exchange():
        received_totals = _exchange_counts(ranks, operation, totals, tables, failure)
        received_ids, receive_counts, failure = _send_ids(
            ranks, requests, [rows for rows, _ in distinct_ids], send_counts, received_totals
        )
        if failure is not None:
            _exchange_counts(ranks, operation, totals, tables, failure)
        local_rows = [
            request.look_up_locally(ids)
            for request, ids in zip(requests, received_ids, strict=True)
        ]
        replicated, fail_replicas = _first_replicated(tables), None
        # The backward pass of such a table gathers gradients.
        if replicated is not None and needs_gradient(replicated):
            fail_replicas = partial(_fail_replicas, replicated)
        all_rows = AllToAll.apply(ranks, receive_counts, send_counts, fail_replicas, *local_rows)  # type: ignore[no-untyped-call]
    return [(*ids, rows) for ids, rows in zip(distinct_ids, all_rows, strict=True)]


def _exchange_counts(
    ranks: Ranks,
    operation: str,
    counts: Sequence[int],
    tables: Sequence[Table],
    failure: Exception | None,
) -> list[int]:
    """Run `Ranks.exchange_counts`; also raise its errors on the replicas of these shards.

    The replicas have the same table rows and make the same lookup at the same time.
    """
    details = ", ".join(f"in {table.dtype} before step {table.steps_taken + 1}" for table in tables)
    first = _first_replicated(tables)
    waits = first is not None and needs_gradient(first)
    try:
        return ranks.exchange_counts(
            operation, counts, failure, details=f" {details}", replicas_wait=waits
        )
    except Exception as error:
        if first is not None:
            _fail_replicas(first, error)
        raise


def _first_replicated(tables: Sequence[Table]) -> Table | None:
    """Return the replicated table about which the replicas exchange something first, if any."""
    replicated = [table for table in tables if table.replicas is not None]
    return next(filter(needs_gradient, replicated), replicated[0] if replicated else None)


def _fail_replicas(table: Table, error: Exception) -> None:
    """After a failed exchange, also raise the error on the replicas if they wait for this rank."""
    if table.replicas is not None and do_replicas_wait(error):
        table.replicas.agree_on_look_up(table, error)


def _describe_operation(shards: Sequence[Shards], *tables: Table) -> str:
    """Return the name of an exchange, for comparison between ranks and for error messages."""
    names = [
        f"{shard.name}{' for training' if needs_gradient(table) else ''}"
        for shard, table in zip(shards, tables, strict=True)
    ]
    return f"look up ids in {', '.join(names)}"


def _send_ids(
    ranks: Ranks,
    requests: Sequence[LookUpRequest],
    ids: Sequence[Tensor],
    send_counts: list[list[int]],
    received_totals: Sequence[int],
) -> tuple[list[Tensor], list[list[int]], HotrowError | None]:
    """Send each rank the ids of the rows that it must return, relative to its first row.

    Returns:
        For each table, the ids that this rank receives, and the number of ids from each rank; and
        an error, the same on all ranks, if two ranks have the same rows of a table.
    """
    shards = [request.shards for request in requests]
    ones = [1] * ranks.count
    id_dtype = torch.int32 if max(shard.rows_per_rank for shard in shards) < 2**31 else torch.int64
    if len(shards) == 1:
        receive_counts = [list(received_totals)]
    else:
        counts = torch.tensor(send_counts, dtype=torch.int64, device=ranks.device).t().contiguous()
        (received,) = ranks.all_to_all([counts], [ones], [ones])  # (W, tables)
        receive_counts = received.t().tolist()
    local_ids = [
        (rows % shard.rows_per_rank).to(id_dtype) for rows, shard in zip(ids, shards, strict=True)
    ]
    sample = [fingerprint(request.table.raw_data) for request in requests]
    samples = torch.tensor([sample], dtype=torch.int16, device=ranks.device)
    *received_ids, received_samples = ranks.all_to_all(
        [*local_ids, samples.expand(ranks.count, -1, -1)],
        [*send_counts, ones],
        [*receive_counts, ones],
    )
    failure = find_same_rows(
        [shard.name for shard in shards], ranks.names, received_samples.tolist()
    )
    return [each.long() for each in received_ids], receive_counts, failure
