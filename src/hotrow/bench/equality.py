"""Compare sampled rows of a peer's table with those of dense training."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hotrow.optim
from hotrow.bench.batches import Batches
from hotrow.verify.sameness import SLACK


class EqualityError(AssertionError):
    """hotrow's rows differ from the rows after dense training."""


def sample_rows(batches: Batches, size: int = 128) -> Tensor:
    """Return sorted distinct rows: the most frequent rows, rows of a batch, and rare rows."""
    third = size // 3
    rare = np.random.default_rng(1).integers(0, batches.rows, third)
    frequent = batches.ids_of_ranks(np.arange(third))
    candidates = [frequent, batches[0][:third], torch.from_numpy(rare)]
    rows: Tensor = torch.unique(torch.cat(candidates) % batches.rows)
    return rows


def train_rows(
    optimizer_name: str | None,
    initial: Tensor,
    rows: Tensor,
    steps: list[Tensor],
    gradient: Tensor,
    dtype: torch.dtype,
) -> Tensor:
    """Train the sampled rows with torch's dense optimizer and return them.

    Without an optimizer, return the gradient of these rows. An elementwise optimizer updates each
    row separately, so a table with only the sampled rows gives the same result.
    """
    table = nn.Parameter(initial.to(dtype, copy=True))
    optimizer = (
        None
        if optimizer_name is None
        else getattr(hotrow.optim, optimizer_name).torch_class([table])
    )
    gradient = gradient.to(dtype)
    for ids in steps:
        slots = torch.searchsorted(rows, ids).clamp_(max=len(rows) - 1)
        places = (rows[slots] == ids).nonzero()[:, 0]
        table.grad = None
        output = F.embedding(slots[places], table)
        output.backward(gradient=gradient[places])  # type: ignore[no-untyped-call]
        if optimizer is not None:
            optimizer.step()
    result = table if table.grad is None or optimizer is not None else table.grad
    return result.detach()


def compare_rows(
    values: Tensor, initial: Tensor, train_dense: Callable[[torch.dtype], Tensor]
) -> dict[str, Any]:
    """Compare the error of `values` with the error of dense torch training in the same dtype.

    Errors are measured against dense torch training in float64. The values count as equal if their
    max error is at most the dense error plus 2 ulp of the largest value. There is no
    more precise reference for float64 values, so their dense error is estimated as twice the
    float32 error, scaled by the ratio of the two ulps.
    """
    truth = train_dense(torch.float64)
    eps = torch.finfo(values.dtype).eps
    if values.dtype == torch.float64:
        scale = 2 * eps / torch.finfo(torch.float32).eps
        dense_error = scale * _max_difference(train_dense(torch.float32), truth)
    else:
        dense_error = _max_difference(train_dense(values.dtype), truth)
    error = _max_difference(values, truth)
    slack = SLACK * eps * float(truth.abs().max())
    return {
        "equal": error <= dense_error + slack,
        "rows_compared": len(values),
        "max_error": error,
        "max_error_of_dense": dense_error,
        "max_change_of_dense": _max_difference(truth, initial),
    }


def _max_difference(a: Tensor, b: Tensor) -> float:
    return float((a.double() - b.double()).abs().max())
