"""Some rows of a peer's table beside dense torch's, after the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.batches import Batches
from hotrow.verify.sameness import SLACK


def sample(batches: Batches, size: int = 128) -> Tensor:
    """Distinct rows, ascending: the most frequent ones, some of a batch, and rare ones."""
    third = size // 3
    rare = np.random.default_rng(1).integers(0, batches.rows, third)
    chosen = [batches.at(np.arange(third)), batches[0][:third], torch.from_numpy(rare)]
    found: Tensor = torch.unique(torch.cat(chosen) % batches.rows)
    return found


def trained(
    rule: str | None,
    initial: Tensor,
    rows: Tensor,
    steps: list[Tensor],
    gradient: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The sampled rows as torch's dense optimizer leaves them; without a rule, their gradient.

    An elementwise optimizer treats each row alone, so a table of these rows will do.
    """
    table = nn.Parameter(initial.to(dtype, copy=True))
    optimizer = None if rule is None else getattr(torch.optim, rule)([table])
    gradient = gradient.to(dtype)
    for ids in steps:
        slots = torch.searchsorted(rows, ids).clamp_(max=len(rows) - 1)
        where = (rows[slots] == ids).nonzero()[:, 0]
        table.grad = None
        output = F.embedding(slots[where], table)
        output.backward(gradient=gradient[where])  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
    found = table if table.grad is None or optimizer is not None else table.grad
    return found.detach()


def compare(
    values: Tensor, initial: Tensor, dense: Callable[[torch.dtype], Tensor]
) -> dict[str, Any]:
    """How far `values` are from the dense ones, and whether dense torch in their dtype is as far.

    Equal means: the largest error to float64 is at most that of dense torch, plus 2 ulp of the
    largest value.
    """
    rival, truth = dense(values.dtype), dense(torch.float64)

    def furthest(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).abs().max())

    error, allowed = furthest(values, truth), furthest(rival, truth)
    slack = SLACK * torch.finfo(values.dtype).eps * float(truth.abs().max())
    named = str(values.dtype).removeprefix("torch.")
    return {
        "equal": error <= allowed + slack,
        "rows_compared": len(values),
        "max_error": error,
        f"max_error_of_dense_{named}": allowed,
        "max_move_of_dense": furthest(truth, initial),
    }
