"""Some rows of a peer's table beside dense torch's, after the same steps."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from bench.batches import Batches
from tests.tolerance import assert_no_worse


def sample(batches: Batches, size: int = 128) -> Tensor:
    """Distinct rows, ascending: the most frequent ones, some of a batch, and rare ones."""
    third = size // 3
    rare = np.random.default_rng(1).integers(0, batches.rows, third)
    chosen = [batches.at(np.arange(third)), batches[0][:third], torch.from_numpy(rare)]
    return torch.unique(torch.cat(chosen) % batches.rows)


def trained(
    rule: str,
    initial: Tensor,
    rows: Tensor,
    steps: list[Tensor],
    gradient: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """The sampled rows as torch's dense optimizer leaves them.

    An elementwise optimizer treats each row alone, so a table of these rows will do.
    """
    table = nn.Parameter(initial.to(dtype, copy=True))
    optimizer = getattr(torch.optim, rule)([table])
    gradient = gradient.to(dtype)
    for ids in steps:
        slots = torch.searchsorted(rows, ids).clamp_(max=len(rows) - 1)
        where = (rows[slots] == ids).nonzero()[:, 0]
        optimizer.zero_grad()
        F.embedding(slots[where], table).backward(gradient=gradient[where])
        optimizer.step()
    return table.detach()


def compare(
    values: Tensor, initial: Tensor, dense: Callable[[torch.dtype], Tensor]
) -> dict[str, Any]:
    """How far `values` are from the dense ones, and whether dense float32 is as far."""
    rival, truth = dense(torch.float32), dense(torch.float64)
    try:
        assert_no_worse(values, rival, truth)
        equal = True
    except AssertionError:
        equal = False

    def furthest(a: Tensor, b: Tensor) -> float:
        return float((a.double() - b.double()).abs().max())

    return {
        "equal": equal,
        "rows_compared": len(values),
        "max_error": furthest(values, truth),
        "max_error_of_dense_float32": furthest(rival, truth),
        "max_move_of_dense": furthest(truth, initial),
    }
