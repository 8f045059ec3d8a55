"""Test random sequences of steps, resizes, reorderings, freezes, reads and checkpoints."""

import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import hotrow
from hotrow import vocabulary
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits
from tests.support.vocabularies import TableRun, ThreeRuns
from tests.vocabulary.test_resizing import RICH

NAMES = [*hotrow.optim.__all__]
MAX_ROWS = 14


class Session:
    """Apply the same random operations to a table and to a dense model changed by hand."""

    def __init__(self, name, data):
        self.name, self.draw = name, data.draw
        self.options = RICH.get(name, {"lr": 0.1})
        self.runs = ThreeRuns(name, self.options, rows=6)

    @property
    def frozen(self):
        return self.runs.rival.frozen

    def train(self):
        self.runs.steps(self.draw(st.integers(1, 4), label="steps"))

    def grow(self):
        self.runs.resize(self.draw(st.integers(self.runs.rows, MAX_ROWS), label="rows"))

    def shrink(self):
        fewest = max([0, *self.frozen]) + 1
        self.runs.resize(self.draw(st.integers(fewest, self.runs.rows), label="rows"))

    def take(self):
        others = [row for row in range(self.runs.rows) if row not in self.frozen]
        kept = self.draw(st.lists(st.sampled_from(others), unique=True) if others else st.just([]))
        new = [-1] * self.draw(st.integers(0, MAX_ROWS - len(kept) - len(self.frozen)))
        sources = self.draw(st.permutations([*kept, *self.frozen, *new]), label="sources")
        if sources:
            self.runs.take(sources)

    def freeze(self):
        rows = st.integers(0, self.runs.rows - 1)
        self.runs.freeze(self.draw(st.lists(rows, max_size=3), label="frozen"))

    def unfreeze(self):
        self.runs.unfreeze(self.frozen[: self.draw(st.integers(0, 2))])

    def read_some_rows(self):
        ids = self.draw(st.lists(st.integers(0, self.runs.rows - 1), max_size=3), label="ids")
        self.runs.table.weight[ids].sum()

    def read_everything(self):
        self.runs.check()

    def keep_an_alias(self):
        self.alias = self.runs.table.weight.data

    def save_and_load(self):
        """Continue training with a new layer and a new optimizer."""
        old = self.runs.table
        table = TableRun(self.name, self.options, old.weights.clone())
        table.layer.load_state_dict(old.layer.state_dict())
        table.optimizer.load_state_dict(copy.deepcopy(old.optimizer.state_dict()))
        table.t = old.t
        assert_same_bits(table.weights, old.weights)
        if self.frozen:
            vocabulary.freeze(table.layer, self.frozen)
        self.runs.table = table


OPERATIONS = [
    Session.train,
    Session.grow,
    Session.shrink,
    Session.take,
    Session.freeze,
    Session.unfreeze,
    Session.read_some_rows,
    Session.read_everything,
    Session.keep_an_alias,
    Session.save_and_load,
]


@pytest.mark.filterwarnings("ignore:a tensor, such as the result of weight.data")
@pytest.mark.parametrize("name", grid(NAMES, ["SGD", "AdamW"].__contains__))
@settings(max_examples=20, deadline=None, print_blob=True)
@given(data=st.data())
def test_any_sequence_of_operations(name, data):
    session = Session(name, data)
    session.train()
    operations = st.lists(st.sampled_from(OPERATIONS), min_size=2, max_size=10)
    for operation in data.draw(operations, label="operations"):
        operation(session)
    session.train()
    session.runs.check()
