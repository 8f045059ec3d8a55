"""Settle rows, and step them: the one mechanism under every rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.grouping import Grouped
from hotrow.kernels.pool import COMPILED
from hotrow.kernels.rows import Program, all_pass_by, drive, is_compiled, pass_by
from hotrow.optim.ledger import Ledger


def settle(
    ledger: Ledger,
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    rows: Tensor,
    now: int | None = None,
) -> None:
    """Bring `rows` to step `now`, as dense training with zero gradients would have.

    For each row: the rule with g = 0 for entries `last[row]` .. `now - 1`, then
    `last[row] = now`.

    Arguments:
        ledger: the steps so far; `now` is all of them unless given.
        table: (V, D). Changed in place.
        slots: (V, D) each, in the order of `rule.slots`. Changed in place.
        last: (V,) int32 or int64, the steps that each row has been through. Changed in place.
        rows: (R,) int64, distinct, in 0 .. V - 1.
        now: the step to settle to; all of the ledger's unless given.

    All on one device; cost follows R, and the steps missed where there is no shortcut.
    """
    _drive(ledger, table, slots, last, rows, None, len(ledger) if now is None else now)


def step(
    ledger: Ledger,
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    grads: Grouped,
) -> None:
    """Settle the rows of `grads` up to the ledger's last entry, and apply that one with them.

    As `settle`, but entry `len(ledger) - 1` is applied with the sum of each row's gradients, in
    the table's dtype. The entry has been recorded before.
    """
    _drive(ledger, table, slots, last, grads.rows, grads, len(ledger))


def _drive(
    ledger: Ledger,
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    rows: Tensor,
    grads: Grouped | None,
    now: int,
) -> None:
    table, slots = table.detach(), [slot.detach() for slot in slots]
    rule, shortcut = ledger.rule, ledger.shortcut
    flags = ledger.form[: len(ledger.form) - len(slots)]
    kind = COMPILED[table.dtype] if is_compiled(table) else COMPILED[torch.float64]
    entries = ledger.entries(kind)
    ways: tuple[Any, ...] = ()  # every missed step is replayed
    if ledger.still:
        ways = pass_by, all_pass_by
    elif shortcut is not None:
        memo = shortcut.advance(ledger.entries(), now if grads is None else now - 1, table.dtype)
        if memo is not None:
            ways = shortcut.jump, shortcut.leap, memo
    program = Program(rule.update, flags, entries.shape[1], *ways)
    drive(program, table, slots, last, rows, grads, entries, now)
