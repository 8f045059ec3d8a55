"""Replicated tables: each rank has all rows, and gathers the row gradients of all ranks.

Before a lookup for training, the ranks check that they all look up ids in the same table. If other
code has written to a copy, they also check that all copies are equal. The backward pass exchanges
the gradients of the touched rows. Before a step, the ranks check that their options and states are
equal. They compare the values of a state only if it may not result from equal steps. If one rank
has settled all its rows, the other ranks settle theirs. If one rank has a gradient of all rows, the
other ranks step all rows too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any, NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from hotrow.distributed.hashing import hash_gradient, hash_values
from hotrow.distributed.ranks import Ranks, hash_text
from hotrow.distributed.tables import (
    MapGradient,
    agree_on_tables,
    check_ddp,
    copy_name,
    exclude_tables_from_ddp,
    refuse_assignment,
    shared_table,
    table_in_files,
)
from hotrow.errors import HotrowError, mark_on_all_ranks
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table, needs_gradient
from hotrow.table.protocols import StepKind

_M = TypeVar("_M", bound=nn.Module)

_STATE = "hash of the state"  # the name of an option in messages
_STEP = "take a step"  # the name of an operation

_calls = itertools.count()  # numbers the calls of `replicate`, and the deep copies of tables


def replicate(model: _M, mesh: DeviceMesh) -> _M:
    """Keep a copy of each table on every rank of a mesh, and keep all copies bitwise equal.

    Wrap the model as `DistributedDataParallel(replicate(model, mesh))`. DistributedDataParallel
    trains the dense parameters and ignores the tables. With W ranks, the gradient of a lookup is::

        gradient = gradient_0 / W + ... + gradient_(W - 1) / W

    DistributedDataParallel computes the same average. With `replicate`, the ranks send only the
    gradients of the rows that their batches touch, and add these gradients in rank order.

    All copies are bitwise equal after every step. If a read settles all rows on one rank, for
    example for a checkpoint, the other ranks settle theirs before the next step. If other code
    writes to a copy, for example with `load_state_dict`, it must write the same values on every
    rank. The next lookup for training compares the copies, and raises an error if they differ. A
    step raises an error if the optimizer's options, its initial or loaded states, or the gradients
    differ, for example because a hook of the weight adds noise to the average. See docs/scale.md
    for writes that aren't noticed.

    Every rank must look up ids in the same tables in the same order, but the ids may differ. A rank
    without data passes an empty batch. If one rank has an invalid id, the lookup raises an error on
    all ranks, and training can continue. You can differentiate a table only through lookups.

    Args:
        model: a model converted by `hotrow.convert`. It is changed in place, and its tables get the
            first rank's values.
        mesh: a mesh with one dimension, such as `init_device_mesh("cpu", (W,))` or `mesh["name"]`.

    Returns:
        The model.

    Raises:
        HotrowError: on every rank, if the model has no tables, the tables differ between ranks, a
            table has a gradient, `max_norm` or `scale_grad_by_freq` or is on disk, or the mesh has
            more than one dimension or unsorted ranks.

    Cost: for each lookup, each rank sends two 16-byte headers, and the gradients and ids of the
    distinct rows in its batch, to each of the W - 1 other ranks. A step sends another header for
    each table. If the tables are also sharded, each lookup and step sends another header to the
    ranks with other rows. After other code has written to a table, the next lookup for training
    hashes the table. The first step of an optimizer, and the first after code has assigned to the
    state, for example in `load_state_dict`, hash the table's state. Each step merges and hashes the
    rows of the gradient.

    Source: `torch.nn.parallel.DistributedDataParallel`.

    >>> import torch, torch.distributed as dist, hotrow
    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> model = hotrow.convert(torch.nn.Embedding(6, 2), min_entries=0)
    >>> model = hotrow.distributed.replicate(model, init_device_mesh("cpu", (1,)))
    >>> model(torch.tensor([5, 0, 5])).sum().backward()
    >>> model.weight.grad.as_dense()[:, 0].tolist()
    [1.0, 0.0, 0.0, 0.0, 0.0, 2.0]
    >>> dist.destroy_process_group()
    """
    ranks, tables = agree_on_tables(model, mesh, "replicate", _find_problem)
    calls = (next(_calls),)
    for name, modules in tables.items():
        table = shared_table(modules)
        table.settle()
        values = table.raw_data.contiguous()  # ranks may have different strides
        dist.broadcast(values, group=ranks.group, group_src=0)
        table.raw_data.copy_(values)
        table.distribute(replicas=_Replicas(name, ranks, calls))
        table.equal_version = table._version
        for module in modules:
            module.register_load_state_dict_pre_hook(refuse_assignment)  # type: ignore[no-untyped-call]
    exclude_tables_from_ddp(model)
    return model


def _find_problem(name: str, modules: list[nn.Embedding | nn.EmbeddingBag]) -> HotrowError | None:
    if shared_table(modules).is_meta:
        return HotrowError(
            f"{name} is on the meta device, so it has no values that replicate could copy",
            fix="initialize the model before hotrow.convert, or use hotrow.distributed.shard",
        )
    if any(module.max_norm is not None for module in modules):
        return HotrowError(
            f"the layer of {name} has max_norm, which replicate does not support: each rank "
            "would renormalize different rows",
            fix="remove max_norm, or use hotrow.distributed.shard",
        )
    if shared_table(modules).backing is not None:
        return table_in_files(name)
    if shared_table(modules).replicas is not None:
        return HotrowError(
            f"{name} is already replicated", fix="call replicate only once per model"
        )
    return None


@dataclass(frozen=True)
class _Replicas:
    """The ranks that have a copy of the same table."""

    name: str  # the table's name in the model, such as "embedding.weight"
    ranks: Ranks
    calls: tuple[int, ...]  # the numbers of the call of `replicate` and of the copies after it

    def __deepcopy__(self, memo: dict[int, Any]) -> _Replicas:
        """Return the replicas of a copy of the table."""
        return replace(self, name=copy_name(self.name), calls=(*self.calls, next(_calls)))

    @property
    def sort_key(self) -> tuple[str, tuple[int, ...]]:
        """A key that sorts tables in the same order on all ranks.

        Two models may have tables with the same name. Ranks may differ in the number of their calls
        of `replicate` and `deepcopy`, but not in the order of the calls that they make together.
        """
        return self.name, self.calls

    @property
    def _look_up_operation(self) -> str:
        return f"look up ids in {self.name} for training"

    def source(self, table: Tensor) -> Tensor:
        """Return a stand-in for the table; its gradient is gathered from all ranks."""
        source: Tensor = MapGradient.apply(table, self._gather)  # type: ignore[no-untyped-call]
        return source

    def _gather(self, gradient: RowGradient) -> RowGradient:
        """Gather the row gradients of all ranks in rank order, divided by the number of ranks."""
        ranks, storage = self.ranks, gradient.merge().row_storage.drop_empty()
        operation = f"average the gradient of {self.name}"
        id_dtype = torch.int32 if gradient.count < 2**31 else torch.int64
        shares = [storage.ids.to(id_dtype), storage.rows / ranks.count]
        with ranks.exchange():
            counts = ranks.exchange_counts(operation, [len(storage.ids)] * ranks.count)
            ids, rows = ranks.all_gather_rows(shares, counts)
        return RowGradient(ids.long(), rows, gradient.shape, columns=storage.columns)

    def prepare_look_up(self, table: Table, failure: Exception | None = None) -> None:
        """Raise an error on every rank unless all ranks look up ids in this table for training.

        Also raise an error if other code has written different values to the copies.
        """
        with _on_all_shards(table, self._look_up_operation):
            self.agree_on_look_up(table, failure)

    def agree_on_look_up(self, table: Table, failure: Exception | None) -> None:
        """Raise the errors of `prepare_look_up` on the ranks with the same rows."""
        check_ddp(table, self.name)
        was_written = int(not table.has_equal_replicas)
        if any(self.ranks.agree(self._look_up_operation, was_written, failure)):
            self._compare_copies(table)

    def _compare_copies(self, table: Table) -> None:
        """Raise an error on every rank unless all copies are equal."""
        operation = f"compare the copies of {self.name}"
        names, hashes = self.ranks.names, self.ranks.all_gather(operation, _hash_copy(table))
        different = self.ranks.first_different(hashes)
        if different is not None:
            error = HotrowError(
                f"the copies of {self.name} on {names[0]} and {names[different]} differ, for "
                "example because only one rank loaded a checkpoint, or each rank initialized the "
                "weight with another seed",
                fix="load the same values on every rank, or call replicate after that",
            )
            mark_on_all_ranks(error)
            raise error
        table.equal_version = table._version

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise a lookup's error; if the lookup needs a gradient, raise it on every rank."""
        if needs_gradient(table):
            self.prepare_look_up(table, error)
        raise error

    def agree_on_rows(
        self, operation: str, rows: Tensor | None, failure: Exception | None = None
    ) -> Tensor:
        """Return the first rank's rows; raise an error on every rank if the operations differ."""
        return self.ranks.agree_on_rows(f"{operation} of {self.name}", rows, failure)

    def prepare_step(
        self,
        table: Table,
        options: Mapping[str, str],
        read_state: Callable[[], Mapping[str, Any]],
        agreement: str | None,
        kind: StepKind,
    ) -> tuple[StepKind, str]:
        """Check that all ranks step with the same options, and settle rows on all ranks or none.

        `agreement` is what this method returned for the last step from this optimizer state, or
        None if the state may differ since then. It is different for each step. So ranks with the
        same agreement have equal states. Otherwise, the ranks compare their states.

        Return the highest kind of all ranks, so that all ranks take the same kind of step, and the
        new agreement.

        If another rank has settled all rows, or closed the `RowLag`, after the last step, this rank
        does the same. All ranks had equal rows after the last step, so the rows are equal again.
        """
        options = {"table": self.name, **options}
        if self.ranks.count > 1:
            options[_STATE] = agreement or hash_values(read_state()).hex()
            if table.grad is not None:
                options["gradient"] = f"{hash_gradient(table.grad, table.columns):x}"
        # 0: rows are stale, 1: all rows are settled, 2: there is no lag, so that none can be stale
        settled = 2 if table.lag is None else int(not table.has_stale_rows)
        checksum = hash_text(repr(options))
        value = (checksum << 4) | (settled << 2) | int(kind)
        with _on_all_shards(table, _STEP):
            received = self.ranks.agree(_STEP, value)
            if any(each >> 4 != value >> 4 for each in received):
                options[_STATE] = hash_values(read_state()).hex()
                self._compare_options(options)
                checksum = hash_text(repr(options))
            self.ranks.step_count += 1
        most_settled = max((each >> 2) & 3 for each in received)
        highest_kind = max(each & 3 for each in received)
        if table.lag is not None and most_settled == 2:
            table.close_lag()
        elif most_settled:
            table.settle()
        return StepKind(highest_kind), f"step {self.ranks.step_count} ({checksum:x})"

    def _compare_options(self, options: Mapping[str, str]) -> None:
        """Raise an error that names the first option that differs between the ranks, if any."""
        gathered, ranks = self.ranks.all_gather(_STEP, options), self.ranks
        different = ranks.first_different(gathered)
        if different is None:
            return
        first, other = gathered[0], gathered[different]
        first_rank, rank = ranks.names[0], ranks.names[different]
        name = next(name for name in [*first, *other] if first.get(name) != other.get(name))
        if name == "gradient":
            error = HotrowError(
                f"the gradients of {self.name} on {first_rank} and {rank} differ, for example "
                "because a hook adds noise, or code clips gradients after a backward pass in "
                "no_sync",
                fix="change the gradient in the same way on every rank: it is the average over all "
                "ranks",
            )
        else:
            error = HotrowError(
                f"{first_rank} steps the replicated table {first['table']} with "
                f"{name}={first.get(name)}, but {rank} with {name}={other.get(name)}",
                fix="use the same optimizer with the same options and state on every rank, "
                "and step the tables in the same order",
            )
        mark_on_all_ranks(error)
        raise error


@contextmanager
def _on_all_shards(table: Table, operation: str) -> Iterator[None]:
    """Also raise errors on the ranks with other rows, because they must not continue alone."""
    failure: Exception | None = None
    try:
        yield
    except Exception as error:
        failure = error
    try:
        if table.shards is not None:
            table.shards.agree(operation, failure)
        if failure is not None:
            raise failure
    finally:
        failure = None  # drop the error, whose traceback refers to the table


def _hash_copy(table: Table) -> bytes:
    """Return a hash of the rows."""
    table.settle()
    return hash_values({"": table.raw_rows})
