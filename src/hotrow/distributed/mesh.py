"""Create the process group for the tables of a device mesh."""

from __future__ import annotations

import zlib
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hotrow.distributed.ranks import Ranks
from hotrow.errors import HotrowError


def make_ranks(mesh: Any, operation: str) -> Ranks:
    """Return the ranks of a one-dimensional mesh, with a new process group.

    Lookups use the new group, because DistributedDataParallel may be using the mesh's group at the
    same time.

    Raises:
        HotrowError: the mesh isn't supported, or torch can't create a group of its ranks.
    """
    _check_mesh(mesh, operation)
    mesh_ranks = Ranks(mesh.get_group(), torch.device(mesh.device_type))
    members = mesh.mesh.tolist()
    is_whole_world = len(members) == dist.get_world_size()
    _check_group_name(mesh_ranks, members, is_whole_world, operation)
    group = dist.new_group(
        members,
        timeout=mesh_ranks.group._get_backend(mesh_ranks.device).options._timeout,
        use_local_synchronization=not is_whole_world,
    )
    return Ranks(group, mesh_ranks.device)


def _check_mesh(mesh: Any, operation: str) -> None:
    if not isinstance(mesh, DeviceMesh):
        raise HotrowError(
            f"mesh is a {type(mesh).__name__}, but {operation} takes a DeviceMesh",
            fix="use torch.distributed.init_device_mesh(device, (dist.get_world_size(),))",
        )
    if mesh.ndim != 1:
        names = mesh.mesh_dim_names
        choice = f"mesh[{names[-1]!r}]" if names else "mesh_dim_names, and select one dimension"
        raise HotrowError(
            f"the mesh has {mesh.ndim} dimensions, but {operation} takes a one-dimensional mesh",
            fix=f"use {choice}",
        )
    members = mesh.mesh.tolist()
    if mesh.get_coordinate() is None:
        raise HotrowError(
            f"rank {dist.get_rank()} is not one of the mesh's ranks {members}",
            fix=f"call {operation} only on the ranks of the mesh",
        )
    if members != sorted(members):
        # A group sorts its ranks, and torch's checkpoints of DTensors have permuted rows.
        raise HotrowError(
            f"the mesh has the ranks {members}, but {operation} takes them in ascending order",
            fix="build the mesh from sorted ranks, for example with init_device_mesh",
        )


def _check_group_name(
    ranks: Ranks, members: list[int], is_whole_world: bool, operation: str
) -> None:
    """Raise an error if torch can't find the same unused name for the new group on these ranks.

    The name depends on the number of process groups, or, since torch 2.14, on the number of groups
    that were ever created. Ranks with different names would wait for each other.
    """
    world = dist.distributed_c10d._world
    hashed = dist.distributed_c10d._hash_ranks_to_str(members)
    name = str(world.group_count) if is_whole_world else hashed
    failure = None
    if name in world.pg_names.values():
        failure = HotrowError(
            f"torch can't create another process group of the ranks {members}, because a group "
            "was destroyed after the last one was created",
            fix=f"call {operation} before you destroy process groups",
        )
    if len(set(ranks.agree(operation, zlib.crc32(name.encode()), failure))) > 1:
        raise HotrowError(
            f"some of the ranks {members} have created process groups without the others, so torch "
            "can't create a group of them",
            fix=f"call {operation} before you create groups for some of these ranks",
        )
