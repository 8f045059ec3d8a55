"""The Triton version of `hotrow.kernels.operators`."""
# mypy: ignore-errors
# Triton has no type annotations for kernels.

from __future__ import annotations

import contextlib
from collections.abc import Hashable, Sequence
from typing import Self

import torch
from torch import Tensor

from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.program import Program, Steps
from hotrow.kernels.triton.batch import CHUNK, DeviceIds
from hotrow.kernels.triton.id_check import id_check
from hotrow.kernels.triton.ledger import DeviceLedger

MAX_BLOCK = 4096  # columns that one program processes at once
AHEAD = 8  # gradients that a program loads at once
ROWS_PER_PROGRAM = 16  # rows that one program processes when all rows are settled
ALIGNMENT = 16  # bytes; with this alignment, a program loads 16 bytes at once
# Without this option, the compiler would fuse multiplications and additions.
OPTIONS = {"enable_fp_fusion": False}


def block_options(columns: int) -> dict[str, int]:
    """Return the block size, and the number of warps that process a block."""
    block = min(1 << max(columns - 1, 0).bit_length(), MAX_BLOCK)
    warps = 1 if block <= 128 else 2 if block <= 512 else 4 if block <= 1024 else 8
    return {"BLOCK": block, "num_warps": warps, **OPTIONS}


def kernel_options(program: Program) -> dict[str, object]:
    """Return the kernels' compile-time arguments for a program's rule and closed form."""
    from hotrow.kernels.triton.translate import translate  # imports triton

    fast_forward = program.fast_forward
    formula, is_inexact = (*map(translate, fast_forward.formulas), None, None)[:2]
    return {
        "update": translate(program.update),
        "flags": program.flags,
        "width": program.width,
        "form": fast_forward.form,
        "formula": formula,
        "is_inexact": is_inexact,
    }


def pitch_of(table: Tensor) -> int | None:
    """Return V if a (V, D) table is stored as (D, V), else None."""
    return None if table.is_contiguous() else len(table)


def on_device(tensor: Tensor) -> contextlib.AbstractContextManager[object]:
    """Make the tensor's GPU the current device, on which Triton launches kernels."""
    if tensor.device.type != "cuda" or tensor.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(tensor.device)


class TritonRows:
    """See `operators.RowOperators`."""

    def __init__(
        self, program: Program, table: Tensor, slots: Sequence[Tensor], row_steps: Tensor
    ) -> None:
        self.table, self.row_steps = table.detach(), row_steps
        self.slots = tuple(slot.detach() for slot in slots)
        self._blocks = block_options(table.shape[1])
        pointers = [each.data_ptr() for each in (row_steps, self.table, *self.slots)]
        self._addresses = (len(table), *pointers)
        # For several tables at once, the kernel needs pointers that are multiples of ALIGNMENT, and
        # tables that are not transposed.
        is_aligned = not any(pointer % ALIGNMENT for pointer in pointers)
        self._can_join = is_aligned and pitch_of(table) is None
        self._set_program(program)

    def _set_program(self, program: Program) -> None:
        self.program = program
        options = program.kernels.get("triton")
        if options is None:
            options = program.kernels["triton"] = kernel_options(program)
        self._options = {**options, **self._blocks}
        self.kernel: Hashable = program, self.table.dtype, self.table.device

    @property
    def is_atomic(self) -> bool:
        """See `operators.RowOperators`; a lookup changes no rows."""
        return True

    def with_program(self, program: Program) -> TritonRows:
        """See `operators.RowOperators`."""
        return TritonRows(program, self.table, self.slots, self.row_steps)

    def _ledger(self, steps: Steps) -> DeviceLedger:
        """Return the ledger on the table's device, with all entries."""
        key = self.table.device, self.table.dtype
        ledger = steps.copies.get(key)
        if ledger is None:
            ledger = steps.copies[key] = DeviceLedger(*key)
            ledger.start(steps.end_step)
        ledger.update(steps, self.program.fast_forward)
        return ledger

    def upload(self, steps: Steps) -> None:
        """Copy the new steps to the device."""
        self._ledger(steps)

    def reserve(self, steps: Steps, step_count: int) -> None:
        """Make room for this many steps on the device, so that a CUDA graph can use the memory."""
        self._ledger(steps).reserve(step_count)

    def look_up(self, ids: DistinctIds, steps: Steps) -> Tensor:
        """See `operators.RowOperators`; this version stores no rows.

        The ids may be out of range; see `id_check.py`.
        """
        ledger = self._ledger(steps)
        state = self.slots, self.row_steps, ledger.clock, ledger.entries, ledger.numbers
        return _look_up(self.table, DeviceIds.of(ids), (*state, ledger.arrays), self._options)

    def settle(self, rows: Tensor | None, steps: Steps) -> None:
        """See `operators.RowOperators`."""
        from hotrow.kernels.triton import rows as kernels

        ledger, check = self._ledger(steps), id_check(self.table.device)
        count = len(self.table) if rows is None else len(rows)
        rows_per_program = ROWS_PER_PROGRAM if rows is None else 1
        if not count or not self.table.shape[1]:
            return
        with on_device(self.table):
            kernels.settle[(-(-count // rows_per_program),)](
                self.table,
                self.slots,
                self.row_steps,
                self.row_steps if rows is None else rows.contiguous(),
                count,
                ledger.clock,
                ledger.entries,
                ledger.numbers,
                ledger.arrays,
                check.bad_id,
                self.table.shape[1],
                pitch_of(self.table),
                ROWS=rows_per_program,
                HAS_ROWS=rows is not None,
                **self._options,
            )

    @classmethod
    def step_together(
        cls, tables: Sequence[Self], batches: Sequence[GroupedGradients], steps: Steps
    ) -> None:
        """See `operators.RowOperators`."""
        from hotrow.kernels.triton import rows as kernels

        check = id_check(tables[0].table.device)
        ledger = tables[0]._ledger(steps)
        by_columns: dict[object, list[tuple[Self, GroupedGradients]]] = {}
        for table, grads in zip(tables, batches, strict=True):
            key = table.table.shape[1] if table._can_join else table
            by_columns.setdefault(key, []).append((table, grads))
        with on_device(tables[0].table):
            for joined in by_columns.values():
                if any(grads.values.numel() for _, grads in joined):
                    # Include empty batches, so that every step joins the same tables.
                    _step_joined(*zip(*joined, strict=True), ledger)
            kernels.advance_clock[(1,)](ledger.clock, check.bad_id, num_warps=1)


def _step_joined(
    tables: Sequence[TritonRows], batches: Sequence[GroupedGradients], ledger: DeviceLedger
) -> None:
    """Update tables with the same number of columns in one launch."""
    from hotrow.kernels.triton import rows as kernels

    first, addresses = tables[0], None
    batch, values = DeviceIds.of(batches[0].ids), batches[0].values.contiguous()
    if len(tables) > 1:
        row_count = max(len(table.table) for table in tables)
        batch = DeviceIds.join([DeviceIds.of(grads.ids) for grads in batches], row_count)
        values = torch.cat([grads.values for grads in batches])
        addresses = ledger.upload_addresses(
            values.shape[1], tuple(table._addresses for table in tables)
        )
    count, columns = values.shape
    ids, order = batch.sorted
    kernels.step[(count,)](
        first.table,
        first.slots,
        first.row_steps,
        addresses,
        len(tables),
        ids,
        order,
        values,
        sum_chunks(batch, values),
        ledger.clock,
        ledger.entries,
        ledger.numbers,
        ledger.arrays,
        id_check(first.table.device).bad_id,
        count,
        len(first.table),
        columns,
        pitch_of(first.table),
        AHEAD=AHEAD,
        **first._options,
    )


def _look_up(
    table: Tensor, batch: DeviceIds, state: tuple[object, ...], options: dict[str, object]
) -> Tensor:
    from hotrow.kernels.triton import rows as kernels

    source, check, columns = batch.source, id_check(table.device), table.shape[1]
    number = check.start(batch, len(table))
    batch.source = None
    output = table.new_empty(*batch.shape, columns)
    slots, row_steps, *ledger = state
    if len(batch.flat):
        with on_device(table):
            kernels.look_up[(len(batch.flat),)](
                table,
                slots,
                row_steps,
                batch.flat if source is None else source,
                output,
                batch.flat,
                *ledger,
                check.bad_id,
                check.has_bad_id,
                number,
                *table.shape,
                pitch_of(table),
                **options,
            )
    return output


_READ = {"update": None, "flags": (), "width": 1, "form": "read", "formula": None}


def read_rows(table: Tensor, batch: DeviceIds) -> Tensor:
    """Return `table[ids]`, (..., D), for a table without stale rows.

    The ids may be out of range; see `id_check.py`.
    """
    options = {**_READ, "is_inexact": None, **block_options(table.shape[1])}
    state = (), table, table, table, table, ()  # the kernel reads only the table
    return _look_up(table, batch, state, options)


def sum_chunks(batch: DeviceIds, values: Tensor, scales: Tensor | None = None) -> Tensor:
    """For each id that occurs more than CHUNK times, sum its gradients in chunks of CHUNK."""
    from hotrow.kernels.triton import rows as kernels

    count, columns = values.shape
    if batch.is_merged or count <= CHUNK:
        return values
    ids, order = batch.sorted
    sums = values.new_empty(2 * (count // CHUNK + 1), columns)
    kernels.sum_chunks[(count,)](
        ids, order, values, scales, sums, count, columns, AHEAD=AHEAD, **block_options(columns)
    )
    return sums


def merge(grads: GroupedGradients, scale_by_frequency: bool = False) -> GroupedGradients:
    """Return the sum of each id's gradients, in N rows, without waiting for the device.

    Unused rows are 0, and their id is -1. With `scale_by_frequency`, divide each gradient by the
    number of times its id occurs. As in torch, this multiplies by the reciprocal, and fuses the
    multiplication with the addition.
    """
    from hotrow.kernels.triton import rows as kernels

    batch, values = DeviceIds.of(grads.ids), grads.values.contiguous()
    count, columns = values.shape
    if batch.is_merged or not count:
        return grads
    ids, order = batch.sorted
    rows, merged, scales = torch.empty_like(ids), torch.empty_like(values), None
    if scale_by_frequency:
        dtype = torch.float64 if values.dtype == torch.float64 else torch.float32
        scales = batch.frequencies().double().reciprocal().to(dtype)
    with on_device(values):
        sums = sum_chunks(batch, values, scales)
        kernels.merge[(count,)](
            ids, order, values, scales, sums, rows, merged, count, columns, AHEAD=AHEAD,
            **block_options(columns),
        )  # fmt: skip
    return GroupedGradients(DeviceIds(rows, rows.shape, is_merged=True), merged)
