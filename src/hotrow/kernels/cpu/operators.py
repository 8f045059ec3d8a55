"""The compiled version of `hotrow.kernels.operators`, for the CPU.

The kernels get the addresses of tensors from plans (`plans.py`). numba is imported inside the
functions, so that `import hotrow` doesn't import it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any, Self

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.compile_notice import show_compile_notice
from hotrow.kernels.cpu import plans
from hotrow.kernels.cpu.threads import run_on_threads, runs_without_python, thread_count
from hotrow.kernels.program import Program, Steps

# For each table dtype with compiled kernels, the dtype in which the kernels compute.
COMPUTE_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.float32,
}


class _Kernel:
    """A compiled kernel with its scratch memory, shared by all tables of one program.

    `run` must not be called again before it returns.
    """

    def __init__(self, program: Program, dtype: torch.dtype, slot_count: int) -> None:
        from hotrow.kernels.cpu.rows import row_kernel  # imports numba

        forward = program.fast_forward
        self._function = row_kernel(
            program.update,
            program.flags,
            program.width,
            forward.apply,
            forward.compute_factors,
            slot_count,
        )
        self._dtype, self._slot_count = dtype, slot_count
        self._factor_count = forward.factor_count
        self._source = program.update.__module__
        # The dtype of this empty array tells the kernel the dtype of the table; int16 means
        # bfloat16.
        self._no_items = np.empty(0, np.int16 if dtype == torch.bfloat16 else COMPUTE_DTYPES[dtype])
        self._scratch: tuple[NDArray[Any], ...] = (np.empty((0, 0, 0)),)
        self._has_run = False

    def run(
        self, task: int, tables: NDArray[np.int64], rows: int, columns: int, steps: Steps
    ) -> None:
        """Process `rows` rows in total, with at most `columns` columns.

        Arguments:
            task: see `plans.py`.
            tables: (tables, 9 + slots), the plans.
            rows: the sum of the plans' `DISTINCT_IDS`.
            columns: the maximum of the plans' `COLUMNS`.
            steps: see `Steps`.
        """
        threads = thread_count(rows, columns)
        scratch_threads, _, scratch_columns = self._scratch[0].shape
        if scratch_threads < threads or scratch_columns < columns:
            self._make_scratch(max(threads, scratch_threads), max(columns, scratch_columns))
        entries, coefficients, step_count, *_ = steps
        scratch = self._scratch
        arguments = task, self._no_items, tables, entries, coefficients, step_count, *scratch
        if self._has_run:
            run_on_threads(self._function, arguments, threads)
            return
        with show_compile_notice((self._function, self._dtype), self._source):
            run_on_threads(self._function, arguments, threads)
        self._has_run = threads > 0

    def _make_scratch(self, threads: int, columns: int) -> None:
        """Allocate scratch memory for each thread: rows, sets of factors, and the sets' keys."""
        from hotrow.kernels.cpu.rows import FACTOR_SETS

        self._scratch = (
            np.zeros((threads, 3 + self._slot_count, columns), COMPUTE_DTYPES[self._dtype]),
            np.empty((threads, FACTOR_SETS, self._factor_count)),
            np.full((threads, FACTOR_SETS), -1, np.int64),
        )


class CompiledRows:
    """The compiled implementation of `operators.RowOperators`.

    The tensors' addresses are read once, and the object keeps the tensors alive.
    """

    def __init__(
        self, program: Program, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
    ) -> None:
        assert row_steps.dtype == torch.int32
        self._dtype, self._columns = table.dtype, table.shape[1]
        self._tensors = [each.detach() for each in (table, *slots, row_steps)]
        addresses = [each.data_ptr() for each in self._tensors]
        *_, row_steps_address = addresses
        sizes = *table.shape, not table.is_contiguous()
        plan = [addresses[0], *sizes, row_steps_address, 0, 0, 0, 0, *addresses[1:-1]]
        self._plans = np.array([plan], np.int64)
        self._plan = self._plans[0]
        self._set_program(program)

    def _set_program(self, program: Program) -> None:
        self.program = program
        key = self._dtype, len(self._tensors)
        kernel = program.kernels.get(key)
        if kernel is None:
            kernel = program.kernels[key] = _Kernel(program, self._dtype, len(self._tensors) - 2)
        self.kernel = kernel

    @property
    def is_atomic(self) -> bool:
        """See `operators.RowOperators`."""
        return runs_without_python()

    def with_program(self, program: Program) -> CompiledRows:
        """See `operators.RowOperators`."""
        result = copy.copy(self)
        result._set_program(program)
        return result

    def settle(self, rows: Tensor | None, steps: Steps) -> None:
        """See `operators.RowOperators`."""
        if rows is None:
            rows = (self._tensors[-1] < steps.step_count).nonzero()[:, 0]
        rows = rows.contiguous()
        self._set_batch(rows.data_ptr(), 0, len(rows), 0)
        self.kernel.run(plans.SETTLE, self._plans, len(rows), self._columns, steps)

    def look_up(self, ids: DistinctIds, steps: Steps) -> Tensor:
        """See `operators.RowOperators`."""
        values = self._tensors[0].new_empty(*ids.shape, self._columns)  # faster than torch.empty
        _, address, size, count = ids.groups
        self._set_batch(address, size, count, values.data_ptr())
        self.kernel.run(plans.LOOK_UP, self._plans, count, self._columns, steps)
        return values

    def _set_batch(self, groups: int, size: int, distinct_count: int, values: int) -> None:
        plan = self._plan
        plan[plans.GROUPS], plan[plans.IDS] = groups, size
        plan[plans.DISTINCT_IDS], plan[plans.BATCH] = distinct_count, values

    @classmethod
    def step_together(
        cls, tables: Sequence[Self], batches: Sequence[GroupedGradients], steps: Steps
    ) -> None:
        """See `operators.RowOperators`."""
        all_values, rows, columns = [], 0, 0
        for table, grads in zip(tables, batches, strict=True):
            values = grads.values.contiguous()
            all_values.append(values)  # keeps the memory alive until the kernel has run
            _, address, size, count = grads.ids.groups
            table._set_batch(address, size, count, values.data_ptr())
            rows, columns = rows + count, max(columns, table._columns)
        all_plans = [table._plans for table in tables]
        joined = np.concatenate(all_plans) if len(tables) > 1 else all_plans[0]
        tables[0].kernel.run(plans.STEP, joined, rows, columns, steps)


def select_rows(table: Tensor, ids: Tensor) -> Tensor | None:
    """See `operators.select_rows`."""
    from hotrow.kernels.cpu.copying import copy_rows  # imports numba

    output = table.new_empty(*ids.shape, table.shape[1])
    item = np.dtype(f"i{table.itemsize}")  # compile once for all dtypes of this size
    bits = [each.detach().view(torch.uint8).numpy().view(item) for each in (table, output)]
    flat_ids = np.ascontiguousarray(ids.numpy().reshape(-1), np.int64)
    out_of_range = np.zeros(1, np.bool_)
    arguments = bits[0], flat_ids, bits[1].reshape(-1, table.shape[1]), out_of_range
    run_on_threads(copy_rows, arguments, thread_count(len(flat_ids), table.shape[1]))
    return None if out_of_range[0] else output
