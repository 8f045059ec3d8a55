"""The dense one-hot arithmetic, written out literally: slow, obvious, the oracle.

Nothing here is clever and nothing is checked. `check` holds the fast code against it;
no other part of hotrow uses it. V rows, D columns, N ids, B bags.
"""

from __future__ import annotations

from itertools import pairwise

import torch
from torch import Tensor


def one_hot(ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """(...,) ids -> (..., V): zeros, and a single one at the id."""
    zeros = torch.zeros(*ids.shape, rows, dtype=dtype, device=ids.device)
    return zeros.scatter_(-1, ids.long().unsqueeze(-1), 1.0)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """(...,) ids, (V, D) table -> (..., D): one-hot @ table."""
    return one_hot(ids, len(table), table.dtype) @ table


def linear(ids: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """(...,) ids, (D, V) weight, (D,) bias -> (..., D): one-hot @ weight.T + bias."""
    return torch.nn.functional.linear(one_hot(ids, weight.shape[1], weight.dtype), weight, bias)


def bag(
    ids: Tensor, offsets: Tensor, table: Tensor, mode: str = "sum", weights: Tensor | None = None
) -> Tensor:
    """(N,) ids cut at (B,) offsets, (V, D) table, (N,) weights -> (B, D).

    Each bag's one-hots are scaled by their weights, then summed or averaged and multiplied
    by the table; for "max" they are multiplied first. An empty bag gives zeros.
    """
    one_hots = one_hot(ids, len(table), table.dtype)
    if weights is not None:
        one_hots = one_hots * weights.unsqueeze(-1)
    outputs = [one_hots[:0] @ table]  # (0, D)
    for start, end in pairwise([*offsets.tolist(), len(ids)]):
        members = one_hots[start:end]  # (members, V)
        if len(members) == 0:
            outputs.append(table.new_zeros(1, table.shape[1]))
        elif mode == "sum":
            outputs.append(members.sum(0, keepdim=True) @ table)
        elif mode == "mean":
            outputs.append(members.mean(0, keepdim=True) @ table)
        else:
            outputs.append((members @ table).max(0, keepdim=True).values)
    return torch.cat(outputs)
