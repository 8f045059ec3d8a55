"""The `Program`, which passes a rule's update and its closed form for idle steps to a kernel.

An idle step is a step with a zero gradient. Dense training applies an idle step to every row
outside the batch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def no_fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Don't advance the row, so that every missed step is replayed."""
    return t


def skip_idle_steps(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Return `end_step` without changing the row, for rules whose idle steps have no effect."""
    return end_step


def skip_idle_steps_batch(
    w: Tensor, slots: Any, steps: Any, end_step: Any, coefficients: Any
) -> Any:
    """Do the same as `skip_idle_steps`, but for tensors of many rows."""
    return w, slots, torch.ones(len(w), dtype=torch.bool, device=w.device)


@dataclass(frozen=True)
class Program:
    """A rule's update, and the functions that apply many idle steps at once.

    Attributes:
        update: `update(w, g, slots, entry, flags) -> (w, slots)`, which computes one step.
        flags: the options of the update; compiled code is specialized for them.
        width: the number of scalars in a ledger entry.
        fast_forward: `fast_forward(w, slots, t, end_step, coefficients)`, compiled by numba. It
            advances a row (D,) and its slots in place from step t to a later step, at most
            `end_step`. It returns the step reached, or t if the next step must be replayed.
        fast_forward_batch: `fast_forward_batch(w, slots, steps, end_step, coefficients) ->
            (w, slots, reached)`. It does the same as `fast_forward` for float32 or float64 tensors
            of many rows, where `steps` contains each row's step. The caller ignores the values of
            rows whose `reached` is false.
        coefficients: the last argument of both functions, computed from the ledger.
    """

    update: Callable[..., Any]
    flags: tuple[bool, ...]
    width: int
    fast_forward: Callable[..., Any] = no_fast_forward
    fast_forward_batch: Callable[..., Any] | None = None
    coefficients: tuple[Any, ...] = ()
