"""Change the rows of several layers together: either all of them change, or none."""

from __future__ import annotations

import math
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError, is_on_all_ranks, mark_on_all_ranks
from hotrow.ids import digest
from hotrow.layers import OneHotLinear
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.interrupts import PostponedSignals, postpone_new_handlers
from hotrow.optim.lag import RowLag
from hotrow.optim.old_rows import mark_old_rows
from hotrow.optim.rule import option_text
from hotrow.table.autograd import leave_inference_mode, replace_data
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from hotrow.table.protocols import Distribution
from hotrow.table.row_change import RowChange
from hotrow.vocabulary.layers import Embeddings, VocabularyLayers
from hotrow.vocabulary.states import check_owner, initial_slots, prepare_change, row_tensors

Init = Callable[[Tensor], object] | Tensor
Complete = Callable[[], None]


@contextmanager
def change_rows(
    changes: Sequence[tuple[VocabularyLayers, RowChange]],
    optimizer: torch.optim.Optimizer | None,
    init: Init | None,
    keys: str = "",
) -> Iterator[None]:
    """Change the rows of layers when the `with` block ends; after an error, change nothing.

    In the block, the new rows are ready, but the layers still have their old rows. So anything
    that belongs to the change and may fail can run there. Signal handlers run before or after
    the change, and other threads can't settle or save the rows in between.

    Arguments:
        changes: pairs of layers and their change. No two of them have the same weight.
        optimizer: the optimizer that trains the layers, or None.
        init: the values of new rows; see `resize`.
        keys: a description of the rows' keys, which must be the same on all ranks.

    Raises:
        HotrowError: one of the layers can't change.
    """
    weights = [layers.weight for layers, _ in changes]
    distributed = [weight for weight in weights if spans_processes(weight)]
    with leave_inference_mode(), PostponedSignals():
        # Without the lock, because `init` is the caller's function.
        prepare = []
        for layers, change in changes:
            weight = layers.weight
            # If the change of a plain weight fails, it fails on the ranks of another weight.
            voters = [weight] if spans_processes(weight) else distributed[:1]
            shared = (*voters, weight)[0]
            check = _check_change(layers, change, optimizer, init, keys, shared)
            prepare.append((voters, check))
        postpone_new_handlers()  # `init` may have set some
        with ExclusiveAccess():
            complete: list[Complete] = []
            try:
                for voters, each in prepare:
                    with failing_on_all_ranks(voters, "prepare the new rows"):
                        complete.append(each())
                with failing_on_all_ranks(distributed, "store the new rows"):
                    yield
            except BaseException:
                complete.clear()  # the error's traceback would keep the new rows in memory
                raise
            for store in complete:
                store()


def _check_change(
    layers: VocabularyLayers,
    change: RowChange,
    optimizer: torch.optim.Optimizer | None,
    init: Init | None,
    keys: str,
    shared: nn.Parameter,
) -> Callable[[], Complete]:
    """Check a change on all ranks, and return a function that prepares the change.

    That function returns another function, which completes the change. The ranks of `shared` agree
    on the new rows.
    """
    weight, added = layers.weight, None
    failure: Exception | None = None
    try:
        if change.new_count < 1:
            raise HotrowError(
                f"rows is {change.new_count}, but a vocabulary needs at least one row",
                fix="to load a vocabulary without rows, use layers without rows",
            )
        check_owner(optimizer, weight)
        _check_shards(weight)
        _check_rows(layers, change)
        added = _added_rows(layers, change, init)
    except Exception as error:
        failure = error
        mark_on_all_ranks(error, False)  # `init` may raise the same object again
    try:
        operation = _describe(change) + keys + _describe_state(weight, optimizer)
        if weight is not shared:
            operation += f" for a plain {tuple(weight.shape)} weight next to the table"
        new_rows = agree_on_rows(shared, operation, added, failure)
    finally:
        failure = None  # drop the error, whose traceback refers to the weight
    shards = weight.shards if isinstance(weight, Table) else None
    if shards is not None:
        shards, change = shards.change_rows(change)

    def prepare() -> Complete:
        if isinstance(weight, Table) and weight.shards is not None:
            _match_lags(weight)
        store = prepare_parameters(layers.parameters, change, new_rows, optimizer)

        def complete() -> None:
            store()
            if isinstance(weight, Table):
                weight.distribute(shards=shards)
            layers.set_row_count(change)

        return complete

    return prepare


def agree_on_rows(
    weight: nn.Parameter, operation: str, rows: Tensor | None, failure: Exception | None = None
) -> Tensor:
    """Return the added rows of the first rank; raise any rank's error on every rank."""
    try:
        if isinstance(weight, Table):
            distributions: list[Distribution[Table] | None] = [weight.shards, weight.replicas]
            if is_on_all_ranks(failure):  # they raised it while they moved rows between shards
                distributions.remove(weight.shards)
            for distribution in distributions:
                if distribution is not None:
                    try:
                        rows = distribution.agree_on_rows(operation, rows, failure)
                    except Exception as error:
                        failure = error  # raise it on the replicas of these shards too
        if failure is not None:
            raise failure
        assert rows is not None
        return rows
    finally:
        failure = None  # drop the error, whose traceback refers to the weight


@contextmanager
def failing_on_all_ranks(
    weights: Sequence[nn.Parameter], operation: str | None = None
) -> Iterator[None]:
    """Raise an error of the `with` block on all ranks that change these weights.

    Arguments:
        weights: the weights, in the same order on all ranks.
        operation: wait for the other ranks at the end of the block, and check that they end the
            same operation. If it is None, the other ranks wait at the start of the change instead,
            for the ranks of the first weight.
    """
    failure: Exception | None = None
    raised: Exception | None = None
    try:
        try:
            yield
        except Exception as error:
            failure = error
        voting = weights if operation else weights[: int(failure is not None)]
        for weight in voting:
            try:
                agree_on_rows(weight, operation or "change the rows", _no_rows(weight), failure)
            except Exception as error:
                raised = raised or error
                failure = HotrowError(str(error))  # raise it on the ranks of the other weights too
        if raised or failure:
            raise raised or failure  # type: ignore[misc]
    finally:
        failure = raised = None  # drop the errors, whose tracebacks refer to the weights


def spans_processes(weight: nn.Parameter) -> bool:
    """Return whether the weight is sharded or replicated."""
    return isinstance(weight, Table) and weight.spans_processes


def _no_rows(weight: nn.Parameter) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return weight.new_empty(0)


def agree_on_keys(weight: nn.Parameter, keys: str) -> None:
    """Raise an error on every rank unless the description of the keys is the same on all ranks."""
    agree_on_rows(weight, f"keep all rows{keys}", _no_rows(weight))


def _check_shards(weight: nn.Parameter) -> None:
    """Raise an error if the weight is sharded and has a gradient."""
    if isinstance(weight, Table) and weight.shards is not None and weight.grad is not None:
        raise HotrowError(
            "the sharded table has a gradient for its old rows",
            fix="call optimizer.zero_grad() before you change the table's rows",
        )


def _match_lags(table: Table) -> None:
    """Close the lag of a sharded table on every rank, unless all ranks have missed the same steps.

    A row that moves to another rank keeps the number of its last step, which counts the entries of
    a ledger. If one rank has read its rows, saved the state or stepped with other options, its
    ledger or its record of settled steps differs.
    """
    assert table.shards is not None
    lag = table.lag
    steps = [-1] * 4
    if isinstance(lag, RowLag):
        options = repr(lag.group_options).encode() + lag.ledger.entries().tobytes()
        steps = [lag.ledger.start_step, lag.ledger.length, lag.settled_steps, zlib.crc32(options)]
    if not table.shards.all_equal(steps):
        table.close_lag()


def prepare_parameters(
    parameters: Sequence[tuple[nn.Parameter, bool]],
    change: RowChange,
    added: Tensor,
    optimizer: torch.optim.Optimizer | None,
) -> Callable[[], None]:
    """Compute the changed rows of parameters and of their state; return a function to store them.

    Arguments:
        parameters: pairs of a parameter and whether ids select its columns. The added rows of the
            first parameter are `added`; the added rows of the other parameters are 0.
        change: the change.
        added: the added rows of the first parameter.
        optimizer: the optimizer that trains the parameters, or None.
    """
    zeros = added.new_zeros(len(added))
    prepared = [
        _prepare(parameter, change, added if i == 0 else zeros, optimizer, columns)
        for i, (parameter, columns) in enumerate(parameters)
    ]

    def complete() -> None:
        for each in prepared:
            each()
        for parameter, columns in parameters:
            if not isinstance(parameter, Table):
                continue
            if not change.is_identity:
                mark_old_rows(parameter, optimizer)
            move_frozen_rows(parameter, change, columns)

    return complete


def move_frozen_rows(table: Table, change: RowChange, columns: bool) -> None:
    """Keep the remaining frozen rows frozen at their new ids, if the change is along their axis."""
    if table.frozen_rows is not None and columns == table.columns:
        frozen = change.new_ids(table.frozen_rows)
        table.frozen_rows = frozen[frozen >= 0].sort().values


def _describe(change: RowChange) -> str:
    """Describe a change, so that all ranks can check that they make the same change."""
    if change.sources is None:
        return f"change the row count from {change.old_count} to {change.new_count}"
    ids = digest(change.sources)
    return f"take {change.new_count} of the {change.old_count} rows (ids {ids})"


def _describe_state(weight: nn.Parameter, optimizer: torch.optim.Optimizer | None) -> str:
    """Name the state tensors whose rows change too, in the order in which the ranks send them.

    If new rows of a state don't start at 0, the text contains their value.
    """
    if optimizer is None:
        return ""
    initial = initial_slots(optimizer, weight)
    names = [
        f"{name} ({option_text(initial[name])})" if initial.get(name) else name
        for name in row_tensors(optimizer, weight)
    ]
    return f" with {', '.join(names)}" if names else ""


def _check_rows(layers: VocabularyLayers, change: RowChange) -> None:
    """Raise an error if the change drops a row that must stay, or if its axis is ambiguous."""
    if layers.columns and not isinstance(layers.layer, OneHotLinear):
        raise HotrowError(
            "the rows of a Linear layer are its outputs, but the layer multiplies one-hots, and "
            "its weight is a table whose rows are the inputs",
            fix="use hotrow.OneHotLinear instead of Linear to change the inputs",
        )
    for what, rows, fix in (
        ("the padding row (padding_idx)", layers.padding_rows(), "set the layer's padding_idx"),
        ("frozen", layers.frozen_rows(), "call hotrow.vocabulary.unfreeze(layer, [{row}])"),
    ):
        dropped = rows[change.new_ids(rows) < 0] if len(rows) else rows
        if len(dropped):
            row = int(dropped[0])
            raise HotrowError(
                f"the change would drop row {row}, which is {what}",
                fix=f"keep it, or {fix.format(row=row)} first",
            )


def _added_rows(layers: VocabularyLayers, change: RowChange, init: Init | None) -> Tensor:
    """Return the values of the added rows, (n, D)."""
    weight, count = layers.weight, change.added_count
    shape = (count, weight.shape[not layers.columns])
    if isinstance(init, Tensor):
        if tuple(init.shape) != shape:
            raise HotrowError(
                f"init has shape {tuple(init.shape)}, but the {count} new rows have shape {shape}",
                fix="pass one row of values for each new row",
            )
        return init.detach().to(weight.device, weight.dtype, copy=True)  # may receive other rows
    with torch._C.DisableTorchFunctionSubclass():
        rows = weight.new_empty(shape)
    if not count:
        return rows
    with torch.no_grad():
        if init is not None:
            init(rows)
        elif isinstance(layers.layer, Embeddings):
            nn.init.normal_(rows)
        else:
            inputs = change.new_count if layers.columns else shape[1]
            bound = 1 / math.sqrt(inputs) if inputs else 0.0
            nn.init.uniform_(rows, -bound, bound)
    return rows


def _prepare(
    parameter: nn.Parameter,
    change: RowChange,
    added: Tensor,
    optimizer: torch.optim.Optimizer | None,
    columns: bool,
) -> Callable[[], None]:
    """Compute the new rows of a parameter, and return a function that stores them."""
    gradient = parameter.grad
    if gradient is not None:
        gradient = change_gradient(gradient, change, columns)
    values, complete_state = prepare_change(optimizer, parameter, change, added, columns)

    def complete() -> None:
        replace_data(parameter, values, gradient)
        complete_state()

    return complete


def change_gradient(gradient: Tensor, change: RowChange, columns: bool) -> Tensor:
    """Return a gradient with the changed rows."""
    if not isinstance(gradient, RowGradient):
        return change.apply_to(gradient, 0.0, columns=columns)
    if columns != gradient.row_storage.columns:  # the rows keep their ids, but change their length
        return change.apply_to(gradient.as_dense(), 0.0, columns=columns)
    # Merge on all ranks, because some of them may have read the gradient, which merges it.
    storage = gradient.merge().row_storage
    has_all_rows, touched = storage.has_all_rows(gradient.count), storage.touched
    new_ids = change.new_ids(gradient.ids)
    kept = new_ids >= 0
    shape = list(gradient.shape)
    shape[columns] = change.new_count
    rows = gradient.rows[kept].clone()
    result = RowGradient(new_ids[kept], rows, shape, columns=storage.columns)
    result.row_storage.includes_all_ranks = storage.includes_all_ranks
    if not has_all_rows:
        return result
    result.step_all_rows()
    if touched is not None:
        new_ids = change.new_ids(touched[touched >= 0])
        new_ids = new_ids[new_ids >= 0]
        if len(new_ids) < change.new_count:
            result.row_storage.touched = new_ids
    return result
