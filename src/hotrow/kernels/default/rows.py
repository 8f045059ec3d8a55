"""The driver of `driver.py` in plain torch: any dtype, any device, gathered rows only.

A rule's `leap` brings each row as far as it can, in a number of operations that does not follow
how far that is; in bfloat16 and float16 it computes in float32 and rounds once. What has to be
replayed is replayed step by step, oldest first, with torch.optim's own operations; the rows are
sorted by how long ago they were settled, so that those that miss step t are neighbours.

On the CPU torch rounds bfloat16 and float16 otherwise in the last elements of an array, and of
each thread's share of a large one, than in the rest (`a + alpha * b` twice instead of once). So
rows are padded to whole vectors and taken in parts too small to be shared: every element is
rounded as in the bulk of a dense step, whatever the batch and the number of threads.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

if TYPE_CHECKING:
    from hotrow.kernels.operators import Program

LANES = 128  # at least two vectors of any dtype torch's loops take at once
SHARED = 32768  # at::internal::GRAIN_SIZE: from here on torch splits an array among threads


def drive(
    program: Program,
    table: Tensor,
    slots: Sequence[Tensor],
    last: Tensor,
    rows: Tensor,
    grads: Tensor | None,
    ledger: NDArray[np.float64],
    now: int,
) -> None:
    """Bring each row through entries `last[row]` .. `now - 1`, the last with its gradient."""
    seen, order = last[rows].sort(stable=True)
    rows, ages = rows[order], seen.cpu().numpy().astype(np.int64)
    size, columns, width = len(rows), table.shape[1], table.shape[1]
    if table.device.type == "cpu":
        width = -(-width // LANES) * LANES
        size = max(1, SHARED // max(width, 1))

    def gather(source: Tensor, which: Tensor) -> Tensor:
        if width == columns:
            return source[which]
        padded = source.new_zeros((len(which), width))
        padded[:, :columns] = source[which]
        return padded

    upto = now if grads is None else now - 1
    for begin in range(0, len(rows), size):
        part, at = rows[begin : begin + size], ages[begin : begin + size]
        every = tuple(gather(each, part) for each in (table, *slots))
        leap(program, every, slice(None), at, upto, columns)
        while (left := np.flatnonzero(at < upto)).size:
            t = at[left].min()
            same = left[at[left] == t]
            which: slice | Tensor = slice(same[0], same[-1] + 1)
            if same[-1] - same[0] >= len(same):  # rows between them have arrived
                which = torch.from_numpy(same).to(table.device)
            replay(program, every, which, ledger[t].tolist())
            at[same] += 1
            leap(program, every, which, at, upto, columns)
        if grads is not None:
            w, *state = every
            g = gather(grads, order[begin : begin + size])
            w, state = program.update(w, g, tuple(state), ledger[upto].tolist(), program.flags)
            every = w, *state
        for target, value in zip((table, *slots), every, strict=True):
            target[part] = value[:, :columns]
    last[rows] = last[rows].clamp(min=now)


def replay(program: Program, every: tuple[Tensor, ...], which: Any, entry: list[float]) -> None:
    """One step without a gradient, in place."""
    w, *state = (each[which] for each in every)
    w, state = program.update(w, torch.zeros_like(w), tuple(state), entry, program.flags)
    for target, value in zip(every, (w, *state), strict=True):
        target[which] = value


def leap(
    program: Program,
    every: tuple[Tensor, ...],
    which: Any,
    at: NDArray[np.int64],
    upto: int,
    columns: int,
) -> None:
    """Bring those rows that can be brought to step `upto`, in place, and note it in `at`."""
    index = which.cpu().numpy() if isinstance(which, Tensor) else which
    behind = at[index] < upto
    if program.leap is None or not behind.any():
        return
    taken = tuple(each[which][:, :columns] for each in every)
    low = taken[0].dtype not in (torch.float32, torch.float64)
    w, *state = (each.float() for each in taken) if low else taken
    w, state, able = program.leap(w, tuple(state), at[index].clip(max=upto), upto, program.memo)
    able = able & torch.from_numpy(behind).to(able.device)
    for target, old, new in zip(every, taken, (w, *state), strict=True):
        target[which, :columns] = torch.where(able[:, None], new.to(old.dtype), old)
    at[index] = np.where(able.cpu().numpy(), upto, at[index])
