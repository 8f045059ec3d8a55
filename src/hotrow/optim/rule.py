"""What a rule is: the update, written once, and what a parameter group means to it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hotrow.optim.closed_form.shortcut import Shortcut

Group = dict[str, Any]  # a parameter group of torch.optim: lr, betas, ... under torch's names
State = Mapping[str, Any]  # a parameter's state in torch.optim; empty before its first step
Carried = dict[str, float]  # per-parameter scalars that one step hands to the next


def scalar_dtype() -> torch.dtype:
    """Of the scalars that torch keeps in an optimizer's state."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def only_maximize(group: Group) -> tuple[bool, ...]:
    """The form of most rules: whether the gradient changes sign."""
    return (bool(group["maximize"]),)


def never(group: Group) -> bool:
    """The answer of a rule that has no such shortcut."""
    return False


def no_shortcut(group: Group) -> Shortcut | None:
    """The answer of a rule whose missed steps are all replayed."""
    return None


def nothing(group: Group, state: State) -> Carried:
    """The scalars of a rule that carries none."""
    return {}


@dataclass(frozen=True)
class Rule:
    """An elementwise optimizer, without the optimizer.

    `update(w, g, slots, entry, flags) -> (w, slots)` is the step, over scalars (compiled) or
    tensors of rows alike. `slots(group)` names the (V, D) state, with its initial values, in
    torch's names and in the order `update` takes it. `entry(group, step, carried)` is what step
    number `step` (1, 2, ...) adds to the ledger; it may change `carried`, which begins as
    `carry(group, state)` and is part of torch's state but for names that begin with "_".
    `flags(group)` chooses between forms of the update that are compiled apart.

    `still(group)`: whether a zero gradient leaves a row and its state exactly as they are.
    `shortcut(group)`: a way over many steps without a gradient at once; where it does not apply
    (coupled decay, but for SGD and ASGD) every missed step is replayed.
    `dense(group)`: whether a table takes torch's own dense step, as where the rounding of a square
    root decides where training ends, so that it has to be torch's.
    `counted`: whether torch's state has the number of steps.
    """

    name: str
    update: Callable[..., Any]
    slots: Callable[[Group], dict[str, float]]
    entry: Callable[[Group, int, Carried], tuple[Any, ...]]
    flags: Callable[[Group], tuple[bool, ...]] = only_maximize
    carry: Callable[[Group, State], Carried] = nothing
    still: Callable[[Group], bool] = never
    shortcut: Callable[[Group], Shortcut | None] = no_shortcut
    dense: Callable[[Group], bool] = never
    counted: bool = True
