"""Inputs that could cause an invalid read, a leak or a wrong message on a GPU."""

from contextlib import nullcontext

import pytest
import torch

from hotrow import HotrowError, optim
from hotrow.kernels.grouping import group
from hotrow.kernels.operators import take_bad_id
from hotrow.kernels.triton.batch import DeviceIds
from hotrow.optim.ledger import Ledger
from hotrow.optim.updater import RowUpdater, step_together
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive
from tests.support.gpu_model import COLUMNS, ROWS, make_training
from tests.support.tolerance import assert_same_bits
from tests.support.training import (
    BROKEN_STATES,
    EXTREME_ROWS,
    RULES,
    train_broken_row,
    train_extreme_row,
    train_with_low_maximum,
)

pytestmark = exhaustive


def make_updaters(sizes, name="Adam"):
    """Return updaters of new tables that share a ledger, and the tables' options."""
    group_of = getattr(torch.optim, name)([torch.nn.Parameter(torch.zeros(1))]).param_groups[0]
    options = dict(group_of)
    ledger, updaters = Ledger(RULES[name], options), []
    for size in sizes:
        table = torch.ones(size)
        slots = [torch.zeros(size) for _ in RULES[name].initial_slots(options)]
        steps = torch.zeros(len(table), dtype=torch.int32)
        updaters.append(RowUpdater(ledger, table, slots, steps))
    return updaters, options


@pytest.mark.parametrize("bad", [0, -1, 7])
def test_a_bad_id_reads_no_row_of_an_empty_table(bad, interpret):
    """An empty table has no step counts, so reading one would crash the process."""
    interpret()
    (updater,), options = make_updaters([(0, 3)])
    no_ids = torch.empty(0, dtype=torch.int64)
    updater.ledger.record_step(options)
    step_together([(updater, group(no_ids, torch.empty(0, 3), 0))])
    output = updater.look_up(DeviceIds.unchecked(torch.tensor([bad]), 0))
    assert output.tolist() == [[0, 0, 0]]
    assert take_bad_id(output.device)[:3] == (0, torch.Size([1]), 0)


def test_training_does_not_depend_on_the_default_device(interpret):
    interpret()
    weights = []
    for context in (nullcontext(), torch.device("meta")):
        with torch.device("cpu"):
            layers, optimizer = make_training()
        ids = torch.tensor([2, 0, 2])
        with context:
            for _ in range(2):
                layers[0](ids).sum().backward()
                optimizer.step()
            weights.append(layers[0].weight.detach().clone())
    assert_same_bits(*weights)


def test_the_error_names_the_id_after_millions_of_lookups(interpret):
    interpret()
    from hotrow.kernels.triton.id_check import NUMBERS, id_check

    layers, _ = make_training()
    assert isinstance(layers[0].weight, Table)
    check = id_check(torch.device("cpu"))
    check._count = NUMBERS - 2
    check._look_ups.clear()  # otherwise, the next lookups reuse recent numbers
    for _ in range(3):
        with pytest.raises(HotrowError, match=rf"input\[1\] = {ROWS}, but the table has {ROWS}"):
            layers[0](torch.tensor([1, ROWS]))


def test_empty_batches_upload_no_new_addresses(interpret, monkeypatch):
    """Every step joins the same tables, so a CUDA graph never needs new addresses."""
    from hotrow.kernels.triton.ledger import DeviceLedger

    interpret()
    uploads, real = [], DeviceLedger._upload

    def upload(self, copy, values, change):
        if copy.shape[1:] == (5,):  # the number of rows, the step counts, the table, two slots
            uploads.append(values)
        real(self, copy, values, change)

    monkeypatch.setattr(DeviceLedger, "_upload", upload)
    updaters, options = make_updaters([(10, COLUMNS)] * 3)
    tables = [updater._tensors[0] for updater in updaters]
    ids = [torch.tensor(each, dtype=torch.int64) for each in ([1, 2], [], [3])]
    for order in (ids, [ids[1], ids[0], ids[2]], [ids[1], ids[2], ids[1]], [ids[1]] * 3):
        updaters[0].ledger.record_step(options)
        batches = [group(each, torch.ones(len(each), COLUMNS), 10) for each in order]
        step_together(list(zip(updaters, batches, strict=True)))
    assert len(uploads) == 1
    assert [bool((table[1:4] != 1).any()) for table in tables] == [True, True, True]
    moved = tables[2].clone()
    updaters[2] = RowUpdater(updaters[2].ledger, moved, *memory_of(updaters[2]))
    updaters[0].ledger.record_step(options)
    batches = [group(ids[0], torch.ones(2, COLUMNS), 10) for _ in updaters]
    step_together(list(zip(updaters, batches, strict=True)))
    assert len(uploads) == 2
    assert not torch.equal(moved, tables[2])


def memory_of(updater):
    """Return the slots and the step counts."""
    return updater._operators.slots, updater.row_steps


def test_gradients_that_are_expanded_or_transposed(interpret):
    interpret()
    ids = torch.tensor([4, 1, 4])
    found = []
    for values in (torch.tensor([1.0, 2, 3]).expand(3, 3), torch.arange(9.0).view(3, 3).t()):
        for grads in (values, values.contiguous()):
            (updater,), options = make_updaters([(10, 3)])
            table = updater._tensors[0]
            updater.ledger.record_step(options)
            step_together([(updater, group(ids, grads, 10))])
            found.append(table)
    assert bool((found[0][4] != 1).any())
    assert_same_bits(found[0], found[1])
    assert_same_bits(found[2], found[3])


@pytest.mark.parametrize("change", ["toggle", "reset"])
def test_a_maximum_below_the_second_moment(change, interpret):
    interpret()
    weights, maximum = train_with_low_maximum(optim, change)
    torch_weights, torch_maximum = train_with_low_maximum(torch.optim, change)
    torch.testing.assert_close(maximum, torch_maximum)
    torch.testing.assert_close(weights, torch_weights, rtol=1e-5, atol=1e-5)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize(("name", "options", "weight"), EXTREME_ROWS, ids=str)
def test_a_row_with_infinite_values_or_factors(name, options, weight, interpret):
    theirs = train_extreme_row(torch.optim, name, options, weight, torch.float32)
    interpret()
    ours = train_extreme_row(optim, name, options, weight, torch.float32)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # the interpreter computes with NumPy
@pytest.mark.parametrize(("name", "options", "slot", "value"), BROKEN_STATES, ids=str)
def test_idle_rows_with_a_broken_state(name, options, slot, value, interpret):
    theirs = train_broken_row(torch.optim, name, options, slot, value, 20)
    interpret()
    ours = train_broken_row(optim, name, options, slot, value, 20)
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-30, equal_nan=True)
