"""Find the tables of a model, and check that all ranks of a mesh have the same tables.

This module also contains the hooks that sharding and replication share, and the code that makes
DistributedDataParallel ignore the tables.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from hotrow.distributed.mesh import make_ranks
from hotrow.distributed.ranks import Ranks
from hotrow.errors import HotrowError
from hotrow.ids import digest
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table, needs_gradient

_TORCH_HOOKS = "torch.distributed.algorithms.ddp_comm_hooks."
# Hooks whose result is the average over all ranks, some in a lower precision.
_AVERAGING_HOOKS = {
    "allreduce_hook",
    "fp16_compress_hook",
    "bf16_compress_hook",
    "powerSGD_hook",
    "batched_powerSGD_hook",
    "_reducer_allreduce_and_upcast_hook",  # of DistributedDataParallel(mixed_precision=...)
}

TableModules = dict[str, list[nn.Embedding | nn.EmbeddingBag]]


def _find_tables(model: nn.Module, operation: str) -> TableModules:
    """Return the modules that use each table, keyed by the name of the first one's weight."""
    if isinstance(model, DistributedDataParallel):
        raise HotrowError(
            f"the model is wrapped in DistributedDataParallel, but {operation} must come first, so "
            "that DistributedDataParallel ignores the tables",
            fix=f"use DistributedDataParallel({operation}(model, mesh))",
        )
    if not isinstance(model, nn.Module):
        raise HotrowError(
            f"model is a {type(model).__name__}, but {operation} takes a torch.nn.Module",
            fix="pass the model that hotrow.convert returns",
        )
    tables: dict[int, tuple[str, list[nn.Embedding | nn.EmbeddingBag]]] = {}
    for path, module in model.named_modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag) and isinstance(module.weight, Table):
            if module.scale_grad_by_freq:
                raise HotrowError(
                    f"{path or 'the model'} has scale_grad_by_freq, which {operation} does not "
                    "support: each rank would count only its own ids",
                    fix="remove scale_grad_by_freq",
                )
            if module.weight.grad is not None:
                raise HotrowError(
                    f"{path or 'the model'} has a gradient, which {operation} cannot average over "
                    "the ranks",
                    fix=f"call optimizer.zero_grad() before {operation}",
                )
            name = f"{path}.weight".lstrip(".")
            tables.setdefault(id(module.weight), (name, []))[1].append(module)
    if not tables:
        raise HotrowError(
            f"{operation} found no tables in this {type(model).__name__}",
            fix="call model = hotrow.convert(model) first, with min_entries=0 if its embeddings "
            "have fewer than 100,000 entries; an embedding that shares its weight with a dense "
            "layer does not become a table",
        )
    return dict(tables.values())


def copy_name(name: str) -> str:
    """Return the name of a deep copy of a table, so that ranks can't mix up the two tables."""
    return f"a copy of {name}"


def shared_table(modules: list[nn.Embedding | nn.EmbeddingBag]) -> Table:
    """Return the table that the modules share."""
    table: Tensor = modules[0].weight
    assert isinstance(table, Table)
    return table


def agree_on_tables(
    model: nn.Module,
    mesh: Any,
    operation: str,
    find_problem: Callable[[str, list[nn.Embedding | nn.EmbeddingBag]], HotrowError | None],
) -> tuple[Ranks, TableModules]:
    """Return a mesh's ranks and a model's tables; the tables must be the same on all ranks.

    Arguments:
        model: the model to shard or replicate.
        mesh: a mesh with one dimension.
        operation: "shard" or "replicate", for error messages.
        find_problem: `find_problem(name, modules)` returns the error for an unsupported table, or
            None.

    Raises:
        HotrowError: on every rank, if the tables differ or a rank finds a problem.
    """
    ranks = make_ranks(mesh, operation)
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
    rank = ranks.first_different(descriptions)
    if rank is not None:
        first, theirs = _first_difference(descriptions[0], descriptions[rank])
        raise HotrowError(
            f"{operation} needs the same tables on every rank, but {ranks.names[0]} has {first} "
            f"and {ranks.names[rank]} has {theirs}",
            fix="build the same model on every rank",
        )
    return ranks, tables


def _describe_table(name: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> str:
    """Describe the properties of a table that must be the same on all ranks."""
    table = shared_table(modules)
    uses = ", ".join(repr(module) for module in modules)
    options = "" if table.requires_grad else ", frozen"
    if any(getattr(module, "include_last_offset", False) for module in modules):
        options += ", include_last_offset"
    if table.frozen_rows is not None:
        options += f", {len(table.frozen_rows)} frozen rows (ids {digest(table.frozen_rows)})"
    if table.shards is not None:
        rows = table.shards.local_slice
        options += f", sharded (rows {rows.start} to {rows.stop - 1})"
    return f"{name} of {uses} in {table.dtype}{options}"


def _first_difference(first: list[str], other: list[str]) -> tuple[str, str]:
    end = ["no more tables"]
    return next((a, b) for a, b in zip([*first, *end], [*other, *end], strict=False) if a != b)


class _IgnoredNames(list[str]):
    """The names that DistributedDataParallel ignores: those of other code, and those of the tables.

    The list stores only the names of other code. Iteration adds the names of the distributed tables
    that the model has at that time, because other code may replace a table with a dense parameter
    of the same name. A pickled model has no tables, so it has only the names of other code.
    """

    def __init__(self, model: nn.Module, others: Iterable[str]) -> None:
        super().__init__(others)
        self._model = weakref.ref(model)  # the model refers to this list

    def __iter__(self) -> Iterator[str]:
        yield from self.others()
        model = self._model()
        if model is not None:
            yield from _distributed_table_names(model)

    def __contains__(self, name: object) -> bool:
        return any(each == name for each in self)

    def __len__(self) -> int:
        return sum(1 for _ in self)

    def others(self) -> list[str]:
        """Return the names of other code."""
        return list(super().__iter__())

    def __reduce__(self) -> tuple[Any, ...]:
        return list, (self.others(),)

    def __deepcopy__(self, memo: dict[int, Any]) -> list[str]:
        model = memo.get(id(self._model()))
        return self.others() if model is None else _IgnoredNames(model, self.others())


def _distributed_table_names(model: nn.Module) -> Iterator[str]:
    for path, module in model.named_modules(remove_duplicate=False):
        for name, parameter in module.named_parameters(recurse=False):
            if isinstance(parameter, Table) and parameter.spans_processes:
                # torch checks the names of a model's own parameters with and without a leading dot.
                yield from {f"{path}.{name}", f"{path}.{name}".lstrip(".")}


def exclude_tables_from_ddp(model: nn.Module) -> None:
    """Make DistributedDataParallel ignore the tables when it later wraps the model."""
    names = getattr(model, "_ddp_params_and_buffers_to_ignore", ())
    others = names.others() if isinstance(names, _IgnoredNames) else names
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(  # type: ignore[no-untyped-call]
        model, {*others, *_distributed_table_names(model)}
    )
    ignored: Any = _IgnoredNames(model, others)
    model._ddp_params_and_buffers_to_ignore = ignored


def table_in_files(name: str) -> HotrowError:
    """Return the error for a `hotrow.disk` table; only one process can open such a table."""
    return HotrowError(
        f"{name} is stored in files that only one process can open",
        fix="shard or replicate a table in memory, or leave this one out of the model",
    )


def refuse_assignment(
    module: nn.Module,
    state_dict: dict[str, Any],
    prefix: str,
    local_metadata: dict[str, Any],
    *others: Any,
) -> None:
    """Raise an error if `load_state_dict` is about to replace the table."""
    weight = module.weight
    is_distributed = isinstance(weight, Table) and weight.spans_processes  # else it was replaced
    is_assigned = local_metadata.get("assign_to_params_buffers")
    if is_distributed and is_assigned and f"{prefix}weight" in state_dict:
        raise HotrowError(
            f"load_state_dict(assign=True) would replace the table {prefix}weight, which is "
            "sharded or replicated, with a plain parameter",
            fix="omit assign, so that the values are copied",
        )


def check_ddp(table: Table, name: str) -> None:
    """Raise an error if the active DistributedDataParallel would not train this model correctly.

    DistributedDataParallel ignores a parameter only if the module that it wraps lists the
    parameter. A list on an inner module has no effect. The process group, communication hooks and
    `no_sync` affect only the parameters that it doesn't ignore.
    """
    wrapper = DistributedDataParallel._active_ddp_module
    is_repeated = torch._C._current_graph_task_id() != -1  # by a checkpoint in a backward pass
    if needs_gradient(table) and not is_repeated:
        table.synchronized = _synchronized_pass(wrapper)
    if wrapper is None:
        return
    if any(parameter is table for parameter in wrapper._module_parameters):
        raise HotrowError(
            f"DistributedDataParallel treats the table {name} as a dense parameter, and has "
            "replaced its values with those of the first rank",
            fix="build the model again, and call shard or replicate on the same module that you "
            "pass to DistributedDataParallel",
        )
    _check_ranks(table, name, wrapper.process_group, "DistributedDataParallel")
    for hook, state in wrapper._comm_hooks:
        hook_name = getattr(hook, "__name__", repr(hook))
        is_from_torch = getattr(hook, "__module__", "").startswith(_TORCH_HOOKS)
        if not (is_from_torch and hook_name in _AVERAGING_HOOKS):
            raise HotrowError(
                f"DistributedDataParallel uses the communication hook {hook_name} for dense "
                f"parameters, but the gradient of the table {name} is always averaged over all "
                "ranks",
                fix="don't register the hook, or use a hook of torch that averages gradients, such "
                "as fp16_compress_hook",
            )
        if hook_name != "_reducer_allreduce_and_upcast_hook":  # this one uses the wrapper's group
            group = getattr(state, "process_group", state)
            _check_ranks(table, name, group, f"the communication hook {hook_name}")
    if wrapper._join_config.enable:
        raise HotrowError(
            f"DistributedDataParallel.join does not support the table {name}: a rank that "
            "has no more batches would not take part in the lookups of the others",
            fix="don't call join; pass empty batches on ranks without data",
        )


_synchronized: weakref.WeakKeyDictionary[DistributedDataParallel, threading.Event] = (
    weakref.WeakKeyDictionary()
)


def _synchronized_pass(wrapper: DistributedDataParallel | None) -> threading.Event | None:
    """If the wrapper is in `no_sync`, return an event for its next pass outside of `no_sync`."""
    if wrapper is None or wrapper.require_backward_grad_sync:
        return None
    if dist.get_world_size(wrapper.process_group) == 1:
        return None  # the gradients of the only rank are the average
    if _set_synchronized not in wrapper._forward_hooks.values():
        wrapper.register_forward_hook(_set_synchronized)
    return _synchronized.setdefault(wrapper, threading.Event())


def _set_synchronized(wrapper: DistributedDataParallel, *arguments: Any) -> None:
    """After a forward pass for training outside of `no_sync`, set the event of the wrapper."""
    if torch.is_grad_enabled() and wrapper.require_backward_grad_sync:
        event = _synchronized.pop(wrapper, None)
        if event is not None:
            event.set()


def _check_ranks(table: Table, name: str, group: Any, user: str) -> None:
    """Raise an error unless `user` averages gradients over the ranks of the table.

    These are the ranks with other rows or with copies of rows; on a two-dimensional mesh, this rank
    knows only those in its row and column. `group` is a process group, or None for all ranks.
    """
    distributions: list[Any] = [each for each in (table.shards, table.replicas) if each is not None]
    count = math.prod(each.ranks.count for each in distributions)
    others = dist.get_process_group_ranks(group)
    known = frozenset[int]().union(*(each.ranks.members for each in distributions))
    if len(others) != count or not known.issubset(others):
        raise HotrowError(
            f"{user} averages the gradients of dense parameters over the ranks {others}, but the "
            f"table {name} is distributed over {count} ranks, including {sorted(known)}",
            fix="use the same ranks for both; for tables that are sharded over one dimension of a "
            'mesh, call replicate(shard(model, mesh["shards"]), mesh["replicas"])',
        )


class MapGradient(torch.autograd.Function):
    """A stand-in for a table; `function` maps the stand-in's gradient to the table's gradient."""

    @staticmethod
    def forward(ctx: Any, table: Tensor, function: Callable[[RowGradient], RowGradient]) -> Tensor:
        """Return a tensor with the table's shape that stores only one value, in separate memory."""
        ctx.set_materialize_grads(False)
        ctx.function = function
        return table.new_empty(()).expand(table.shape)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, gradient: RowGradient | None) -> tuple[RowGradient | None, None]:
        """Return the gradient of the table."""
        if gradient is None:
            return None, None
        result: RowGradient = ctx.function(gradient)
        result.row_storage.includes_all_ranks = True
        return result, None
