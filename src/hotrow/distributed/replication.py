"""Replicated tables: each rank has all rows, and the row gradients of all ranks are gathered."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hotrow.distributed.ranks import Ranks
from hotrow.distributed.tables import (
    MapGradient,
    agree_on_tables,
    check_ddp_ignores,
    exclude_tables_from_ddp,
    refuse_assignment,
    shared_table,
    table_in_files,
)
from hotrow.errors import HotrowError
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table, needs_gradient

_M = TypeVar("_M", bound=nn.Module)


def replicate(model: _M, mesh: DeviceMesh) -> _M:
    """Keep the tables of a converted model equal on all ranks of a mesh, as DDP keeps the rest.

    `DistributedDataParallel(replicate(model, mesh))` trains dense parameters as ever and leaves the
    tables alone. A look-up's gradient, the rows that a rank's batch touched, is gathered from all
    ranks, each divided by their number W, and added in the order of the ranks: what
    DistributedDataParallel does to a dense gradient, V x D of zeros aside. The replicas keep the
    same bits: rows are looked up in a copy, and what settles all of them on one rank, as a
    checkpoint does, settles them on the others before the next step. An id that one rank cannot
    look up is an error on all, in that look-up, and the run may go on.

    Every rank must make the same look-ups, an empty batch where it has no data. To differentiate
    anything else of a table is refused.

    Args:
        model: changed in place; its tables get the values of the first rank.
        mesh: of one dimension, as from `init_device_mesh("cpu", (W,))` or `mesh["name"]`.

    Returns:
        The model.

    Raises:
        HotrowError: on every rank. The model has no tables; they differ among ranks; they have
            `max_norm`, which shortens other rows on each rank; the mesh has more dimensions.

    Cost: each look-up's gradient sends the distinct rows of a rank to W - 1 others, with two
    headers of 16 bytes; a step sends 16 bytes for each table beside.

    Source: `torch.nn.parallel.DistributedDataParallel`.
    """
    ranks, tables = agree_on_tables(model, mesh, "replicate", _find_problem)
    for path, modules in tables.items():
        table = shared_table(modules)
        table.settle()
        dist.broadcast(table.raw_data, group=ranks.group, group_src=0)
        table.replicas = _Replicas(path, ranks)
        for module in modules:
            module.register_load_state_dict_pre_hook(refuse_assignment)  # type: ignore[no-untyped-call]
    exclude_tables_from_ddp(model)
    return model


def _find_problem(path: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> HotrowError | None:
    if any(module.max_norm is not None for module in modules):
        return HotrowError(
            f"{path} has max_norm, which would shorten other rows on each rank",
            fix="leave it out of a model for replicate",
        )
    if shared_table(modules).backing is not None:
        return table_in_files(path)
    if shared_table(modules).replicas is not None:
        return HotrowError(f"{path}.weight is replicated already", fix="replicate a model once")
    return None


@dataclass(frozen=True)
class _Replicas:
    """The ranks that have the same table."""

    path: str
    ranks: Ranks

    def source(self, table: Tensor) -> Tensor:
        """A tensor like the table, whose gradient is gathered from all ranks."""
        source: Tensor = MapGradient.apply(table, self._gather)  # type: ignore[no-untyped-call]
        return source

    def _gather(self, gradient: RowGradient) -> RowGradient:
        """The rows of all ranks in their order; the rows of each rank are distinct."""
        ranks, storage = self.ranks, gradient.merge().row_storage
        operation = f"average the gradient of {self.path}"
        counts = ranks.exchange_counts(operation, [len(storage.ids)] * ranks.count)
        id_dtype = torch.int32 if gradient.count < 2**31 else torch.int64
        shares = [storage.ids.to(id_dtype), storage.rows / ranks.count]
        ids, rows = ranks.all_gather_rows(shares, counts)
        return RowGradient(ids.long(), rows, gradient.shape, columns=storage.columns)

    def prepare_look_up(self, table: Table, failure: HotrowError | None = None) -> None:
        """Before a look-up that trains: all ranks make it, or each raises."""
        check_ddp_ignores(table, self.path)
        operation = f"look up in {self.path} to train"
        self.ranks.exchange_counts(operation, [0] * self.ranks.count, failure)

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise on every rank that trains, in place of a look-up."""
        if needs_gradient(table):
            self.prepare_look_up(table, error)
        raise error

    def settle_together(self, table: Table) -> None:
        """Settle all rows, or close the lag, if another rank has since the last step.

        The rows of all ranks were equal after that step, and so are again.
        """
        lag_ended, is_settled = table.lag is None, not table.has_stale_rows
        flags = torch.tensor([lag_ended, is_settled], dtype=torch.int64, device=self.ranks.device)
        dist.all_reduce(flags, dist.ReduceOp.MAX, group=self.ranks.group)
        any_ended, any_settled = flags.tolist()
        if table.lag is not None and any_ended:
            table.lag.close()
        elif any_settled:
            table.settle()
