"""Detect code that uses `hotrow.convert` without `hotrow.optim`, or the other way around.

Code that uses only one of the two either trains as slowly as dense training, or fails with an
error that doesn't mention the other.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import (
    _global_optimizer_post_hooks,
    _global_optimizer_pre_hooks,
    register_optimizer_step_pre_hook,
)

from hotrow.errors import HotrowError
from hotrow.optim.dense_steps import check_state_shapes, find_tables
from hotrow.optim.old_rows import refuse_old_rows, register
from hotrow.table.lookup import MIN_TABLE_ENTRIES
from hotrow.table.parameter import TABLE_CLASSES, Table, table_count
from hotrow.table.reading import raise_pending_error
from hotrow.table.stack import caller_stack_level

_warned: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()
_own_hooks: set[int] = set()  # ids of the hooks that this module registers
_MAX_TOUCHED = 0.1  # the share of rows with a gradient
_SUPPORT_SPARSE = torch.optim.SGD, torch.optim.Adagrad


def warn_of_dense_steps(names: frozenset[str]) -> None:
    """Register a check that runs before each step of an optimizer outside `hotrow.optim`.

    Arguments:
        names: the names of the optimizers in `hotrow.optim`.

    The check raises a `HotrowError` if the optimizer would change frozen rows, or if its state has
    rows from before a change of the table's rows. It warns once for each optimizer that updates a
    table with dense steps. SparseAdam doesn't support tables, ZeroRedundancyOptimizer doesn't
    support sharded or replicated tables, and no torch optimizer supports sharded tables, so the
    check raises a `HotrowError` for these.

    An optimizer that calls a hotrow optimizer, as implementations of SAM and Lookahead do, takes no
    dense steps.
    """

    def check(optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        if hasattr(optimizer, "torch_class") or not table_count():
            return
        tables = find_tables(optimizer.param_groups)
        is_wrapper = _wraps_row_optimizer(optimizer, [table for _, table in tables])
        for group, table in tables:
            refuse_old_rows(optimizer, table)
            _refuse_table(optimizer, table, names, is_wrapper)
            raise_pending_error(table)  # torch's step doesn't check for invalid ids
            table.equal_version = None  # torch's fused steps don't change `Tensor._version`
            if group.get("fused") and table.grad is not None:
                check_state_shapes(table, optimizer.state)
        if not tables or optimizer in _warned:
            return
        _warned.add(optimizer)
        register(optimizer)
        if is_wrapper:
            return
        name, shape = type(optimizer).__name__, tuple(tables[0][1].shape)
        warnings.warn(
            f"{name} updates every row of the {shape} table that hotrow.convert created, so it is "
            f"as slow as dense training. Use {_suggest(optimizer, names)}, which updates only "
            "the touched rows",
            stacklevel=caller_stack_level(),
        )

    _own_hooks.add(register_optimizer_step_pre_hook(check).id)


def _wraps_row_optimizer(optimizer: torch.optim.Optimizer, tables: list[Table]) -> bool:
    """Return whether the optimizer has hotrow optimizers of the tables.

    They can be its attributes, in a list or dict, or attributes of another wrapper.
    """
    pending, found = [optimizer], {optimizer}
    while pending:
        for value in vars(pending.pop()).values():
            # `isinstance` would ask the object of a weak reference, which may be gone.
            if issubclass(type(value), dict):
                values = list(dict.values(value))
            else:
                values = list(value) if issubclass(type(value), list | tuple) else [value]
            for each in values:
                if issubclass(type(each), torch.optim.Optimizer) and each not in found:
                    pending.append(each)
                    found.add(each)
    wrapped = {
        table
        for each in found
        if hasattr(each, "torch_class")
        for _, table in find_tables(each.param_groups)
    }
    return wrapped.issuperset(tables)


def _suggest(optimizer: torch.optim.Optimizer, names: frozenset[str]) -> str:
    """Return the optimizer to use instead of a torch optimizer."""
    name = type(optimizer).__name__
    return f"hotrow.optim.{name}" if name in names else "an optimizer from hotrow.optim"


def _refuse_table(
    optimizer: torch.optim.Optimizer, table: Table, names: frozenset[str], is_wrapper: bool
) -> None:
    """Raise an error if a torch optimizer would not train the table correctly."""
    name, shape = type(optimizer).__name__, tuple(table.shape)
    if table.frozen_rows is not None and not is_wrapper:
        raise HotrowError(
            f"torch's {name} would change the frozen rows of a table",
            fix=f"use {_suggest(optimizer, names)}, or call hotrow.vocabulary.unfreeze(layer)",
        )
    if isinstance(optimizer, torch.optim.SparseAdam):
        raise HotrowError(
            f"SparseAdam does not support the {shape} table that hotrow.convert created",
            fix="use hotrow.optim.Adam, which trains the same model as torch.optim.Adam",
        )
    if not table.spans_processes:
        return
    # The class is found by its name, because importing its module is slow.
    if any(each.__name__ == "ZeroRedundancyOptimizer" for each in type(optimizer).__mro__):
        # After its step, it would overwrite the rows of every rank with those of one rank.
        raise HotrowError(
            "ZeroRedundancyOptimizer steps each parameter on one rank only, but all ranks "
            f"step the {shape} table, which is sharded or replicated",
            fix="use an optimizer from hotrow.optim on every rank",
        )
    if table.shards is not None and (table.requires_grad or table.grad is not None):
        # Its step may depend on a whole tensor, and its state_dict() has no DTensors, so that a
        # checkpoint would contain the state of one rank only.
        raise HotrowError(
            f"{name} does not support a sharded table, because its step and its state_dict() would "
            f"use the {shape} shard of this rank as the whole table",
            fix=f"use {_suggest(optimizer, names)} for the sharded tables, or use "
            "hotrow.distributed.replicate",
        )
    if table.grad is not None:
        refuse_unsynchronized(table)


def refuse_unsynchronized(table: Table) -> None:
    """Raise an error if the last lookup for training ran in `no_sync`, without a later other pass.

    The dense parameters then have the gradients of one rank, but the table those of all ranks.
    """
    if table.synchronized is not None and not table.synchronized.is_set():
        raise HotrowError(
            "the step follows a backward pass in DistributedDataParallel.no_sync, in which each "
            "rank computes its own gradients, but the gradient of the "
            f"{tuple(table.shape)} table is averaged over all ranks",
            fix="run the last forward and backward pass before each step outside of no_sync; if "
            "your code averages the gradients, call the model without DistributedDataParallel, "
            "and leave out sharded tables, whose gradients are averaged already",
        )


def has_hooks(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether other code has registered hooks that a step of this optimizer calls."""
    return bool(
        optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or _global_optimizer_post_hooks
        or _global_optimizer_pre_hooks.keys() - _own_hooks
    )


def warn_of_missing_state(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Warn if a table on disk continues its training, but the other parameters start again.

    Arguments:
        optimizer: the optimizer of the table.
        state: the state of the table, which its folder contains.
    """
    others = [
        parameter
        for group in optimizer.param_groups
        for parameter in group["params"]
        if type(parameter) not in TABLE_CLASSES
    ]
    if state and others and not any(optimizer.state.get(each) for each in others):
        count = (
            f"its other {len(others):,} parameters" if len(others) > 1 else "its other parameter"
        )
        warnings.warn(
            f"{type(optimizer).__name__} continues with the saved state of a table on disk, but it "
            f"has no state for {count}. Use a separate optimizer for the rest of the model, and "
            "save its state_dict() with Store.save",
            stacklevel=caller_stack_level(),
        )


def check_sparse_gradients(optimizer: torch.optim.Optimizer) -> None:
    """Warn about a sparse gradient, which means that the parameter's layer was not converted.

    Raises:
        HotrowError: the optimizer does not support sparse gradients.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if gradient is None or gradient.layout is torch.strided:
                continue
            found = f"the gradient of a {tuple(parameter.shape)} parameter is sparse"
            fix = "call hotrow.convert(model) before you create the optimizer"
            if isinstance(optimizer, _SUPPORT_SPARSE):
                warnings.warn(
                    f"{found}, so torch's sparse step updates that parameter. To train like dense "
                    f"torch, {fix}",
                    stacklevel=caller_stack_level(),
                )
                return
            name = type(optimizer).__name__
            raise HotrowError(f"{found}, which {name} does not support", fix=fix)


def warn_of_dense_embeddings(optimizer: torch.optim.Optimizer) -> None:
    """Warn if a large dense gradient looks like that of an embedding that was not converted.

    An optimizer doesn't know which module uses a parameter. But few gradients other than those of
    an embedding are zero in almost all rows. The check reads the gradient once, in the first step.
    In that step, updating the parameter takes much longer than the check.
    """
    for group in optimizer.param_groups:
        for parameter in group["params"]:
            gradient = parameter.grad
            if type(parameter) is not torch.nn.Parameter or type(gradient) is not Tensor:
                continue
            if parameter.ndim != 2 or parameter.numel() < MIN_TABLE_ENTRIES:
                continue
            if "lookup_axis" in parameter.__dict__:
                continue  # this step turns it into a table
            if gradient.layout is not torch.strided or _is_capturing(gradient):
                continue
            touched = int(gradient.any(1).sum())
            if 0 < touched <= _MAX_TOUCHED * len(gradient):
                name = type(optimizer).__name__
                warnings.warn(
                    f"the gradient of a {tuple(parameter.shape)} parameter is zero except in "
                    f"{touched:,} rows, but hotrow.optim.{name} updates every row. If the "
                    "parameter is the weight of an embedding, call hotrow.convert(model), so that "
                    "a step updates only the touched rows",
                    stacklevel=caller_stack_level(),
                )
                return


def _is_capturing(gradient: Tensor) -> bool:
    """Return whether a CUDA graph is being captured, so that no value can be read."""
    return gradient.is_cuda and torch.cuda.is_current_stream_capturing()
