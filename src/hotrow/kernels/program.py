"""The input of every kernel: a rule's update, and its closed form for idle steps.

An idle step is a step with a zero gradient, as dense training makes for a row outside the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def no_fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Leave the row at step t, so that every missed step is replayed."""
    return t


def skip_idle_steps(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Fast-forward a row that idle steps do not change."""
    return end_step


def skip_idle_steps_batch(
    w: Tensor, slots: Any, steps: Any, end_step: Any, coefficients: Any
) -> Any:
    """`skip_idle_steps` for tensors of rows."""
    return w, slots, torch.ones(len(w), dtype=torch.bool, device=w.device)


@dataclass(frozen=True)
class Program:
    """A rule's update in one form, and the functions that apply many idle steps at once.

    Attributes:
        update: the step, `update(w, g, slots, entry, flags) -> (w, slots)`.
        flags: the form of the update; compiled code is specialized for it.
        width: the number of scalars in a ledger entry.
        fast_forward: `fast_forward(w, slots, t, end_step, coefficients)`, for numba. It advances
            a row (D,) and its slots in place from step t to a later step, at most `end_step`.
            Returns the step that it reached, or t if the next step must be replayed.
        fast_forward_batch: `fast_forward_batch(w, slots, steps, end_step, coefficients) ->
            (w, slots, reached)`. The same for tensors of many rows that are at `steps`, in
            float32 or float64. The caller ignores the values of rows whose `reached` is false.
        coefficients: the last argument of both functions, computed from the ledger.
    """

    update: Callable[..., Any]
    flags: tuple[bool, ...]
    width: int
    fast_forward: Callable[..., Any] = no_fast_forward
    fast_forward_batch: Callable[..., Any] | None = None
    coefficients: tuple[Any, ...] = ()
