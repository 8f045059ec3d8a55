"""Tables of which each rank has all rows: their gradients are gathered, and stay by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hotrow.distributed.ranks import Ranks
from hotrow.distributed.tables import (
    Through,
    agreed,
    check_wrapper,
    in_files,
    leave_to_hotrow,
    refuse_assignment,
    table_of,
)
from hotrow.errors import HotrowError
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table, trains

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
    ranks, found = agreed(model, mesh, "replicate", _refusal)
    for path, modules in found.items():
        table = table_of(modules)
        table.settle()
        dist.broadcast(table.stored, group=ranks.group, group_src=0)
        table.replicas = _Replicas(path, ranks)
        for module in modules:
            module.register_load_state_dict_pre_hook(refuse_assignment)  # type: ignore[no-untyped-call]
    leave_to_hotrow(model)
    return model


def _refusal(path: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> HotrowError | None:
    if any(module.max_norm is not None for module in modules):
        return HotrowError(
            f"{path} has max_norm, which would shorten other rows on each rank",
            fix="leave it out of a model for replicate",
        )
    if table_of(modules).backing is not None:
        return in_files(path)
    if table_of(modules).replicas is not None:
        return HotrowError(f"{path}.weight is replicated already", fix="replicate a model once")
    return None


@dataclass(frozen=True)
class _Replicas:
    """Who has the same table."""

    path: str
    ranks: Ranks

    def source(self, table: Tensor) -> Tensor:
        """Its gradient is that of all ranks."""
        found: Tensor = Through.apply(table, self._gathered)  # type: ignore[no-untyped-call]
        return found

    def _gathered(self, gradient: RowGradient) -> RowGradient:
        """The rows of all ranks, each rank's distinct, in their order."""
        ranks, held = self.ranks, gradient.merge().held
        doing = f"average the gradient of {self.path}"
        counts = ranks.announce(doing, [len(held.ids)] * ranks.count)
        short = torch.int32 if gradient.count < 2**31 else torch.int64
        shares = [held.ids.to(short), held.rows / ranks.count]
        ids, rows = ranks.share(shares, counts)
        return RowGradient(ids.long(), rows, gradient.shape, columns=held.columns)

    def begin(self, table: Table, failure: HotrowError | None = None) -> None:
        """Before a look-up that trains: all ranks make it, or each raises."""
        check_wrapper(table, self.path)
        doing = f"look up in {self.path} to train"
        self.ranks.announce(doing, [0] * self.ranks.count, failure)

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise on every rank that trains, in the place of a look-up."""
        if trains(table):
            self.begin(table, error)
        raise error

    def agree(self, table: Table) -> None:
        """Settle here, and let go of the lag, if another rank has; they began alike."""
        ended = table.lag is None
        mine = torch.tensor([ended, not table.behind], dtype=torch.int64, device=self.ranks.device)
        dist.all_reduce(mine, dist.ReduceOp.MAX, group=self.ranks.group)
        others_ended, others_settled = mine.tolist()
        if table.lag is not None and others_ended:
            table.lag.close()
        elif others_settled:
            table.settle()
