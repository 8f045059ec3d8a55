"""What a table needs of its optimizer, of other processes and of files.

`hotrow.optim`, `hotrow.distributed` and `hotrow.disk` implement it.
"""

from __future__ import annotations

from typing import NoReturn, Protocol, TypeVar

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels.batch import DistinctIds

_Table = TypeVar("_Table", bound=Tensor, contravariant=True)


class Lag(Protocol):
    """The steps that the rows of a table have missed, in an optimizer."""

    @property
    def has_stale_rows(self) -> bool:
        """Whether any row may have missed a step that would have moved it."""

    def settle(self, rows: Tensor | None) -> None:
        """Bring the distinct `rows`, or all, to the values of dense training."""

    def look_up(self, ids: DistinctIds) -> Tensor:
        """(..., D): the current rows of the ids, which the next step trains.

        A row whose value was quick to compute is not stored: the step computes it again.
        """

    def peek(self, ids: DistinctIds) -> Tensor:
        """(..., D): the current rows of the ids. None is stored."""

    def close(self) -> None:
        """Settle all rows, and drop the references to the table."""


class Distribution(Protocol[_Table]):
    """The processes that have rows of the same table."""

    def source(self, table: Tensor) -> Tensor:
        """A tensor like `table` for look-ups to read, through which their gradient passes."""

    def fail(self, table: _Table, error: HotrowError) -> NoReturn:
        """Raise an error of a look-up in every process."""


class Shards(Distribution[_Table], Protocol[_Table]):
    """Each process has some of the rows."""

    @property
    def rows(self) -> int:
        """V, of all processes."""

    def fetch(
        self,
        table: _Table,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The distinct ids (R,), the index of each id among them, and their rows (R, D)."""

    def to_global(self, rows: Tensor) -> Tensor:
        """The distributed tensor whose local part is `rows`, to be saved."""

    def to_local(self, value: Tensor) -> Tensor:
        """The rows of this process, from a saved tensor with all rows."""


class Replicas(Distribution[_Table], Protocol[_Table]):
    """Each process has all of the rows."""

    def prepare_look_up(self, table: _Table, failure: HotrowError | None = None) -> None:
        """Before a look-up: check that all processes make it, or raise in each."""

    def settle_together(self, table: _Table) -> None:
        """Settle here if another process has settled, so that all keep the same bits."""


class GradientShards(Protocol):
    """The processes that have the other rows of a gradient."""

    def norm(self, local_norm: Tensor, order: float) -> Tensor:
        """The norm of all rows, from the norm of this process's rows."""

    def all_reduce_max(self, value: Tensor) -> None:
        """Set `value` to its maximum over all processes, in place."""


class Backing(Protocol):
    """Files that a table and its optimizer's state are mapped from."""

    def create_slot(self, name: str, initial: float) -> Tensor:
        """(V, D), a new state of the table with its initial values, in a file."""

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """(V, D), a state of the table with these values, in a file."""

    def row_steps(self) -> Tensor:
        """(V,) int32, zero: the count of steps that each row has been through."""
