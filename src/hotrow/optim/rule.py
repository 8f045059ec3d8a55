"""The rule of an optimizer: its update, ledger entries, state and closed form.

The `Rule` of every optimizer is defined in `rules/`. Compiled kernels, plain torch and the closed
forms all run the same `update`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from hotrow.optim.closed_form.base import ClosedForm

ParamGroup = dict[str, Any]  # a torch.optim parameter group, with torch's names: lr, betas, ...
ParamState = Mapping[str, Any]  # a parameter's torch.optim state; empty before its first step
ScalarState = dict[str, float]  # a parameter's scalars that change from step to step


# A scalar state contains only floats. The value of this key is the index in `SCALAR_DTYPES` of the
# dtype to which torch rounds the scalars.
DTYPE_KEY = "_dtype"
# The value of this key is 0.0 until a step has set the slots, which torch's state contains as None.
BEGUN_KEY = "_begun"
SCALAR_DTYPES = torch.float32, torch.float64, torch.bfloat16, torch.float16


def scalar_dtype() -> torch.dtype:
    """Return the dtype of the scalars in a new torch optimizer state."""
    return torch.float64 if torch.get_default_dtype() == torch.float64 else torch.float32


def numeric_group(group: ParamGroup, defaults: ParamGroup) -> ParamGroup:
    """Return the group's options, with tensors converted to numbers.

    `lr` and `weight_decay` become scalar tensors on the CPU instead. torch computes with them in
    their own dtype, so ledger entries must do the same.

    Like torch, take Adagrad's `initial_accumulator_value` from the optimizer's defaults.
    """
    group = {**group}
    group.pop("params", None)
    if _FROM_DEFAULTS in defaults:
        group[_FROM_DEFAULTS] = defaults[_FROM_DEFAULTS]
    for key, value in group.items():
        if isinstance(value, Tensor) and value.numel() == 1:
            keep = key in _TENSOR_OPTIONS
            group[key] = value.detach().cpu().reshape(()) if keep else value.item()
    return group


_FROM_DEFAULTS = "initial_accumulator_value"
_TENSOR_OPTIONS = "lr", "weight_decay"


def option_text(value: Any) -> str:
    """Return a text that is the same for two options if they have the same effect."""
    if isinstance(value, Tensor):  # torch computes in its dtype
        return f"{value.tolist()} ({value.dtype})"
    if isinstance(value, tuple | list):
        return f"({', '.join(map(option_text, value))})"
    is_number = isinstance(value, Real) and not isinstance(value, bool)
    return str(float(value)) if is_number else str(value)


def describe_dtype(scalar: Tensor | None) -> ScalarState:
    """Return a scalar state with the dtype of `scalar`, or with torch's default dtype for None.

    torch's `load_state_dict` casts scalars other than the step count to the parameter's dtype.
    """
    dtype = scalar_dtype() if scalar is None else scalar.dtype
    return {DTYPE_KEY: float(SCALAR_DTYPES.index(dtype))}


def stored_dtype(scalars: ScalarState) -> torch.dtype:
    """Return the dtype to which torch rounds these scalars."""
    code = scalars.get(DTYPE_KEY)
    return scalar_dtype() if code is None else SCALAR_DTYPES[int(code)]


def maximize_flag(group: ParamGroup) -> tuple[bool, ...]:
    """Return `(maximize,)`, the flags of most rules; `maximize` negates the gradient."""
    return (bool(group["maximize"]),)


def always_false(group: ParamGroup) -> bool:
    """Return False for any options."""
    return False


def no_closed_form(group: ParamGroup) -> ClosedForm | None:
    """Return None, so that every missed step is replayed."""
    return None


def no_scalars(group: ParamGroup, state: ParamState) -> ScalarState:
    """Return an empty scalar state."""
    return {}


@dataclass(frozen=True)
class Rule:
    """The arithmetic of an elementwise optimizer.

    Attributes:
        name: the name of the corresponding torch optimizer.
        update: `update(w, g, slots, entry, flags) -> (w, slots)`, which computes one step. The
            function runs on scalars (in compiled code) and on tensors of rows. It must not contain
            float literals, which would promote float32 to float64; constants are part of the entry.
        initial_slots: `initial_slots(group)`, which maps torch's name for each (V, D) state tensor
            to its initial value, in the order that `update` expects.
        ledger_entry: `ledger_entry(group, step, scalars)`, which returns the ledger entry of step
            number `step` (1, 2, ...). It may change `scalars`.
        flags: `flags(group)`, which returns the flags that select a form of the update. Each form
            is compiled separately.
        initial_scalars: `initial_scalars(group, state)`, which returns the scalar state before the
            first entry. Scalars whose names don't start with "_" are part of torch's state.
        idle_rows_unchanged: `idle_rows_unchanged(group)`, which returns whether a zero gradient
            leaves a row and its state unchanged.
        closed_form: `closed_form(group)`, which returns a `ClosedForm` that applies many idle steps
            at once, or None. Where no closed form applies (coupled decay, except in SGD and ASGD),
            every missed step is replayed.
        needs_dense_step: `needs_dense_step(group)`, which returns whether rounding errors would
            grow, so that tables must take torch's dense step.
        has_step_count: whether torch's state includes a step count.
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
