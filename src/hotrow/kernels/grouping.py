"""Ids to distinct rows, and the gradients of repeated ids added in batch order."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.pool import spread
from hotrow.kernels.rows import COMPILED

_heads: list[NDArray[np.int32]] = []


@contextmanager
def _head(rows: int) -> Iterator[NDArray[np.int32]]:
    """-1 for each row of a table: scratch space, kept so that no step allocates it.

    Each caller has one to itself, and leaves it as it was.
    """
    try:
        head = _heads.pop()
    except IndexError:
        head = np.empty(0, np.int32)
    if len(head) < rows:
        head = np.full(rows, -1, np.int32)
    yield head
    _heads.append(head)  # not after an error: it may not be what it was


def distinct(ids: Tensor, rows: int) -> tuple[Tensor, Tensor]:
    """The distinct ids, ascending, and for each id its place among them.

    What `torch.unique(ids, return_inverse=True)` gives, without sorting the ids.

    Arguments:
        ids: int64 or int32, 0 .. rows - 1, any shape.
        rows: V, of the table.

    Returns:
        (R,) int64, and int64 of the shape of the ids. Time follows the ids, but for the first
        table of its size, which needs 4 bytes a row of scratch space.
    """
    ids = ids.detach().long()
    if ids.device.type != "cpu":
        found, places = torch.unique(ids, return_inverse=True)
        return found, places
    from hotrow.kernels import adding  # numba is imported with the first kernel

    flat = ids.reshape(-1).numpy()
    with _head(rows) as head:
        found = np.sort(adding.distinct(flat, head))
        places = adding.number(flat, found, head)
    return torch.from_numpy(found), torch.from_numpy(places).view(ids.shape)


def group(ids: Tensor, grads: Tensor, rows: int, padding: int = -1) -> tuple[Tensor, Tensor]:
    """The distinct rows among `ids`, ascending, and for each the sum of its gradients.

    Bit for bit the rows of `torch.nn.functional.embedding`'s dense gradient: the sum begins at 0
    and adds the gradients in batch order, each addition rounded to their dtype.

    Arguments:
        ids: (N,) int64 or int32, 0 .. rows - 1.
        grads: (N, D), one gradient for each id.
        rows: V, of the table.
        padding: an id whose gradients are dropped, as torch's `padding_idx`.

    Returns:
        (R,) int64 and (R, D). Time follows N, as for `distinct`.
    """
    if padding >= 0 and bool((ids == padding).any()):
        kept = (ids != padding).nonzero()[:, 0]
        ids, grads = ids[kept], grads[kept]
    found, places = distinct(ids, rows)
    if not (ids.device.type == "cpu" and grads.dtype in COMPILED):
        # torch's own kernel, on as many rows as there are distinct ids.
        return found, torch.ops.aten.embedding_dense_backward(grads, places, len(found), -1, False)
    from hotrow.kernels import adding

    sums = torch.empty((len(found), grads.shape[1]), dtype=grads.dtype)
    order, offsets = adding.by_place(places.numpy(), len(found))
    arrays = grads.contiguous().numpy(), order, offsets, sums.numpy()
    spread(lambda taken: adding.add_up(*arrays, taken), len(found))
    return found, sums
