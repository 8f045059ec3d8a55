"""A folder with one table, its optimizer state and its ledger.

An open `Store` is the `backing` of its table. The optimizer creates its state in the folder's
files. A save includes the ledger, so stale rows don't need to be settled first.
"""

from __future__ import annotations

import json
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from filelock import FileLock, Timeout
from torch import Tensor, nn

from hotrow import optim
from hotrow.disk.journal import WHOLE_FILE, FileWrite, commit, flush_folder, replay_journal
from hotrow.disk.mapped_tensor import PAGE, MappedTensor, RowBlocks, write_new
from hotrow.disk.run import (
    REST_FILE,
    RUN_FILE,
    Run,
    damaged_file,
    error_summary,
    read_rest,
    read_run,
    serialize_rest,
)
from hotrow.errors import HotrowError
from hotrow.layers import Embedding
from hotrow.optim.lag import RowLag
from hotrow.optim.ledger import Ledger
from hotrow.optim.rule import ParamGroup, Rule
from hotrow.optim.state import RowState
from hotrow.table.parameter import Table

BLOCK_VALUES = 1 << 22  # the number of values per write to a new file


def create(
    path: str | Path,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    fill: Callable[[Tensor], object] | None = None,
) -> Store:
    """Create a folder with a new table, and open it.

    The table contains zeros, or the values that `fill` writes.

    Args:
        path: the folder, which must not exist yet.
        rows: V, at least 1.
        columns: D, at least 1.
        dtype: float32 or float64.
        fill: a function such as `torch.nn.init.normal_`. `create` calls it with one
            (n, D) block of rows at a time, and `fill` writes the values in place.

    Returns:
        The open store.

    Raises:
        HotrowError: the folder exists, the dtype is not supported, `rows` or `columns` is not a
            positive integer, or the disk is full. After an error, no new folder remains.

    Cost: `create` writes the table once. Zeros cost nothing, because the files are sparse.

    >>> import tempfile, torch, hotrow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hotrow.disk.create(folder + "/users", 1_000_000, 16) as store:
    ...         optimizer = hotrow.optim.Adam(store.layer.parameters())
    ...         store.layer(torch.tensor([3, 999_999])).sum().backward()
    ...         optimizer.step()
    ...         store.save()
    ...     with hotrow.disk.open(folder + "/users") as store:
    ...         round(store.layer.weight[3, 0].item(), 4)
    -0.001
    """
    folder = Path(path)
    if dtype not in (torch.float32, torch.float64):
        raise HotrowError(
            f"dtype is {dtype}, but a table on disk must be float32 or float64",
            fix="pass dtype=torch.float32 or torch.float64",
        )
    if not (isinstance(rows, int) and isinstance(columns, int)):
        raise HotrowError(
            f"rows is {rows!r} and columns is {columns!r}, but both must be integers",
            fix="pass integers",
        )
    if rows < 1 or columns < 1:
        raise HotrowError(
            f"rows is {rows} and columns is {columns}, but both must be at least 1",
            fix="pass 1 or more",
        )
    if folder.exists():
        raise HotrowError(
            f"{folder} already exists", fix="open it with hotrow.disk.open, or use another path"
        )
    new_folder: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # Use a unique name, because another process may be creating the same folder.
        new_folder = folder.with_name(f"{folder.name}.{uuid.uuid4().hex[:12]}")
        new_folder.mkdir()
        values = _filled_blocks((rows, columns), dtype, fill) if fill else ()
        write_new(new_folder / "weight.safetensors", "weight", (rows, columns), dtype, values)
        new_folder.rename(folder)
        flush_folder(folder.parent)
    except BaseException as error:
        if new_folder is not None:
            shutil.rmtree(new_folder, ignore_errors=True)
        if not isinstance(error, OSError):
            raise
        raise HotrowError(
            f"{folder} could not be created ({error})", fix="free disk space, or use another path"
        ) from None
    return Store(folder)


def open(path: str | Path) -> Store:
    """Open a table's folder to train the table or to read its rows.

    If a crash interrupted a save whose journal was complete, `open` first finishes the save.

    Args:
        path: a folder that `create` created.

    Returns:
        The open store. To continue training, create an optimizer of the same class with the same
        options. The optimizer continues from the saved state.

    Raises:
        HotrowError: the folder does not exist or is damaged, or it is already open, in this
            process or another one.

    Cost: `open` reads no rows. After an interrupted save, `open` applies the journal once.

    >>> import tempfile, hotrow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hotrow.disk.create(folder + "/users", 1000, 4).close()
    ...     with hotrow.disk.open(folder + "/users") as store:
    ...         store.layer
    Embedding(1000, 4)
    """
    return Store(Path(path))


class Store:
    """An open folder with a table; call `create` or `open` to get one.

    Train the table like any other table, with an optimizer from `hotrow.optim`. Use the store in a
    `with` statement, or call `close` when you are done.

    Memory: changed pages (4,096 bytes each) stay in memory until `save` writes them to the files
    and frees them. So memory use grows with the number of rows touched since the last save.

    Cost of a save: `save` writes the changed pages, and the ledger with its scalars for each step.
    `save` doesn't settle stale rows, but stores them with the steps that they have missed.

    Reads of the whole table (`layer.state_dict()`, `layer.weight.norm()`) and of the whole
    optimizer state (`optimizer.state_dict()`) settle every row. Such reads need memory for all rows
    that change.

    Attributes:
        layer: a `hotrow.Embedding` with the table.
        rest: the `rest` argument of the last save, or None.
        folder: the path of the folder.

    >>> import tempfile, hotrow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with hotrow.disk.create(folder + "/users", 1000, 4) as store:
    ...         store.save(rest={"epoch": 1})
    ...     with hotrow.disk.open(folder + "/users") as store:
    ...         store.rest
    {'epoch': 1}
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise HotrowError(
                f"the folder {folder} does not exist", fix="create it with hotrow.disk.create"
            )
        self.folder = folder
        self._lock, self._is_open, self._process = FileLock(folder / "lock"), True, os.getpid()
        try:
            with _wrap_open_errors(folder):
                self._lock.acquire(timeout=0)
                replay_journal(folder)
                self._weight_file = MappedTensor(folder / "weight.safetensors")
                self._state_files: dict[str, MappedTensor] = {}
                self._run = read_run(folder)
                self._resuming = False
                self.rest = read_rest(folder)
                self.layer = self._make_layer()
                if self._run:
                    self._resume()
        except BaseException:
            self._lock.release()
            raise

    def _make_layer(self) -> Embedding:
        values = self._weight_file.tensor()
        if values.ndim != 2:
            raise damaged_file(self._weight_file.path, f"its tensor is {values.ndim}-D, not 2-D")
        rows, columns = values.shape
        layer = Embedding(rows, columns, _weight=values)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        self.table = Table.adopt(weight)  # makes no copy: `values` is the mapped memory
        self.table.backing = self
        return layer

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder, so that another process can open it.

        Changes since the last save are lost. Do not use the table after you close the store.
        """
        self._is_open = False
        self._lock.release()

    # --- The optimizer state ---------------------------------------------------------------------

    def create_slot(self, name: str, initial: float) -> Tensor:
        """Create a (V, D) state tensor for the optimizer, filled with this initial value."""
        if name in self._state_files:
            raise HotrowError(
                f"{self.folder} already has the state {name!r} of another optimizer",
                fix="use one optimizer; to switch optimizers, save and reopen the folder first",
            )
        shape, dtype = self._weight_file.shape, self._weight_file.dtype
        values: RowBlocks = ()
        if initial:
            values = _filled_blocks(shape, dtype, lambda block: block.fill_(initial))
        return self._state_tensor(name, shape, dtype, values)

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """Return a (V, D) state tensor for the optimizer, with these values."""
        slot = self._state_tensor(name, self._weight_file.shape, self._weight_file.dtype, ())
        if slot.data_ptr() != values.data_ptr():
            slot.copy_(values)
        return slot

    def row_steps(self) -> Tensor:
        """Return (V,) int32 zeros, which the optimizer uses to count the steps of each row."""
        exists = "last" in self._state_files
        values = self._state_tensor("last", self._weight_file.shape[:1], torch.int32, ())
        return values.zero_() if exists else values

    def _state_tensor(
        self, name: str, shape: tuple[int, ...], dtype: torch.dtype, values: RowBlocks
    ) -> Tensor:
        path = self.folder / f"{name}.safetensors"
        if name not in self._state_files:
            if not (self._resuming and name in self._run["files"]):
                write_new(path, name, shape, dtype, values)
            elif not path.exists():
                raise damaged_file(path, "it is missing")
            file = MappedTensor(path)
            if (file.shape, file.dtype) != (tuple(shape), dtype):
                found = f"{_format_shape(file.shape)} {file.dtype}"
                raise damaged_file(path, f"it contains {found}, not {_format_shape(shape)} {dtype}")
            self._state_files[name] = file
        return self._state_files[name].tensor()

    # --- Saving ----------------------------------------------------------------------------------

    def save(self, rest: Any = None) -> None:
        """Write all changes to the files atomically.

        Args:
            rest: other data to save in the same transaction, such as the state dicts of the dense
                part of the model. It replaces the `rest` of the last save. `torch.save` must be
                able to write it, and `torch.load(weights_only=True)` must be able to read it.

        Raises:
            HotrowError: the disk is full, a write fails, the store is closed, the table no longer
                uses the memory-mapped files, or `torch.load` cannot read `rest`. After an error,
                the folder contains either the previous save or this one, and the changes are
                still in memory.

        Cost: the changed pages and `rest` are written twice, because of the journal.
        """
        self._check_can_save()
        writes = self._writes(json.dumps(self._describe_run()).encode(), serialize_rest(rest))
        commit(self.folder, writes)
        for file in (self._weight_file, *self._state_files.values()):
            file.discard_pages()
        self._run, self.rest = read_run(self.folder), rest

    def _check_can_save(self) -> None:
        if not self._is_open:
            raise HotrowError(
                f"{self.folder} is closed, and another process may have opened it",
                fix="call save before close, or open the folder again",
            )
        if self._process != os.getpid():
            raise HotrowError(
                f"{self.folder} was opened before this process was forked",
                fix="save in the process that opened it",
            )
        weight, mapped = self.layer.weight, self._weight_file.tensor()
        current = weight.raw_data if isinstance(weight, Table) else weight
        is_mapped = current.data_ptr() == mapped.data_ptr() and current.dtype == mapped.dtype
        if not is_mapped or current.shape != mapped.shape:
            raise HotrowError(
                f"the table in {self.folder} no longer uses its memory-mapped files, for example "
                "after layer.double() or an assignment to weight.data",
                fix="copy the values into the original table: weight.copy_(...) in torch.no_grad()",
            )

    def _writes(self, run: bytes, rest: bytes) -> Iterator[FileWrite]:
        for file in (self._weight_file, *self._state_files.values()):
            for number in file.written_pages().tolist():
                yield file.path.name, number * PAGE, file.page(number).data
        yield RUN_FILE, WHOLE_FILE, run
        yield REST_FILE, WHOLE_FILE, rest

    def _describe_run(self) -> Run:
        """Describe the training run: the steps that rows may have missed, and the options."""
        lag = self.table.lag
        if not isinstance(lag, RowLag):
            if self._state_files:
                raise HotrowError(
                    "the optimizer state cannot be saved, because the optimizer has settled all "
                    "rows and closed its ledger, for example in state_dict()",
                    fix="run an optimizer step before you save",
                )
            return {}
        ledger = lag.ledger
        return {
            "rule": ledger.rule.name,
            "group": lag.group_options,
            "files": ["last", *lag.slots],
            "start": ledger.start_step,
            "carried": ledger.scalar_state,
            "still": ledger.idle_rows_unchanged,
            "settled": lag.settled_steps,
            "behind": lag.has_stale_rows,
            "entries": ledger.entries().tolist(),
        }

    def _resume(self) -> None:
        """Restore the `RowLag` that was saved with the table."""
        run = self._run
        group: ParamGroup = {
            key: tuple(value) if isinstance(value, list) else value
            for key, value in run["group"].items()
        }
        self._resuming = True
        lag = RowLag(_rules_by_name()[run["rule"]], self.table, group, RowState())
        self._resuming = False
        lag.ledger = _restore_ledger(lag.ledger, group, run)
        lag.settled_steps = run["settled"]
        lag.write_scalars(lag.ledger.torch_scalars(group))
        self.table.lag = lag


@contextmanager
def _wrap_open_errors(folder: Path) -> Iterator[None]:
    """Convert errors from opening a folder to HotrowErrors."""
    try:
        yield
    except Timeout:
        raise HotrowError(
            f"{folder} is already open, in this process or another one",
            fix="close it first, or use a copy of the folder",
        ) from None
    except OSError as error:
        raise HotrowError(
            f"{folder} could not be opened ({error})",
            fix="free disk space or check the permissions, and open it again; nothing is lost",
        ) from None
    except (KeyError, TypeError, AttributeError) as error:  # raised for a damaged run file
        raise damaged_file(folder / RUN_FILE, error_summary(error)) from None


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _restore_ledger(new_ledger: Ledger, group: ParamGroup, run: Run) -> Ledger:
    """Return a ledger with the saved entries and scalars."""
    ledger = Ledger(new_ledger.rule, group, start_step=run["start"])
    for entry in run["entries"]:
        ledger.append(tuple(entry))
    ledger.scalar_state, ledger.idle_rows_unchanged = run["carried"], run["still"]
    return ledger


def _rules_by_name() -> dict[str, Rule]:
    return {rule.name: rule for rule in (getattr(optim, name).rule for name in optim.__all__)}


def _filled_blocks(
    shape: tuple[int, ...], dtype: torch.dtype, fill: Callable[[Tensor], object]
) -> Iterator[Tensor]:
    """Yield blocks of rows in order, with the values that `fill` writes."""
    rows, columns = shape
    block_rows = max(1, BLOCK_VALUES // columns)
    for begin in range(0, rows, block_rows):
        block = torch.empty(min(block_rows, rows - begin), columns, dtype=dtype)
        fill(block)
        yield block
