"""The rule of an optimizer: its update, ledger entries, state and closed form.

Every optimizer has one `Rule`, in `rules/`. Compiled kernels, plain torch and the closed forms all
run the same `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hotrow.optim.closed_form.base import ClosedForm

ParamGroup = dict[str, Any]  # a parameter group of torch.optim: lr, betas, ... under torch's names
ParamState = Mapping[str, Any]  # a parameter's state in torch.optim; empty before its first step
ScalarState = dict[str, float]  # the scalars of a parameter that change from step to step


def scalar_dtype() -> torch.dtype:
    """The dtype of the scalars in torch's optimizer state."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def maximize_flag(group: ParamGroup) -> tuple[bool, ...]:
    """The flags of most rules: `maximize`, which negates the gradient."""
    return (bool(group["maximize"]),)


def always_false(group: ParamGroup) -> bool:
    """False for any options."""
    return False


def no_closed_form(group: ParamGroup) -> ClosedForm | None:
    """None: every missed step is replayed."""
    return None


def no_scalars(group: ParamGroup, state: ParamState) -> ScalarState:
    """An empty scalar state."""
    return {}


@dataclass(frozen=True)
class Rule:
    """The arithmetic of an elementwise optimizer.

    Attributes:
        name: the name of torch's optimizer.
        update: `update(w, g, slots, entry, flags) -> (w, slots)`, one step. It runs on scalars
            (compiled) and on tensors of rows. It contains no float literals, which would promote
            float32 to float64; constants are part of the entry.
        initial_slots: `initial_slots(group)`, torch's name and the initial value of each (V, D)
            state, in the order that `update` takes them.
        ledger_entry: `ledger_entry(group, step, scalars)`, the ledger entry of step number `step`
            (1, 2, ...). It may change `scalars`.
        flags: `flags(group)`, which selects one form of the update; each is compiled separately.
        initial_scalars: `initial_scalars(group, state)`, the scalar state before the first entry.
            It is part of torch's state, except for names that start with "_".
        idle_rows_unchanged: `idle_rows_unchanged(group)`, whether a zero gradient leaves a row and
            its state exactly as they are.
        closed_form: `closed_form(group)`, which applies many idle steps at once, or None. Where it
            does not apply (coupled decay, except in SGD and ASGD), every missed step is replayed.
        needs_dense_step: `needs_dense_step(group)`, whether a table takes torch's dense step,
            because a difference in the last bit would grow to a visible one.
        has_step_count: whether torch's state has a step count.
    """

    name: str
    update: Callable[..., Any]
    initial_slots: Callable[[ParamGroup], dict[str, float]]
    ledger_entry: Callable[[ParamGroup, int, ScalarState], tuple[Any, ...]]
    flags: Callable[[ParamGroup], tuple[bool, ...]] = maximize_flag
    initial_scalars: Callable[[ParamGroup, ParamState], ScalarState] = no_scalars
    idle_rows_unchanged: Callable[[ParamGroup], bool] = always_false
    closed_form: Callable[[ParamGroup], ClosedForm | None] = no_closed_form
    needs_dense_step: Callable[[ParamGroup], bool] = always_false
    has_step_count: bool = True
