"""Agree with the other ranks on a step of replicated tables."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import Tensor

from hotrow.optim.dense_steps import Reason, TableGradient
from hotrow.optim.rule import ParamGroup, Rule, option_text
from hotrow.optim.state import RowState
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from hotrow.table.protocols import StepKind


class StepAgreement:
    """The agreement of all ranks on one step of an optimizer's replicated tables.

    Arguments:
        rule: the optimizer's rule.
        option_names: the names of the optimizer's options.
        states: the optimizer's states.
    """

    def __init__(
        self, rule: Rule, option_names: Iterable[str], states: Mapping[Any, dict[str, Any]]
    ) -> None:
        self._rule, self._option_names, self._states = rule, sorted(option_names), states
        # For each table, what the ranks have agreed on, or None if its rows may differ.
        self._agreed: list[tuple[Table, str | None]] = []

    def prepare(self, gradients: list[TableGradient], reasons: list[Reason | None]) -> None:
        """Prepare the step; if another rank takes a dense step of a table, set its reason.

        The tables are prepared in the same order on all ranks, even if the ranks list their
        parameters in different orders.
        """
        order = sorted(
            (table.replicas.sort_key, index)
            for index, (_, table, _) in enumerate(gradients)
            if table.replicas is not None
        )
        tables = [gradients[index][1] for _, index in order]
        try:
            agreed = [self._prepare_table(gradients, reasons, index) for _, index in order]
            # With weight decay, the state also depends on the rows.
            self._agreed = [
                (table, each if table.has_equal_replicas else None)
                for table, each in zip(tables, agreed, strict=True)
            ]
        finally:
            for table in tables:  # until the step is complete: it may fail on one rank
                self._record(table, None)

    def complete(self) -> None:
        """Record that this rank has taken the step."""
        for table, agreed in self._agreed:
            self._record(table, agreed)

    def _record(self, table: Table, agreed: str | None) -> None:
        state = self._states.get(table)
        if isinstance(state, RowState):
            state.agreement = agreed
        table.equal_version = None if agreed is None else table._version

    def _prepare_table(
        self, gradients: list[TableGradient], reasons: list[Reason | None], index: int
    ) -> str:
        """Prepare one table's step, and return what the ranks have agreed on."""
        group, table, gradient = gradients[index]
        kind = StepKind.DENSE
        if isinstance(gradient, RowGradient) and reasons[index] is None:
            kind = gradient.step_kind
        state, earlier = self._states.get(table, {}), None
        if isinstance(state, RowState):
            state.adopt_data()  # an assignment to the `data` of a tensor ends the agreement
            earlier = state.agreement
        names = self._state_names(state, table, group)
        options = {name: option_text(group.get(name)) for name in self._option_names}
        options = {"optimizer": self._rule.name, **options, "state": _describe_state(state, names)}
        assert table.replicas is not None
        kind, agreed = table.replicas.prepare_step(
            table, options, lambda: {name: state[name] for name in names}, earlier, kind
        )
        if kind == StepKind.DENSE:
            reasons[index] = reasons[index] or ("another rank takes one", "")
        elif kind == StepKind.ALL_ROWS:
            assert isinstance(gradient, RowGradient)
            gradient.step_all_rows()
        return agreed

    def _state_names(self, state: dict[str, Any], table: Table, group: ParamGroup) -> list[str]:
        """Return the names of the slots and scalars in a table's state.

        These include slots that the options don't use now. Other code's names are left out, unless
        they name a tensor of the table's shape.
        """
        rule = self._rule
        scalars = {*rule.initial_scalars(group, {}), *["step"] * rule.has_step_count}
        return sorted(
            name
            for name, value in dict.items(state)  # doesn't settle the rows
            if name in scalars or (isinstance(value, Tensor) and value.shape == table.shape)
        )


def _describe_state(state: dict[str, Any], names: list[str]) -> str:
    """Return the names in a table's state, and its step count."""
    steps = [option_text(dict.get(state, name)) for name in names if name == "step"]
    return ", ".join([*names, *steps]) or "none"
