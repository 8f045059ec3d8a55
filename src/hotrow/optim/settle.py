"""Settle, update and look up rows, with a program built from a ledger and its closed form.

`RowLag` calls these functions, which call `hotrow.kernels.operators`.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels import operators
from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.program import Program, skip_idle_steps, skip_idle_steps_batch
from hotrow.optim.ledger import Ledger


def settle(
    ledger: Ledger,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    rows: Tensor,
    step_count: int | None = None,
) -> None:
    """Apply the missed steps to `rows`, as dense training with zero gradients does.

    For each row, apply the rule with g = 0 for entries `row_steps[row]` to `step_count - 1`, then
    set `row_steps[row] = step_count`. All tensors must be on the same device.

    The cost is proportional to R and, without a closed form, to the number of missed steps.

    Arguments:
        ledger: the ledger of all steps so far.
        table: (V, D). Changed in place.
        slots: tensors of shape (V, D), in the order of `rule.initial_slots`. Changed in place.
        row_steps: (V,) int32 or int64, the number of steps applied to each row. Changed in place.
        rows: (R,) int64, distinct, from 0 to V - 1.
        step_count: the total number of steps applied to each row after the call. Defaults to the
            length of the ledger.
    """
    step_count = len(ledger) if step_count is None else step_count
    program, entries = _program(ledger, table, len(slots), step_count)
    operators.settle(program, *_detached(table, slots), row_steps, rows, entries, step_count)


def step(
    ledger: Ledger,
    table: Tensor,
    slots: Sequence[Tensor],
    row_steps: Tensor,
    grads: GroupedGradients,
) -> None:
    """Settle the rows of `grads`, and apply the ledger's last entry with their gradients.

    The caller must have recorded this entry, number `len(ledger) - 1`, before the call. Each row's
    gradients are summed in the table's dtype.
    """
    step_count = len(ledger)
    program, entries = _program(ledger, table, len(slots), step_count - 1)
    operators.step(program, *_detached(table, slots), row_steps, grads, entries, step_count)


def look_up(
    ledger: Ledger, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor, ids: DistinctIds
) -> Tensor:
    """Return the settled rows selected by `ids`, (..., D).

    `operators.look_up` describes which rows are stored.
    """
    program, entries = _program(ledger, table, len(slots), len(ledger))
    return operators.look_up(
        program, *_detached(table, slots), row_steps, ids, entries, len(ledger)
    )


def _detached(table: Tensor, slots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return table.detach(), [slot.detach() for slot in slots]


def _program(
    ledger: Ledger, table: Tensor, slot_count: int, end_step: int
) -> tuple[Program, NDArray[Any]]:
    """Return a program with the ledger's rule and closed form, and the ledger's entries."""
    rule, closed_form = ledger.rule, ledger.closed_form
    flags = ledger.form[: len(ledger.form) - slot_count]
    entries = ledger.entries(operators.entry_dtype(table))
    fast_forward: tuple[Any, ...] = ()  # by default, replay every missed step
    if ledger.idle_rows_unchanged:
        fast_forward = skip_idle_steps, skip_idle_steps_batch
    elif closed_form is not None:
        coefficients = closed_form.compute_coefficients(ledger.entries(), end_step, table.dtype)
        if coefficients is not None:
            fast_forward = (
                closed_form.fast_forward,
                closed_form.fast_forward_batch,
                coefficients,
            )
    return Program(rule.update, flags, entries.shape[1], *fast_forward), entries
