"""What a table asks of those that make one with it: other processes, and files.

See `hotrow.distributed` and `hotrow.disk`.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NoReturn, Protocol

from torch import Tensor

from hotrow.errors import HotrowError

if TYPE_CHECKING:
    from hotrow.table.parameter import Table


class Spread(Protocol):
    """How a table and others, in other processes, make one; of `hotrow.distributed`."""

    def source(self, table: Tensor) -> Tensor:
        """A tensor like `table` for look-ups to read, through which their gradient passes."""

    def fail(self, table: Table, error: HotrowError) -> NoReturn:
        """Raise an error of a look-up in every process."""


class Shards(Spread, Protocol):
    """Each process has some of the rows."""

    @property
    def rows(self) -> int:
        """V, of all processes."""

    def fetch(
        self,
        table: Table,
        ids: Tensor,
        padding_idx: int | None,
        max_norm: float | None,
        norm_type: float,
    ) -> tuple[Tensor, Tensor, Tensor]:
        """The distinct ids (R,), the place of each id among them, and their rows (R, D)."""

    def whole(self, rows: Tensor) -> Tensor:
        """What is shaped as this process's rows as a part of that of all, to be saved."""

    def part(self, value: Tensor) -> Tensor:
        """Of what is for all rows, as saved, what is for this process's."""


class Replicas(Spread, Protocol):
    """Each process has all of the rows."""

    def begin(self, table: Table, failure: HotrowError | None = None) -> None:
        """Before a look-up: have all processes make it, or raise in each."""

    def agree(self, table: Table) -> None:
        """Settle here what another process has settled, so that all keep the same bits."""


class Backing(Protocol):
    """Files that a table and its optimizer's state are mapped from."""

    def slot(self, name: str, initial: float) -> Tensor:
        """(V, D), a state of the table with its initial values."""

    def keep(self, name: str, values: Tensor) -> Tensor:
        """(V, D), a state of the table with these values, in the files."""

    def last(self) -> Tensor:
        """(V,) int32, zero: the steps that each row has been through."""
