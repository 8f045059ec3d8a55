"""Sharded tables: a lookup sends ids to the ranks that have their rows, and receives the rows."""

from __future__ import annotations

from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

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
from hotrow.kernels import devices
from hotrow.table.functional import check_options
from hotrow.table.jagged import restore_parts, values_of
from hotrow.table.parameter import Table

_M = TypeVar("_M", bound=nn.Module)


def shard(model: _M, mesh: DeviceMesh) -> _M:
    """Split the tables of a model by rows over the ranks of a mesh.

    With W ranks and C = ceil(V / W), rank r has the rows r C .. (r + 1) C - 1; the last ranks may
    have fewer rows, or none. This is the layout of DTensor's `Shard(0)`.

    A lookup sends each distinct id of the batch to the rank that has its row, and receives the row.
    The backward pass sends that rank one gradient for each distinct id, divided by W as in
    DistributedDataParallel. A step gives the same result as a step in a single process that adds
    the gradients of the ranks' batches in rank order.

    Call `shard` before you create the optimizer and before you pass the same module to
    DistributedDataParallel. DistributedDataParallel trains the dense parameters and ignores the
    tables.

    In `state_dict()`, a table and its optimizer state are DTensors. `torch.distributed.checkpoint`
    can load a checkpoint on a different number of ranks, or in a single process. You can
    also load a state dict that contains whole tables; each rank then takes its own rows.

    Every rank must look up ids in the same tables in the same order, but the ids may differ. A rank
    without data passes an empty batch. A direct read of a table's `weight` returns the rows of this
    rank, and cannot be differentiated. The norm of a table's gradient includes the rows of all
    ranks, so `clip_grad_norm_` clips the same way it does in a single process. Every rank must call
    `clip_grad_norm_`. Other results, such as the gradient's sum or its nuclear and spectral norm,
    include only the rows of this rank.

    Args:
        model: a model converted by `hotrow.convert`. It is changed in place. Every rank must pass
            the same model, for example by creating it with the same seed. If the model is on the
            "meta" device, each rank initializes its rows with `reset_parameters`.
        mesh: a mesh with one dimension, such as `init_device_mesh("cpu", (W,))` or `mesh["name"]`.
            To replicate each shard, call `hotrow.distributed.replicate` with another dimension of
            the same mesh.

    Returns:
        The model.

    Raises:
        HotrowError: on every rank, if the model has no tables, the tables differ between ranks, a
            table has a gradient, `scale_grad_by_freq` or frozen rows, or is on disk, or the mesh
            has more than one dimension or unsorted ranks.

    Cost: each rank copies its own rows and frees the other rows. See docs/scale.md for the cost of
    a step.

    Source: `torch.distributed.tensor.Shard`; hybrid parallelism, https://arxiv.org/abs/1906.00091.

    >>> import torch, torch.distributed as dist, hotrow
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = hotrow.convert(torch.nn.Embedding(6, 2), min_entries=0)
    >>> model = hotrow.distributed.shard(model, init_device_mesh("cpu", (1,)))
    >>> model(torch.tensor([5, 0, 5])).shape, len(model.weight)
    (torch.Size([3, 2]), 6)
    >>> dist.destroy_process_group()
    """
    ranks, tables = agree_on_tables(model, mesh, "shard", _find_problem)
    for name, modules in tables.items():
        _split_table(name, modules, mesh, ranks)
        for module in modules:
            module.register_state_dict_post_hook(_save_hook)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(refuse_assignment)  # type: ignore[no-untyped-call]
            module.register_load_state_dict_pre_hook(_load_hook)  # type: ignore[no-untyped-call]
            module.register_forward_pre_hook(_check_forward, with_kwargs=True)
    exclude_tables_from_ddp(model)
    return model


def _find_problem(name: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> HotrowError | None:
    if shared_table(modules).backing is not None:
        return table_in_files(name)
    if shared_table(modules).shards is not None:
        return HotrowError(f"{name} is already sharded", fix="call shard only once per model")
    if shared_table(modules).frozen_rows is not None:
        return HotrowError(
            f"{name} has frozen rows, which shard does not support",
            fix="call hotrow.vocabulary.unfreeze(layer) first, or use replicate",
        )
    return None


def _split_table(
    name: str, modules: list[nn.Embedding | nn.EmbeddingBag], mesh: DeviceMesh, ranks: Ranks
) -> None:
    """Keep only the rows of this rank."""
    table = shared_table(modules)
    table.settle()
    shards = Shards(name, ranks, mesh, len(table))
    local_rows = table.raw_data[shards.local_slice]
    if table.is_meta:
        rows = torch.empty_like(local_rows, device=torch.device(mesh.device_type))
        table = Table.adopt(nn.Parameter(rows, table.requires_grad))
        for module in modules:
            module.weight = table
        _initialize_rows(modules[0], shards)
    else:
        table.data = local_rows.clone(memory_format=torch.contiguous_format)
    table.distribute(shards=shards)
    table.steps_taken = 0


def _initialize_rows(module: nn.Embedding | nn.EmbeddingBag, shards: Shards) -> None:
    """Initialize the rows of this rank; ranks with the same seed get different values."""
    seed = int(torch.randint(2**62, (), device="cpu")) + shards.ranks.rank
    padding, module.padding_idx = module.padding_idx, None
    with torch.random.fork_rng([] if module.weight.is_cpu else devices.all_accelerators()):
        torch.manual_seed(seed)
        module.reset_parameters()
    module.padding_idx = padding
    if padding is not None and shards.local_slice.start <= padding < shards.local_slice.stop:
        with torch.no_grad():
            module.weight[padding - shards.local_slice.start].zero_()


def _check_forward(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
    """Raise an error if the lookup would read only the rows of this rank."""
    if not isinstance(module.weight, Table):
        raise HotrowError(
            f"the weight of {module} is a {type(module.weight).__name__} instead of the sharded "
            "table, so a lookup would read only the rows of this rank",
            fix="don't replace the weight after hotrow.distributed.shard, and don't wrap the model "
            "in FullyShardedDataParallel, which replaces it",
        )


def look_up(*pairs: tuple[nn.Embedding, Tensor]) -> list[Tensor]:
    """Look up ids in several sharded embeddings with one exchange, instead of one per embedding.

    The backward pass also sends all gradients in one exchange. The results are the same as
    with separate calls.

    Args:
        pairs: (layer, ids) pairs. The layers' tables must be sharded over the same mesh. The ids
            are int64 or int32 tensors of any shape or jagged, with values from 0 to V - 1.

    Returns:
        `layer(ids)` for each pair, of shape `(*ids.shape, D)`.

    Raises:
        HotrowError: a table is not sharded, or the meshes differ. If an id on any rank is invalid,
            the error is raised on every rank.

    Cost: `look_up` sends the same data as separate calls, but in five messages to each rank instead
    of four per layer.

    Source: the all-to-all exchange of embedding lookups in https://arxiv.org/abs/1906.00091.

    >>> import torch, torch.distributed as dist, hotrow
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> layers = torch.nn.ModuleList([torch.nn.Embedding(6, 2), torch.nn.Embedding(9, 3)])
    >>> model = hotrow.convert(layers, min_entries=0)
    >>> users, items = hotrow.distributed.shard(model, init_device_mesh("cpu", (1,)))
    >>> ids = torch.tensor([5, 0])
    >>> [rows.shape for rows in hotrow.distributed.look_up((users, ids), (items, ids))]
    [torch.Size([2, 2]), torch.Size([2, 3])]
    >>> dist.destroy_process_group()
    """
    for layer, _ in pairs:
        table = layer.weight
        if not isinstance(layer, nn.Embedding):
            raise HotrowError(
                f"look_up takes embeddings, but one of the layers is {layer}",
                fix="call the layer itself",
            )
        if not (isinstance(table, Table) and isinstance(table.shards, Shards)):
            raise HotrowError(
                f"{type(layer).__name__}({layer.num_embeddings}, {layer.embedding_dim}) is not "
                "sharded",
                fix="call hotrow.distributed.shard on the model first",
            )
        check_options(table, layer.padding_idx, layer.max_norm, layer.scale_grad_by_freq)
    requests = [
        LookUpRequest(
            layer.weight,  # type: ignore[arg-type]
            values_of(ids),
            layer.padding_idx,
            layer.max_norm,
            layer.norm_type,
        )
        for layer, ids in pairs
    ]
    if len({request.shards.mesh for request in requests}) > 1:
        raise HotrowError(
            "the tables are sharded over different meshes", fix="call look_up once per mesh"
        )
    results = fetch(requests) if requests else []
    return [
        restore_parts(F.embedding(inverse, rows), ids)
        for (_, ids), (_, inverse, rows) in zip(pairs, results, strict=True)
    ]


def _save_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, local_metadata: dict[str, Any]
) -> None:
    """Replace this rank's rows with a DTensor if the module or an earlier hook has saved them.

    What torch saves is a DTensor already; see `Table.__torch_function__`.
    """
    table, name = module.weight, prefix + "weight"
    rows = state_dict.get(name)
    if not isinstance(table, Table) or table.shards is None or rows is table:
        return
    if isinstance(rows, Tensor) and not isinstance(rows, DTensor):
        if rows.shape != table.shape:
            raise HotrowError(
                f"the layer saves {name} with the shape {tuple(rows.shape)}, but this rank stores "
                f"{tuple(table.shape)} of the sharded table",
                fix="save the weight as it is, and change its shape when you load it",
            )
        state_dict[name] = table.shards.to_dtensor(rows)


def _load_hook(
    module: nn.Module, state_dict: dict[str, Any], prefix: str, *arguments: Any, **options: Any
) -> None:
    """Before loading, replace a DTensor or a whole table in `state_dict` with this rank's rows."""
    table, name = module.weight, prefix + "weight"
    if isinstance(table, Table) and table.shards is not None and name in state_dict:
        count, rows = len(state_dict[name]), table.shards.rows
        if count != rows:
            raise HotrowError(
                f"{name} has {count} rows in the state dict, but the sharded table has {rows}",
                fix="load the state dict of a whole model or of a sharded model",
            )
        state_dict[name] = table.shards.from_dtensor(state_dict[name])
        table.steps_taken = (
            0  # all ranks load the table, even if some of them failed to take a step
        )
