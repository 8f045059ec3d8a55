"""Compare the results, time and memory of the one-hot matmul and the lookup on a table."""

from __future__ import annotations

import html
import platform
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, check_ids
from hotrow.inputs.tables import check_table
from hotrow.verify.check import Check, compare_results, draw_cotangent
from hotrow.verify.cost import Cost, cost
from hotrow.verify.measure import (
    Measurement,
    Progress,
    free_memory,
    measure_peak_memory,
    time_interleaved,
)
from hotrow.verify.sides import Batch, make_lookup_side, make_matmul_side

_ROUNDS = 7


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`. It is truthy if both methods agree, and prints as a report.

    Attributes:
        title: the title of the report.
        table: (V, D).
        ids: (N,), all ids that were passed.
        tokens: the token text of each id, or None.
        compared_count: the number of ids compared, starting from the first id.
        budget: the memory limit for the matmul, in bytes.
        needed_bytes: the estimated memory of the matmul with all ids, in bytes.
        check: the comparison of outputs and gradients.
        cost: each method's multiplications, additions and bytes written, computed from formulas.
        matmul: the measured time and memory of the one-hot matmul, for forward and gradient.
        lookup: the measured time and memory of the lookup, for forward and gradient.
    """

    title: str
    table: Tensor
    ids: Tensor
    tokens: tuple[str, ...] | None
    compared_count: int
    budget: int
    needed_bytes: int
    check: Check
    cost: Cost
    matmul: Measurement
    lookup: Measurement

    @property
    def equal(self) -> bool:
        """Return whether the output and the gradient are equal."""
        return self.check.equal

    @property
    def ratio(self) -> float:
        """The median time of the one-hot matmul divided by that of the lookup."""
        return self.matmul.median_ms / self.lookup.median_ms

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        times = f"matmul {self.matmul.median_ms:.3g} ms, lookup {self.lookup.median_ms:.3g} ms"
        return f"{self.title}\n{self.check}\n{self.cost}\n{times}: {self.ratio:.1f}x"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self.check._repr_html_()}<pre>{html.escape(str(self.cost))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, without the table's values. Key names include the units."""
        return {
            "title": self.title,
            "equal": self.equal,
            "rows": self.cost.rows,
            "columns": self.cost.columns,
            "dtype": str(self.table.dtype).removeprefix("torch."),
            "device": str(self.table.device),
            "ids": self.ids.tolist(),
            "tokens": None if self.tokens is None else list(self.tokens),
            "ids_compared": self.compared_count,
            "budget_bytes": self.budget,
            "needed_bytes": self.needed_bytes,
            **{
                key: value
                for key, value in self.check.to_dict().items()
                if key not in ("equal", "a", "b")
            },
            "matmul": asdict(self.cost.matmul) | self.matmul.to_dict(),
            "lookup": asdict(self.cost.lookup) | self.lookup.to_dict(),
            "time_ratio": self.ratio,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def compare(
    table: Tensor,
    ids: Any,
    *,
    tokens: Sequence[str] | None = None,
    title: str | None = None,
    budget: int | None = None,
    seconds: float = 2.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare the dense one-hot matmul with the lookup on a table, and measure their cost.

    The two methods compute::

        matmul   output = one_hot(ids) @ table    gradient = one_hot(ids).T @ c
        lookup   output = table[ids]              gradient[ids] += c

    The output's gradient c contains random integers, which add up exactly in any order. So if the
    two table gradients differ in any bit, one of them is wrong. Each method first runs once, to
    compare the results and to measure peak memory. Then the two methods take turns while they are
    timed.

    If the estimated memory of the matmul exceeds the budget, both methods process only as many of
    the first ids as fit in the budget.

    Args:
        table: a (V, D) tensor in float64, float32, bfloat16 or float16, on the CPU. `compare` does
            not change the table.
        ids: an int64 or int32 tensor or a list, of any shape; the ids are flattened in order.
        tokens: the token texts of the ids, in the same order.
        title: the title of the report.
        budget: the memory that the matmul may use, in bytes; half of the free memory by default.
        seconds: how long to time the methods; at least 1 round and at most 7 rounds run.
        seed: the seed for c.
        progress: a function called with (the current activity, steps done, total steps).

    Returns:
        A `Comparison`. It is truthy if both methods agree, and prints as a report.

    Raises:
        HotrowError: the table or the ids are invalid, there is no id or no column, or the budget is
            too small for a single id.
        HotrowIndexError: an id is out of range.

    Cost: several runs of both methods. `hotrow.cost(V, D, N)` gives the cost of one run.

    >>> torch.manual_seed(123)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> found = compare(torch.nn.Embedding(4, 5).weight, [2, 3, 1])
    >>> print(found.check)
    one-hot @ table and lookup: equal
    output    equal, 15 of 15 values bit for bit
    gradient  equal, 20 of 20 values bit for bit
    >>> found.cost.matmul.by_zero, found.cost.lookup.multiplications
    (90, 0)
    """
    table = check_table(table, "the table").detach()
    if table.device.type != "cpu":
        raise HotrowError(
            f"the table is on {table.device}, but compare runs on the CPU",
            fix="use table.cpu()",
        )
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise HotrowError(f"budget is {budget!r}, but it must be an int, in bytes")
    rows, columns = table.shape
    ids = check_ids(as_ids(ids), rows).reshape(-1)
    if not len(ids) or not columns:
        raise HotrowError(
            f"{len(ids)} ids in a {rows:,} x {columns:,} table have no values to compare",
            fix="pass at least one id, or a text with at least one token"
            if columns
            else "pass a table with at least one column",
        )
    if isinstance(tokens, str):
        raise HotrowError("tokens is a str, but it must be a list of str, one for each id")
    if tokens is not None and len(tokens) != len(ids):
        raise HotrowError(f"there are {len(tokens)} tokens for {len(ids)} ids")
    if budget is None:
        budget = free_memory() // 2
    compared_count = _count_fitting(table, len(ids), budget)
    batch = Batch(ids[:compared_count])
    matmul = make_matmul_side(table, batch)
    lookup = make_lookup_side(table, batch)
    cotangent = draw_cotangent(lookup, batch, seed)
    report = progress or (lambda what, done, total: None)
    steps = 3 + _ROUNDS
    try:
        report("one-hot matmul", 0, steps)
        matmul_results, matmul_peak = measure_peak_memory(lambda: matmul.compute_results(cotangent))
        report("lookup", 1, steps)
        lookup_results, lookup_peak = measure_peak_memory(lambda: lookup.compute_results(cotangent))
        report("comparing", 2, steps)
        check = compare_results(matmul, matmul_results, lookup, lookup_results, batch, cotangent)
        del matmul_results, lookup_results
        times = []
        report("timing", 3, steps)
        runs = [
            lambda: matmul.compute_results(cotangent),
            lambda: lookup.compute_results(cotangent),
        ]
        for round_times in time_interleaved(runs, seconds, _ROUNDS):
            times.append(round_times)
            report("timing", 3 + len(times), steps)
        report("done", steps, steps)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise HotrowError(
            f"out of memory: comparing {compared_count:,} ids in a {rows:,} x {columns:,} table "
            f"needs about {estimate_bytes(table, compared_count):,} bytes",
            fix="pass fewer ids or a smaller budget",
        ) from None
    matmul_times, lookup_times = zip(*times, strict=True)
    return Comparison(
        title or f"{compared_count:,} ids in a {rows:,} x {columns:,} table",
        table,
        ids,
        None if tokens is None else tuple(tokens),
        compared_count,
        budget,
        estimate_bytes(table, len(ids)),
        check,
        cost(rows, columns, compared_count, dtype=table.dtype),
        Measurement(matmul_times, matmul_peak),
        Measurement(lookup_times, lookup_peak),
    )


def estimate_bytes(table: Tensor, count: int) -> int:
    """Estimate the peak memory for comparing `count` ids, in bytes, excluding the table."""
    fixed, per_id = _fixed_and_per_id_bytes(table)
    return fixed + per_id * count


def _fixed_and_per_id_bytes(table: Tensor) -> tuple[int, int]:
    """Estimate the fixed memory and the memory per id, in bytes."""
    rows, columns = table.shape
    itemsize = table.dtype.itemsize
    # Both methods need a gradient, and comparing the gradients in chunks needs temporaries.
    fixed = 2 * itemsize * rows * columns + 64 * min(rows * columns, 1 << 22)
    if itemsize == 2:  # a half-precision matmul uses float32 copies of the table and its gradient
        fixed += 8 * rows * columns
    # Each id needs a row of the one-hot, and a float32 copy of it for a half-precision matmul. Each
    # id also needs two outputs and their gradient, the rounding bounds, and temporaries for sorting
    # and counting the ids.
    one_hot = (itemsize if itemsize > 2 else itemsize + 4) * rows
    return fixed, one_hot + 3 * itemsize * columns + 64 * columns + 192


def _count_fitting(table: Tensor, count: int, budget: int) -> int:
    fixed, per_id = _fixed_and_per_id_bytes(table)
    fits = min(count, max(budget - fixed, 0) // per_id) if per_id else count
    if fits == 0 and count > 0:
        raise HotrowError(
            f"the one-hot matmul needs {fixed + per_id:,} bytes for a single id in this "
            f"{table.shape[0]:,} x {table.shape[1]:,} table, but the budget is {budget:,}",
            fix="pass a larger budget or a smaller table",
        )
    return fits
