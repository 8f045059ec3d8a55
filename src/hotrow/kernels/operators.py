"""Replay and step of given rows: compiled where it can be, in plain torch elsewhere."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.compile_notice import first_time
from hotrow.kernels.cpu.threads import spread, threads_for
from hotrow.kernels.default import rows as twin
from hotrow.kernels.grouping import Grouped, Places

SETTLE, STEP, LOOK_UP = range(3)  # the tasks of a compiled driver
# What a table of each dtype is computed in, where that is compiled.
COMPUTED = {torch.float32: np.float32, torch.float64: np.float64, torch.bfloat16: np.float32}


def stay(w: Any, slots: Any, t: Any, upto: Any, memo: Any) -> Any:
    """The jump of a rule that has none: every missed step is replayed."""
    return t


def pass_by(w: Any, slots: Any, t: Any, upto: Any, memo: Any) -> Any:
    """The jump of a rule under which idle rows do not change."""
    return upto


def all_pass_by(w: Tensor, slots: Any, at: Any, upto: Any, memo: Any) -> Any:
    """`pass_by` for tensors."""
    return w, slots, torch.ones(len(w), dtype=torch.bool, device=w.device)


@dataclass(frozen=True)
class Program:
    """A rule's update in one form, and the jumps that may spare it steps.

    `jump(w, slots, t, upto, memo)`, compiled, may bring a row (D,) and its slots from step t to a
    later one, at most `upto`, and returns the step it reached; t itself if the next step has to be
    replayed.
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
    """Whether a table goes through numba: on the CPU, of a dtype it has, rows in one piece."""
    return table.device.type == "cpu" and table.dtype in COMPUTED and table.is_contiguous()


def _array(tensor: Tensor) -> NDArray[Any]:
    """The values, or of bfloat16 the bits, as numpy has none."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()


def select(table: Tensor, ids: Tensor) -> Tensor | None:
    """(*ids.shape, D): table[ids]; None if there are no such rows.

    Arguments:
        table: (V, D), one that `is_compiled`.
        ids: int64 or int32, on the CPU, any shape.
    """
    from hotrow.kernels.cpu import look_up as selecting  # numba is imported with the first kernel

    count, columns = ids.numel(), table.shape[1]
    output = table.new_empty(*ids.shape, columns)
    flat, wrong = _array(output).reshape(count, columns), np.zeros(1, np.bool_)
    given = _array(table), np.ascontiguousarray(ids.numpy().reshape(-1), np.int64), flat, wrong
    # Ids are checked even where rows have no columns.
    spread(selecting.rows_at, given, max(threads_for(count, columns), min(count, 1)))
    return None if wrong[0] else output


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
    if not (is_compiled(table) and all(map(is_compiled, slots))):
        sums = None if grads is None else grads.sums()
        if len(rows):
            twin.drive(program, table, slots, last, rows, sums, ledger, now)
    elif grads is None:
        _run(SETTLE, program, table, slots, last, Places(rows, rows[:0]), table[:0], ledger, now)
    else:
        batch = grads.grads.contiguous()
        _run(STEP, program, table, slots, last, grads.at, batch, ledger, now)


def gather(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    at: Places,
    ledger: NDArray[np.float64],
    now: int,
) -> Tensor:
    """(..., D): what the ids at `at` would select if their rows had been driven to `now`.

    A row that can jump there does so in a copy.
    """
    if not (is_compiled(table) and all(map(is_compiled, slots))):
        drive(program, table, slots, last, at.rows, None, ledger, now)
        return table[at.rows[at.places]]
    values = table.new_empty(*at.places.shape, table.shape[1])
    flat = values.view(at.places.numel(), table.shape[1])
    _run(LOOK_UP, program, table, slots, last, at, flat, ledger, now)
    return values


def _run(
    task: int,
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    at: Places,
    batch: Tensor,  # (N, D): the gradients to step with, the values to fill, or nothing
    ledger: NDArray[np.float64],
    now: int,
) -> None:
    from hotrow.kernels.cpu.rows import compiled  # numba is imported with the first kernel

    run = compiled(program.update, program.jump, program.flags, program.width)
    kind = COMPUTED[table.dtype]
    arrays = _array(table), tuple(map(_array, slots)), last.numpy()
    given = at.rows.numpy(), *at.order, _array(batch), ledger.astype(kind, copy=False)
    threads = threads_for(len(at.rows), table.shape[1])
    spare = np.zeros((threads, 3 + len(slots), table.shape[1]), kind)
    with first_time((run, table.dtype), program.update.__module__):
        spread(run, (task, *arrays, *given, program.memo, now, spare), threads)
