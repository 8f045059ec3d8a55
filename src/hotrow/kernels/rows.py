"""Replay and step of given rows: compiled where it can be, in plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels import twin
from hotrow.kernels.grouping import Grouped
from hotrow.kernels.patience import first_time
from hotrow.kernels.pool import COMPILED, spread


def stay(table: Any, slots: Any, r: Any, t: Any, upto: Any, memo: Any) -> Any:
    """The jump of a rule that has none: every missed step is replayed."""
    return t


def pass_by(table: Any, slots: Any, r: Any, t: Any, upto: Any, memo: Any) -> Any:
    """The jump of a rule under which idle rows do not change."""
    return upto


def all_pass_by(w: Tensor, slots: Any, at: Any, upto: Any, memo: Any) -> Any:
    """`pass_by` for tensors."""
    return w, slots, torch.ones(len(w), dtype=torch.bool, device=w.device)


@dataclass(frozen=True)
class Program:
    """A rule's update in one form, and the jumps that may spare it steps.

    `jump(table, slots, r, t, upto, memo)`, compiled, may bring row r from step t to a later one,
    at most `upto`, and returns the step it reached; t itself if the next step has to be replayed.
    `leap(w, slots, at, upto, memo) -> (w, slots, able)` is the same for tensors of many rows, in
    float32 or float64, that are at steps `at`; what it returns for rows not `able` is not used.
    """

    update: Callable[..., Any]
    flags: tuple[bool, ...]
    width: int
    jump: Callable[..., Any] = stay
    leap: Callable[..., Any] | None = None
    memo: tuple[Any, ...] = ()


def is_compiled(table: Tensor) -> bool:
    """Whether a table goes through numba: float32 or float64, on the CPU, rows in one piece."""
    return table.device.type == "cpu" and table.dtype in COMPILED and table.is_contiguous()


def drive(
    program: Program,
    table: Tensor,  # (V, D)
    slots: Sequence[Tensor],  # (V, D) each
    last: Tensor,  # (V,) integer: steps that a row has been through
    rows: Tensor,  # (R,) int64, distinct
    grads: Grouped | None,  # of these rows
    ledger: NDArray[np.float64],  # (now or more, width)
    now: int,
) -> None:
    """Bring `rows` through entries `last[row]` .. `now - 1`, the last with `grads` if given."""
    if not len(rows):
        return
    if not (is_compiled(table) and all(map(is_compiled, slots))):
        sums = None if grads is None else grads.sums()
        twin.drive(program, table, slots, last, rows, sums, ledger, now)
        return
    from hotrow.kernels.driver import compiled  # numba is imported with the first kernel

    run = compiled(program.update, program.jump, program.flags, program.width)
    arrays = table.numpy(), tuple(slot.numpy() for slot in slots), last.numpy(), rows.numpy()
    none = np.empty(0, np.int64)
    given = arrays[0][:0], none, none
    if grads is not None:
        given = grads.grads.contiguous().numpy(), *grads.order()
    ledger = ledger.astype(COMPILED[table.dtype], copy=False)

    def work(taken: NDArray[np.int64]) -> None:
        run(*arrays, *given, grads is not None, ledger, program.memo, now, taken)

    with first_time((run, table.dtype), program.update.__module__):
        spread(work, len(rows))
