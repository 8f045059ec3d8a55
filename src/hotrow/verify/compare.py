"""Compare operations on dense one-hots with the same operations on ids."""

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
from hotrow.verify.check import Check, compare_operation, draw_integers
from hotrow.verify.cost import Cost, cost
from hotrow.verify.measure import (
    Measurement,
    Progress,
    free_memory,
    measure_peak_memory,
    time_interleaved,
)
from hotrow.verify.sides import Batch, check_operation_name, make_operation_sides

_ROUNDS = 7


@dataclass(frozen=True, eq=False)
class Comparison:
    """The result of `compare`. It is truthy if both methods agree, and prints as a report.

    Attributes:
        title: the title of the report.
        table: (V, D).
        ids: (N,), all ids that were passed.
        tokens: the token text of each id, or None.
        compared_count: how many of the ids were compared, starting with the first.
        budget: the memory limit for the matmul, in bytes.
        needed_bytes: the estimated memory that the matmul would need for all ids, in bytes.
        check: the comparison of outputs and gradients.
        cost: each method's multiplications, additions and bytes written, computed from formulas;
            None for operations other than a lookup.
        matmul: the measured time and memory of the literal one-hot arithmetic in both passes. For a
            lookup, this is the one-hot matmul.
        lookup: the measured time and memory of the operation on the ids, in both passes.
        operation: "lookup", "gather", "scatter" or "count".
    """

    title: str
    table: Tensor
    ids: Tensor
    tokens: tuple[str, ...] | None
    compared_count: int
    budget: int
    needed_bytes: int
    check: Check
    cost: Cost | None
    matmul: Measurement
    lookup: Measurement
    operation: str = "lookup"

    @property
    def equal(self) -> bool:
        """Return whether the output and the gradient are equal."""
        return self.check.equal

    @property
    def ratio(self) -> float:
        """The median time of the literal arithmetic divided by that of the operation on the ids."""
        return self.matmul.median_ms / self.lookup.median_ms

    @property
    def literal_name(self) -> str:
        """The name of the literal arithmetic in reports: "one-hot matmul", or a formula."""
        return literal_name(self.operation, self.check.a)

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        times = (
            f"{self.literal_name.removeprefix('one-hot ')} {self.matmul.median_ms:.3g} ms, "
            f"{self.operation} {self.lookup.median_ms:.3g} ms: {self.ratio:.1f}x"
        )
        parts = self.title, self.check, self.cost, times
        return "\n".join(str(part) for part in parts if part is not None)

    __repr__ = __str__

    def _repr_html_(self) -> str:
        cost = "" if self.cost is None else f"<pre>{html.escape(str(self.cost))}</pre>"
        return self.check._repr_html_() + cost

    def to_dict(self) -> dict[str, Any]:
        """Return a dict for JSON, without the table's values. Key names include the units."""
        return {
            "title": self.title,
            "operation": self.operation,
            "equal": self.equal,
            "rows": self.table.shape[0],
            "columns": self.table.shape[1],
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
            "matmul": (asdict(self.cost.matmul) if self.cost else {}) | self.matmul.to_dict(),
            self.operation: (asdict(self.cost.lookup) if self.cost else {}) | self.lookup.to_dict(),
            "time_ratio": self.ratio,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def compare(
    table: Tensor,
    ids: Any,
    *,
    operation: str = "lookup",
    tokens: Sequence[str] | None = None,
    title: str | None = None,
    budget: int | None = None,
    seconds: float = 2.0,
    seed: int = 0,
    progress: Progress | None = None,
) -> Comparison:
    """Compare a dense one-hot matmul with a table lookup, and measure the cost of both.

    The two methods compute::

        matmul   output = one_hot(ids) @ table    gradient = one_hot(ids).T @ c
        lookup   output = table[ids]              gradient[ids] += c

    The other operations are compared the same way. In place of the matmul, they use this arithmetic
    on the dense one-hot::

        gather   output = (one_hot(ids) * scores).sum(1), with random scores
        scatter  output = one_hot(ids).T @ rows, with a random row for each id
        count    output = one_hot(ids).sum(0)

    The output's gradient c contains random integers, which add up exactly in any order. So if the
    two table gradients differ in any bit, one of them is wrong. Each method first runs once, to
    compare the results and to measure peak memory. Then the two methods take turns while they are
    timed.

    If the estimated memory of the matmul exceeds the budget, both methods process only as many of
    the first ids as fit in the budget.

    Args:
        table: a (V, D) tensor in float64, float32, bfloat16 or float16. `compare` does not change
            the table, and runs on the table's device.
        ids: an int64 or int32 tensor or a list, of any shape; the ids are flattened in order.
        operation: "lookup", "gather", "scatter" or "count".
        tokens: the token texts of the ids, in the same order.
        title: the title of the report.
        budget: the memory that the matmul may use, in bytes; half of the free memory by default.
        seconds: the time limit for the timed rounds. At least 1 and at most 7 rounds run.
        seed: the seed for c.
        progress: a function called with (the current activity, steps done, total steps).

    Returns:
        A `Comparison`. It is truthy if both methods agree, and prints as a report.

    Raises:
        HotrowError: the table, the ids or the operation is invalid, there are no ids or no columns,
            or the budget is too small for a single id.
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
    check_operation_name(operation)
    table = check_table(table, "the table").detach()
    if table.device.type not in ("cpu", "cuda"):
        raise HotrowError(
            f"the table is on {table.device}, but compare runs on a CPU or an NVIDIA GPU",
            fix="use table.cpu()",
        )
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise HotrowError(f"budget is {budget!r}, but it must be an int, in bytes")
    rows, columns = table.shape
    ids = check_ids(as_ids(ids), rows).reshape(-1).to(table.device)
    if not len(ids) or not columns:
        raise HotrowError(
            f"there are no values to compare for {len(ids)} ids in a {rows:,} x {columns:,} table",
            fix="pass at least one id, or a text with at least one token"
            if columns
            else "pass a table with at least one column",
        )
    if isinstance(tokens, str):
        raise HotrowError("tokens is a str, but it must be a list of str, one for each id")
    if tokens is not None and len(tokens) != len(ids):
        raise HotrowError(f"there are {len(tokens)} tokens for {len(ids)} ids")
    if budget is None:
        budget = free_memory(table.device) // 2
    compared_count = _count_fitting(table, len(ids), budget, operation)
    batch = Batch(ids[:compared_count])
    sides = make_operation_sides(operation, table, batch, seed)
    matmul, lookup = sides.literal, sides.by_ids
    cotangent = draw_integers(sides.shape, table, seed)
    runs = [
        lambda: matmul.compute_results(cotangent),
        lambda: lookup.compute_results(cotangent),
    ]
    report = progress or (lambda what, done, total: None)
    steps = 3 + _ROUNDS
    try:
        report(literal_name(operation, matmul.name), 0, steps)
        matmul_results, matmul_peak = measure_peak_memory(runs[0], table.device)
        report(operation, 1, steps)
        lookup_results, lookup_peak = measure_peak_memory(runs[1], table.device)
        report("comparing", 2, steps)
        check = compare_operation(batch, sides, matmul_results, lookup_results, cotangent)
        del matmul_results, lookup_results
        times = []
        report("timing", 3, steps)
        for round_times in time_interleaved(runs, seconds, _ROUNDS, table.device):
            times.append(round_times)
            report("timing", 3 + len(times), steps)
        report("done", steps, steps)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error) and not isinstance(
            error, torch.OutOfMemoryError
        ):
            raise
        raise HotrowError(
            f"out of memory: comparing {compared_count:,} ids in a {rows:,} x {columns:,} table "
            f"needs about {estimate_bytes(table, compared_count, operation):,} bytes",
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
        estimate_bytes(table, len(ids), operation),
        check,
        cost(rows, columns, compared_count, dtype=table.dtype) if operation == "lookup" else None,
        Measurement(matmul_times, matmul_peak),
        Measurement(lookup_times, lookup_peak),
        operation,
    )


def literal_name(operation: str, formula: str) -> str:
    """Return the name that reports use for the literal arithmetic of an operation."""
    return "one-hot matmul" if operation == "lookup" else formula


def estimate_bytes(table: Tensor, count: int, operation: str = "lookup") -> int:
    """Estimate the peak memory in bytes for comparing `count` ids, excluding the table."""
    fixed, per_id = _fixed_and_per_id_bytes(table, operation)
    return fixed + per_id * count


def _fixed_and_per_id_bytes(table: Tensor, operation: str = "lookup") -> tuple[int, int]:
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
    per_id = one_hot + 3 * itemsize * columns + 64 * columns + 192
    if operation == "gather":
        # Each id also needs one row each of the scores, the product, the gradients, and the
        # temporaries for comparing these.
        per_id += (7 * itemsize + 68) * rows
    elif operation in ("scatter", "count"):
        # The output's gradient and the bounds of its rows have the shape of the table.
        fixed += (2 * itemsize + 8) * rows * columns + 64 * rows
    return fixed, per_id


def _count_fitting(table: Tensor, count: int, budget: int, operation: str) -> int:
    fixed, per_id = _fixed_and_per_id_bytes(table, operation)
    fits = min(count, max(budget - fixed, 0) // per_id) if per_id else count
    if fits == 0 and count > 0:
        raise HotrowError(
            f"the one-hot {'matmul' if operation == 'lookup' else operation} needs "
            f"{fixed + per_id:,} bytes for a single id in this "
            f"{table.shape[0]:,} x {table.shape[1]:,} table, but the budget is {budget:,}",
            fix="pass a larger budget or a smaller table",
        )
    return fits
