"""The interfaces between a table and its optimizer, other processes, and files.

`hotrow.optim`, `hotrow.distributed` and `hotrow.disk` implement these interfaces.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from enum import IntEnum
from typing import Any, NoReturn, Protocol, TypeVar

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels.batch import DistinctIds
from hotrow.table.row_change import RowChange

_Table = TypeVar("_Table", bound=Tensor, contravariant=True)


class StepKind(IntEnum):
    """The rows whose gradients a step uses, from the fewest to all in torch's own step."""

    TOUCHED_ROWS = 0
    ALL_ROWS = 1
    DENSE = 2


class Lag(Protocol):
    """A record of the steps that a table's rows have missed; see `hotrow.optim.lag.RowLag`.

    Attributes:
        was_written: whether other code may have written to the table since the last step.
    """

    was_written: bool

    @property
    def has_stale_rows(self) -> bool:
        """Return whether any row may have missed a step that would have changed it."""

    def settle(self, rows: Tensor | None) -> None:
        """Apply every missed step to the distinct `rows`, or to all rows if `rows` is None."""

    def look_up(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by the ids, (..., D); the next step updates these rows.

        Rows that are fast to settle are not stored; the step settles them again.
        """

    def peek(self, ids: DistinctIds) -> Tensor:
        """Return the settled rows selected by the ids, (..., D), without storing them."""

    def freeze(self, rows: Tensor) -> None:
        """Settle and freeze the distinct `rows`, so that later steps don't change them."""

    def unfreeze(self, rows: Tensor) -> None:
        """Unfreeze these rows, so that later steps change them again."""

    def close(self) -> None:
        """Settle all rows, then detach the lag from the table."""

    def undo_stopped_steps(self) -> None:
        """Undo the steps that the device did not run because of an id out of range."""


class Distribution(Protocol[_Table]):
    """The processes that store rows of the same table."""

    def source(self, table: Tensor) -> Tensor:
        """Return a stand-in for `table` in autograd; it passes gradients on to the table."""

    def fail(self, table: _Table, error: HotrowError) -> NoReturn:
        """Raise a lookup's error in every process."""

    def agree_on_rows(
        self, operation: str, rows: Tensor | None, failure: Exception | None = None
    ) -> Tensor:
        """Check that all processes run this operation, and return the first process's rows."""


class Shards(Distribution[_Table], Protocol[_Table]):
    """A table whose rows are split among processes; see `hotrow.distributed.shards.Shards`."""

    @property
    def rows(self) -> int:
        """V, the total number of rows in all processes."""

    @property
    def local_slice(self) -> slice:
        """The rows of this process as a slice of all rows."""

    def fetch(
        self,
        table: _Table,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct ids (R,), the position of each id among them, and the rows (R, D)."""

    def mark_gradient(self, gradient: Tensor) -> Tensor:
        """Store the processes in the gradient of this process's rows, as a `RowGradient`."""

    def refuse_averaging(self) -> None:
        """Raise an error if torch's model averaging is about to replace this process's rows."""

    def agree(self, operation: str, failure: Exception | None) -> None:
        """Raise an error of any process in all of them, unless all of them run the operation."""

    def all_equal(self, values: Sequence[int]) -> bool:
        """Return whether these values are the same in all processes."""

    def change_rows(self, change: RowChange) -> tuple[Shards[_Table], RowChange]:
        """Return the table's shards after `change`, and the change to each process's rows."""

    def to_dtensor(self, rows: Tensor) -> Tensor:
        """Return a DTensor whose local part is `rows`, for a checkpoint."""

    def from_dtensor(self, value: Tensor) -> Tensor:
        """Return this process's rows from a DTensor, or from a saved tensor with all rows."""


class Replicas(Distribution[_Table], Protocol[_Table]):
    """A table that every process stores in full; see `hotrow.distributed.replication`."""

    def prepare_look_up(self, table: _Table, failure: Exception | None = None) -> None:
        """Check that every process makes this lookup; if not, raise an error in every process."""

    def agree_on_look_up(self, table: _Table, failure: Exception | None) -> None:
        """Raise the errors of `prepare_look_up` in the processes with the same rows."""

    @property
    def sort_key(self) -> tuple[str, tuple[int, ...]]:
        """A key that sorts tables in the same order in all processes."""

    def prepare_step(
        self,
        table: _Table,
        options: Mapping[str, str],
        read_state: Callable[[], Mapping[str, Any]],
        agreement: str | None,
        kind: StepKind,
    ) -> tuple[StepKind, str]:
        """Prepare a step so that all replicas stay bit-identical.

        Check that the options are equal, and settle all rows if any process has done so. Unless
        all processes pass the same `agreement`, compare the optimizer states.

        Return the highest kind of all processes, which all of them must use, and the agreement to
        pass to the next step from the state after this step.
        """


class GradientShards(Protocol):
    """The processes that store the other rows of a gradient."""

    def norm(self, local_norm: Tensor, order: float) -> Tensor:
        """Return the norm of all rows, computed from each process's local norm."""

    def all_reduce_max(self, value: Tensor) -> None:
        """Set `value` to its maximum over all processes, in place."""


class ChangedFiles(Protocol):
    """The files of a table whose rows are about to change; see `hotrow.disk.resized_files`."""

    def apply(self, tensor: Tensor, added: float | Tensor, expected_uses: int) -> Tensor:
        """Return the changed tensor; raise an error if too many tensors share its memory."""

    def complete(self) -> None:
        """Use the new files from now on."""


class StateFiles(Protocol):
    """The files of a table's optimizer state; see `hotrow.disk.state_files.StateFiles`."""

    last_run: object  # the `Run` of the last lag that was closed, or None

    @property
    def used(self) -> object:
        """The files in use, for `discard`."""

    def create_slot(self, name: str, initial: float) -> Tensor:
        """Create a (V, D) state tensor filled with `initial` in a memory-mapped file."""

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """Store `values` in a memory-mapped file, and return the mapped (V, D) tensor."""

    def row_steps(self) -> Tensor:
        """Return a memory-mapped (V,) int32 tensor of zeros, for the step count of each row."""

    def discard(self, files: object, run: object) -> None:
        """Forget the optimizer state, which must be new, and use an earlier run and its files."""


class Backing(Protocol):
    """The files of a memory-mapped table and its optimizer state; see `hotrow.disk.Store`."""

    @property
    def state_files(self) -> StateFiles:
        """The files of the optimizer state."""

    def check_rows(self, rows: Tensor | None) -> None:
        """Check that the files of these rows, or of all rows if `rows` is None, are undamaged."""

    def change_rows(self, change: RowChange) -> ChangedFiles:
        """Prepare a change to the rows in all files."""
