"""Load damaged state dicts into hotrow's optimizers, and compare the result with torch's."""

from __future__ import annotations

import copy
import random
from typing import Any

import torch
from torch import Tensor

import hotrow
from hotrow import HotrowError
from hotrow.table.parameter import Table

NAMES = ("Adam", "AdamW", "SGD", "Adagrad", "NAdam", "RAdam", "Adamax", "ASGD", "RMSprop", "Rprop")
NUMBERS = (0, -1, 1, 0.5, -0.0, 2**31, 2**63, 1e9, float("nan"), float("inf"), None, "x", [], {})
TENSORS = (
    torch.zeros(()),
    torch.tensor(-3.0),
    torch.tensor(float("nan")),
    torch.tensor(2.0**40),
    torch.zeros(6),
    torch.zeros(3, 6),
    torch.zeros(6, 3, dtype=torch.float64),
    torch.zeros(6, 3, dtype=torch.int64),
    torch.full((6, 3), float("nan")),
    torch.ones(6, 3, dtype=torch.bfloat16),
    torch.zeros(0),
    torch.zeros(6, 3).to_sparse(),
    torch.zeros(6, 3, device="meta"),
)


class WrongRowsError(Exception):
    """Raised if loading a state dict changes rows."""


def load_state(data: bytes) -> None:
    """Use `data` to choose how to damage a state dict; load it and run two steps.

    Raises:
        HotrowError: hotrow or torch rejects the state dict.
    """
    chance = random.Random(data)
    name = chance.choice(NAMES)
    options: dict[str, Any] = {"lr": 0.01}
    if name == "SGD":
        options["momentum"] = 0.9
    runs = [_train(kind, name, options) for kind in (torch.optim, hotrow.optim)]
    state = copy.deepcopy(runs[chance.randrange(2)][1].state_dict())
    for _ in range(chance.randrange(1, 3)):
        _damage(state, chance)
    weight, error, _ = _load(runs[1], copy.deepcopy(state))
    if isinstance(error, HotrowError):
        raise error  # don't give torch's optimizer this state, which may crash it
    # hotrow's tables ignore `foreach`, whose results differ if they overflow.
    for group in state["param_groups"]:
        group.update({} if group.get("foreach") is None else {"foreach": False})
    dense, dense_error, largest = _load(runs[0], copy.deepcopy(state))
    if error is not None:
        # Any other error is correct only if torch's optimizer raises an error of the same type.
        if type(error) is not type(dense_error):
            raise error
        raise HotrowError(f"rejected: {error}")
    assert dense_error is None, f"torch rejects the state: {dense_error!r}"
    # A weight may have been as large as `largest`, and then rounded, in the first step.
    torch.testing.assert_close(weight, dense, rtol=1e-4, atol=1e-6 * largest, equal_nan=True)


def _train(kind: Any, name: str, options: dict[str, Any]) -> tuple[torch.nn.Embedding, Any]:
    values = torch.arange(18.0).reshape(6, 3) / 10
    layer = torch.nn.Embedding(6, 3, _weight=values.clone())
    if kind is hotrow.optim:
        layer = hotrow.convert(layer, min_entries=0)
        assert isinstance(layer.weight, Table)
    optimizer = getattr(kind, name)(layer.parameters(), **options)
    for t in range(3):
        _step(layer, optimizer, t)
    return layer, optimizer


def _step(layer: torch.nn.Embedding, optimizer: Any, t: int) -> None:
    optimizer.zero_grad()
    layer(torch.tensor([t, 5, t])).square().sum().backward()
    optimizer.step()


def _load(
    run: tuple[torch.nn.Embedding, Any], state: Any
) -> tuple[Tensor, Exception | None, float]:
    """Load the state and run two steps; return the weight, the error and the largest weight."""
    layer, optimizer = run
    before, largest = layer.weight.detach().clone(), 1.0
    try:
        optimizer.load_state_dict(state)
        if not torch.equal(layer.weight, before):
            raise WrongRowsError
        for t in range(2):
            _step(layer, optimizer, t)
            finite = layer.weight.detach().nan_to_num(0, 0, 0)
            largest = max(largest, float(finite.abs().max()))
    except WrongRowsError:
        raise
    except Exception as error:
        return before, error, largest
    return layer.weight.detach().clone(), None, largest


def _damage(state: dict[str, Any], chance: random.Random) -> None:
    """Replace or delete a part of a state dict."""
    path: list[tuple[Any, Any]] = []
    each: Any = state
    while isinstance(each, dict | list) and each and (not path or chance.random() < 0.85):
        key = chance.choice(list(each) if isinstance(each, dict) else range(len(each)))
        path.append((each, key))
        each = each[key]
    owner, key = path[-1]
    action = chance.randrange(4)
    if action == 0:
        del owner[key]
    elif action == 1 and isinstance(owner, dict):
        owner[chance.choice(["extra", key])] = chance.choice(NUMBERS)
    else:
        new = chance.choice(TENSORS if isinstance(each, Tensor) or action == 2 else NUMBERS)
        # In torch, a step count that shares its memory with another tensor would change it.
        owner[key] = new.clone() if isinstance(new, Tensor) else new
