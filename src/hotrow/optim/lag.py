"""`RowLag`, which tracks the steps that each row of a table has missed.

A `RowLag` connects a table to its optimizer. The optimizer's step calls `step.step_together`; reads
of the table and of its state call `settle`, `look_up` or `peek`.
"""

from __future__ import annotations

import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, NoReturn, TypeVar

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels import devices
from hotrow.kernels.batch import DistinctIds, GroupedGradients
from hotrow.kernels.program import FROZEN
from hotrow.optim import exclusive_access
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.ledger import Ledger
from hotrow.optim.loading import check_scalars
from hotrow.optim.rule import BEGUN_KEY, ParamGroup, Rule, ScalarState, scalar_dtype
from hotrow.optim.state import RowState
from hotrow.optim.updater import RowUpdater
from hotrow.table.autograd import StorageUses, overlaps_itself, storage_use_count
from hotrow.table.parameter import Table
from hotrow.table.protocols import ChangedFiles
from hotrow.table.reading import raise_earlier_error, raise_pending_error
from hotrow.table.row_change import RowChange
from hotrow.table.stack import caller_stack_level

_T = TypeVar("_T")

ALIAS_WARNING_STEPS = 10  # warn after this many consecutive steps with a live alias
MAX_LEDGER_ENTRIES = 1 << 16  # after this many steps, settle all rows and start a new ledger


class Run(NamedTuple):
    """What is needed to create a lag again."""

    rule: Rule
    group: ParamGroup
    state: RowState

    def reopen(self, table: Table) -> None:
        """Create the lag again."""
        table.lag = RowLag(self.rule, table, self.group, self.state)


class Replaced(NamedTuple):
    """What a lag has replaced: the last run of a table on disk, and the files of its state."""

    run: Run | None
    was_open: bool
    files: object
    had_state: bool  # whether the lag continues from earlier state of its optimizer

    @staticmethod
    def by_new_lag(table: Table, state: Mapping[str, Any]) -> Replaced:
        """Return what a new lag of this table with this state would replace."""
        if table.backing is None:
            return Replaced(None, False, None, bool(state))
        was_open = isinstance(table.lag, RowLag)
        return Replaced(last_run(table), was_open, table.backing.state_files.used, bool(state))

    def reopen(self, table: Table) -> None:
        """Create the earlier lag again, if it was open."""
        if self.was_open and self.run is not None:
            self.run.reopen(table)


class RowLag:
    """The ledger, the optimizer state and the row step counts of one table.

    `state` has torch's format, and only its stale rows differ from torch's values. The state's
    tensors and the slots have the table's shape. Their (V, D) views exist only during an operation.
    """

    def __init__(
        self,
        rule: Rule,
        table: Table,
        group: ParamGroup,
        state: RowState,
    ) -> None:
        self._table, self._state = weakref.ref(table), weakref.ref(state)
        self.replaced: Replaced | None = None  # set until the first step of this lag
        self.group_options = {key: value for key, value in group.items() if key != "params"}
        self.values = table.raw_data
        # Unlike `RowState`, dict's own method doesn't trim the spare memory of the tensors.
        loaded = {name: dict.__getitem__(state, name) for name in state}
        initial_slots = rule.initial_slots(group)
        start_step = 0
        if rule.has_step_count and loaded:
            if "step" not in loaded:
                raise _missing("step", f"it has {next(iter(loaded))!r}")
            check_scalars(loaded, ("step", *rule.initial_scalars(group, {})))
            start_step = int(loaded["step"])
        # The ledger must not refer to the slots, but SGD's rule checks whether they exist.
        scalars = {
            name: True if name in initial_slots else value
            for name, value in loaded.items()
            if value is not None
        }
        self.ledger = Ledger(rule, group, start_step=start_step, state=scalars)
        self.ledger.next_entry(group)  # raises an error if the options are invalid
        self._check_memory([loaded[name] for name in initial_slots if loaded.get(name) is not None])
        self.slots: dict[str, Tensor] = {}
        for name, initial in initial_slots.items():
            self.slots[name] = self._make_slot(name, initial, loaded.get(name)).detach()
        # The scalars in torch's state. Each step updates them in place, as torch does.
        self.scalar_tensors: dict[str, Tensor] = {
            name: loaded.get(name, torch.tensor(value, dtype=scalar_dtype(), device="cpu"))
            for name, value in self.ledger.torch_scalars(group).items()
        }
        self._scalar_marks = {name: _mark(scalar) for name, scalar in self.scalar_tensors.items()}
        self.tensors = [self.values, *self.slots.values()]
        self._by_columns, count = table.columns, len(table.raw_rows)
        if table.backing is None:
            self.row_steps = torch.zeros(count, dtype=torch.int32, device=self.values.device)
        else:
            self.row_steps = table.backing.state_files.row_steps()
        if table.frozen_rows is not None:
            self.row_steps[table.frozen_rows] = FROZEN
        self.settled_steps = 0  # the number of ledger entries already applied to all rows
        self.is_busy = False  # whether an operation on rows is running
        self.is_broken = False  # whether an error has interrupted an operation halfway
        self.is_closed = False
        # Whether other code may have written to the table or its state since the last step.
        self.was_written = bool(loaded)
        self._updater: RowUpdater | None = None
        self._addresses: list[int] = []
        self._expected_uses: list[tuple[StorageUses, int]] = []
        self.captured: object = None  # what a CUDA graph uses; see `graphs.py`
        self._is_on_gpu = devices.is_on_gpu(self.values)
        if self._is_on_gpu:
            self.ledger.allow_undo()
        self.alias_steps = 0  # the number of consecutive steps with a live alias so far
        self.must_warn = False  # whether to call `warn_about_alias`
        dict.update(state, loaded, **self.scalar_tensors, **self.slots)  # in torch's order
        state.lag = self
        if table.backing is not None:
            table.backing.state_files.last_run = self.run  # keeps the state for the next save

    @property
    def state(self) -> RowState:
        """The state in `optimizer.state`, or an empty state if it no longer exists."""
        state = self._state()
        return RowState() if state is None else state

    @property
    def run(self) -> Run:
        """What is needed to create this lag again once it is closed."""
        return Run(self.ledger.rule, self.group_options, self.state)

    @property
    def table(self) -> Table:
        """The table that uses this lag."""
        table = self._table()
        assert table is not None
        return table

    def _make_slot(self, name: str, initial: float, loaded: Tensor | None) -> Tensor:
        """Return the loaded slot or a new slot, which is on disk if the table is on disk."""
        backing = self.table.backing
        if loaded is not None:
            self._check_slot(name, loaded)
            return loaded if backing is None else backing.state_files.store_slot(name, loaded)
        if self.ledger.rule.has_step_count and self.state:
            raise _missing(name, f"its step count is {self.ledger.start_step}")
        if backing is None:
            return torch.full_like(self.values, initial)
        return backing.state_files.create_slot(name, initial)

    def _check_slot(self, name: str, slot: Tensor) -> None:
        for prop, actual, expected in (
            ("shape", tuple(slot.shape), tuple(self.values.shape)),
            ("dtype", slot.dtype, self.values.dtype),
            ("device", slot.device, self.values.device),
        ):
            if actual != expected:
                raise HotrowError(
                    f"the optimizer state {name!r} has {prop} {actual}, but the table has {prop} "
                    f"{expected}",
                    fix="create a new optimizer after you move or cast a table; to resize a table, "
                    "use hotrow.vocabulary.resize",
                )
        if overlaps_itself(slot):
            raise HotrowError(
                f"several entries of the optimizer state {name!r} of a {tuple(slot.shape)} table "
                "share memory, for example after expand()",
                fix="assign a copy of the tensor to optimizer.state[weight] (.clone())",
            )

    def _check_memory(self, slots: Sequence[Tensor]) -> None:
        """Raise an error if two loaded slots, or a slot and the table, are the same memory."""
        pointers = [each.data_ptr() for each in (self.values, *slots) if each.numel()]
        if len(set(pointers)) < len(pointers) and not self.values.is_meta:
            raise HotrowError(
                f"two state tensors of a {tuple(self.values.shape)} table, or one of them and the "
                "table, share memory",
                fix="assign a copy of the tensor to optimizer.state[weight] (.clone())",
            )

    def _row_views(self) -> tuple[Tensor, list[Tensor]]:
        """Return (V, D) views of the table and its slots; a stored view would count as an alias."""
        tensors = self.tensors
        if self._by_columns:
            tensors = [tensor.t() for tensor in tensors]
        return tensors[0], tensors[1:]

    def rows(self) -> RowUpdater:
        """Return the updater of the rows; recreate it if their memory or the ledger has changed."""
        addresses = list(map(Tensor.data_ptr, self.tensors))
        updater = self._updater
        if updater is None or updater.ledger is not self.ledger or addresses != self._addresses:
            updater = RowUpdater(self.ledger, *self._row_views(), self.row_steps)
            # 3 uses of the table's storage are expected: the table, `values` and the updater. A
            # slot has only 2.
            slots = [(StorageUses(slot), 2) for slot in self.slots.values()]
            self._expected_uses = [(StorageUses(self.values), 3), *slots]
            self._updater, self.captured = updater, None
            self._addresses = addresses  # set this last: a signal handler may raise an error
        return updater

    def drop_updater(self) -> None:
        """Drop all references to the memory of the table and its slots, except `tensors`."""
        self._updater, self._expected_uses, self.captured = None, [], None

    @property
    def is_shared(self) -> bool:
        """Return whether anything else refers to the table's storage."""
        if self._expected_uses:
            uses, expected = self._expected_uses[0]
            return uses.count() > expected
        return storage_use_count(self.values) > 2  # the table and `values`

    @property
    def has_stale_rows(self) -> bool:
        """Return whether any row may have missed a step that would have changed it."""
        if self.is_broken:
            return True  # so that every read settles the rows, which raises an error
        return self.settled_steps < self.ledger.length and not self.ledger.idle_rows_unchanged

    def accepts(self, group: ParamGroup) -> bool:
        """Check the table's storage, and return whether the ledger can record the next step."""
        if self.is_broken:
            self._raise_broken()
        return (
            self._has_same_storage()
            and self.ledger.accepts(group)
            and self.ledger.length < MAX_LEDGER_ENTRIES
            and not self.scalars_changed()
        )

    def _has_same_storage(self) -> bool:
        """Return whether the table's storage was not replaced, for example by `set_`.

        Raises:
            HotrowError: the storage was replaced while rows were stale.
        """
        with torch._C.DisableTorchFunctionSubclass():
            is_same = self.table.is_set_to(self.values)
        if not is_same and self.has_stale_rows:
            raise HotrowError(
                "the table's storage was replaced while some of its rows were stale",
                fix="write the values with table.data.copy_(...), or create a new optimizer",
            )
        return is_same

    def scalars_changed(self) -> bool:
        """Return whether the user changed the step count or another scalar in torch's state."""
        return any(_mark(s) != self._scalar_marks[name] for name, s in self.scalar_tensors.items())

    def _raise_broken(self) -> NoReturn:
        raise HotrowError(
            f"an error has interrupted a step or a read of a {tuple(self.values.shape)} table "
            "after some of its rows had changed",
            fix="build the model and the optimizer again, and load the last checkpoint",
        )

    def check_idle(self) -> None:
        """Raise an error if an operation on rows is running, or was interrupted."""
        if self.is_broken:
            self._raise_broken()
        if self.is_busy:
            raise HotrowError(
                "a table was read during its own step, for example by a signal handler",
                fix="set a flag in the handler, and read the table after optimizer.step()",
            )

    def has_row_at(self, step: int) -> bool:
        """Return whether any row has taken this step, counted from the start of the ledger."""
        return bool((self.row_steps == step).any())

    def settle(self, rows: Tensor | None) -> None:
        """Apply every missed step to the distinct `rows`, or to all rows if `rows` is None."""
        self.raise_earlier_error()
        with ExclusiveAccess(self):
            if self._has_no_steps():
                return
            step_count = self.ledger.length
            self._run(lambda updater: updater.settle(rows))
            if rows is None:
                self.settled_steps = step_count

    def _has_no_steps(self) -> bool:
        """Return whether another thread has settled all rows, and closed or replaced a lag."""
        return self.is_closed or not self.ledger.length

    def look_up(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by `ids`, (..., D). The next step will update them.

        `RowOperators.look_up` describes which rows are stored.
        """
        if not self._has_same_storage():
            self.close()
        with exclusive_access.lock:
            self.check_idle()
            if self._has_no_steps():
                return self._read(ids)
            updater = self.rows()
            if updater.looks_up_atomically:  # postponing signals would take 4 us
                return updater.look_up(ids)
        with ExclusiveAccess(self):
            if self._has_no_steps():
                return self._read(ids)
            return self._run(lambda updater: updater.look_up(ids))

    def _run(self, operation: Callable[[RowUpdater], _T]) -> _T:
        """Run an operation on rows, and remember if an error may have stopped it halfway."""
        updater = self.rows()
        try:
            return operation(updater)
        except BaseException:
            self.is_broken = updater.can_stop_halfway
            raise

    def raise_earlier_error(self) -> None:
        """Raise the error from an earlier lookup on the table's GPU; see `raise_bad_id`."""
        if self._is_on_gpu:
            raise_earlier_error(self.values.device)

    def raise_pending_error(self) -> None:
        """Wait for the table's GPU, and raise the error of an earlier lookup."""
        raise_pending_error(self.values)

    def undo_stopped_steps(self) -> None:
        """Undo the steps that the device did not run because an id was out of range."""
        self.ledger.undo_stopped_steps()
        self.drop_updater()  # so that no graph uses the old ledger
        self.settled_steps = min(self.settled_steps, self.ledger.length)
        self.write_scalars(self.ledger.torch_scalars(self.group_options))

    def peek(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by `ids`, (..., D), without storing them."""
        if not self._has_same_storage():
            self.close()
        with ExclusiveAccess(self):
            if self._has_no_steps():
                return self._read(ids)
            table, slots = self._row_views()
            rows, *row_slots = (tensor[ids.rows] for tensor in (table, *slots))
            indices = torch.arange(len(ids.rows), device=rows.device)
            RowUpdater(self.ledger, rows, row_slots, self.row_steps[ids.rows]).settle(indices)
        return rows[ids.inverse]

    def _read(self, ids: DistinctIds) -> Tensor:
        """Return rows that another thread has settled, (..., D)."""
        return self.table.raw_rows[ids.rows][ids.inverse]

    def cast_scalars(self, dtype: torch.dtype) -> None:
        """Cast the scalars in torch's state, except the step count."""
        for name, scalar in self.scalar_tensors.items():
            if name != "step":
                scalar.data = scalar.to(dtype)

    def write_scalars(self, scalars: ScalarState) -> None:
        """Set the scalars in torch's state."""
        for name, value in scalars.items():
            self._scalar_marks[name] = _mark(self.scalar_tensors[name].fill_(value))

    def has_alias(self) -> bool:
        """Return whether the storage is shared with a tensor whose reads don't settle rows."""
        has_alias = self.table.was_sent
        for uses, expected in self._expected_uses:
            has_alias |= uses.count() > expected
        self.alias_steps = self.alias_steps + 1 if has_alias else 0
        self.must_warn |= self.alias_steps == ALIAS_WARNING_STEPS
        return has_alias

    def warn_about_alias(self) -> None:
        """Warn that steps of this table are slow because a tensor shares its storage.

        Call this method at the end of a step, because a warning filter may raise an error.
        """
        self.must_warn = False
        warnings.warn(
            "a tensor, such as the result of weight.data, state_dict() or .numpy(), shares the "
            f"storage of a {tuple(self.values.shape)} table or of its optimizer state. To keep "
            "that tensor up to date, every step settles all rows, which is slow. Keep a copy "
            "(.clone()) instead, or delete the tensor",
            stacklevel=caller_stack_level(),
        )

    def change_rows(
        self, change: RowChange, added: Tensor, initial_slots: Mapping[str, float]
    ) -> tuple[Tensor, Callable[[], None]]:
        """Compute the changed rows of the table and of the slots, without settling any row.

        The missed steps of old rows can still be applied later. Added rows have no missed steps.
        `initial_slots` lacks the slots of an option that was set to 0 or False since the last step.

        Returns:
            The new values of the table, and a function that completes the change. Call this
            function once the table has its new values.
        """
        backing = self.table.backing
        if backing is not None:
            self.check_unused_state("change the rows of")
        self.raise_pending_error()
        unused = self.unused_state()
        with ExclusiveAccess(self):
            self.drop_updater()  # its references would count as aliases
            files = None if backing is None else backing.change_rows(change)
            # 2 uses of the table's storage are expected: `values` and the table. A slot has only 1.
            values = self._change_tensor(change, files, self.values, added, 2)
            new_slots = {
                name: self._change_tensor(change, files, slot, initial_slots.get(name, 0.0), 1)
                for name, slot in self.slots.items()
            }
            new_unused = {
                name: self._change_tensor(change, None, value, 0.0, 1)
                for name, value in unused.items()
            }
            if files is None:
                row_steps = change.apply(self.row_steps, self.ledger.length, extend=True)
            else:
                row_steps = files.apply(self.row_steps, self.ledger.length, 1)

        def complete() -> None:
            self.values, self.slots, self.row_steps = self.table.raw_data, new_slots, row_steps
            self.tensors = [self.values, *new_slots.values()]
            dict.update(self.state, new_slots, **new_unused)
            if files is not None:
                files.complete()

        return values, complete

    def unused_state(self) -> dict[str, Tensor]:
        """Return the state tensors with a row for each row, which the options don't use now."""
        return {
            name: value
            for name, value in dict.items(self.state)
            if isinstance(value, Tensor)
            and value.shape == self.values.shape
            and name not in self.slots
        }

    def check_unused_state(self, action: str) -> None:
        """Raise an error if a table on disk has state tensors that the options don't use now."""
        for name in self.unused_state():
            raise HotrowError(
                f"hotrow cannot {action} a table on disk with the optimizer state {name!r}, which "
                "the options of the optimizer don't use any more",
                fix=f"del optimizer.state[weight][{name!r}], or set the options back; then run a "
                "step",
            )

    def freeze(self, rows: Tensor) -> None:
        """Settle and freeze the distinct `rows`, so that later steps don't change them."""
        self.settle(rows)
        self.row_steps[rows] = FROZEN

    def unfreeze(self, rows: Tensor) -> None:
        """Unfreeze these rows, so that later steps change them again."""
        self.raise_pending_error()
        self.row_steps[rows] = self.ledger.length
        self.was_written = True  # `finish_write` leaves frozen rows alone

    def _change_tensor(
        self,
        change: RowChange,
        files: ChangedFiles | None,
        tensor: Tensor,
        added: float | Tensor,
        expected_uses: int,
    ) -> Tensor:
        """Return the changed rows of the table or of a slot; aliases keep the old rows."""
        if files is not None:
            return files.apply(tensor, added, expected_uses)
        return change.apply_to(
            tensor,
            added,
            columns=self._by_columns,
            extend=storage_use_count(tensor) <= expected_uses,
        )

    def settle_all(self) -> None:
        """Settle all rows, so that the state equals torch's."""
        table = self._table()
        if table is not None:
            table.check_files()
        if self.has_stale_rows:
            self.settle(None)

    def finish_write(self) -> None:
        """After a step, make the weights NaN that torch makes NaN, if the step skips idle rows.

        torch divides 0 by the root of a slot, which is NaN if the slot is NaN or negative. Steps
        leave NaN in such a row themselves, so this is needed only after other code has written to
        the table or to the state.
        """
        if self.ledger.idle_rows_unchanged:
            self.table.check_files()
            rows, slots = self._row_views()
            for slot in slots:
                becomes_nan = ~(slot >= 0) & (self.row_steps != FROZEN)[:, None]
                rows.masked_fill_(becomes_nan, torch.nan)
        self.was_written = False

    def discard(self) -> bool:
        """Remove this lag, because its first step has failed, and reopen the one before.

        Returns:
            Whether its state was new, and has been emptied.
        """
        table, replaced = self.table, self.replaced
        assert replaced is not None
        self._detach()
        if not replaced.had_state:
            self.state.clear()
        if table.backing is not None:
            # A state that existed before uses the newest files.
            files = table.backing.state_files.used if replaced.had_state else replaced.files
            table.backing.state_files.discard(files, replaced.run)
        replaced.reopen(table)
        return not replaced.had_state

    def close(self) -> None:
        """Settle all rows, then detach this lag from the table and the state."""
        with ExclusiveAccess():  # no other thread may take a step in between
            if self.is_closed:
                return
            self.settle_all()
            # A closed lag can't undo stopped steps. The wait also lets its memory be freed.
            self.raise_pending_error()
            self._detach()

    def is_unset(self, name: str) -> bool:
        """Return whether a slot is None in torch, because there was no step yet."""
        return name in self.slots and not self.ledger.scalars(self.group_options).get(BEGUN_KEY, 1)

    def _detach(self) -> None:
        # Make all calls that can fail first, so that no error leaves the lag half attached.
        # The next lag must not take the slots for the results of a step.
        unset = {name: None for name in self.slots if self.is_unset(name)}
        table, run = self._table(), self.run
        self.drop_updater()  # its references would count as aliases
        if table is not None and table.lag is self:
            table.lag = None
            if table.backing is not None:
                table.backing.state_files.last_run = run
        self.is_closed = True
        self.ledger.table_count -= 1
        self.state.lag = None
        dict.update(self.state, unset)


def last_run(table: Table) -> Run | None:
    """Return the run of a table's lag, or of the last lag of a table on disk."""
    if isinstance(table.lag, RowLag):
        return table.lag.run
    run = None if table.backing is None else table.backing.state_files.last_run
    return run if isinstance(run, Run) else None


def _missing(name: str, but: str) -> HotrowError:
    return HotrowError(
        f"the optimizer state has no {name!r}, but {but}",
        fix="load a complete state, saved by an optimizer with the same options; if the table is "
        "on disk, call optimizer.state_dict() before you change its saved state",
    )


def _mark(scalar: Tensor) -> float:
    """Return a number that changes whenever a scalar in torch's state changes.

    On the CPU, this number is the scalar's value. Reading a value from a GPU would make the CPU
    wait, so on a GPU, the number is the tensor's version counter.
    """
    return float(scalar) if devices.is_on_cpu(scalar) else scalar._version


def finish_step(lags: Sequence[RowLag]) -> None:
    """Tell autograd that the tables have changed, and settle the tables that have aliases."""
    torch.autograd.graph.increment_version(
        [tensor for lag in lags for tensor in (lag.table, *lag.tensors[1:])]
    )
    for lag in lags:
        if lag.was_written:
            lag.finish_write()
        if lag.has_stale_rows and lag.has_alias():
            lag.settle_all()


# One table's part of a step: its lag, the options and the gradients.
TableStep = tuple[RowLag, ParamGroup, GroupedGradients]
