"""The tables of a model, and the ranks that they are spread over."""

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

Found = dict[str, list[nn.Embedding | nn.EmbeddingBag]]


def _found_in(model: nn.Module, doing: str) -> Found:
    """By the path of the first, the embeddings that have each table; not those left to torch."""
    if isinstance(model, DistributedDataParallel):
        raise HotrowError(
            f"{doing} comes before DistributedDataParallel, which is to leave the tables alone",
            fix=f"use DistributedDataParallel({doing}(model))",
        )
    if not isinstance(model, nn.Module):
        raise HotrowError(f"{doing} takes a torch.nn.Module, not a {type(model).__name__}")
    found: dict[int, tuple[str, list[nn.Embedding | nn.EmbeddingBag]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and isinstance(module.weight, Table):
            if module.scale_grad_by_freq:
                raise HotrowError(
                    f"{path or 'the model'} has scale_grad_by_freq, which would count the ids of "
                    "one rank only",
                    fix=f"leave it out of a model for {doing}",
                )
            found.setdefault(id(module.weight), (path, []))[1].append(module)
    if not found:
        raise HotrowError(
            f"{doing} found no tables in this {type(model).__name__}",
            fix="call model = hotrow.convert(model) before, with least=0 if its embeddings have "
            "fewer than 100,000 entries; those that share their weight with a dense layer are no "
            "tables",
        )
    return dict(found.values())


def table_of(modules: list[nn.Embedding | nn.EmbeddingBag]) -> Table:
    """The one that they share."""
    table: Tensor = modules[0].weight
    assert isinstance(table, Table)
    return table


def agreed(
    model: nn.Module,
    mesh: Any,
    doing: str,
    refusal: Callable[[str, list[nn.Embedding | nn.EmbeddingBag]], HotrowError | None],
) -> tuple[Ranks, Found]:
    """The ranks of a mesh, and the tables of a model, which are the same on all of them.

    Arguments:
        model: to be spread.
        mesh: of one dimension.
        doing: what is being done, for a message.
        refusal: of a path and its modules, why they cannot take part; None if they can.

    Raises:
        HotrowError: on every rank.
    """
    ranks = _ranks_of(mesh, doing)
    found: Found = {}
    failure = None
    try:
        found = _found_in(model, doing)
        failure = next(filter(None, (refusal(*each) for each in found.items())), None)
    except HotrowError as error:
        failure = error
    every = ranks.gather(doing, [_described(*each) for each in found.items()], failure)
    for rank, other in enumerate(every):
        if other != every[0]:
            first, theirs = _first_difference(every[0], other)
            raise HotrowError(
                f"{doing} needs the same tables on every rank, but rank 0 has {first} and rank "
                f"{rank} has {theirs}",
                fix="build the same model on every rank",
            )
    return ranks, found


def _described(path: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> str:
    """All of a table that the ranks have to have in common."""
    table = table_of(modules)
    uses = ", ".join(repr(module) for module in modules)
    also = "" if table.requires_grad else ", frozen"
    if any(getattr(module, "include_last_offset", False) for module in modules):
        also += ", include_last_offset"
    return f"{path}.weight of {uses} in {table.dtype}{also}"


def _ranks_of(mesh: Any, doing: str) -> Ranks:
    """The ranks of a mesh that has one dimension, as a group of their own.

    DistributedDataParallel may be using the mesh's while a look-up uses this one.
    """
    if not isinstance(mesh, DeviceMesh):
        raise HotrowError(
            f"{doing} takes a DeviceMesh, not a {type(mesh).__name__}",
            fix="use torch.distributed.init_device_mesh(device, (dist.get_world_size(),))",
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        choice = f"mesh[{names[-1]!r}]" if names else "a mesh with mesh_dim_names, and one of them"
        raise HotrowError(
            f"{doing} takes a mesh of one dimension, and this one has {mesh.ndim}",
            fix=f"use {choice}",
        )
    device = torch.device(mesh.device_type)
    group = mesh.get_group()
    own = dist.new_group(
        dist.get_process_group_ranks(group),
        timeout=group._get_backend(device).options._timeout,
        use_local_synchronization=True,
    )
    return Ranks(own, device)


def _first_difference(own: list[str], other: list[str]) -> tuple[str, str]:
    none = ["no more tables"]
    return next((a, b) for a, b in zip([*own, *none], [*other, *none], strict=False) if a != b)


def leave_to_hotrow(model: nn.Module) -> None:
    """Have DistributedDataParallel, which is made next, leave the tables alone."""
    names = set(getattr(model, "_ddp_params_and_buffers_to_ignore", ()))
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, Table) and parameter.is_spread:
                # torch asks for both forms of what the model itself has
                names |= {f"{path}.{name}", f"{path}.{name}".lstrip(".")}
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, sorted(names)
    )


def in_files(path: str) -> HotrowError:
    """Why a table of `hotrow.disk` stays in one process."""
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
    """A hook before `load_state_dict`: the table is not to be replaced."""
    if f"{prefix}weight" in state_dict and local_metadata.get("assign_to_params_buffers"):
        raise HotrowError(
            f"load_state_dict(assign=True) would put a plain parameter of this process in the "
            f"place of {prefix}weight, which other processes share",
            fix="leave assign out: the values are copied",
        )


def check_wrapper(table: Table, path: str) -> None:
    """Raise if DistributedDataParallel, whose forward pass this may be, takes a table for its own.

    It leaves alone what the module that it was given names, not what modules inside of it do.
    """
    around = DistributedDataParallel._active_ddp_module
    if around is not None and any(each is table for each in around._module_parameters):
        raise HotrowError(
            f"DistributedDataParallel has taken {path}.weight for a dense parameter, and given it "
            "the first rank's values",
            fix="build the model again, and call shard or replicate on the very module that "
            "DistributedDataParallel gets",
        )


class Through(torch.autograd.Function):
    """The table, whose gradient goes through `receive` before it comes there."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, receive: Callable[[RowGradient], RowGradient]) -> Tensor:
        """Of the table's shape, with one value: nobody is to hold the table's memory."""
        ctx.set_materialize_grads(False)
        ctx.receive = receive
        return table.new_empty(()).expand(table.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: RowGradient | None) -> tuple[RowGradient | None, None]:
        """What `receive` makes of it."""
        return None if gradient is None else ctx.receive(gradient), None
