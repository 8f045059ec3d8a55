"""Update several tables in one step."""

from __future__ import annotations

from collections.abc import Hashable, Mapping, Sequence

from hotrow.errors import HotrowError
from hotrow.kernels import devices
from hotrow.optim import graphs, updater
from hotrow.optim.exclusive_access import ExclusiveAccess
from hotrow.optim.lag import RowLag, TableStep, finish_step
from hotrow.optim.ledger import Ledger


def step_together(steps: Sequence[TableStep]) -> None:
    """Record a step for each table, and apply it to the rows in the table's gradient.

    If an error interrupts the step before any row has changed, the step is removed again.
    Otherwise, later reads and steps of the tables raise an error, because repeating the step would
    apply it twice.
    """
    if devices.is_capturing(steps[0][0].values):
        graphs.capture(steps)
        return
    lags = [lag for lag, _, _ in steps]
    for lag in lags:
        lag.raise_earlier_error()
    _share_new_ledgers(steps)
    by_ledger: dict[tuple[int, int], list[TableStep]] = {}
    for each in steps:
        by_ledger.setdefault((id(each[0].ledger), id(each[1])), []).append(each)
    for same_ledger in by_ledger.values():
        lag = same_ledger[0][0]
        if len(same_ledger) < lag.ledger.table_count:
            lag.raise_pending_error()  # a split ledger can't undo stopped steps
    with ExclusiveAccess(*lags):
        lengths: dict[Ledger, int] = {}
        try:
            for same_ledger in by_ledger.values():
                lag, group, _ = same_ledger[0]
                ledger = lag.ledger
                if len(same_ledger) < ledger.table_count:  # not all tables take this step
                    ledger = ledger.split(len(same_ledger))
                    for lag, _, _ in same_ledger:
                        lag.ledger = ledger
                lengths[ledger] = ledger.length
                ledger.record_step(group)
            for same_ledger in by_ledger.values():
                updater.step_together([(lag.rows(), grads) for lag, _, grads in same_ledger])
            for lag in lags:
                lag.replaced = None  # if an error follows, this lag and its state must stay
            for same_ledger in by_ledger.values():
                lag, group, _ = same_ledger[0]
                scalars = lag.ledger.torch_scalars(group)
                for lag, _, _ in same_ledger:
                    lag.write_scalars(scalars)
                    lag.group_options = group
        except BaseException:
            _undo_step(lags, lengths)
            raise
    try:
        finish_step(lags)
    except HotrowError:  # later reads and steps raise the same error
        raise
    except BaseException:
        for lag in lags:
            lag.is_broken = True
        raise


def _undo_step(lags: Sequence[RowLag], lengths: Mapping[Ledger, int]) -> None:
    """Remove the interrupted step from the ledgers, unless a row has taken it."""
    if any(lag.has_row_at(lengths[lag.ledger] + 1) for lag in lags if lag.ledger in lengths):
        for lag in lags:
            lag.is_broken = True
        return
    for ledger, length in lengths.items():
        ledger.undo(length)
    for lag in lags:
        lag.drop_updater()


def _share_new_ledgers(steps: Sequence[TableStep]) -> None:
    """Create one shared ledger for tables that take their first step together."""
    shared: dict[Hashable, Ledger] = {}
    for lag, group, _ in steps:
        if not lag.ledger.length:
            key = id(group), lag.values.device, lag.ledger.sharing_key(group)
            ledger = shared.setdefault(key, lag.ledger)
            if ledger is not lag.ledger:
                lag.ledger.table_count -= 1
                lag.ledger = ledger
                ledger.table_count += 1
