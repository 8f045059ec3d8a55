"""The interfaces between a table and its optimizer, other processes, and files.

`hotrow.optim`, `hotrow.distributed` and `hotrow.disk` implement them.
"""

from __future__ import annotations

from typing import NoReturn, Protocol, TypeVar

from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.kernels.batch import DistinctIds

_Table = TypeVar("_Table", bound=Tensor, contravariant=True)


class Lag(Protocol):
    """The steps that the rows of a table have missed; `hotrow.optim.lag.RowLag`."""

    @property
    def has_stale_rows(self) -> bool:
        """Whether any row may have missed a step that would have changed it."""

    def settle(self, rows: Tensor | None) -> None:
        """Give the distinct `rows`, or all rows if None, the values of dense training."""

    def look_up(self, ids: DistinctIds) -> Tensor:
        """Return (..., D), the settled rows of the ids, which the next step updates.

        A row that is fast to settle is not stored; the step settles it again.
        """

    def peek(self, ids: DistinctIds) -> Tensor:
        """Return (..., D), the settled rows of the ids, without storing them."""

    def close(self) -> None:
        """Settle all rows, then detach the lag from the table."""


class Distribution(Protocol[_Table]):
    """The processes that have rows of the same table."""

    def source(self, table: Tensor) -> Tensor:
        """A stand-in for `table` in autograd, which passes the gradient of lookups on to it."""

    def fail(self, table: _Table, error: HotrowError) -> NoReturn:
        """Raise the error of a lookup in every process."""


class Shards(Distribution[_Table], Protocol[_Table]):
    """A table of which each process has some rows; `hotrow.distributed.shards.Shards`."""

    @property
    def rows(self) -> int:
        """V, the number of rows in all processes."""

    def fetch(
        self,
        table: _Table,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Return the distinct ids (R,), the position of each id among them, and the rows (R, D)."""

    def to_global(self, rows: Tensor) -> Tensor:
        """The DTensor whose local part is `rows`, for a checkpoint."""

    def to_local(self, value: Tensor) -> Tensor:
        """The rows of this process, from a saved tensor with all rows or a DTensor."""


class Replicas(Distribution[_Table], Protocol[_Table]):
    """A table of which each process has all rows; `hotrow.distributed.replication`."""

    def prepare_look_up(self, table: _Table, failure: HotrowError | None = None) -> None:
        """Check before a lookup that every process makes it; otherwise raise in every process."""

    def settle_together(self, table: _Table) -> None:
        """Settle if another process has settled, so that all processes have the same bits."""


class GradientShards(Protocol):
    """The processes that have the other rows of a gradient."""

    def norm(self, local_norm: Tensor, order: float) -> Tensor:
        """The norm of all rows, computed from the norm of the rows of each process."""

    def all_reduce_max(self, value: Tensor) -> None:
        """Set `value` to its maximum over all processes, in place."""


class Backing(Protocol):
    """The files that a table and its optimizer state are mapped from; `hotrow.disk.Store`."""

    def create_slot(self, name: str, initial: float) -> Tensor:
        """Create a state tensor (V, D) with this initial value, mapped from a file."""

    def store_slot(self, name: str, values: Tensor) -> Tensor:
        """Return a state tensor (V, D) with these values, mapped from a file."""

    def row_steps(self) -> Tensor:
        """Return zeros, (V,) int32, mapped from a file: the number of steps applied to each row."""
