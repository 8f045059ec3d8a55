"""Reconnect an optimizer after other code has resized the embeddings of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.table.autograd import leave_inference_mode, replace_data
from hotrow.table.parameter import Table
from hotrow.table.row_change import RowChange
from hotrow.vocabulary.changing import (
    agree_on_rows,
    change_gradient,
    move_frozen_rows,
    prepare_parameters,
)
from hotrow.vocabulary.layers import check_in_memory
from hotrow.vocabulary.states import check_owner, prepare_state, row_tensors, rule_of, unwrap


def reconnect(model: nn.Module, optimizer: Any) -> list[str]:
    """Let an optimizer continue after other code has resized the embeddings of its model.

    Call this function after code such as Hugging Face's `model.resize_token_embeddings(n)`, which
    gives the model larger or smaller weights but doesn't update the optimizer's state. The result
    is the same as that of `hotrow.vocabulary.resize`: the first rows keep their state, and new rows
    get the optimizer's initial state. Call it right after the change, before the next backward
    pass.

    If the model has new parameter objects, the old parameters get the new values and are put back
    into the model, so that the optimizer and its schedulers still refer to them.

    If the model has replicated tables, call this function on every rank. Their new rows get the
    first rank's values.

    Args:
        model: the model after the change.
        optimizer: the optimizer that trained the model before the change, or a wrapper around it.

    Returns:
        The names of the parameters that have been reconnected.

    Raises:
        HotrowError: before anything changes, if a parameter of the optimizer is no longer in
            the model, and not exactly one new parameter begins with the same rows and has the same
            `requires_grad`; if that new parameter already has a gradient; or if a state tensor has
            another shape than its parameter and the optimizer isn't one of those in `hotrow.optim`
            or their torch counterparts. With replicated tables, every rank raises the error.

    Cost: compares and copies the parameters that have changed, and their state.

    >>> import torch, hotrow
    >>> model = torch.nn.Sequential(torch.nn.Embedding(4, 5))
    >>> optimizer = torch.optim.AdamW(model.parameters())
    >>> larger = torch.nn.Embedding(6, 5)
    >>> _ = larger.weight.data[:4].copy_(model[0].weight.data)
    >>> model[0] = larger
    >>> hotrow.vocabulary.reconnect(model, optimizer)
    ['0.weight']
    """
    inner = unwrap(optimizer)
    if inner is None:
        raise HotrowError("optimizer is None", fix="pass the optimizer of the model")
    trained = [each for group in inner.param_groups for each in group["params"]]
    matches: list[tuple[nn.Parameter, nn.Parameter]] = []
    failure = None
    try:
        matches = _match_new_parameters(model, trained)
        for old, _ in matches:
            check_owner(inner, old)
        _check_support([*trained, *(new for _, new in matches)])
    except HotrowError as error:
        failure = error
    try:
        _agree_on_added_rows(inner, trained, matches, failure)
        if failure is not None:
            raise failure
    finally:
        failure = None  # drop the error, whose traceback refers to the parameters
    names = {id(each): name for name, each in model.named_parameters()}
    # A signal or another thread must never see a part of the change.
    with leave_inference_mode(), ExclusiveAccess():
        complete: list[tuple[str, Callable[[], None]]] = []
        for old, new in matches:
            change = RowChange(len(old), len(new))
            store = prepare_parameters([(old, False)], change, new.detach()[len(old) :], inner)
            complete.append((names[id(new)], store))
        for each in trained:
            if id(each) in names and (resize_state := _prepare_resized_state(inner, each)):
                complete.append((names[id(each)], resize_state))
        for _, store in complete:
            store()
        for old, new in matches:
            _replace(model, new, old)
        return [name for name, _ in complete]


def _match_new_parameters(
    model: nn.Module, trained: list[nn.Parameter]
) -> list[tuple[nn.Parameter, nn.Parameter]]:
    """Pair the trained parameters that are no longer in the model with those that replace them."""
    trained_ids, model_ids = (set(map(id, each)) for each in (trained, model.parameters()))
    newcomers = [each for each in model.parameters() if id(each) not in trained_ids]
    removed = [each for each in trained if id(each) not in model_ids]
    matches: list[tuple[nn.Parameter, nn.Parameter]] = []
    for old in removed:
        found = [each for each in newcomers if _continues(old, each)]
        if len(found) != 1:
            what = f"{len(found)} new parameters" if found else "no new parameter"
            raise HotrowError(
                f"the optimizer trains a {tuple(old.shape)} parameter that is no longer in the "
                f"model, and {what} with the same requires_grad can continue its rows",
                fix="call reconnect right after each resize, or create a new optimizer",
            )
        (new,) = found
        if new.grad is not None:
            raise HotrowError(
                f"the new {tuple(new.shape)} parameter has a gradient, but the optimizer does not "
                "train it yet",
                fix="call reconnect before backward(), right after the resize",
            )
        newcomers = [each for each in newcomers if each is not new]
        matches.append((old, new))
    return matches


def _check_support(parameters: list[nn.Parameter]) -> None:
    """Raise an error if one of the parameters is on disk or sharded."""
    for parameter in parameters:
        check_in_memory(parameter, "reconnect")
        if isinstance(parameter, Table) and parameter.shards is not None:
            raise HotrowError(
                f"reconnect does not support the sharded {tuple(parameter.shape)} table",
                fix="resize it with hotrow.vocabulary.resize",
            )


def _agree_on_added_rows(
    optimizer: torch.optim.Optimizer,
    trained: list[nn.Parameter],
    matches: list[tuple[nn.Parameter, nn.Parameter]],
    failure: HotrowError | None,
) -> None:
    """Copy the first rank's added rows to all replicas; raise any rank's error on every rank."""
    replacements = {id(old): new for old, new in matches}
    agreed = []
    for old in trained:
        if isinstance(old, Table) and old.spans_processes:
            new = replacements.get(id(old), old)
            count = _state_row_count(optimizer, old) if new is old else len(old)
            operation = f"reconnect the optimizer after a change from {count} to {len(new)} rows"
            with torch._C.DisableTorchFunctionSubclass():
                added = new.data[count:]
            rows = added.to(old.device, copy=True)
            agreed.append((added, agree_on_rows(old, operation, rows, failure)))
    for added, rows in agreed:
        added.copy_(rows)


def _continues(old: Tensor, new: Tensor) -> bool:
    """Return whether `new` has the same first rows as `old`, and may be trained if `old` may."""
    same = old.dtype == new.dtype and old.ndim == new.ndim > 0
    same = same and old.requires_grad == new.requires_grad
    count = min(len(old), len(new)) if same else 0
    return same and torch.equal(old.detach()[:count].to(new.device), new.detach()[:count])


def _state_row_count(optimizer: torch.optim.Optimizer, parameter: nn.Parameter) -> int:
    """Return the number of rows of a parameter's state, or of the parameter if it has no state.

    Raises:
        HotrowError: a state tensor has another shape, and it is unknown whether it contains rows.
    """
    tensors = row_tensors(optimizer, parameter)
    shapes = {value.shape for value in tensors.values()} or {parameter.shape}
    if shapes == {parameter.shape}:
        return len(parameter) if parameter.ndim else 0
    ((count, *sizes), *others) = shapes
    if others or tuple(sizes) != parameter.shape[1:] or rule_of(optimizer) is None:
        raise HotrowError(
            f"the optimizer state {min(tensors)!r} has shape {tuple(tensors[min(tensors)].shape)}, "
            f"but the parameter has shape {tuple(parameter.shape)}, and reconnect can't tell "
            "whether the state has a row for each row of the parameter",
            fix=f"create a new {type(optimizer).__name__} after the change",
        )
    return count


def _prepare_resized_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Callable[[], None] | None:
    """Return a function that resizes a parameter's state to the parameter's number of rows.

    Returns None if the number of rows has not changed.
    """
    old_count = _state_row_count(optimizer, parameter)
    if not parameter.ndim or old_count == len(parameter):
        return None
    shape = torch.Size((old_count, *parameter.shape[1:]))
    change = RowChange(old_count, len(parameter))
    store_state = prepare_state(optimizer, parameter, shape, change, columns=False)
    gradient = parameter.grad
    if gradient is not None and len(gradient) == old_count:
        gradient = change_gradient(gradient, change, columns=False)

    def store() -> None:
        with torch._C.DisableTorchFunctionSubclass():
            replace_data(parameter, parameter.data, gradient)
        store_state()
        if isinstance(parameter, Table):
            move_frozen_rows(parameter, change, columns=False)

    return store


def _replace(model: nn.Module, new: nn.Parameter, old: nn.Parameter) -> None:
    """Replace one parameter with another in all modules."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is new:
                module._parameters[name] = old
