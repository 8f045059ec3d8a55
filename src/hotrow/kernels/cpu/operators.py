"""The compiled version of `hotrow.kernels.operators`, for the CPU.

Tensors are passed to the kernels as numpy arrays. numba is imported inside the functions, so that
`import hotrow` doesn't import it.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.batch import BatchArrays, DistinctIds, GroupedGradients
from hotrow.kernels.compile_notice import show_compile_notice
from hotrow.kernels.cpu.tasks import LOOK_UP, SETTLE, STEP
from hotrow.kernels.cpu.threads import run_on_threads, runs_without_python, thread_count
from hotrow.kernels.program import Program, Steps

# Maps each table dtype that has compiled kernels to the dtype in which they compute.
COMPUTE_DTYPES = {
    torch.float32: np.float32,
    torch.float64: np.float64,
    torch.bfloat16: np.float32,
}

_CPU = torch.device("cpu")  # a user may have set another default device


class CompiledRows:
    """See `operators.RowOperators`.

    The numpy arrays are created once; they keep the tensors' memory alive.
    """

    def __init__(
        self, program: Program, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
    ) -> None:
        arrays = [_as_array(each.detach()) for each in (table, *slots)]
        self._dtype = table.dtype
        self._target = arrays[0], tuple(arrays[1:]), row_steps.numpy()
        self._no_ids: NDArray[np.int64] = np.empty(0, np.int64)
        self._set_program(program)

    def _set_program(self, program: Program) -> None:
        from hotrow.kernels.cpu.rows import row_kernel  # imports numba

        self.program = program
        self._kernel = row_kernel(
            program.update, program.flags, program.width, program.fast_forward
        )
        self._scratch: tuple[NDArray[Any], ...] = (np.empty(0),)
        self._has_run = False

    @property
    def is_atomic(self) -> bool:
        """See `operators.RowOperators`."""
        return runs_without_python()

    def with_program(self, program: Program) -> CompiledRows:
        """See `operators.RowOperators`."""
        result = copy.copy(self)
        result._set_program(program)
        return result

    def settle(self, rows: Tensor, steps: Steps) -> None:
        """See `operators.RowOperators`."""
        offsets = np.zeros(len(rows) + 1, np.int64)
        arrays = BatchArrays(rows.numpy(), self._no_ids, self._no_ids, offsets)
        self._run(SETTLE, arrays, self._target[0][:0], steps)

    def step(self, grads: GroupedGradients, steps: Steps) -> None:
        """See `operators.RowOperators`."""
        self._run(STEP, grads.ids.arrays, _as_array(grads.values.contiguous()), steps)

    def look_up(self, ids: DistinctIds, steps: Steps) -> Tensor:
        """See `operators.RowOperators`."""
        columns = self._target[0].shape[1]
        values = torch.empty((*ids.shape, columns), dtype=self._dtype, device=_CPU)
        batch = _as_array(values).reshape(len(ids.arrays.inverse), columns)
        self._run(LOOK_UP, ids.arrays, batch, steps)
        return values

    def _make_scratch(self, threads: int) -> tuple[NDArray[Any], ...]:
        """Return the memory of each thread: rows, sets of factors, and the keys of the sets."""
        from hotrow.kernels.cpu.rows import FACTOR_SETS

        table, slots, _ = self._target
        row_shape = threads, 3 + len(slots), table.shape[1]
        factor_count = self.program.fast_forward.factor_count
        return (
            np.zeros(row_shape, COMPUTE_DTYPES[self._dtype]),
            np.empty((threads, FACTOR_SETS, factor_count)),
            np.full((threads, FACTOR_SETS), -1, np.int64),
        )

    def _run(
        self,
        task: int,
        ids: BatchArrays,
        batch: NDArray[Any],  # (N, D): the gradients for STEP, the output for LOOK_UP
        steps: Steps,
    ) -> None:
        rows, _, order, offsets = ids
        columns = batch.shape[1]
        threads = thread_count(len(rows), columns)
        if len(self._scratch[0]) < threads:
            self._scratch = self._make_scratch(threads)
        rows_of_batch = rows, order, offsets, batch
        arguments = task, *self._target, *rows_of_batch, *steps, *self._scratch
        if self._has_run:
            run_on_threads(self._kernel, arguments, threads)
            return
        with show_compile_notice((self._kernel, self._dtype), self.program.update.__module__):
            run_on_threads(self._kernel, arguments, threads)
        self._has_run = threads > 0


def _as_array(tensor: Tensor) -> NDArray[Any]:
    """Return a numpy array that shares the tensor's memory, with bfloat16 values as int16 bits."""
    return (tensor.view(torch.int16) if tensor.dtype == torch.bfloat16 else tensor).numpy()
