"""Settle rows, step them, look them up: the one mechanism under every rule."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.grouping import Grouped, Places
from hotrow.kernels.operators import (
    COMPUTED,
    Program,
    all_pass_by,
    drive,
    gather,
    is_compiled,
    pass_by,
)
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
    now = len(ledger) if now is None else now
    program, entries = _program(ledger, table, len(slots), now)
    drive(program, *_plain(table, slots), last, rows, None, entries, now)


def step(
    ledger: Ledger, table: Tensor, slots: Sequence[Tensor], last: Tensor, grads: Grouped
) -> None:
    """Settle the rows of `grads` up to the ledger's last entry, and apply that one with them.

    As `settle`, but entry `len(ledger) - 1` is applied with the sum of each row's gradients, in
    the table's dtype. The entry has been recorded before.
    """
    now = len(ledger)
    program, entries = _program(ledger, table, len(slots), now - 1)
    drive(program, *_plain(table, slots), last, grads.at.rows, grads, entries, now)


def look_up(
    ledger: Ledger, table: Tensor, slots: Sequence[Tensor], last: Tensor, at: Places
) -> Tensor:
    """(..., D), the rows at `at` as they are when settled.

    A row that can jump to the ledger's end does so in a copy: the step that trains it jumps again,
    which costs less than to write it twice. Other rows are settled.
    """
    program, entries = _program(ledger, table, len(slots), len(ledger))
    return gather(program, *_plain(table, slots), last, at, entries, len(ledger))


def _plain(table: Tensor, slots: Sequence[Tensor]) -> tuple[Tensor, list[Tensor]]:
    return table.detach(), [slot.detach() for slot in slots]


def _program(ledger: Ledger, table: Tensor, slots: int, upto: int) -> tuple[Program, NDArray[Any]]:
    """The rule in the ledger's form, able to jump to step `upto`, and the ledger's entries."""
    rule, shortcut = ledger.rule, ledger.shortcut
    flags = ledger.form[: len(ledger.form) - slots]
    entries = ledger.entries(COMPUTED[table.dtype if is_compiled(table) else torch.float64])
    ways: tuple[Any, ...] = ()  # every missed step is replayed
    if ledger.still:
        ways = pass_by, all_pass_by
    elif shortcut is not None:
        memo = shortcut.advance(ledger.entries(), upto, table.dtype)
        if memo is not None:
            ways = shortcut.jump, shortcut.leap, memo
    return Program(rule.update, flags, entries.shape[1], *ways), entries
