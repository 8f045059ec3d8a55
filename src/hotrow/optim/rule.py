"""An optimizer's rule: its update, written once, and its ledger entries, state and closed form."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hotrow.optim.closed_form.base import ClosedForm

ParamGroup = dict[str, Any]  # a parameter group of torch.optim: lr, betas, ... under torch's names
ParamState = Mapping[str, Any]  # a parameter's state in torch.optim; empty before its first step
ScalarState = dict[str, float]  # a parameter's scalars that one step passes on to the next


def scalar_dtype() -> torch.dtype:
    """The dtype of the scalars in torch's optimizer state."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def maximize_flag(group: ParamGroup) -> tuple[bool, ...]:
    """The flags of most rules: whether the gradient changes sign."""
    return (bool(group["maximize"]),)


def always_false(group: ParamGroup) -> bool:
    """A property that a rule has with no options."""
    return False


def no_closed_form(group: ParamGroup) -> ClosedForm | None:
    """The closed form of a rule whose missed steps are all replayed."""
    return None


def no_scalars(group: ParamGroup, state: ParamState) -> ScalarState:
    """The scalar state of a rule that has none."""
    return {}


@dataclass(frozen=True)
class Rule:
    """An elementwise optimizer's arithmetic.

    Attributes:
        name: of torch's optimizer.
        update: `update(w, g, slots, entry, flags) -> (w, slots)`, the step, over scalars
            (compiled) or tensors of rows alike. It has no float literals, which would turn
            float32 into float64: constants are in the entry.
        initial_slots: `initial_slots(group)` names the (V, D) state, with its initial values, in
            torch's names and in the order `update` takes it.
        ledger_entry: `ledger_entry(group, step, scalars)` returns what step number `step`
            (1, 2, ...) adds to the ledger. It may change `scalars`.
        flags: `flags(group)` chooses between forms of the update that are compiled separately.
        initial_scalars: `initial_scalars(group, state)`, the scalar state before the first entry.
            It is part of torch's state, except for names that begin with "_".
        idle_rows_unchanged: `idle_rows_unchanged(group)`, whether a zero gradient leaves a row and
            its state exactly as they are.
        closed_form: `closed_form(group)` applies many steps without a gradient at once. Where it
            does not apply (coupled decay, except SGD and ASGD) every missed step is replayed.
        needs_dense_step: `needs_dense_step(group)`, whether a table takes torch's own dense step.
            It does where a difference in the last bit grows to a visible one.
        has_step_count: whether torch's state has the number of steps.
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
