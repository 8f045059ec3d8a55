"""Formulas for the cost of a one-hot matmul and a lookup with V rows, D columns and N ids."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

import torch

from hotrow.ids import check_count


@dataclass(frozen=True)
class Work:
    """The arithmetic and memory traffic of one method, for the forward pass and the gradient.

    Attributes:
        multiplications: the number of multiplications.
        by_zero: the number of multiplications by a zero in the one-hot.
        additions: the number of additions.
        bytes_written: the bytes of the one-hot, the output and the gradient, each written once.
            The table and the output's gradient also use memory, but are not counted.
    """

    multiplications: int
    by_zero: int
    additions: int
    bytes_written: int


@dataclass(frozen=True)
class Cost:
    """The cost of both methods for one table and one batch. It prints as a report.

    Attributes:
        rows: V.
        columns: D.
        ids: N.
        itemsize: the size of a number in bytes.
        matmul: the work of the one-hot matmul.
        lookup: the work of the lookup.
    """

    rows: int
    columns: int
    ids: int
    itemsize: int
    matmul: Work
    lookup: Work

    def to_dict(self) -> dict[str, Any]:
        """Return all values as a dict for JSON."""
        return asdict(self)

    def lines(self) -> list[tuple[str, int, int]]:
        """Return (name, value for matmul, value for lookup) for each cost."""
        matmul, lookup = asdict(self.matmul), asdict(self.lookup)
        names = {
            "multiplications": "multiplications",
            "by_zero": "  of them by zero",
            "additions": "additions",
            "bytes_written": "bytes written",
        }
        return [(name, matmul[key], lookup[key]) for key, name in names.items()]

    def __str__(self) -> str:
        head = f"{self.ids:,} ids, table {self.rows:,} x {self.columns:,}, {self.itemsize} bytes"
        rows = [f"{what:<24}{a:>22,}{b:>16,}" for what, a, b in self.lines()]
        return "\n".join([head, f"{'':<24}{'one-hot matmul':>22}{'lookup':>16}", *rows])


def cost(V: int, D: int, N: int, *, dtype: torch.dtype = torch.float32) -> Cost:
    """Compute the cost of a one-hot matmul and a lookup, for the forward pass and the gradient.

    With s bytes per number::

        matmul   output = one_hot @ table        N V D products, of which N (V-1) D are by zero
                 gradient = one_hot.T @ dOutput  the same number of products
                 bytes: s (N V + N D + V D)      one-hot, output, gradient
        lookup   output = table[ids]             no products
                 gradient[ids] += dOutput        N D additions
                 bytes: s (N D + N D) + 8 N      output, rows of the gradient and their ids

    Like a sparse gradient, the lookup's gradient contains only the touched rows, at most N of them.
    torch's default dense gradient writes s V D bytes.

    Args:
        V: the number of rows in the table.
        D: the number of columns in the table.
        N: the number of ids.
        dtype: the table's dtype, which determines the bytes per number.

    Returns:
        A `Cost`. It prints as a report.

    Raises:
        HotrowError: V, D or N is negative, or not an int.

    >>> print(cost(50_257, 768, 300))
    300 ids, table 50,257 x 768, 4 bytes
                                    one-hot matmul          lookup
    multiplications                 23,158,425,600               0
      of them by zero               23,157,964,800               0
    additions                       23,119,597,824         230,400
    bytes written                      215,619,504       1,845,600
    """
    V, D, N = (check_count(name, value) for name, value in (("V", V), ("D", D), ("N", N)))
    itemsize = dtype.itemsize
    output, gradient, one_hot = itemsize * N * D, itemsize * V * D, itemsize * N * V
    products = 2 * N * V * D
    sums = N * max(V - 1, 0) * D + V * max(N - 1, 0) * D
    dense = Work(
        multiplications=products,
        by_zero=2 * N * max(V - 1, 0) * D,
        additions=sums,
        bytes_written=one_hot + output + gradient,
    )
    lookup = Work(0, 0, N * D, bytes_written=2 * output + 8 * N)
    return Cost(V, D, N, itemsize, dense, lookup)
