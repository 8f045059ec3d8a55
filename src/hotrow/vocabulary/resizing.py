"""Add, drop and move the rows of a vocabulary in place, with the optimizer state of each row."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.ids import as_ids, check_count
from hotrow.optim.interrupts import PostponedSignals
from hotrow.table.autograd import replace_data
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from hotrow.table.protocols import Distribution
from hotrow.table.row_change import RowChange
from hotrow.vocabulary.layers import Embeddings, VocabularyLayers, find_layers
from hotrow.vocabulary.states import check_owner, prepare_change, unwrap

_M = TypeVar("_M", bound=nn.Module)
Init = Callable[[Tensor], object] | Tensor


def resize(
    layer: _M,
    rows: int,
    optimizer: Any = None,
    *,
    model: nn.Module | None = None,
    init: Init | None = None,
) -> _M:
    """Grow or shrink a vocabulary in place, with the optimizer state of its rows.

    The result is the same as if you resized a dense parameter and its optimizer state by hand::

        weight = cat([weight, init(new rows)])          or weight[:rows]
        state  = cat([state, the optimizer's initial values])

    Existing rows, their state and the step count don't change, so training continues as before. New
    rows get the optimizer's initial state, which is usually zero. torch keeps one step count per
    parameter, so Adam's bias correction for a new row is that of the current step.

    The layer, its parameters, and the optimizer's parameter groups remain the same objects. The
    layer's `num_embeddings`, `in_features` or `out_features` changes. If a linear layer shares the
    weight (a tied head), its `out_features` and its bias change too. A gradient in `grad` is also
    resized.

    Args:
        layer: an `Embedding`, `EmbeddingBag`, `OneHotLinear` or `Linear` layer of torch or hotrow;
            or a model whose embeddings all share one weight. If `hotrow.convert`
            has made the weight a table, its rows are not settled.
        rows: V, the new number of rows; at least 1. In a `Linear` layer, this is the number of
            outputs.
        optimizer: the optimizer that trains the weight, from `hotrow.optim` or `torch.optim`, or a
            wrapper around it. Pass None if you have not created the optimizer yet.
        model: the model that contains the layer. It is searched for other layers that share the
            weight. You can omit it if there are none.
        init: the values of the n new rows, as an (n, D) tensor, or a function such as
            `torch.nn.init.normal_` that writes the values into a given (n, D) tensor. By default,
            the layer's own initialization is used. New entries of a bias are 0.

    Returns:
        `layer` itself.

    Raises:
        HotrowError: before anything changes, if the layer has no weight with a row for each id, the
            optimizer does not train the weight, or a removed row is frozen or is the padding row.
            For a sharded or replicated table, every rank raises the error. For a table on disk, the
            error is also raised if the disk has too little space for the new rows, or if another
            tensor shares the memory of the table or of its state.

    Cost: when a table on the CPU grows for the first time, it gets capacity for twice as many rows.
    On Linux, the memory pages of a large table are then moved rather than copied. On other systems,
    growing in many small steps copies each row about once in total. Unused capacity takes no
    physical memory. Other weights are copied each time they grow. No other thread may use the layer
    during the call. The files of a table on disk don't change until the next
    `hotrow.disk.Store.save`, which writes the new rows.

    >>> import torch, hotrow
    >>> layer = hotrow.convert(torch.nn.Embedding(4, 5), min_entries=0)
    >>> optimizer = hotrow.optim.AdamW(layer.parameters())
    >>> layer(torch.tensor([2, 0])).sum().backward()
    >>> optimizer.step()
    >>> hotrow.vocabulary.resize(layer, 6, optimizer)
    Embedding(6, 5)
    >>> optimizer.state[layer.weight]["exp_avg"].shape
    torch.Size([6, 5])
    """
    rows = check_count("rows", rows)
    layers = find_layers(layer, model)
    if rows < 1:
        raise HotrowError(f"rows is {rows}, but a vocabulary needs at least one row")
    _change(layers, RowChange(layers.row_count, rows), unwrap(optimizer), init)
    return layer


def take(
    layer: nn.Module,
    ids: Any,
    optimizer: Any = None,
    *,
    model: nn.Module | None = None,
    init: Init | None = None,
) -> Tensor:
    """Keep, drop and reorder the rows of a vocabulary in place, with their optimizer state.

    The result is the same as if you selected rows of a dense parameter and its optimizer state by
    hand::

        weight = weight[ids]
        state  = state[ids]

    To merge vocabularies or to add rows at any position, use -1 in `ids` for each new row.

    Args:
        layer: see `resize`.
        ids: (V',), the old id of each new row. Ids must be distinct, except for -1. It adds a row,
            the same way `resize` does. Rows that are not listed are dropped.
        optimizer: see `resize`.
        model: see `resize`.
        init: see `resize`.

    Returns:
        (V,) int64: the new id of each old id, or -1 if its row was dropped. Use it to
        translate stored data: `new_ids = remap[old_ids]`.

    Raises:
        HotrowError: before anything changes, if an id is out of range or repeated, and in the same
            cases as `resize`.

    Cost: copies the rows of the weight and of its state once. Rows are not settled. For a table on
    disk, the copy stays in memory until the next save.

    >>> import torch, hotrow
    >>> layer = torch.nn.Embedding.from_pretrained(torch.tensor([[1.], [2.], [3.]]))
    >>> hotrow.vocabulary.take(layer, [2, 0])
    tensor([ 1, -1,  0])
    >>> layer.weight.flatten()
    tensor([3., 1.])
    """
    layers = find_layers(layer, model)
    sources = _check_sources(ids, layers.row_count)
    change = RowChange(layers.row_count, len(sources), sources)
    _change(layers, change, unwrap(optimizer), init)
    return change.new_ids(torch.arange(change.old_count))


def _check_sources(ids: Any, row_count: int) -> Tensor:
    """Return the ids of `take` as (V',) int64 on the CPU."""
    sources = as_ids(ids).to("cpu", torch.int64)
    if sources.ndim != 1 or not len(sources):
        raise HotrowError(
            f"ids has shape {tuple(sources.shape)}, but it must list at least one row",
            fix="pass the old id of each new row",
        )
    outside = ((sources < -1) | (sources >= row_count)).nonzero()[:, 0]
    if len(outside):
        position = int(outside[0])
        raise HotrowIndexError(
            f"ids[{position}] is {int(sources[position])}, but this vocabulary's ids are 0 to "
            f"{row_count - 1}",
            fix="use -1 for a new row",
        )
    kept = sources[sources >= 0]
    counts = kept.bincount()
    if len(kept) and int(counts.max()) > 1:
        repeated = int(counts.argmax())
        positions = (sources == repeated).nonzero()[:2, 0].tolist()
        raise HotrowError(
            f"ids[{positions[0]}] and ids[{positions[1]}] are both {repeated}, but a row can have "
            "only one new id",
            fix="list each id once; for a copy of a row, use -1 and pass its values as init",
        )
    return sources


def _change(
    layers: VocabularyLayers,
    change: RowChange,
    optimizer: torch.optim.Optimizer | None,
    init: Init | None,
) -> None:
    """Change the rows of the weight, the biases and their state."""
    weight, failure, added = layers.weight, None, None
    try:
        check_owner(optimizer, weight)
        _check_shards(weight)
        _check_dropped_rows(layers, change)
        added = _added_rows(layers, change, init)
    except HotrowError as error:
        failure = error
    try:
        added = _agree_on_rows(weight, _describe(change), added, failure)
    finally:
        failure = None  # drop the error, whose traceback refers to the weight
    shards = weight.shards if isinstance(weight, Table) else None
    if shards is not None:
        shards, change = shards.change_rows(change)
    complete = prepare_parameters(layers.parameters, change, added, optimizer)
    with PostponedSignals():
        complete()
        if isinstance(weight, Table):
            weight.distribute(shards=shards)
        layers.set_row_count(change)


def _agree_on_rows(
    weight: nn.Parameter, operation: str, rows: Tensor | None, failure: HotrowError | None
) -> Tensor:
    """Return the added rows of the first rank; raise any rank's error on every rank."""
    if isinstance(weight, Table):
        distributions: tuple[Distribution[Table] | None, ...] = weight.shards, weight.replicas
        for distribution in distributions:
            if distribution is not None:
                rows = distribution.agree_on_rows(operation, rows, failure)
    if failure is not None:
        raise failure
    assert rows is not None
    return rows


def _check_shards(weight: nn.Parameter) -> None:
    """Raise an error if the weight is sharded and has a gradient."""
    if isinstance(weight, Table) and weight.shards is not None and weight.grad is not None:
        raise HotrowError(
            "the sharded table has a gradient for its old rows",
            fix="call optimizer.zero_grad() before you change the table's rows",
        )


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
        for parameter, _ in parameters:
            if isinstance(parameter, Table) and parameter.frozen is not None:
                frozen = change.new_ids(parameter.frozen)
                parameter.frozen = frozen[frozen >= 0].sort().values

    return complete


def _describe(change: RowChange) -> str:
    """Describe a change, so that all ranks can check that they make the same change."""
    if change.sources is None:
        return f"change the row count from {change.old_count} to {change.new_count}"
    digest = hashlib.sha256(change.sources.numpy().tobytes()).hexdigest()[:16]
    return f"take {change.new_count} of the {change.old_count} rows (ids {digest})"


def _check_dropped_rows(layers: VocabularyLayers, change: RowChange) -> None:
    """Raise an error if the change drops a row that must stay."""
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
        return init.detach().to(weight.device, weight.dtype)
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
        gradient = _change_gradient(gradient, change, columns)
    values, complete_state = prepare_change(optimizer, parameter, change, added, columns)

    def complete() -> None:
        replace_data(parameter, values, gradient)
        complete_state()

    return complete


def _change_gradient(gradient: Tensor, change: RowChange, columns: bool) -> Tensor:
    """Return a gradient with the changed rows."""
    if not isinstance(gradient, RowGradient):
        return change.apply_to(gradient, 0.0, columns=columns)
    new_ids = change.new_ids(gradient.ids)
    kept = new_ids >= 0
    shape = list(gradient.shape)
    shape[columns] = change.new_count
    rows = gradient.rows[kept].clone()
    return RowGradient(new_ids[kept], rows, shape, columns=gradient.row_storage.columns)
