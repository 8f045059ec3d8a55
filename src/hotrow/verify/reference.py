"""The dense reference: literal one-hot arithmetic.

The reference is slow and simple, and doesn't check its input. Only `check` uses the reference, to
test the fast code. In shapes, V is the number of rows, D the number of columns, N the number of
ids, and B the number of bags.
"""

from itertools import pairwise

import torch
from torch import Tensor


def one_hot(ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Map (...,) ids to (..., V) one-hots: zeros, with a 1 at the id."""
    zeros = torch.zeros(*ids.shape, rows, dtype=dtype, device=ids.device)
    return zeros.scatter_(-1, ids.long().unsqueeze(-1), 1.0)


def embedding(ids: Tensor, table: Tensor) -> Tensor:
    """Map (...,) ids and a (V, D) table to (..., D): one-hot @ table."""
    return one_hot(ids, len(table), table.dtype) @ table


def gather(ids: Tensor, scores: Tensor) -> Tensor:
    """Map (N,) ids and (N, V) scores to (N,): the sum over the classes of one-hot * scores."""
    return (one_hot(ids, scores.shape[1], scores.dtype) * scores).sum(1)


def scatter(ids: Tensor, rows: Tensor, count: int) -> Tensor:
    """Map (N,) ids and (N, D) rows to (V, D): one-hot.T @ rows, where V is `count`."""
    return one_hot(ids, count, rows.dtype).T @ rows


def count(ids: Tensor, rows: int, dtype: torch.dtype) -> Tensor:
    """Map (N,) ids to (V,): the sum of the one-hot over the batch."""
    return one_hot(ids, rows, dtype).sum(0)


def multi_hot(members: Tensor, offsets: Tensor, mode: str) -> Tensor:
    """Pool (N, V) one-hots or other rows into bags that start at (B,) offsets; return (B, V).

    The result for a bag is the sum, mean or maximum of its members, or zeros if the bag is empty.
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
    """Select rows of a (V, D) table by (N,) ids, and pool the rows into bags; return (B, D).

    The bags start at the (B,) offsets. The one-hots are scaled by their (N,) weights, summed or
    averaged, and multiplied by the table. For "max", the one-hots are multiplied by the table
    before they are pooled.
    """
    one_hots = one_hot(ids, len(table), table.dtype)
    if weights is not None:
        one_hots = one_hots * weights.unsqueeze(-1)
    if mode == "max":
        return multi_hot(one_hots @ table, offsets, mode)
    return multi_hot(one_hots, offsets, mode) @ table
