"""What the kernels of every device are given: a rule's update, and its way over idle steps."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor


def no_fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any) -> Any:
    """Fast-forward no row: every missed step is replayed."""
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
    """A rule's update in one form, and its ways to apply many idle steps at once.

    Attributes:
        update: the step, `update(w, g, slots, entry, flags) -> (w, slots)`.
        flags: the form of the update; the compiled code is specialized for it.
        width: the count of numbers in a ledger entry.
        fast_forward: `fast_forward(w, slots, t, end_step, coefficients)`, for numba. It advances
            a row (D,) and its slots in place from step t to a later one, at most `end_step`, and
            returns the step it reached; t itself if the next step has to be replayed.
        fast_forward_batch: `fast_forward_batch(w, slots, steps, end_step, coefficients) ->
            (w, slots, reached)`. The same for tensors of many rows that are at `steps`, in
            float32 or float64. The values of rows that are not `reached` are not used.
        coefficients: what the two need, computed from the ledger.
    """

    update: Callable[..., Any]
    flags: tuple[bool, ...]
    width: int
    fast_forward: Callable[..., Any] = no_fast_forward
    fast_forward_batch: Callable[..., Any] | None = None
    coefficients: tuple[Any, ...] = ()
