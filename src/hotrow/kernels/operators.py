"""Choose the kernels for a table, and use them to settle, update or look up rows.

`cpu/` has compiled kernels for float32, float64 and bfloat16 tables on the CPU, and `triton/` for
tables on NVIDIA GPUs. Both need tables that are contiguous or transposes of contiguous tensors.
`default/` has plain torch kernels for all other tables. `grouping.py` groups ids.
"""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from typing import Protocol, Self

import torch
from torch import Tensor

from hotrow.kernels import devices
from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.cpu import operators as cpu
from hotrow.kernels.default import operators as default
from hotrow.kernels.grouping import sum_by_row
from hotrow.kernels.program import Program, Steps
from hotrow.kernels.triton import operators as gpu
from hotrow.kernels.triton.batch import DeviceIds
from hotrow.kernels.triton.id_check import BadId, id_check


class RowOperators(Protocol):
    """The kernels of one program, ready to run on the rows of one table.

    The kernels refer to the memory of the table, the slots and the step counts, and change this
    memory in place.

    Attributes:
        program: the program.
        kernel: an identifier of the kernel. One call can update all tables that share it.
    """

    program: Program
    kernel: Hashable

    @property
    def is_atomic(self) -> bool:
        """Whether an operation always completes before a Python signal handler runs."""

    def with_program(self, program: Program) -> Self:
        """Return the kernels of another program for the same rows."""

    def settle(self, rows: Tensor | None, steps: Steps) -> None:
        """Apply the missed steps of the distinct `rows`, (R,) int64, with zero gradients.

        If `rows` is None, apply the missed steps of all rows.
        """

    def look_up(self, ids: DistinctIds, steps: Steps) -> Tensor:
        """Return the settled rows selected by the ids, (..., D).

        The compiled kernels store a row only if they replay more than two steps for it. The next
        optimizer step settles the other rows again, which costs less than writing them twice. The
        plain torch kernels store all rows, and the Triton kernels store none.
        """

    @classmethod
    def step_together(
        cls, tables: Sequence[Self], batches: Sequence[GroupedGradients], steps: Steps
    ) -> None:
        """Update tables that have the same kernel; see the function `step_together`."""


def is_compiled(table: Tensor) -> bool:
    """Return whether the compiled kernels support this table's device, dtype and layout."""
    is_on_cpu = devices.is_on_cpu(table)
    return is_on_cpu and table.dtype in cpu.COMPUTE_DTYPES and devices.has_layout(table)


def prepare(
    program: Program, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
) -> RowOperators:
    """Return the kernels of a program for the rows of a table.

    Arguments:
        program: the program of the rule.
        table: (V, D), contiguous or a transpose of a contiguous tensor; the plain torch kernels
            support any strides.
        slots: the tensors of the optimizer state, each (V, D).
        row_steps: (V,) integer, the number of steps applied to each row.
    """
    tensors = table, *slots
    if len({each.is_contiguous() for each in tensors}) == 1:
        if all(map(is_compiled, tensors)):
            return cpu.CompiledRows(program, table, slots, row_steps)
        if all(map(devices.has_triton_kernels, tensors)):
            return gpu.TritonRows(program, table, slots, row_steps)
    return default.TorchRows(program, table, slots, row_steps)


def read_rows(table: Tensor, ids: DeviceIds) -> Tensor:
    """Return `table[ids]`, (..., D), for a table with Triton kernels and without stale rows.

    The kernel checks the ids; see `take_bad_id`.
    """
    return gpu.read_rows(table, ids)


def take_bad_id(device: torch.device, wait: bool = False) -> BadId | None:
    """Return and clear the first out-of-range id of the lookups on a GPU, or return None.

    After a lookup with an out-of-range id, no kernel changes any row until this function returns
    the id. Without `wait`, the function doesn't wait for kernels, so it can't return the id before
    the lookup's kernel has run.
    """
    return id_check(device).take_error(wait)


def merge_rows(grads: GroupedGradients, scale_by_frequency: bool = False) -> GroupedGradients:
    """Sum the gradients of each id, and return gradients in which each id occurs once.

    With `scale_by_frequency`, divide each gradient by the number of times its id occurs.

    See `grouping.sum_by_row`. On a GPU with Triton kernels, the result still has N rows, because
    only the device knows how many ids are distinct. Unused rows are 0, and their id is -1. If an id
    has more than 32 gradients, the Triton kernels add them in chunks of 32.
    """
    if devices.has_triton_kernels(grads.values):
        return gpu.merge(grads, scale_by_frequency)
    return GroupedGradients(grads.ids, sum_by_row(grads, scale_by_frequency))


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """Return `table[ids]`, (*ids.shape, D), or None if an id is out of range.

    If the result takes 8 MB or more, the call takes 0.7 to 0.9 times as long as `torch.embedding`.

    Arguments:
        table: (V, D), any dtype, contiguous, on the CPU; V and D are at least 1.
        ids: int64 or int32, on the CPU, any shape, at least one id.
    """
    return cpu.select_rows(table, ids)


def step_together(tables: Sequence[tuple[RowOperators, Steps, GroupedGradients]]) -> None:
    """Settle the rows of each batch, then apply the last step with the rows' gradients.

    One call to a compiled kernel updates all tables with the same program and dtype. For small
    batches, separate calls would take longer than the work itself.
    """
    by_kernel: dict[Hashable, list[tuple[RowOperators, Steps, GroupedGradients]]] = {}
    for table in tables:
        by_kernel.setdefault(table[0].kernel, []).append(table)
    for same_kernel in by_kernel.values():
        operators, steps, batches = zip(*same_kernel, strict=True)
        operators[0].step_together(operators, batches, steps[0])
