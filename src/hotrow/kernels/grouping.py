"""Ids to distinct rows, and the gradients of a batch by row, added in batch order."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.cpu.operators import batch_order
from hotrow.kernels.cpu.threads import run_on_threads, thread_count

COMPILED_DTYPES = torch.float32, torch.float64  # of the gradients that compiled code adds up


def find_distinct(ids: Tensor, row_count: int) -> DistinctIds:
    """The distinct ids and the index of each id among them.

    The same as `torch.unique(ids, return_inverse=True)`, but only the distinct ids are sorted.

    Arguments:
        ids: int64 or int32, 0 .. row_count - 1, any shape.
        row_count: V, of the table.

    Ids out of range may be changed, but stay out of range (see `DistinctIds.are_in_range`).

    Time and memory are proportional to the count of ids.
    """
    if ids.is_meta:  # only shapes: all may be distinct
        return DistinctIds(ids.long().reshape(-1), ids.long())
    bits = ids.numel().bit_length()  # of a number below the count of ids
    if ids.device.type != "cpu" or row_count.bit_length() + bits > 63:
        return DistinctIds(*torch.unique(ids.long(), return_inverse=True))
    # numba is imported with the first kernel
    from hotrow.kernels.cpu.grouping import hash_ids, sort_distinct

    array = ids.numpy()
    flat = np.ascontiguousarray(array.reshape(-1), np.int64)
    packed, numbers, counts = hash_ids(flat, np.full(2 << bits, -1, np.int32), bits)
    rows, inverse, *order = sort_distinct(np.sort(packed), numbers, counts, bits)
    shaped = torch.from_numpy(inverse.reshape(array.shape))
    return DistinctIds(torch.from_numpy(rows), shaped, tuple(order))


def sum_by_row(grads: GroupedGradients) -> Tensor:
    """(R, D), the sum of each row's gradients.

    Bit for bit the rows of `torch.nn.functional.embedding`'s dense gradient: the sum begins at 0
    and adds the gradients in batch order, each addition rounded to their dtype.
    """
    values, count = grads.values, len(grads.ids.rows)
    sums: Tensor
    if not (values.device.type == "cpu" and values.dtype in COMPILED_DTYPES):
        # torch's own kernel, on as many rows as there are distinct ids.
        inverse = grads.ids.inverse
        sums = torch.ops.aten.embedding_dense_backward(values, inverse, count, -1, False)
        return sums
    from hotrow.kernels.cpu.grouping import sum_rows  # numba is imported with the first kernel

    sums = torch.empty((count, values.shape[1]), dtype=values.dtype)
    arguments = values.contiguous().numpy(), *batch_order(grads.ids), sums.numpy()
    run_on_threads(sum_rows, arguments, thread_count(count, values.shape[1]))
    return sums


def group(ids: Tensor, grads: Tensor, row_count: int) -> GroupedGradients:
    """Group the gradients (N, D) of the ids (N,); see `find_distinct` for the cost."""
    return GroupedGradients(find_distinct(ids, row_count), grads.detach())
