"""A folder with one table, its optimizer state and its ledger.

An open `Store` is the `backing` of its table. The optimizer creates its state in the folder's
files. A save includes the ledger, so stale rows don't need to be settled first. The number of rows
can change between saves; see `mapped_file`.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Self

import numpy as np
from torch import Tensor, nn

from hotrow.disk.access import FileAccess
from hotrow.disk.folder import Folder, damaged_file, fix_for, reason_for
from hotrow.disk.journal import WHOLE_FILE, FileWrite, commit, replay_journal
from hotrow.disk.layout import check_file
from hotrow.disk.mapped_tensor import MappedTensor
from hotrow.disk.record import (
    RECORD_FILE,
    STEPS,
    TABLE,
    Record,
    new_name,
    parse_saved_record,
    read_record,
)
from hotrow.disk.resized_files import ResizedFiles
from hotrow.disk.rest import REST_FILE, describe_rest, read_rest, serialize_rest
from hotrow.disk.run import describe_run, find_saved_run
from hotrow.disk.state_files import StateFiles
from hotrow.errors import HotrowError
from hotrow.layers import Embedding
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.interrupts import PostponedSignals
from hotrow.optim.lag import RowLag, last_run
from hotrow.optim.optimizer import RowOptimizer
from hotrow.table.autograd import leave_inference_mode
from hotrow.table.parameter import Table, all_tables
from hotrow.table.row_change import RowChange


def open(path: str | Path, *, verify: bool = True) -> Store:
    """Open a table's folder to train the table or to read its rows.

    If a crash interrupted a save after its journal was complete, `open` first finishes the save.

    Args:
        path: a folder that `create` created.
        verify: whether to compare each page of the files with its checksum before the page is first
            used.

    Returns:
        The open store. To continue training, create an optimizer of the same class with the same
        options. At its first step, the optimizer continues from the saved state, and so does every
        later optimizer of this class, even before the next `open`. But if an optimizer of another
        class takes a step first, the saved state is dropped without a warning.

    Raises:
        HotrowError: the folder does not exist, a file of the last save is missing, damaged or part
            of another save, or the folder is already open, in this or another process. In these
            cases, no file changes. If a page does not match its checksum, the operation that first
            uses the page raises the error.

    Cost: `open` reads no rows. After an interrupted save, `open` applies the journal once. With
    `verify`, `open` reads all checksums, 4 bytes for each page of 4,096 bytes. Each page is read
    and checked before its first use, which takes a few microseconds.

    >>> import tempfile, hotrow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hotrow.disk.create(folder + "/users", 1000, 4).close()
    ...     with hotrow.disk.open(folder + "/users") as store:
    ...         store.layer
    Embedding(1000, 4)
    """
    return Store(Path(path), verify=verify)


def verify(path: str | Path) -> int:
    """Compare all files of a table's folder with their checksums.

    Like `open`, `verify` first finishes a save that a crash interrupted.

    Args:
        path: a folder that `create` created. It must not be open.

    Returns:
        The number of bytes of the table and of its optimizer state.

    Raises:
        HotrowError: `open` could not open the folder, or rows do not match their checksum. The
            message names the file and the rows.

    Cost: `verify` reads the files once, but skips the holes of sparse files.

    >>> import tempfile, hotrow
    >>> with tempfile.TemporaryDirectory() as folder:
    ...     hotrow.disk.create(folder + "/users", 1000, 4).close()
    ...     hotrow.disk.verify(folder + "/users")
    16000
    """
    with Store(Path(path)) as store:
        store.check_rows(None)
        return sum(file.layout.value_bytes for file in store.files())


class Store:
    """An open folder with a table; call `create` or `open` to get one.

    Train the table like any other table, with an optimizer from `hotrow.optim`. Use the store in a
    `with` statement, or call `close` when you are done.

    To change the number of rows, use `hotrow.vocabulary`. The next save changes the files.

    Memory: changed pages (4,096 bytes each) and new rows stay in memory until `save` writes them to
    the files and frees them. So memory use grows with the number of rows touched since the last
    save.

    Cost of a save: `save` writes the changed pages, and the ledger with its scalars for each step.
    `save` doesn't settle stale rows, but stores them with the steps that they have missed.

    Threads and signals: a save is a snapshot between two steps. It waits for the step or save of
    another thread, and other threads' steps, lookups and saves wait for it. Signal handlers run
    after the save. During a save, no other thread may assign to the table's rows directly.

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

    def __init__(self, folder: Path, *, verify: bool = True) -> None:
        with _wrap_open_errors(folder):
            self._open(Folder(folder), verify)

    @classmethod
    def in_folder(cls, folder: Folder) -> Self:
        """Open the store in a `Folder` that is already open."""
        self = cls.__new__(cls)
        with _wrap_open_errors(folder.path):
            self._open(folder, verify=True)
        return self

    def _open(self, folder: Folder, verify: bool) -> None:
        self.folder, self._folder, self._verify = folder.path, folder, verify
        self._is_open = True
        self._access = FileAccess(self.folder)
        try:
            self._folder.lock()
            replay_journal(self._folder)
            with leave_inference_mode():  # the table may be trained later
                self._load(read_record(self._folder))
        except BaseException:
            self._folder.close()
            raise

    def _load(self, record: Record) -> None:
        """Check all files of a save, then map them and restore the training run."""
        self._session, self._possible_saves = new_name(), {record.save}
        record_path = self.folder / RECORD_FILE
        try:
            run = find_saved_run(record)
        except ValueError as error:
            raise damaged_file(record_path, str(error)) from None
        for layout, _ in record.files().values():
            check_file(self._folder, [(layout, record.save)])
        self.rest = read_rest(self._folder, record.rest)
        files = {
            name: MappedTensor(
                self._folder, layout, run.step_count if run and name == STEPS else None
            )
            for name, layout in record.tensors.items()
        }
        for name, file in files.items():
            if self._verify or name == STEPS:
                file.check_digest()
        self.state_files = StateFiles(
            self._folder, self._session, files, self._access, self._previous_save
        )
        self.layer = self._make_layer()
        self._is_checked = np.zeros(self.layer.num_embeddings, np.bool_)  # for each row
        self._are_all_checked = False  # filling the array would take a byte of memory per row
        if run is not None:
            self.state_files.is_resuming = True
            try:
                run.restore(self.table)
            except ValueError as error:
                raise damaged_file(record_path, str(error)) from None
            self.state_files.is_resuming = False

    def _make_layer(self) -> Embedding:
        values = self.state_files.used[TABLE].tensor()
        rows, columns = values.shape
        layer = Embedding(rows, columns, _weight=values)
        weight = layer.weight
        assert isinstance(weight, nn.Parameter)
        self.table = Table.adopt(weight)  # makes no copy: `values` is the mapped memory
        self.table.backing = self
        return layer

    def files(self) -> list[MappedTensor]:
        """Return the mapped files."""
        return list(self.state_files.used.values())

    def __enter__(self) -> Store:
        return self

    def __exit__(self, *error: object) -> None:
        self.close()

    def close(self) -> None:
        """Release the folder, so that another process can open it.

        Changes since the last save are lost. After the call, reading the table raises an error.

        Other tensors that share the table's memory, such as `weight.detach()` or the values of a
        `state_dict()`, must not be used after the call: they are still mapped to the files, which
        another process may change or shorten. Keep copies (`.clone()`) instead.

        Raises:
            HotrowError: a signal handler calls `close` during a save.
        """
        if not self._folder.is_locked:  # after a fork, the parent process may be saving
            self._is_open = False
            self._folder.close()
            return
        with self._access.exclusive():
            self._is_open = False
            self._folder.close()
            for file in (*self.files(), *self.state_files.new.values()):
                file.close()

    def check_rows(self, rows: Tensor | None) -> None:
        """Check the pages that contain these rows, or all pages, before they are used.

        The last step of each row is always checked, because the kernels use it as an index.

        Raises:
            HotrowError: a page does not match its checksum, or the store is closed or was opened
                before this process was forked.
        """
        # In a forked process, the parent's next save would change some of the pages.
        self._check_owner(
            "read the table before close, or open the folder again",
            "copy the rows that the child needs before the fork",
        )
        if self._are_all_checked:
            return
        numbers = None if rows is None else rows.reshape(-1).long().cpu().numpy()
        if numbers is not None:
            numbers = numbers[~self._is_checked[numbers]]
            if not len(numbers):
                return
        for name, file in self.state_files.used.items():
            if self._verify or name == STEPS:
                file.check_rows(numbers)
        if numbers is None:
            self._are_all_checked = True
        else:
            self._is_checked[numbers] = True

    def change_rows(self, change: RowChange) -> ResizedFiles:
        """Prepare a change in the rows of all files; see `ResizedFiles`.

        Raises:
            HotrowError: the store is closed or was opened in another process, a row that moves does
                not match its checksum, or the disk or the memory is full.
        """
        with self._access.exclusive():
            self._check_owner()
            if change.sources is not None:
                self.check_rows(None)
            return ResizedFiles(self._folder, self.state_files.used, change, self._complete_change)

    def _complete_change(self, files: dict[str, MappedTensor], change: RowChange) -> None:
        self.state_files.replace(files)
        if not self._are_all_checked:
            is_checked = np.ones(change.new_count, np.bool_)  # added rows aren't in the files
            kept = min(change.old_count, change.new_count)
            is_checked[:kept] = self._is_checked[:kept]
            self._is_checked = is_checked

    # --- Saving ----------------------------------------------------------------------------------

    def save(self, rest: Any = None) -> None:
        """Write all changes to the files atomically.

        The optimizer state is that of the optimizer that last took a step or loaded a state. If
        you assign a dict to `optimizer.state[weight]` of an optimizer that has done neither, saves
        contain it only after that optimizer's first step.

        Args:
            rest: other data to save in the same transaction, such as the state dicts of the dense
                part of the model. It replaces the `rest` of the last save. `torch.save` must be
                able to write it, and `torch.load(weights_only=True)` must be able to read it.

        Raises:
            HotrowError: the disk is full, a write fails, the store is closed, the table was cast or
                replaced, the step count was changed in place, the optimizer state was removed or is
                incomplete, another program has replaced files, `disk.open` could not read the save,
                or a signal handler calls `save` during a save or a step. After an error, the folder
                contains either the previous save or this one, and the changes are still in memory.

        Cost: the changed pages and `rest` are written twice, because of the journal.
        """
        self._check_owner()
        with PostponedSignals():  # a handler may call `save`, so it runs after this save
            rest_data = serialize_rest(rest)  # this may read tables
            with ExclusiveAccess():
                self._check_owner()
                self._check_mapping()
                optimizer = self.table.last_optimizer
                if isinstance(optimizer, RowOptimizer):
                    optimizer.prepare_save(self.table)
                self._reopen_lag()
                with self._access.exclusive(self.table):
                    try:
                        self._save(rest, rest_data)
                    except (OSError, MemoryError) as error:
                        raise HotrowError(
                            f"{self.folder} could not be saved ({reason_for(error)})",
                            fix=f"{fix_for(error)} and save again; the folder still contains a "
                            "complete save",
                        ) from None

    def _reopen_lag(self) -> None:
        """Create the lag again if it is closed, for example by an assignment to `weight.data`.

        The initial values of a state depend on the options of its first step, so a state that has
        been emptied can't be saved before.
        """
        run = last_run(self.table)
        if self.table.lag is not None or run is None:
            return
        if run.state or not run.rule.initial_slots(run.group):
            run.reopen(self.table)

    def _save(self, rest: Any, rest_data: bytes) -> None:
        previous = self._previous_save()
        self._copy_moved_tensors()
        record = self._describe_save(previous, rest_data)
        record_data = self._serialize(record)
        files = [self.state_files.used[name] for name in record.tensors]
        layouts = record.files().values()
        for _, old in layouts:
            check_file(self._folder, [(old, save) for save in (record.previous, self._session)])
        for file in files:
            file.check_names(self._folder)
            file.set_saved_rows(record.previous_rows)
        self._possible_saves.add(record.save)

        def complete() -> None:
            # From now on, this is the last save, even if it can be finished only later.
            self.state_files.keep(record.tensors)
            self.rest = rest

        writes = self._writes(record, record_data, rest_data)
        commit(self._folder, [layout for layout, _ in layouts], writes, complete)
        self._possible_saves = {record.save}
        for file in files:
            file.map_saved(self._folder)

    def _check_owner(
        self,
        if_closed: str = "call save before close, or open the folder again",
        if_forked: str = "save in the process that opened it",
    ) -> None:
        """Raise an error with one of these fixes if the store is closed, or after a fork."""
        if not self._is_open:
            raise HotrowError(
                f"{self.folder} is closed, and another process may have opened it", fix=if_closed
            )
        if not self._folder.is_locked:
            raise HotrowError(
                f"{self.folder} was opened before this process was forked", fix=if_forked
            )

    def _check_mapping(self) -> None:
        """Check that a save of the files would contain the table and its optimizer state."""
        current, layout = self.table.raw_data, self.state_files.used[TABLE].layout
        is_like_files = (current.dtype, tuple(current.shape)) == (layout.dtype, layout.shape)
        # Another parameter may share the rows, but the save would lack its optimizer state.
        is_table = self.layer.weight is self.table
        if not (is_table and is_like_files and current.is_cpu):
            raise HotrowError(
                f"the table in {self.folder} no longer uses its memory-mapped files, for example "
                "after layer.double(), an assignment to layer.weight or "
                "layer.load_state_dict(..., assign=True)",
                fix=f"set layer.weight = store.table, and convert it back to {layout.dtype} and "
                f"shape {layout.shape} on the CPU, for example with layer.float()",
            )
        for other in all_tables():
            if other is self.table or not isinstance(other.lag, RowLag):
                continue
            if other.raw_data.data_ptr() == current.data_ptr():
                raise HotrowError(
                    f"a second parameter shares the rows in {self.folder}, and the save would lack "
                    "its optimizer state",
                    fix="train store.layer or its weight, not nn.Parameter(store.layer.weight)",
                )

    def _copy_moved_tensors(self) -> None:
        """Copy the values of tensors that have left the mapped memory to new mapped memory.

        For example, torch moves a tensor to shared memory when it sends the tensor to a process.
        """
        lag, used = self.table.lag, self.state_files.used
        tensors = {TABLE: self.table.raw_data}
        if isinstance(lag, RowLag):
            tensors |= {STEPS: lag.row_steps, **lag.slots}
        moved = {name: used[name].with_values(tensor) for name, tensor in tensors.items()}
        self.state_files.replace({**used, **moved})

    def _previous_save(self) -> Record:
        """Return the record of the last save; finish that save if a full disk interrupted it."""
        self._check_owner()
        if self._folder.is_replaced():
            raise HotrowError(
                f"another folder has replaced {self.folder}, which was moved while it was open",
                fix="move it back and save again, or open the new folder",
            )
        with _wrap_open_errors(self.folder):
            replay_journal(self._folder)
            record = read_record(self._folder)
        if record.save not in self._possible_saves:
            raise HotrowError(
                f"{self.folder} contains another save than the last one of this process, because "
                "another machine has saved or an older copy was restored",
                fix="open the folder again, and let no other program change it while it is open",
            )
        self._possible_saves = {record.save}
        return record

    def _describe_save(self, previous: Record, rest: bytes) -> Record:
        """Return the record of the next save."""
        lag, names, run = self.table.lag, [TABLE], None
        if isinstance(lag, RowLag):
            if lag.scalars_changed():
                raise HotrowError(
                    f"the state of {self.folder} cannot be saved, because the step count or "
                    "another scalar in the optimizer state was changed after the last step",
                    fix="run an optimizer step, or call optimizer.state_dict(), before you save",
                )
            names, run = [TABLE, STEPS, *lag.slots], describe_run(lag)
            lag.check_unused_state("save")
        elif len(self.state_files.used) > 1:
            raise HotrowError(
                "the optimizer state cannot be saved, because it was emptied, for example by "
                "load_state_dict()",
                fix="run an optimizer step before you save",
            )
        return Record(
            save=new_name(),
            previous=previous.save,
            session=self._session,
            previous_rows=previous.rows,
            tensors={name: self.state_files.used[name].layout for name in names},
            rest=describe_rest(rest),
            run=run,
            behind=self.table.has_stale_rows,
        )

    def _serialize(self, record: Record) -> bytes:
        """Serialize a record, and check that `open` can read the result."""
        try:
            data = record.serialize()
            find_saved_run(parse_saved_record(data))
        except (TypeError, ValueError, ArithmeticError, RecursionError) as error:
            raise HotrowError(
                f"{self.folder} cannot be saved, because disk.open could not read the save "
                f"({error})",
                fix="use only numbers, strings and tuples of these as options of the optimizer",
            ) from None
        return data

    def _writes(self, record: Record, record_data: bytes, rest: bytes) -> Iterator[FileWrite]:
        yield RECORD_FILE, WHOLE_FILE, record_data
        yield REST_FILE, WHOLE_FILE, rest
        for name in record.tensors:
            check = self._verify or name == STEPS
            yield from self.state_files.used[name].changes(record.save, check=check)


@contextmanager
def _wrap_open_errors(folder: Path) -> Iterator[None]:
    """Convert errors from opening a folder to HotrowErrors."""
    try:
        yield
    except (OSError, MemoryError) as error:
        raise HotrowError(
            f"{folder} could not be opened ({reason_for(error)})",
            fix=f"{fix_for(error)}, and open it again; nothing is lost",
        ) from None
