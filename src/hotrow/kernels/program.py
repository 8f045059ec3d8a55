"""The `Program` of a kernel: a rule's update and its closed form for idle steps.

An idle step is a step with a zero gradient. Dense training applies an idle step to every row
outside the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor


def no_factors(t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """Compute nothing, for closed forms without factors."""


def no_fast_forward(
    w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any, factors: Any
) -> Any:
    """Don't advance the row, so that every missed step is replayed."""
    return t


def skip_idle_steps(
    w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any, factors: Any
) -> Any:
    """Return `end_step` without changing the row, for rules whose idle steps have no effect."""
    return end_step


def skip_idle_steps_batch(
    w: Tensor, slots: Any, steps: Any, end_step: Any, coefficients: Any
) -> Any:
    """Skip the idle steps of many rows; see `skip_idle_steps`."""
    return w, slots, torch.ones(len(w), dtype=torch.bool, device=w.device)


def no_changes(step: int) -> tuple[slice, ...]:
    """Return no slices, for closed forms without arrays."""
    return ()


class FastForward(NamedTuple):
    """The functions that apply many idle steps to a row at once.

    Attributes:
        apply: `apply(w, slots, t, end_step, coefficients, factors)`, compiled by numba. It advances
            a row (D,) and its slots in place from step t to a later step, at most `end_step`. It
            returns the step reached, or t if the next step must be replayed.
        apply_batch: `apply_batch(w, slots, steps, end_step, coefficients) -> (w, slots, reached)`,
            or None. It does the same as `apply`, but for many rows at once, in float32 or float64
            tensors; `steps` contains each row's step. The caller ignores the values of rows whose
            `reached` is false.
        compute_factors: `compute_factors(t, end_step, coefficients, factors)`, compiled by numba.
            It sets the factors that `apply` needs. They are the same for all rows at step t.
        factor_count: the number of factors (float64).
        form: the name of the function in `triton/closed_forms.py` that replaces `apply` on a GPU.
        formulas: the elementwise functions that `form` calls.
        changed_since: `changed_since(step)`, which returns a slice for each array among the
            coefficients. The slice selects the items that have changed since the coefficients for
            `step` were computed.
    """

    apply: Callable[..., Any]
    apply_batch: Callable[..., Any] | None = None
    compute_factors: Callable[..., Any] = no_factors
    factor_count: int = 0
    form: str = "replay"
    formulas: tuple[Callable[..., Any], ...] = ()
    changed_since: Callable[[int], tuple[slice, ...]] = no_changes


REPLAY = FastForward(no_fast_forward)
SKIP_IDLE_STEPS = FastForward(skip_idle_steps, skip_idle_steps_batch, form="skip")


@dataclass(frozen=True, eq=False)
class Program:
    """A rule's update, and the functions that apply many idle steps at once.

    Attributes:
        update: `update(w, g, slots, entry, flags) -> (w, slots)`, which computes one step.
        flags: the options of the update; compiled code is specialized for them.
        width: the number of scalars in a ledger entry.
        fast_forward: the functions for idle steps.
        kernels: the kernels that are ready to run this program, with the memory that they need.
            Each device's kernels choose their own keys in this dict.
    """

    update: Callable[..., Any]
    flags: tuple[bool, ...]
    width: int
    fast_forward: FastForward = REPLAY
    kernels: dict[Any, Any] = field(default_factory=dict)


FROZEN = 2**31 - 1  # the step count of a frozen row; greater than any other step count


class Steps(NamedTuple):
    """The recorded steps, up to the current step.

    Attributes:
        entries: (at least step_count, width) float64, the scalars of each step.
        coefficients: the data that `fast_forward` needs in addition to the row.
        step_count: the total number of steps applied to each row after a kernel has run.
        end_step: the number of the last step that is applied as an idle step, counting from 1.
        copies: the ledger's copies on other devices, by device and dtype.
    """

    entries: NDArray[np.float64]
    coefficients: tuple[Any, ...]
    step_count: int
    end_step: int
    copies: dict[Any, Any]
