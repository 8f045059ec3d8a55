"""The training run in a record: the table's ledger, and the options of its optimizer."""

from __future__ import annotations

import math
import sys
from typing import Any

import numpy as np
from torch import Tensor

from hotrow import optim
from hotrow.disk.record import STEPS, TABLE, Record
from hotrow.disk.rest import error_summary
from hotrow.optim.lag import RowLag
from hotrow.optim.ledger import Ledger
from hotrow.optim.rule import DTYPE_KEY, SCALAR_DTYPES, ParamGroup, Rule, stored_dtype
from hotrow.optim.state import RowState
from hotrow.table.parameter import Table

Run = dict[str, Any]


def describe_run(lag: RowLag) -> Run:
    """Return the steps that rows may have missed, and the optimizer's options, as JSON values.

    Options of other types are the user's own, and no rule needs them.
    """
    ledger = lag.ledger
    group = {key: _plain_option(value) for key, value in lag.group_options.items()}
    return {
        "rule": ledger.rule.name,
        "group": {
            key: value for key, value in group.items() if isinstance(key, str) and _is_option(value)
        },
        "start": ledger.start_step,
        "carried": {
            name: float(value) for name, value in ledger.scalars(lag.group_options).items()
        },
        "still": ledger.idle_rows_unchanged,
        "settled": lag.settled_steps,
        "entries": ledger.entries().tolist(),
    }


def find_saved_run(record: Record) -> SavedRun | None:
    """Return the training run in a record, or None if the table has not been trained.

    Raises:
        ValueError: the run is invalid, or the record doesn't list the run's tensors.
    """
    run = None if record.run is None else SavedRun(record.run)
    names = {TABLE} if run is None else {TABLE, STEPS, *run.slots}
    if record.tensors.keys() != names:
        raise ValueError(f"the tensors of the save are not {', '.join(sorted(names))}")
    return run


class SavedRun:
    """A training run from a record. The record's contents are not trusted.

    Arguments:
        run: the result of `describe_run`.

    Attributes:
        slots: the names of the optimizer's state tensors.
        step_count: the number of steps in the ledger.

    Raises:
        ValueError: a value has the wrong type or is out of range.
    """

    def __init__(self, run: Run) -> None:
        try:
            self._run = run
            self._rule = _rules_by_name()[run["rule"]]
            self._group = _parse_group(run["group"])
            self.slots = list(self._rule.initial_slots(self._group))
            self.step_count = len(run["entries"])
            self._check()
        except (KeyError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
            raise ValueError(error_summary(error)) from None

    def _check(self) -> None:
        run, group = self._run, self._group
        for key, least, most in (("start", 0, 1 << 53), ("settled", 0, self.step_count)):
            if type(run[key]) is not int or not least <= run[key] <= most:
                raise ValueError(f"{key!r} is not an integer from {least} to {most}")
        if not isinstance(run["still"], bool):
            raise ValueError("'still' is not true or false")
        scalars = self._rule.initial_scalars(group, {})
        names = scalars.keys() if self.step_count else run["carried"].keys() & scalars.keys()
        if run["carried"].keys() != names or not _are_numbers(run["carried"].values()):
            raise ValueError("'carried' does not contain the scalars of the optimizer")
        if run["carried"].get(DTYPE_KEY, 0) not in range(len(SCALAR_DTYPES)):
            raise ValueError(f"{DTYPE_KEY!r} in 'carried' is not the number of a dtype")
        # No rule uses a text. Python would repeat it as often as a number says.
        numbers = {key: value for key, value in group.items() if not isinstance(value, str)}
        width = len(self._rule.ledger_entry(numbers, run["start"] + 1, scalars))
        if not all(
            isinstance(entry, list) and len(entry) == width and _are_numbers(entry)
            for entry in run["entries"]
        ):
            raise ValueError(f"an entry of the ledger is not a list of {width} numbers")

    def restore(self, table: Table) -> None:
        """Attach the saved `RowLag` to the table.

        Raises:
            ValueError: the options of the optimizer are invalid.
        """
        run, group = self._run, self._group
        try:
            lag = RowLag(self._rule, table, group, RowState())
            ledger = Ledger(lag.ledger.rule, group, start_step=run["start"])
            entries = [tuple(map(float, entry)) for entry in run["entries"]]
            ledger.restore(entries, run["carried"], run["still"])
            if ledger.length:
                ledger.steps(ledger.length, ledger.length, table.dtype)
            lag.ledger, lag.settled_steps = ledger, run["settled"]
            lag.cast_scalars(stored_dtype(run["carried"]))
            lag.write_scalars(ledger.torch_scalars(group))
        except (KeyError, TypeError, AttributeError, ArithmeticError, IndexError) as error:
            raise ValueError(error_summary(error)) from None
        table.lag = lag


def _plain_option(value: Any) -> Any:
    """Return an option with Python numbers instead of numpy's numbers and torch's scalars."""
    if isinstance(value, list | tuple):
        return [_plain_option(each) for each in value]
    is_scalar = isinstance(value, Tensor | np.generic | np.ndarray) and math.prod(value.shape) == 1
    return value.item() if is_scalar else value


def _is_option(value: Any) -> bool:
    """Return whether the value of an option can be saved."""
    values = value if isinstance(value, list) else [value]
    return all(
        isinstance(each, bool | float | str | None)
        or (isinstance(each, int) and abs(each) <= sys.float_info.max)
        for each in values
    )


def _parse_group(group: Any) -> ParamGroup:
    """Return the options of the optimizer, with tuples instead of lists, and floats."""
    for key, value in group.items():
        if not _is_option(value):
            raise ValueError(f"the optimizer's option {key!r} has an invalid type")
    return {
        key: tuple(map(_as_float, value)) if isinstance(value, list) else _as_float(value)
        for key, value in group.items()
    }


def _as_float(value: Any) -> Any:
    """Convert an integer to float, because a large power of an integer would fill the memory."""
    return float(value) if type(value) is int else value


def _are_numbers(values: Any) -> bool:
    return all(type(value) in (int, float) for value in values)


def _rules_by_name() -> dict[str, Rule]:
    return {rule.name: rule for rule in (getattr(optim, name).rule for name in optim.__all__)}
