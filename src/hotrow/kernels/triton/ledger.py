"""A copy of the ledger on a device. Each step uploads only the new entries."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from hotrow.kernels.program import FastForward, Steps

START_CAPACITY = 1024  # steps
COMPUTE_DTYPES = {
    torch.float32: torch.float32,
    torch.float64: torch.float64,
    torch.bfloat16: torch.float32,
    torch.float16: torch.float32,
}


class DeviceLedger:
    """The entries and the closed form's coefficients on a device.

    Attributes:
        clock: (1,) int32, the number of steps applied so far. Only kernels change it.
        entries: (capacity, width), in the dtype used for arithmetic.
        numbers: (8,) float64, the scalars among the coefficients.
        arrays: the arrays among the coefficients.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, COMPUTE_DTYPES[dtype]
        self.clock = torch.zeros(1, dtype=torch.int32, device=device)
        self.entries = torch.empty(0, 0, dtype=self._dtype, device=device)
        self.numbers = torch.zeros(8, dtype=torch.float64, device=device)
        self.arrays: tuple[Tensor, ...] = ()
        self._entry_count, self._end_step = 0, 0
        self._numbers: tuple[float, ...] = ()
        self._fast_forward: FastForward | None = None
        self._addresses: dict[int, tuple[tuple[tuple[int, ...], ...], Tensor]] = {}
        self.capacity = START_CAPACITY

    def start(self, step_count: int) -> None:
        """Set the clock of a copy that is created after some steps have run."""
        self.clock.fill_(step_count)

    def update(self, steps: Steps, fast_forward: FastForward) -> None:
        """Append the entries and the coefficients that are new since the last call."""
        entries = steps.entries
        if len(entries) > self._entry_count:
            self.entries = self._fit(self.entries, len(entries), entries.shape[1:])
            self.capacity = max(self.capacity, 2 * len(entries))
            self._upload(self.entries, entries, slice(self._entry_count, len(entries)))
            self._entry_count = len(entries)
        if fast_forward is not self._fast_forward:
            for replaced in self.arrays:
                self._keep_until_used(replaced)
            self._fast_forward, self._end_step, self._numbers, self.arrays = fast_forward, 0, (), ()
        if not steps.coefficients or (self._end_step == steps.end_step and self._numbers):
            return
        arrays = [each for each in steps.coefficients if isinstance(each, np.ndarray)]
        numbers = tuple(
            float(each) for each in steps.coefficients if not isinstance(each, np.ndarray)
        )
        if numbers != self._numbers:
            self._upload(self.numbers, np.array(numbers), slice(0, len(numbers)))
        if not self.arrays:
            self.arrays = tuple(
                torch.empty(0, dtype=torch.from_numpy(array[:0]).dtype, device=self._device)
                for array in arrays
            )
        changes = fast_forward.changed_since(self._end_step)
        self.arrays = tuple(
            self._fit(copy, change.stop, array.shape[1:])
            for copy, array, change in zip(self.arrays, arrays, changes, strict=True)
        )
        for copy, array, change in zip(self.arrays, arrays, changes, strict=True):
            self._upload(copy, array, change)
        self._end_step, self._numbers = steps.end_step, numbers

    def upload_addresses(self, columns: int, addresses: tuple[tuple[int, ...], ...]) -> Tensor:
        """Return a copy of the tables' addresses on the device, (tables, addresses) int64.

        Tables with the same ledger take every step together. So the addresses of the tables with
        this number of columns are uploaded only once, unless a table's memory moves.
        """
        known, copy = self._addresses.get(columns, (None, self.clock))
        if known != addresses:
            values = np.array(addresses)
            self._keep_until_used(copy)
            copy = torch.empty(values.shape, dtype=torch.int64, device=self._device)
            self._upload(copy, values, slice(0, len(values)))
            self._addresses[columns] = addresses, copy
        return copy

    def reserve(self, step_count: int) -> None:
        """Make room for this many steps, so that the memory doesn't move while graphs use it."""
        self.capacity = 2 * step_count + 64  # a linear recurrence has fewer blocks than this
        tensors = self.entries, *self.arrays
        self.entries, *arrays = (self._fit(each, self.capacity, each.shape[1:]) for each in tensors)
        self.arrays = tuple(arrays)

    def _fit(self, copy: Tensor, length: int, shape: tuple[int, ...]) -> Tensor:
        """Return the copy with room for `length` items; it may move to new memory."""
        if length <= len(copy) and copy.shape[1:] == shape:
            return copy
        larger = copy.new_zeros(max(self.capacity, length), *shape)
        if copy.shape[1:] == shape:
            larger[: len(copy)] = copy
        self._keep_until_used(copy)
        return larger

    def _keep_until_used(self, replaced: Tensor) -> None:
        """Let no other stream reuse this memory before the current stream has read it."""
        if replaced.is_cuda:
            replaced.record_stream(torch.cuda.current_stream(self._device))

    def _upload(self, copy: Tensor, values: NDArray[Any], change: slice) -> None:
        """Copy the changed items to the device, without waiting for it."""
        part = torch.from_numpy(values[change])
        source = torch.empty(
            part.shape, dtype=copy.dtype, device="cpu", pin_memory=self._device.type == "cuda"
        )
        source.copy_(part)
        copy[change].copy_(source, non_blocking=True)
