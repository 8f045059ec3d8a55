"""Plain torch code that an expert would write with the ids in place of each one-hot.

These functions show how fast each use of a one-hot could be at best. Each function computes the
same result and gradients as the use with the same name in `benchmarks.onehots`. The benchmark
verifies this before it measures the times.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from benchmarks.onehots_operands import Operands


def _gather(n: Operands) -> Tensor:
    return n.dense.gather(1, n.ids.unsqueeze(1)).squeeze(1)


def _counts(n: Operands) -> Tensor:
    return n.ids.bincount(minlength=n.classes).float()


def _perplexity(n: Operands) -> Tensor:
    share = _counts(n) / n.rows_count
    return torch.exp(-(share * torch.log(share + 1e-10)).sum())


def _pair_ids(n: Operands) -> Tensor:
    return n.ids * n.expert_count + n.few_ids


def _pairs(n: Operands) -> Tensor:
    size = n.classes * n.expert_count
    return _pair_ids(n).bincount(minlength=size).reshape(n.classes, n.expert_count).float()


def _scatter(n: Operands, ids: Tensor, size: int) -> Tensor:
    return n.rows.new_zeros(size, n.rows.shape[1]).index_add_(0, ids, n.rows)


def _dispatch(n: Operands) -> Tensor:
    rows = _scatter(n, _pair_ids(n), n.classes * n.expert_count)
    return rows.reshape(n.classes, n.expert_count, -1)


def _places(n: Operands) -> Tensor:
    ids, order = n.ids.sort(stable=True)
    places = torch.arange(len(ids)) - torch.searchsorted(ids, ids)
    return torch.empty_like(places).scatter_(0, order, places)


def _subtract(n: Operands) -> Tensor:
    return n.dense.scatter_add(1, n.ids.unsqueeze(1), n.dense.new_full((n.rows_count, 1), -1))


def _logit_losses(n: Operands, ids: Tensor) -> Tensor:
    """Return the mean binary cross entropy: softplus(q), minus q at the ids."""
    return (F.softplus(n.dense).sum() - n.dense.gather(1, ids).sum()) / n.dense.numel()


def _dice(n: Operands) -> Tensor:
    overlap = n.dense.new_zeros(n.classes).index_add_(0, n.ids, _gather(n))
    return (2 * overlap / (n.dense.sum(0) + _counts(n) + 1e4)).mean()


class _Sampled(torch.autograd.Function):
    """Look up rows of the table; the gradient also flows to the probabilities."""

    @staticmethod
    def forward(ctx: Any, p: Tensor, ids: Tensor, table: Tensor) -> Tensor:
        ctx.save_for_backward(ids, table)
        return table.index_select(0, ids)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, Tensor]:
        ids, table = ctx.saved_tensors
        return gradient @ table.t(), None, torch.zeros_like(table).index_add_(0, ids, gradient)


def _straight_through(n: Operands) -> Tensor:
    p = n.dense.softmax(-1)
    sampled: Tensor = _Sampled.apply(p, p.argmax(-1), n.table)  # type: ignore[no-untyped-call]
    return sampled


BY_HAND: dict[str, Callable[[Operands], Tensor]] = {
    "x @ table": lambda n: n.table.index_select(0, n.ids),
    "linear(x)": lambda n: n.linear_weight.index_select(1, n.ids).t() + n.linear_bias,
    "x.T @ rows": lambda n: _scatter(n, n.ids, n.classes),
    "rows.T @ x": lambda n: n.rows.new_zeros(n.rows.shape[1], n.classes).index_add_(
        1, n.ids, n.rows.t()
    ),
    "x.mean(0), perplexity": _perplexity,
    "x.T @ y (pairs)": _pairs,
    "(q * x).sum(1)": _gather,
    "q[x.bool()]": _gather,
    "where(x > 0, q, 0).sum(1)": _gather,
    "(weights * x).sum(1)": lambda n: n.weights.index_select(0, n.ids),
    "x[:, 0] * q[:, 0]": lambda n: (n.ids == 0) * n.dense[:, 0],
    "(x.cumsum(0) - 1) * x": _places,
    "dispatch to experts": _dispatch,
    "combine from experts": lambda n: n.experts.flatten(0, 1).index_select(0, _pair_ids(n)),
    "cross_entropy(q, x)": lambda n: F.cross_entropy(n.dense, n.ids),
    "cross_entropy(q, smoothed x)": lambda n: F.cross_entropy(n.dense, n.ids, label_smoothing=0.1),
    "bce_with_logits(q, x)": lambda n: _logit_losses(n, n.ids.unsqueeze(1)),
    "bce_with_logits(q, multi-hot)": lambda n: _logit_losses(n, n.label_ids),
    "mse_loss(q, x)": lambda n: _subtract(n).square().mean(),
    "q - x": _subtract,
    "dice": _dice,
    "straight-through @ table": _straight_through,
}
