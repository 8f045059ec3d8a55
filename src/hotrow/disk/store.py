"""A folder with one table, the state of its optimizer and its ledger."""

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

BLOCK_VALUES = 1 << 22  # values in one write into a new file


def create(
    path: str | Path,
    rows: int,
    columns: int,
    *,
    dtype: torch.dtype = torch.float32,
    fill: Callable[[Tensor], object] | None = None,
) -> Store:
    """Make a folder with a table of zeros, or of what `fill` writes, and open it.

    Args:
        path: of the folder; there is none yet.
        rows: V.
        columns: D.
        dtype: float32 or float64.
        fill: gets some rows at a time and writes into them, as `torch.nn.init.normal_` does.

    Raises:
        HotrowError: the folder exists; another dtype; no rows or columns; a full disk.

    Cost: nothing for zeros, of which the file system stores none; else the table is written once.

    >>> import tempfile
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     with create(folder + "/users", 1_000_000, 16) as store:
    ...         optimizer = optim.Adam(store.layer.parameters())
    ...         store.layer(torch.tensor([3, 999_999])).sum().backward()
    ...         optimizer.step()
    ...         store.save()
    ...     with open(folder + "/users") as store:
    ...         round(store.layer.weight[3, 0].item(), 4)
    -0.001
    """
    folder = Path(path)
    if dtype not in (torch.float32, torch.float64):
        raise HotrowError(f"dtype is {dtype}, but a table in files is float32 or float64")
    if not (isinstance(rows, int) and isinstance(columns, int)):
        raise HotrowError(f"rows and columns are {rows} and {columns}", fix="give integers")
    if rows < 1 or columns < 1:
        raise HotrowError(f"a table of {rows} x {columns} has no values", fix="give 1 or more")
    if folder.exists():
        raise HotrowError(f"{folder} exists already", fix="use hotrow.disk.open, or another path")
    new_folder: Path | None = None
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        # A unique name, as another process may be making the same folder.
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
            f"{folder} could not be made ({error})", fix="free some space, or choose another path"
        ) from None
    return Store(folder)


def open(path: str | Path) -> Store:
    """Open the folder of a table, to train it or to read its rows.

    If a save was interrupted after its journal was complete, this replays the journal.

    Raises:
        HotrowError: no such folder, or a damaged one; another process has it open.
    """
    return Store(Path(path))


class Store:
    """An open folder. Its table is trained as any other, by an optimizer of `hotrow.optim`.

    What training writes stays in this process, in pages of 4,096 bytes, until `save` puts it into
    the files; then the memory is free again. So the memory in use follows the rows that were
    touched since the last save. Rows that lag are saved as they are, with what they have missed,
    so that a save costs the written pages and 12 bytes a step for each scalar of the ledger.

    Reading the whole table (`state_dict`, `weight.norm()`) settles every row, as does the
    optimizer's `state_dict()`: that takes the memory, or the time, of all. Close it when done (or
    use `with`).

    Attributes:
        layer: a `hotrow.Embedding` with the table.
        rest: what the last save kept beside the table.
    """

    def __init__(self, folder: Path) -> None:
        if not folder.is_dir():
            raise HotrowError(
                f"there is no folder {folder}", fix="make one with hotrow.disk.create"
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
            raise damaged_file(self._weight_file.path, f"it has {values.ndim} dimensions, not 2")
        rows, columns = values.shape
        layer = Embedding(rows, columns, _weight=values)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        self.table = Table.adopt(weight)  # not copied: `values` shares the memory
        self.table.backing = self
        return layer

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Let others open the folder. What was not saved is lost; the table is not to be used."""
        self._is_open = False
        self._lock.release()

    # --- The optimizer state ---------------------------------------------------------------------

    def create_slot(self, name: str, initial: float) -> Tensor:
        """(V, D), a new state of the table with its initial values, in a file."""
        if name in self._state_files:
            raise HotrowError(
                f"{self.folder} has the state {name!r} of another optimizer",
                fix="keep one optimizer for a table in files; for another, save, and open it again",
            )
        shape, dtype = self._weight_file.shape, self._weight_file.dtype
        values: RowBlocks = ()
        if initial:
            values = _filled_blocks(shape, dtype, lambda block: block.fill_(initial))
        return self._state_tensor(name, shape, dtype, values)

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """(V, D), a state of the table with these values, in a file."""
        slot = self._state_tensor(name, self._weight_file.shape, self._weight_file.dtype, ())
        if slot.data_ptr() != values.data_ptr():
            slot.copy_(values)
        return slot

    def row_steps(self) -> Tensor:
        """(V,) int32, zero: the steps that each row has been through."""
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
                raise damaged_file(
                    path,
                    f"it is {_format_shape(file.shape)} {file.dtype}, not {_format_shape(shape)}",
                )
            self._state_files[name] = file
        return self._state_files[name].tensor()

    # --- Saving ----------------------------------------------------------------------------------

    def save(self, rest: Any = None) -> None:
        """Put all that was written into the files; all or nothing of it, whatever happens.

        Args:
            rest: what else is to be saved in the same moment, in place of what the last save
                kept: what `torch.save` takes and `torch.load(weights_only=True)` reads, such as
                the state dicts of the dense part.

        Raises:
            HotrowError: the disk is full or fails; the store is closed; the table has left the
                files' memory; `rest` could not be read again. The folder holds the save before or
                this one, and what was trained is still in memory.
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
                f"{self.folder} is closed, and another may have opened it",
                fix="save before it is closed",
            )
        if self._process != os.getpid():
            raise HotrowError(
                f"{self.folder} was opened by the process that this one was forked from",
                fix="save there",
            )
        weight, mapped = self.layer.weight, self._weight_file.tensor()
        current = weight.raw_data if isinstance(weight, Table) else weight
        is_mapped = current.data_ptr() == mapped.data_ptr() and current.dtype == mapped.dtype
        if not is_mapped or current.shape != mapped.shape:
            raise HotrowError(
                f"the table of {self.folder} is no longer in the memory of its files, as after "
                "layer.double(), or an assignment of weight.data",
                fix="copy the values into the table that was opened: weight.copy_(...) in no_grad",
            )

    def _writes(self, run: bytes, rest: bytes) -> Iterator[FileWrite]:
        for file in (self._weight_file, *self._state_files.values()):
            for number in file.written_pages().tolist():
                yield file.path.name, number * PAGE, file.page(number).data
        yield RUN_FILE, WHOLE_FILE, run
        yield REST_FILE, WHOLE_FILE, rest

    def _describe_run(self) -> Run:
        """The run so far: the steps that rows may have missed, and their options."""
        lag = self.table.lag
        if not isinstance(lag, RowLag):
            if self._state_files:
                raise HotrowError(
                    "the table's rows have settled and its optimizer has let go of it, as after "
                    "state_dict()",
                    fix="make a step before the save",
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
        """Give the table the lag that it was saved with."""
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
        lag.write_scalars(group)
        self.table.lag = lag


@contextmanager
def _wrap_open_errors(folder: Path) -> Iterator[None]:
    """Turn the errors of opening a folder into HotrowErrors with a fix."""
    try:
        yield
    except Timeout:
        raise HotrowError(
            f"{folder} is open already, in this process or another",
            fix="close it there, or work on a copy of the folder",
        ) from None
    except OSError as error:
        raise HotrowError(
            f"{folder} could not be opened ({error})",
            fix="free some space or see to its permissions, and open it again; nothing is lost",
        ) from None
    except (KeyError, TypeError, AttributeError) as error:  # of a damaged run file
        raise damaged_file(folder / RUN_FILE, error_summary(error)) from None


def _format_shape(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape))


def _restore_ledger(new_ledger: Ledger, group: ParamGroup, run: Run) -> Ledger:
    """The ledger that was saved."""
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
    """Blocks of rows of a tensor, filled in order."""
    rows, columns = shape
    block_rows = max(1, BLOCK_VALUES // columns)
    for begin in range(0, rows, block_rows):
        block = torch.empty(min(block_rows, rows - begin), columns, dtype=dtype)
        fill(block)
        yield block
