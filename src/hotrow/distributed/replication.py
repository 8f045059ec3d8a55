"""Tables of which each rank has all rows: their gradients are gathered, and stay by rows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hotrow.distributed.ranks import Ranks
from hotrow.distributed.tables import (
    Through,
    found_in,
    leave_to_hotrow,
    ranks_of,
    same_on_all,
    table_of,
)
from hotrow.errors import HotrowError
from hotrow.gradient import RowGradient
from hotrow.rows import Table, trains

_M = TypeVar("_M", bound=nn.Module)


def replicate(model: _M, mesh: DeviceMesh) -> _M:
    """Keep the tables of a converted model equal on all ranks of a mesh, as DDP keeps the rest.

    `DistributedDataParallel(replicate(model, mesh))` trains dense parameters as ever and leaves the
    tables alone. A look-up's gradient, the rows that a rank's batch touched, is gathered from all
    ranks, each divided by their number W, and added in the order of the ranks: what
    DistributedDataParallel does to a dense gradient, V x D of zeros aside. The replicas keep the
    same bits: rows are looked up in a copy, and what settles all of them on one rank, as a
    checkpoint does, settles them on the others before the next step.

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

    Cost: each look-up's gradient sends the distinct rows of a rank to W - 1 others; a step sends 16
    bytes for each table beside.

    Source: `torch.nn.parallel.DistributedDataParallel`.
    """
    given = ranks_of(mesh, "replicate")
    found = found_in(model, "replicate")
    for path, modules in found.items():
        if any(module.max_norm is not None for module in modules):
            raise HotrowError(
                f"{path} has max_norm, which would shorten other rows on each rank",
                fix="leave it out of a model for replicate",
            )
    same_on_all(given, found, "replicate")
    ranks = Ranks(_group_like(given), given.device)
    for path, modules in found.items():
        table = table_of(modules)
        if table.replicas is not None:
            raise HotrowError(f"{path}.weight is replicated already", fix="replicate a model once")
        table.settle()
        dist.broadcast(table.stored, group=ranks.group, group_src=0)
        table.replicas = _Replicas(path, ranks)
    leave_to_hotrow(model)
    return model


def _group_like(ranks: Ranks) -> Any:
    """A group of its own: an error may come while DistributedDataParallel uses the other one."""
    timeout = ranks.group._get_backend(ranks.device).options._timeout
    members = dist.get_process_group_ranks(ranks.group)
    return dist.new_group(members, timeout=timeout, use_local_synchronization=True)


@dataclass(frozen=True)
class _Replicas:
    """Who has the same table."""

    path: str
    ranks: Ranks

    @property
    def doing(self) -> str:
        """What its exchange is for."""
        return f"average the gradient of {self.path}"

    def source(self, table: Tensor) -> Tensor:
        """Its gradient is that of all ranks."""
        found: Tensor = Through.apply(table, self._gathered)  # type: ignore[no-untyped-call]
        return found

    def _gathered(self, gradient: RowGradient) -> RowGradient:
        """The rows of all ranks, each rank's distinct, in their order."""
        ranks, held = self.ranks, gradient.merge().held
        counts = ranks.announce(self.doing, [len(held.ids)] * ranks.count)
        short = torch.int32 if gradient.count < 2**31 else torch.int64
        shares = [held.ids.to(short), held.rows / ranks.count]
        ids, rows = ranks.share(shares, counts)
        return RowGradient(ids.long(), rows, gradient.shape, columns=held.columns)

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise on every rank: on the others in their backward pass."""
        if trains(table):
            self.ranks.announce(self.doing, [0] * self.ranks.count, error)
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
