"""The rule of Rprop; it matches `_single_tensor_rprop` in `torch/optim/rprop.py`.

    s = etaplus, 1 or etaminus                     if g * prev is positive, zero or negative
    step_size = clamp(step_size * s, smallest, largest)
    g = 0                                          if g * prev is negative
    w = w - sign(g) * step_size
    prev = g

Source: Riedmiller and Braun, https://doi.org/10.1109/ICNN.1993.298623.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.program import FastForward
from hotrow.kernels.rule_math import addcmul, clamp, select_by_sign, sign, zero_where_negative
from hotrow.optim.closed_form.base import ClosedForm, Coefficients
from hotrow.optim.rule import ParamGroup, Rule, ScalarState


def initial_slots(group: ParamGroup) -> dict[str, float]:
    """Return the slots for the previous gradient and for the step sizes, which start at lr."""
    return {"prev": 0.0, "step_size": float(group["lr"])}


def ledger_entry(group: ParamGroup, step: int, scalars: ScalarState) -> tuple[Any, ...]:
    """Return the entry (etaminus, 1, etaplus, smallest step size, largest step size, -1).

    Raises:
        ValueError: if lr or a limit of the step size is NaN; torch would set all weights to NaN.
    """
    if any(map(math.isnan, (group["lr"], *group["step_sizes"]))):
        raise ValueError("lr and step_sizes must not be NaN")
    return group["etas"][0], 1.0, group["etas"][1], *group["step_sizes"], -1.0


def update(w: Any, g: Any, slots: Any, entry: Any, flags: Any) -> Any:
    """Apply one step to one element or to a tensor of rows."""
    etaminus, one, etaplus, min_step, max_step, minus_one = entry
    if flags[0]:
        g = -g
    product = g * slots[0]
    step_size = clamp(
        slots[1] * select_by_sign(product, etaminus, one, etaplus), min_step, max_step
    )
    g = zero_where_negative(product, g)
    return addcmul(w, sign(g), step_size, minus_one), (g, step_size)


def fast_forward(w: Any, slots: Any, t: Any, end_step: Any, coefficients: Any, factors: Any) -> Any:
    """Clear the previous gradient and clamp the step size; later idle steps change nothing.

    Like torch, subtract 0 times the step size, which is NaN if the step size is infinite or NaN.
    """
    first_step, min_step, max_step = coefficients
    if t < first_step:
        return t
    prev_grads, step_sizes = slots
    zero = w.dtype.type(0)
    unusual = 0
    for j in range(len(w)):
        prev_grads[j], step_sizes[j] = zero, clamp(step_sizes[j], min_step, max_step)
        unusual += not step_sizes[j] < np.inf
    if unusual:
        for j in range(len(w)):
            w[j] -= zero * step_sizes[j]
    return end_step


class RpropClosedForm:
    """The closed form of Rprop, for all steps since the step size limits last changed."""

    def __init__(self) -> None:
        self.entry_count, self.first_step = 0, 0

    @functools.cached_property
    def fast_forward(self) -> FastForward:
        """See `ClosedForm.fast_forward`."""
        return FastForward(fast_forward, self.fast_forward_batch, form="rprop")

    def compute_coefficients(
        self, entries: NDArray[np.float64], end_step: int, dtype: torch.dtype
    ) -> Coefficients | None:
        """Return the coefficients for `end_step`, or None if later coefficients already exist."""
        if end_step < self.entry_count or not end_step:
            return None
        for i in range(max(self.entry_count, 1), end_step):
            if (entries[i] != entries[i - 1]).any():
                self.first_step = i
        self.entry_count = end_step
        scalar_type = np.float64 if dtype == torch.float64 else np.float32
        min_step, max_step = entries[end_step - 1][3:5].astype(scalar_type)
        return self.first_step, min_step, max_step

    def fast_forward_batch(
        self,
        w: Tensor,
        slots: tuple[Tensor, ...],
        steps: NDArray[np.int64],
        end_step: int,
        coefficients: Coefficients,
    ) -> tuple[Tensor, tuple[Tensor, ...], Tensor]:
        """Fast-forward many rows in plain torch."""
        first_step, min_step, max_step = coefficients
        step_sizes = clamp(slots[1], float(min_step), float(max_step))
        zeros = torch.zeros_like(w)
        return (
            w - zeros * step_sizes,
            (zeros, step_sizes),
            torch.from_numpy(steps >= first_step).to(w.device),
        )


def closed_form(group: ParamGroup) -> ClosedForm:
    """Return a closed form; idle steps don't change w, and only the first changes the slots."""
    return RpropClosedForm()


rule = Rule("Rprop", update, initial_slots, ledger_entry, closed_form=closed_form)
