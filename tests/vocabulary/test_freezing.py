"""Compare freezing with dense training that restores the frozen rows after every step."""

import copy
import re

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError, vocabulary
from hotrow.table.parameter import Table
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits
from tests.support.training import label
from tests.support.vocabularies import ThreeRuns
from tests.vocabulary.test_resizing import CASES, is_decisive


@pytest.mark.parametrize(("name", "options"), grid(CASES, is_decisive), ids=label)
def test_frozen_rows_are_put_back_after_every_step(name, options):
    runs = ThreeRuns(name, options, rows=12)
    runs.freeze([2])  # before the first step
    runs.steps(4)
    runs.freeze([0, 5, 7])
    frozen = runs.table.weights[[0, 2, 5, 7]]
    runs.steps(5)
    assert_same_bits(runs.table.weights[[0, 2, 5, 7]], frozen)
    runs.check()
    runs.take([5, 0, 1, -1, 7, 2, 9])
    runs.resize(10)
    runs.steps(4)
    assert_same_bits(runs.table.weights[[1, 5, 0, 4]], frozen)
    runs.unfreeze([0, 1])
    runs.steps(5)
    runs.check()
    vocabulary.unfreeze(runs.table.layer)
    assert runs.table.weight.frozen_rows is None


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
def test_every_kernel_skips_frozen_rows(dtype):
    torch.manual_seed(0)
    layer = hotrow.convert(nn.Embedding(8, 3, dtype=dtype), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters(), lr=0.1, weight_decay=0.5)
    for step in range(4):
        if step == 2:
            vocabulary.freeze(layer, [3, 4])
            before = layer.weight.data.clone(), optimizer.state[layer.weight]["exp_avg"].clone()
        optimizer.zero_grad()
        output = layer(torch.tensor([3, 1, 3]))
        if step >= 2:
            assert_same_bits(output[0].detach(), before[0][3])
        output.sum().backward()
        optimizer.step()
    exp_avg = optimizer.state[layer.weight]["exp_avg"]
    assert_same_bits(layer.weight.data[3:5], before[0][3:5])
    assert_same_bits(exp_avg[3:5], before[1][3:5])
    assert not torch.equal(layer.weight.data[0], before[0][0])  # decay moves idle rows


@pytest.mark.parametrize("name", ["SGD", "AdamW", "Adagrad", "Rprop"])
@pytest.mark.parametrize("columns", [False, True])
def test_a_dense_gradient_does_not_change_frozen_rows(name, columns):
    torch.manual_seed(0)
    weight = nn.Parameter(torch.randn(3, 6) if columns else torch.randn(6, 3))
    layer = nn.Linear(6, 3, bias=False) if columns else nn.Embedding(6, 3)
    layer.weight = weight
    table = Table.adopt(weight, columns=columns)
    rival = nn.Parameter(weight.data.clone())
    options = {"lr": 0.1, "momentum": 0.9} if name == "SGD" else {"lr": 0.1}
    optimizer = getattr(hotrow.optim, name)([table], **options)
    dense = getattr(torch.optim, name)([rival], **options)
    vocabulary.freeze(layer, [4, 1])
    index = (slice(None), [1, 4]) if columns else [1, 4]
    rival_before = rival.data[index].clone()
    initial = {"step_size": 0.1}
    for _ in range(4):
        for parameter, each in ((table, optimizer), (rival, dense)):
            each.zero_grad()
            parameter.pow(2).sum().backward()
            each.step()
        rival.data[index] = rival_before
        for key, value in dense.state[rival].items():
            if value.ndim:
                value[index] = initial.get(key, 0.0)
        assert_same_bits(table.data, rival.data)
    state = optimizer.state[table]
    for key, value in dense.state[rival].items():
        assert torch.equal(state[key], value)


def test_a_new_lag_and_a_copy_keep_rows_frozen():
    runs = ThreeRuns("AdamW", {"lr": 0.1}, rows=8)
    runs.steps(2)
    runs.freeze([1, 2])
    twin = copy.deepcopy(runs.table.layer)
    runs.table.optimizer.state_dict()  # closes the lag
    runs.steps(4)
    runs.check()
    assert twin.weight.frozen_rows.tolist() == [1, 2]


def test_clipping_counts_the_gradient_of_frozen_rows():
    layer = hotrow.convert(nn.Embedding(4, 1), min_entries=0)
    vocabulary.freeze(layer, [0])
    layer(torch.tensor([0, 1])).sum().backward()
    assert float(nn.utils.clip_grad_norm_(layer.parameters(), 10.0)) == pytest.approx(2**0.5)


def table_of_four():
    return hotrow.convert(nn.Embedding(4, 2), min_entries=0)


INVALID = {
    "is not a table, so its rows cannot be frozen: call hotrow.convert": lambda: vocabulary.freeze(
        nn.Embedding(4, 2), [1]
    ),
    "ids[1] = 4, but the table has 4 rows": lambda: vocabulary.freeze(table_of_four(), [0, 4]),
    "ids[0] = 9, but the table has 4 rows": lambda: vocabulary.unfreeze(table_of_four(), [9]),
    "ids is float32": lambda: vocabulary.freeze(table_of_four(), [0.5]),
}


@pytest.mark.parametrize("message", INVALID)
def test_invalid_arguments(message):
    with pytest.raises(HotrowError, match=re.escape(message)):
        INVALID[message]()


def test_a_frozen_row_cannot_be_dropped():
    layer = table_of_four()
    vocabulary.freeze(layer, [1, 3])
    for change in (
        lambda: vocabulary.resize(layer, 3),
        lambda: vocabulary.take(layer, [1, 2]),
    ):
        with pytest.raises(HotrowError, match="drop row 3, which is frozen: keep it, or call"):
            change()
        assert layer.weight.shape == (4, 2)
        assert layer.weight.frozen_rows.tolist() == [1, 3]
    vocabulary.unfreeze(layer, [3])
    vocabulary.resize(layer, 3)
    assert layer.weight.frozen_rows.tolist() == [1]


def test_a_torch_optimizer_refuses_to_change_frozen_rows():
    layer = table_of_four()
    optimizer = torch.optim.AdamW(layer.parameters())
    vocabulary.freeze(layer, [1])
    layer(torch.tensor([2])).sum().backward()
    before = layer.weight.data.clone()
    with pytest.raises(HotrowError, match="torch's AdamW would change the frozen rows"):
        optimizer.step()
    assert_same_bits(layer.weight.data, before)
    torch.optim.SGD(nn.Linear(2, 2).parameters()).step()


def test_a_row_with_a_nan_in_its_state_becomes_nan_after_it_is_unfrozen():
    layer = hotrow.convert(nn.Embedding(6, 3), min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adagrad(layer.parameters())

    def step():
        optimizer.zero_grad()
        layer(torch.tensor([0])).sum().backward()
        optimizer.step()

    step()
    vocabulary.freeze(layer, [4])
    optimizer.state[layer.weight]["sum"][4] = torch.nan
    step()
    assert not layer.weight.isnan().any()
    vocabulary.unfreeze(layer, [4])
    step()
    assert layer.weight.isnan().any(1).tolist() == [False, False, False, False, True, False]
