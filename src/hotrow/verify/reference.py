"""The reference: dense one-hot arithmetic, written out literally.

It is slow and obvious, and checks nothing. `check` compares the fast code with it; no other part
of hotrow uses it. V rows, D columns, N ids, B bags.
"""

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


def multi_hot(members: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """(N, V) one-hots, or rows of anything, cut at (B,) offsets -> (B, V).

    Each bag is the sum, mean or maximum of its members; an empty one is zeros.
    """
    bags = [members[:0]]
    for start, end in pairwise([*offsets.tolist(), len(members)]):
        bag = members[start:end]
        if len(bag) == 0:
            bags.append(members.new_zeros(1, members.shape[1]))
        elif mode == "sum":
            bags.append(bag.sum(0, keepdim=True))
        elif mode == "mean":
            bags.append(bag.mean(0, keepdim=True))
        else:
            bags.append(bag.max(0, keepdim=True).values)
    return torch.cat(bags)


def bag(
    ids: Tensor, offsets: Tensor, table: Tensor, mode: str = "sum", weights: Tensor | None = None
) -> Tensor:
    """(N,) ids cut at (B,) offsets, (V, D) table, (N,) weights -> (B, D).

    Each bag's one-hots are scaled by their weights, then summed or averaged and multiplied
    by the table; for "max" they are multiplied first.
    """
    one_hots = one_hot(ids, len(table), table.dtype)
    if weights is not None:
        one_hots = one_hots * weights.unsqueeze(-1)
    if mode == "max":
        return multi_hot(one_hots @ table, offsets, mode)
    return multi_hot(one_hots, offsets, mode) @ table
