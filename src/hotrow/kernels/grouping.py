"""Find the distinct ids of a batch, and sum the batch's gradients by row, in batch order.

Optimizer steps and lookups of stale rows group their ids here before they call a kernel.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.cpu.operators import batch_order
from hotrow.kernels.cpu.threads import run_on_threads, thread_count

COMPILED_DTYPES = torch.float32, torch.float64  # the gradient dtypes that compiled code sums


def find_distinct(ids: Tensor, row_count: int) -> DistinctIds:
    """Return the distinct ids, and the position of each id among them.

    The result equals `torch.unique(ids, return_inverse=True)`, but the function sorts only the
    distinct ids. Time and memory are proportional to the number of ids.

    An out-of-range id may be replaced by a different out-of-range id. Use
    `DistinctIds.are_in_range` to check the result.

    Arguments:
        ids: int64 or int32, from 0 to row_count - 1, any shape.
        row_count: V.
    """
    if ids.is_meta:  # meta tensors have no values, so assume that all ids are distinct
        return DistinctIds(ids.long().reshape(-1), ids.long())
    bits = ids.numel().bit_length()  # enough bits for any position in the batch
    if ids.device.type != "cpu" or row_count.bit_length() + bits > 63:
        return DistinctIds(*torch.unique(ids.long(), return_inverse=True))
    # imports numba
    from hotrow.kernels.cpu.grouping import hash_ids, sort_distinct

    array = ids.numpy()
    flat = np.ascontiguousarray(array.reshape(-1), np.int64)
    packed, numbers, counts = hash_ids(flat, np.full(2 << bits, -1, np.int32), bits)
    rows, inverse, *order = sort_distinct(np.sort(packed), numbers, counts, bits)
    shaped = torch.from_numpy(inverse.reshape(array.shape))
    return DistinctIds(torch.from_numpy(rows), shaped, tuple(order))


def sum_by_row(grads: GroupedGradients) -> Tensor:
    """Return the sum of the gradients of each row, (R, D).

    The sums equal the rows of the dense gradient of `torch.nn.functional.embedding` bit for bit.
    Each sum starts at 0 and adds the gradients in batch order, and every addition is rounded to the
    gradient dtype.
    """
    values, count = grads.values, len(grads.ids.rows)
    sums: Tensor
    if not (values.device.type == "cpu" and values.dtype in COMPILED_DTYPES):
        # Call torch's own kernel as if the table had R rows instead of V.
        inverse = grads.ids.inverse
        sums = torch.ops.aten.embedding_dense_backward(values, inverse, count, -1, False)
        return sums
    from hotrow.kernels.cpu.grouping import sum_rows  # imports numba

    sums = torch.empty((count, values.shape[1]), dtype=values.dtype)
    arguments = values.contiguous().numpy(), *batch_order(grads.ids), sums.numpy()
    run_on_threads(sum_rows, arguments, thread_count(count, values.shape[1]))
    return sums


def group(ids: Tensor, grads: Tensor, row_count: int) -> GroupedGradients:
    """Group gradients (N, D) by their ids (N,); see `find_distinct` for the cost."""
    return GroupedGradients(find_distinct(ids, row_count), grads.detach())
