"""Reconnect an optimizer after other code has resized the embeddings of its model."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from hotrow.errors import HotrowError
from hotrow.optim.lag import ExclusiveAccess
from hotrow.table.autograd import replace_data
from hotrow.table.parameter import Table
from hotrow.table.row_change import RowChange
from hotrow.vocabulary.changing import leave_inference_mode, prepare_parameters
from hotrow.vocabulary.layers import check_in_memory
from hotrow.vocabulary.states import prepare_state, row_tensors, unwrap


def reconnect(model: nn.Module, optimizer: Any) -> list[str]:
    """Let an optimizer continue after other code has resized the embeddings of its model.

    Call this function after code such as Hugging Face's `model.resize_token_embeddings(n)`, which
    gives the model larger or smaller weights but doesn't update the optimizer's state. The result
    is the same as that of `hotrow.vocabulary.resize`: the first rows keep their state, and new rows
    get the optimizer's initial state.

    If the model has new parameter objects, the old parameters get the new values and are put back
    into the model, so that the optimizer and its schedulers still refer to them.

    Args:
        model: the model after the change.
        optimizer: the optimizer that trained the model before the change, or a wrapper around it.

    Returns:
        The names of the parameters that have been reconnected.

    Raises:
        HotrowError: before anything changes, if a parameter of the optimizer is no longer in
            the model, and no new parameter begins with the same rows.

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
    trained_ids = set(map(id, trained))
    names = {id(each): name for name, each in model.named_parameters()}
    newcomers = [each for each in model.parameters() if id(each) not in trained_ids]
    matches = []
    for old in trained:
        if id(old) not in names:
            new = next((each for each in newcomers if _continues(old, each)), None)
            if new is None:
                raise HotrowError(
                    f"the optimizer trains a {tuple(old.shape)} parameter that is no longer in the "
                    "model, and no new parameter begins with its rows",
                    fix="call reconnect right after the model is resized, or create a new "
                    "optimizer",
                )
            newcomers = [each for each in newcomers if each is not new]
            matches.append((old, new))
    for parameter in [*trained, *(new for _, new in matches)]:
        check_in_memory(parameter, "reconnect")
        if isinstance(parameter, Table) and parameter.shards is not None:
            raise HotrowError(
                f"reconnect does not support the sharded {tuple(parameter.shape)} table",
                fix="resize it with hotrow.vocabulary.resize",
            )
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


def _continues(old: Tensor, new: Tensor) -> bool:
    """Return whether `new` has the same first rows as `old`."""
    same = old.dtype == new.dtype and old.ndim == new.ndim > 0
    count = min(len(old), len(new)) if same else 0
    return same and torch.equal(old.detach()[:count].to(new.device), new.detach()[:count])


def _prepare_resized_state(
    optimizer: torch.optim.Optimizer, parameter: nn.Parameter
) -> Callable[[], None] | None:
    """Return a function that resizes a parameter's state to the parameter's number of rows.

    Returns None if the number of rows has not changed.
    """
    lengths = {len(value) for value in row_tensors(optimizer, parameter).values()}
    if not lengths or lengths == {len(parameter)}:
        return None
    (old_count,) = lengths
    shape = torch.Size((old_count, *parameter.shape[1:]))
    change = RowChange(old_count, len(parameter))
    store_state = prepare_state(optimizer, parameter, shape, change, columns=False)

    def store() -> None:
        with torch._C.DisableTorchFunctionSubclass():
            replace_data(parameter, parameter.data, None)
        store_state()
        if isinstance(parameter, Table) and parameter.frozen is not None:
            frozen = change.new_ids(parameter.frozen)
            parameter.frozen = frozen[frozen >= 0]

    return store


def _replace(model: nn.Module, new: nn.Parameter, old: nn.Parameter) -> None:
    """Replace one parameter with another in all modules."""
    for module in model.modules():
        for name, parameter in module._parameters.items():
            if parameter is new:
                module._parameters[name] = old
