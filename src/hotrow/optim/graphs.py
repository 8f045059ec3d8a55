"""Capture a step in a CUDA graph, and replay the graph for later steps.

The captured kernels read the step's number and its scalars from the copy of the ledger on the GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Protocol

from hotrow.errors import HotrowError
from hotrow.kernels.program import Program
from hotrow.optim import updater
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.lag import MAX_LEDGER_ENTRIES, RowLag, TableStep, finish_step
from hotrow.optim.rule import ParamGroup
from hotrow.optim.updater import RowUpdater


class Graph(Protocol):
    """A `torch.cuda.CUDAGraph`."""

    def replay(self) -> None:
        """Launch all captured kernels."""


# The value of `RowLag.captured`: the kernels, and the number of tables that share the step.
_Captured = tuple[RowUpdater, Program, int]


def prepare_capture(lags: Sequence[RowLag]) -> None:
    """Prepare these tables so that their next step can be captured in a CUDA graph."""
    if not lags:
        raise HotrowError(
            "no table has a gradient, so no step can be captured in a CUDA graph",
            fix="take a step without a graph, then call optimizer.prepare_capture()",
        )
    for lag in lags:
        rows = lag.rows()
        if not rows.has_stepped:
            raise HotrowError(
                f"the step of a {tuple(lag.values.shape)} table cannot be captured in a CUDA "
                "graph: the table or its state has changed since the last step",
                fix="take a step without a graph, then call optimizer.prepare_capture()",
            )
        rows.reserve(MAX_LEDGER_ENTRIES)
        lag.captured = None


def capture(steps: Sequence[TableStep]) -> None:
    """Launch a step's kernels during a CUDA graph capture; the ledger does not record the step."""
    by_ledger: dict[int, list[TableStep]] = {}
    for each in steps:
        by_ledger.setdefault(id(each[0].ledger), []).append(each)
    for same_ledger in by_ledger.values():
        count = same_ledger[0][0].ledger.table_count
        if len(same_ledger) < count:
            raise HotrowError(
                f"{count} tables took all their steps together, but the captured step has "
                f"gradients for only {len(same_ledger)} of them",
                fix="take a step without a graph, with gradients for the same tables as in the "
                "captured step, then call optimizer.prepare_capture() and capture the step again",
            )
    for same_ledger in by_ledger.values():
        rows = [(lag.rows(), grads) for lag, _, grads in same_ledger]
        updater.step_together(rows, is_recorded=False)
        for (lag, _, _), (row_updater, _) in zip(same_ledger, rows, strict=True):
            captured: _Captured = row_updater, row_updater.program, len(same_ledger)
            lag.captured, lag.replaced = captured, None  # the next step is a replay


def replay(graph: Graph, lags: Sequence[tuple[RowLag, ParamGroup]]) -> None:
    """Record the next step of the captured tables in their ledgers, and replay the graph.

    No other code can read the tables until the replay has been launched. Until then, the ledger on
    the GPU contains a step that has not been applied to the rows.
    """
    if not lags:
        raise HotrowError(
            "no table is part of a CUDA graph, so no step can be replayed",
            fix="call optimizer.prepare_capture(), then capture a step",
        )
    table_counts = Counter(id(lag.ledger) for lag, _ in lags)
    for lag, group in lags:
        _check_replay(lag, group, table_counts[id(lag.ledger)])
    ledgers = {id(lag.ledger): (lag.ledger, group) for lag, group in lags}
    with ExclusiveAccess(*(lag for lag, _ in lags)):
        for ledger, group in ledgers.values():
            ledger.record_step(group)
        for lag, _ in lags:
            lag.rows().upload_entry()
        try:
            graph.replay()
        except BaseException:
            for lag, _ in lags:
                lag.undo_stopped_steps()
            raise
        for lag, group in lags:
            lag.write_scalars(lag.ledger.torch_scalars(group))
    finish_step([lag for lag, _ in lags])


def _check_replay(lag: RowLag, group: ParamGroup, table_count: int) -> None:
    """Check that a captured step can be replayed as the next step, and upload the ledger.

    Arguments:
        lag: the lag of a table.
        group: the table's options.
        table_count: the number of replayed tables that share the ledger.

    Raises:
        HotrowError: the step was not captured, or its memory or its options have changed.
    """
    lag.raise_earlier_error()
    rows = lag.rows()
    if not lag.accepts(group) or lag.captured != (rows, rows.upload(), table_count):
        raise HotrowError(
            f"the step of a {tuple(lag.values.shape)} table cannot be replayed: it was not "
            "captured, or the table, its state or an option has changed since then",
            fix="take a step without a graph, call optimizer.prepare_capture(), and capture "
            "the step again",
        )
