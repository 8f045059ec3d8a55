"""Sharded tables: ids are sent to the rank that has their rows, and the rows are sent back."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hotrow.distributed.ranks import Ranks
from hotrow.distributed.shards import LookUpRequest, Shards, fetch
from hotrow.distributed.tables import (
    agree_on_tables,
    exclude_tables_from_ddp,
    refuse_assignment,
    shared_table,
    table_in_files,
)
from hotrow.errors import HotrowError
from hotrow.table.parameter import Table

_M = TypeVar("_M", bound=nn.Module)


def shard(model: _M, mesh: DeviceMesh) -> _M:
    """Split the tables of a converted model by rows over the ranks of a mesh.

    Rank r of W keeps rows r C .. (r + 1) C - 1, with C = ceil(V / W); the last ranks may have
    fewer, or none. So DTensor's `Shard(0)` does it, and in `state_dict()` a table and its optimizer
    state are such DTensors: `torch.distributed.checkpoint` saves them at one world size and loads
    them at another, or in one plain process. A state dict with the whole tables loads as well, of
    which each rank takes its rows.

    A look-up sends the batch's distinct ids to their rows' ranks and gets the rows; backward, their
    gradients go the same way, each distinct id once a rank, divided by W as
    DistributedDataParallel divides. So a step is that of one process that adds up the gradients of
    the ranks' batches, in their order. Dense parameters stay with DistributedDataParallel, which
    leaves the tables alone; call `shard` before it, on the module that it gets.

    Every rank must make the same look-ups, an empty batch where it has no data. What reads a
    table's `weight` gets the rows of this rank; to differentiate that is refused. The norm of the
    gradient is that of all ranks', so that `clip_grad_norm_` clips as one process would; every
    rank has to ask for it. An optimizer is made after this.

    Args:
        model: changed in place. Each rank gives the same one, as from the same seed; of a model on
            the "meta" device each rank makes its rows, by `reset_parameters`.
        mesh: of one dimension, as from `init_device_mesh("cpu", (W,))` or `mesh["name"]`. With
            `hotrow.distributed.replicate` over another dimension each shard is replicated.

    Returns:
        The model.

    Raises:
        HotrowError: on every rank. The model has no tables; they differ among ranks; an option
            that a shard cannot honour; the mesh has more dimensions.

    Cost: of a step see docs/scale.md; here each rank copies its rows, and the rest is freed.

    Source: `torch.distributed.tensor.Shard`; hybrid parallelism as in
    https://arxiv.org/abs/1906.00091.
    """
    ranks, tables = agree_on_tables(model, mesh, "shard", _find_problem)
    for path, modules in tables.items():
        _split_table(path, modules, mesh, ranks)
        for module in modules:
            module.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(refuse_assignment)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]
    exclude_tables_from_ddp(model)
    return model


def _find_problem(path: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> HotrowError | None:
    if shared_table(modules).backing is not None:
        return table_in_files(path)
    if shared_table(modules).shards is not None:
        return HotrowError(f"{path}.weight is sharded already", fix="shard a model once")
    return None


def _split_table(
    path: str, modules: list[nn.Embedding | nn.EmbeddingBag], mesh: DeviceMesh, ranks: Ranks
) -> None:
    """Keep only this rank's rows of a table."""
    table = shared_table(modules)
    table.settle()
    shards = Shards(path, ranks, mesh, len(table))
    local_rows = table.raw_data[shards.local_slice]
    if table.is_meta:
        rows = torch.empty_like(local_rows, device=torch.device(mesh.device_type))
        table = Table.adopt(nn.Parameter(rows, table.requires_grad))
        for module in modules:
            module.weight = table
        _initialize_rows(modules[0], shards)
    else:
        table.data, table.grad = local_rows.clone(), None
    table.shards = shards


def _initialize_rows(module: nn.Embedding | nn.EmbeddingBag, shards: Shards) -> None:
    """Initialize this rank's rows, with other values than the other ranks' even for equal seeds."""
    seed = int(torch.randint(2**62, ())) + shards.ranks.rank
    padding, module.padding_idx = module.padding_idx, None
    with torch.random.fork_rng(devices=[] if module.weight.is_cpu else None):
        torch.manual_seed(seed)
        module.reset_parameters()
    module.padding_idx = padding
    if padding is not None and shards.local_slice.start <= padding < shards.local_slice.stop:
        with torch.no_grad():
            module.weight[padding - shards.local_slice.start].zero_()


def look_up(*pairs: tuple[nn.Embedding, Tensor]) -> list[Tensor]:
    """What several sharded embeddings give for their ids, in one exchange instead of one each.

    Their gradients go back in one exchange, too. The numbers are those of the layers called one by
    one.

    Args:
        pairs: an embedding whose table is sharded, and its ids; all over the same mesh.

    Returns:
        For each pair what `layer(ids)` gives.

    Raises:
        HotrowError: on every rank, as the layers do; a table is not sharded, or over other ranks.

    Cost: as of the layers, with five messages to each rank in place of four for each layer.
    """
    for layer, _ in pairs:
        table = layer.weight
        if not (isinstance(table, Table) and isinstance(table.shards, Shards)):
            raise HotrowError(
                f"{type(layer).__name__}({layer.num_embeddings}, {layer.embedding_dim}) is not "
                "sharded",
                fix="call hotrow.distributed.shard on the model before",
            )
    requests = [
        LookUpRequest(layer.weight, ids, layer.padding_idx, layer.max_norm, layer.norm_type)  # type: ignore[arg-type]
        for layer, ids in pairs
    ]
    if len({request.shards.mesh for request in requests}) > 1:
        raise HotrowError(
            "the tables are sharded over different meshes", fix="look up in those of one at a time"
        )
    results = fetch(requests) if requests else []
    return [F.embedding(inverse, rows) for _, inverse, rows in results]


def _save_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """A hook after `state_dict`: the table becomes a DTensor."""
    table, name = module.weight, prefix + "weight"
    if isinstance(table, Table) and table.shards is not None and state_dict[name] is not table:
        state_dict[name] = table.shards.to_global(state_dict[name])


def _load_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
) -> None:
    """A hook before `load_state_dict`: take this rank's rows of a DTensor or a whole table."""
    table, name = module.weight, prefix + "weight"
    if isinstance(table, Table) and table.shards is not None and name in state_dict:
        count, rows = len(state_dict[name]), table.shards.rows
        if count != rows:
            raise HotrowError(
                f"{name} has {rows} rows on all ranks, but what is loaded has {count}",
                fix="load a state dict of a whole model, or of a sharded one",
            )
        state_dict[name] = table.shards.to_local(state_dict[name])
