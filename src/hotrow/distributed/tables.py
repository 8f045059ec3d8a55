"""The tables of a model, and the ranks that they are sharded or replicated over."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

from hotrow.distributed.ranks import Ranks
from hotrow.errors import HotrowError
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table

TableModules = dict[str, list[nn.Embedding | nn.EmbeddingBag]]


def _find_tables(model: nn.Module, operation: str) -> TableModules:
    """The modules of each table, by the path of the first one."""
    if isinstance(model, DistributedDataParallel):
        raise HotrowError(
            f"{operation} comes before DistributedDataParallel, which is to leave the tables alone",
            fix=f"use DistributedDataParallel({operation}(model))",
        )
    if not isinstance(model, nn.Module):
        raise HotrowError(f"{operation} takes a torch.nn.Module, not a {type(model).__name__}")
    tables: dict[int, tuple[str, list[nn.Embedding | nn.EmbeddingBag]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and isinstance(module.weight, Table):
            if module.scale_grad_by_freq:
                raise HotrowError(
                    f"{path or 'the model'} has scale_grad_by_freq, which would count the ids of "
                    "one rank only",
                    fix=f"leave it out of a model for {operation}",
                )
            tables.setdefault(id(module.weight), (path, []))[1].append(module)
    if not tables:
        raise HotrowError(
            f"{operation} found no tables in this {type(model).__name__}",
            fix="call model = hotrow.convert(model) before, with min_entries=0 if its embeddings "
            "have fewer than 100,000 entries; those that share their weight with a dense layer are "
            "no tables",
        )
    return dict(tables.values())


def shared_table(modules: list[nn.Embedding | nn.EmbeddingBag]) -> Table:
    """The table that the modules share."""
    table: Tensor = modules[0].weight
    assert isinstance(table, Table)
    return table


def agree_on_tables(
    model: nn.Module,
    mesh: Any,
    operation: str,
    find_problem: Callable[[str, list[nn.Embedding | nn.EmbeddingBag]], HotrowError | None],
) -> tuple[Ranks, TableModules]:
    """The ranks of a mesh, and the tables of a model, checked to be the same on all ranks.

    Arguments:
        model: to be sharded or replicated.
        mesh: of one dimension.
        operation: "shard" or "replicate", for a message.
        find_problem: `find_problem(path, modules)`, the error of a table that cannot take part, or
            None.

    Raises:
        HotrowError: on every rank.
    """
    ranks = _make_ranks(mesh, operation)
    tables: TableModules = {}
    failure = None
    try:
        tables = _find_tables(model, operation)
        failure = next(filter(None, (find_problem(*item) for item in tables.items())), None)
    except HotrowError as error:
        failure = error
    descriptions = ranks.all_gather(
        operation, [_describe_table(*item) for item in tables.items()], failure
    )
    for rank, other in enumerate(descriptions):
        if other != descriptions[0]:
            first, theirs = _first_difference(descriptions[0], other)
            raise HotrowError(
                f"{operation} needs the same tables on every rank, but rank 0 has {first} and rank "
                f"{rank} has {theirs}",
                fix="build the same model on every rank",
            )
    return ranks, tables


def _describe_table(path: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> str:
    """The properties of a table that are the same on all ranks."""
    table = shared_table(modules)
    uses = ", ".join(repr(module) for module in modules)
    options = "" if table.requires_grad else ", frozen"
    if any(getattr(module, "include_last_offset", False) for module in modules):
        options += ", include_last_offset"
    return f"{path}.weight of {uses} in {table.dtype}{options}"


def _make_ranks(mesh: Any, operation: str) -> Ranks:
    """The ranks of a mesh of one dimension, as a new process group.

    DistributedDataParallel may use the mesh's group while a look-up uses this one.
    """
    if not isinstance(mesh, DeviceMesh):
        raise HotrowError(
            f"{operation} takes a DeviceMesh, not a {type(mesh).__name__}",
            fix="use torch.distributed.init_device_mesh(device, (dist.get_world_size(),))",
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        choice = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names, and one of them"
        raise HotrowError(
            f"{operation} takes a mesh of one dimension, and this one has {mesh.ndim}",
            fix=f"use {choice}",
        )
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    new_group = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group._get_backend(device).options._timeout,
        use_local_synchronization=True,
    )
    return Ranks(new_group, device)


def _first_difference(first: list[str], other: list[str]) -> tuple[str, str]:
    end = ["no more tables"]
    return next((a, b) for a, b in zip([*first, *end], [*other, *end], strict=False) if a != b)


def exclude_tables_from_ddp(model: nn.Module) -> None:
    """Make a later DistributedDataParallel ignore the tables."""
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, Table) and parameter.spans_processes:
                # torch looks up both forms for parameters of the model itself
                names |= {f"{path}.{name}", f"{path}.{name}".lstrip(".")}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, sorted(names)
    )


def table_in_files(path: str) -> HotrowError:
    """The error of a table of `hotrow.disk`, which belongs to one process."""
    return HotrowError(
        f"{path}.weight is in files, which belong to one process",
        fix="shard or replicate a table in memory, or leave this one out of the model",
    )


def refuse_assignment(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *others: Any,
) -> None:
    """A hook before `load_state_dict`: raise if it would replace the table."""
    if f"{prefix}weight" in state_dict and local_metadata.get("assign_to_params_buffers"):
        raise HotrowError(
            f"load_state_dict(assign=True) would put a plain parameter of this process in the "
            f"place of {prefix}weight, which other processes share",
            fix="leave assign out: the values are copied",
        )


def check_ddp_ignores(table: Table, path: str) -> None:
    """Raise if the DistributedDataParallel of this forward pass does not ignore a table.

    It ignores the parameters that its own module names, not those that modules inside of it name.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    if wrapper is not None and any(parameter is table for parameter in wrapper._module_parameters):
        raise HotrowError(
            f"DistributedDataParallel has taken {path}.weight for a dense parameter, and given it "
            "the first rank's values",
            fix="build the model again, and call shard or replicate on the very module that "
            "DistributedDataParallel gets",
        )


class MapGradient(torch.autograd.Function):
    """A stand-in for a table, whose gradient goes through `function` to the table."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, function: Callable[[RowGradient], RowGradient]) -> Tensor:
        """A tensor of the table's shape with one value in memory: not an alias of the table."""
        ctx.set_materialize_grads(False)
        ctx.function = function
        return table.new_empty(()).expand(table.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: RowGradient | None) -> tuple[RowGradient | None, None]:
        """The gradient that `function` returns."""
        return None if gradient is None else ctx.function(gradient), None
