"""Ids to distinct rows, and the gradients of repeated ids added in batch order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.pool import spread
from hotrow.kernels.rows import COMPILED


def new_head(rows: int) -> Tensor:
    """The scratch space that `group` needs for a table of so many rows: -1 for each."""
    return torch.full((rows,), -1, dtype=torch.int32)


def group(
    ids: Tensor, grads: Tensor, head: Tensor | None = None, padding: int = -1
) -> tuple[Tensor, Tensor]:
    """The distinct rows among `ids`, ascending, and for each the sum of its gradients.

    Bit for bit the rows of `torch.nn.functional.embedding`'s dense gradient: the sum begins at 0
    and adds the gradients in batch order, each addition rounded to their dtype.

    Arguments:
        ids: (N,) int64, in range.
        grads: (N, D), one gradient for each id.
        head: from `new_head(V)`, kept by the caller from step to step; comes back as it was.
            Without it the ids are sorted, which is slower.
        padding: an id whose gradients are dropped, as torch's `padding_idx`.

    Returns:
        (R,) int64 and (R, D). Time follows N, never V.
    """
    if padding >= 0 and bool((ids == padding).any()):
        kept = (ids != padding).nonzero()[:, 0]
        ids, grads = ids[kept], grads[kept]
    if not (ids.device.type == "cpu" and grads.dtype in COMPILED):
        # torch's own kernel, on as many rows as there are distinct ids.
        rows, inverse = torch.unique(ids, return_inverse=True)
        sums = torch.ops.aten.embedding_dense_backward(grads, inverse, len(rows), -1, False)
        return rows, sums
    from hotrow.kernels import adding  # numba is imported with the first kernel

    ids, grads = ids.contiguous(), grads.contiguous()
    if head is None:
        rows, inverse, counts = torch.unique(ids, return_inverse=True, return_counts=True)
        order, offsets = adding.sort_by_slot(inverse.numpy(), counts.numpy())
    else:
        rows = torch.from_numpy(np.sort(adding.distinct(ids.numpy(), head.numpy())))
        order, offsets = adding.by_row(ids.numpy(), rows.numpy(), head.numpy())
    sums = torch.empty((len(rows), grads.shape[1]), dtype=grads.dtype)
    arrays = grads.numpy(), order, offsets, sums.numpy()
    spread(lambda taken: adding.add_up(*arrays, taken), len(rows))
    return rows, sums
