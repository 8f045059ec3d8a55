"""Find the distinct ids of a batch, and sum the batch's gradients by row, in batch order.

Optimizer steps and lookups of stale rows use this module to group ids before they call a kernel.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
import torch
from torch import Tensor

from hotrow.kernels import devices
from hotrow.kernels.batch import DistinctIds, GroupedGradients, GroupedIds
from hotrow.kernels.cpu.threads import run_on_threads, thread_count
from hotrow.kernels.triton.batch import DeviceIds

COMPILED_DTYPES = torch.float32, torch.float64  # compiled code sums gradients of these dtypes


def find_distinct(ids: Tensor, row_count: int) -> DistinctIds:
    """Return the distinct ids, and each batch id's position among them.

    On the CPU, time and memory are proportional to the number of ids, and the distinct ids are in
    order of first appearance. An out-of-range id is not an error; see `DistinctIds.are_in_range`.
    On other devices, this function doesn't check the range, because it would have to wait for the
    device.

    Arguments:
        ids: int64 or int32, any shape.
        row_count: V; ids from 0 to V - 1 are in range.
    """
    if ids.is_meta:  # meta tensors have no values, so assume that all ids are distinct
        return DistinctIds(ids.long().reshape(-1), ids.long())
    if not devices.is_on_cpu(ids):
        if devices.is_on_gpu(ids):
            return DeviceIds.copy(ids, row_count)
        return DistinctIds(*torch.unique(ids.long(), return_inverse=True))
    shape, size, flat = ids.shape, ids.numel(), ids
    is_plain = type(ids) is Tensor and ids.dtype is torch.int64 and not ids.is_neg()
    if not (is_plain and ids.is_contiguous()):
        flat = torch.from_numpy(np.ascontiguousarray(ids.resolve_neg().numpy(), np.int64))
    memory = np.empty(4 * size + 1, np.int64)
    count, are_in_range, address = _group_ids()(flat.data_ptr(), row_count, memory)
    return DistinctIds.from_groups(GroupedIds(memory, address, size, count), shape, are_in_range)


@functools.cache
def _group_ids() -> Any:
    """Return the compiled function, cached because executing the import statement takes 1 us."""
    from hotrow.kernels.cpu.grouping import group_ids  # imports numba

    return group_ids


def sum_by_row(grads: GroupedGradients, scale_by_frequency: bool = False) -> Tensor:
    """Return the sum of the gradients of each row, (R, D).

    With `scale_by_frequency`, divide each gradient by the number of gradients of its row.

    The sums equal the rows of the dense gradient of `torch.nn.functional.embedding` bit for bit.
    For each sum, the gradients are added to 0 in batch order, and every addition is rounded to the
    gradient dtype.
    """
    values = grads.values
    sums: Tensor
    has_kernel = devices.is_on_cpu(values) and values.dtype in COMPILED_DTYPES
    if scale_by_frequency or not has_kernel:
        # Call torch's own kernel as if the table had R rows instead of V.
        inverse, count = grads.ids.inverse, len(grads.ids.rows)
        backward = torch.ops.aten.embedding_dense_backward
        sums = backward(values, inverse, count, -1, scale_by_frequency)
        return sums
    from hotrow.kernels.cpu.grouping import sum_rows  # imports numba

    groups = grads.ids.groups
    sums = values.new_empty((groups.distinct_count, values.shape[1]))
    arguments = values.contiguous().numpy(), groups.order, groups.offsets, sums.numpy()
    run_on_threads(sum_rows, arguments, thread_count(groups.distinct_count, values.shape[1]))
    return sums


def group(ids: Tensor, grads: Tensor, row_count: int) -> GroupedGradients:
    """Group gradients (N, D) by their ids (N,); see `find_distinct` for the cost."""
    return GroupedGradients(find_distinct(ids, row_count), grads.detach())
