"""The main job: one table and some ids, both ways, the same or not, and what each cost."""

from __future__ import annotations

import html
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from hotrow.errors import HotrowError
from hotrow.ids import as_ids, checked
from hotrow.inputs.tables import check_table
from hotrow.verify.check import Check, draw_cotangent, judge
from hotrow.verify.cost import Cost, cost
from hotrow.verify.measure import Measured, free_memory, in_turn, peak_memory
from hotrow.verify.sides import Batch, lookup_side, matmul_side

Progress = Callable[[str, int, int], None]

_ROUNDS = 7


@dataclass(frozen=True, eq=False)
class Comparison:
    """What `compare` found; true if both ways are equal, and prints as a report.

    Attributes:
        title: what was compared.
        table: (V, D).
        ids: (N,), all that were given.
        tokens: their texts, or None.
        compared: how many of the ids, from the first on, both ways were run with.
        budget: bytes that the dense way might take.
        needed: bytes that the dense way would take with all ids, estimated before the run.
        check: whether output and gradient are the same.
        cost: products, bytes and memory as formulas of what was compared.
        matmul: time and memory of the one-hot matmul, forward and gradient, as measured.
        lookup: the same of the look-up.
    """

    title: str
    table: Tensor
    ids: Tensor
    tokens: tuple[str, ...] | None
    compared: int
    budget: int
    needed: int
    check: Check
    cost: Cost
    matmul: Measured
    lookup: Measured

    @property
    def equal(self) -> bool:
        """Whether output and gradient are the same numbers."""
        return self.check.equal

    @property
    def ratio(self) -> float:
        """How many times longer the one-hot matmul took, median against median."""
        return self.matmul.median_ms / self.lookup.median_ms

    def __bool__(self) -> bool:
        return self.equal

    def __str__(self) -> str:
        times = f"{self.matmul.median_ms:.3g} ms by matmul, {self.lookup.median_ms:.3g} by look-up"
        return f"{self.title}\n{self.check}\n{self.cost}\n{times}: {self.ratio:.1f} x"

    __repr__ = __str__

    def _repr_html_(self) -> str:
        return f"{self.check._repr_html_()}<pre>{html.escape(str(self.cost))}</pre>"

    def to_dict(self) -> dict[str, Any]:
        """Everything but the table's values, for JSON. Units are in the names."""
        return {
            "title": self.title,
            "equal": self.equal,
            "rows": self.cost.rows,
            "columns": self.cost.columns,
            "dtype": str(self.table.dtype).removeprefix("torch."),
            "device": str(self.table.device),
            "ids": self.ids.tolist(),
            "tokens": None if self.tokens is None else list(self.tokens),
            "ids_compared": self.compared,
            "budget_bytes": self.budget,
            "needed_bytes": self.needed,
            **{
                key: value
                for key, value in self.check.to_dict().items()
                if key not in ("equal", "a", "b")
            },
            "matmul": asdict(self.cost.matmul) | _measured(self.matmul),
            "lookup": asdict(self.cost.lookup) | _measured(self.lookup),
            "time_ratio": self.ratio,
            "torch": torch.__version__,
            "threads": torch.get_num_threads(),
            "machine": platform.machine(),
        }


def _measured(work: Measured) -> dict[str, Any]:
    return {
        "measured_bytes_peak": work.bytes_peak,
        "median_ms": work.median_ms,
        "runs_ms": list(work.milliseconds),
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
    """Run the literal one-hot matmul and the look-up, forward and gradient; compare and measure.

        matmul   one_hot(ids) @ table      and  one_hot(ids).T @ c
        look-up  table[ids]                and  c added into the rows of ids

    with c, the output's gradient, drawn from the integers, which add up exactly in any order: both
    gradients are the same to the bit, or one is wrong. Both run once, with their memory watched
    and their results compared, and then in turn to be timed.

    The memory of the dense way is estimated first. Where it is over the budget, both ways get
    the longest run of ids from the first on that keeps to it.

    Args:
        table: (V, D), float64, float32, bfloat16 or float16; not changed.
        ids: int64 or int32 or a list, any shape; taken in order.
        tokens: the ids' texts, in the same order.
        title: what to call it.
        budget: bytes that the dense way may take; default: half of what is free.
        seconds: how long to go on timing: one round at least, 7 at most, both ways in turn.
        seed: of c.
        progress: called with (what is being done, steps done, steps in all).

    Raises:
        HotrowError: not a table, not ids, an id out of range, or a budget that one
            id is too much for.

    Cost: `hotrow.cost(V, D, N)` gives that of a run of each.

    >>> torch.manual_seed(123)  # doctest: +ELLIPSIS
    <torch._C.Generator object at ...>
    >>> found = compare(torch.nn.Embedding(4, 5).weight, [2, 3, 1])
    >>> print(found.check)
    one-hot @ table and look-up: equal
    output    equal, 15 of 15 values bit for bit
    gradient  equal, 20 of 20 values bit for bit
    >>> found.cost.matmul.by_zero, found.cost.lookup.multiplications
    (90, 0)
    """
    table = check_table(table, "the table").detach()
    if table.device.type != "cpu":
        raise HotrowError(
            f"the table is on {table.device}, and compare measures on the CPU",
            fix="use table.cpu()",
        )
    if budget is not None and (isinstance(budget, bool) or not isinstance(budget, int)):
        raise HotrowError(f"budget is {budget!r}, but must be an int, in bytes")
    rows, columns = table.shape
    ids = checked(as_ids(ids), rows).reshape(-1)
    if isinstance(tokens, str):
        raise HotrowError("tokens is a str, but must be a list of them, one for each id")
    if tokens is not None and len(tokens) != len(ids):
        raise HotrowError(f"there are {len(tokens)} tokens for {len(ids)} ids")
    if budget is None:
        budget = free_memory() // 2
    compared = _fitting(table, len(ids), budget)
    batch = Batch(ids[:compared])
    matmul = matmul_side(table, batch)
    lookup = lookup_side(table, batch)
    cotangent = draw_cotangent(lookup, batch, seed)
    tell = progress or (lambda what, done, total: None)
    steps = 3 + _ROUNDS
    try:
        tell("one-hot matmul", 0, steps)
        by_matmul, matmul_peak = peak_memory(lambda: matmul.results(cotangent))
        tell("look-up", 1, steps)
        by_lookup, lookup_peak = peak_memory(lambda: lookup.results(cotangent))
        tell("comparing", 2, steps)
        check = judge(matmul, by_matmul, lookup, by_lookup, batch, cotangent)
        del by_matmul, by_lookup
        times = []
        tell("timing", 3, steps)
        runs = [lambda: matmul.results(cotangent), lambda: lookup.results(cotangent)]
        for round_times in in_turn(runs, seconds, _ROUNDS):
            times.append(round_times)
            tell("timing", 3 + len(times), steps)
        tell("done", steps, steps)
    except RuntimeError as error:
        if "can't allocate memory" not in str(error):
            raise
        raise HotrowError(
            f"the system refused the memory that {compared:,} ids in a {rows:,} x {columns:,} "
            f"table need, about {needed_bytes(table, compared):,} bytes",
            fix="give fewer ids or a smaller budget",
        ) from None
    of_matmul, of_lookup = zip(*times, strict=True)
    return Comparison(
        title or f"{compared:,} ids in a {rows:,} x {columns:,} table",
        table,
        ids,
        None if tokens is None else tuple(tokens),
        compared,
        budget,
        needed_bytes(table, len(ids)),
        check,
        cost(rows, columns, compared, dtype=table.dtype),
        Measured(of_matmul, matmul_peak),
        Measured(of_lookup, lookup_peak),
    )


def needed_bytes(table: Tensor, count: int) -> int:
    """About what comparing `count` ids holds at once beside the table."""
    fixed, per_id = _needs(table)
    return fixed + per_id * count


def _needs(table: Tensor) -> tuple[int, int]:
    """Bytes whatever the ids are, and bytes for each id."""
    rows, columns = table.shape
    size = table.dtype.itemsize
    # Two gradients, and the temporaries of comparing them a part at a time.
    fixed = 2 * size * rows * columns + 64 * min(rows * columns, 1 << 22)
    if size == 2:  # a half precision matmul converts the table and its gradient
        fixed += 8 * rows * columns
    # A row of the one-hot, and where a half precision matmul converts, of its copy; two outputs
    # and their gradient; the bounds on rounding; ids, counts and what sorting them takes.
    one_hot = (size if size > 2 else size + 4) * rows
    return fixed, one_hot + 3 * size * columns + 64 * columns + 192


def _fitting(table: Tensor, count: int, budget: int) -> int:
    fixed, per_id = _needs(table)
    fits = min(count, max(budget - fixed, 0) // per_id) if per_id else count
    if fits == 0 and count > 0:
        raise HotrowError(
            f"the dense way needs {fixed + per_id:,} bytes for a single id in this "
            f"{table.shape[0]:,} x {table.shape[1]:,} table, over the budget of {budget:,}",
            fix="give it a larger budget, or a smaller table",
        )
    return fits
