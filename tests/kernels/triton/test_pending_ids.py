"""Operations that wait for the GPU, while an out-of-range id is still unknown to Python."""

import copy

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.optim import updater
from hotrow.table.parameter import Table
from hotrow.vocabulary import freeze, resize, unfreeze
from tests.support.exhaustive import exhaustive
from tests.support.gpu_model import COLUMNS, ROWS, batches
from tests.support.tolerance import assert_same_bits

pytestmark = exhaustive


def make_training():
    """Return two tables that have taken two steps together, and their optimizer."""
    torch.manual_seed(0)
    layers = nn.ModuleList(nn.Embedding(ROWS, COLUMNS) for _ in range(2))
    hotrow.convert(layers, min_entries=0)
    assert all(type(layer.weight) is Table for layer in layers)
    freeze(layers[0], [2])
    optimizer = hotrow.optim.AdamW(layers.parameters(), weight_decay=0.1)
    train(layers, optimizer, 2)
    return layers, optimizer


def train(layers, optimizer, steps, seed=1):
    for ids in batches(steps, size=3, seed=seed):
        step(optimizer, *((layer, ids) for layer in layers))


def step(optimizer, *look_ups):
    optimizer.zero_grad()
    for layer, ids in look_ups:
        layer(ids).pow(2).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def step_with_another_option(layers, optimizer):
    optimizer.param_groups[0]["maximize"] = True
    train(layers, optimizer, 1)


def take_dense_step(layers, optimizer):
    layers[1].weight.pow(2).sum().backward()
    optimizer.step()


def use_torch_optimizer(layers, optimizer):
    layers[1](torch.tensor([1, 2])).sum().backward()
    torch.optim.SGD(layers[1].parameters(), lr=0.1).step()


def replace_data(layers, optimizer):
    layers[0].weight.data = torch.ones(ROWS, COLUMNS)


OPERATIONS = {
    "step of one table": lambda layers, optimizer: train(layers[:1], optimizer, 1),
    "step with another option": step_with_another_option,
    "step with a full ledger": lambda layers, optimizer: train(layers, optimizer, 1),
    "dense step": take_dense_step,
    "step of a torch optimizer": use_torch_optimizer,
    "state_dict": lambda layers, optimizer: optimizer.state_dict(),
    "load_state_dict": lambda layers, optimizer: optimizer.load_state_dict(
        {**optimizer.state_dict(), "state": {}}
    ),
    "copy of the optimizer": lambda layers, optimizer: copy.deepcopy(optimizer),
    "read of the state": lambda layers, optimizer: optimizer.state[layers[0].weight]["step"],
    "new data": replace_data,
    "resize": lambda layers, optimizer: resize(layers[0], ROWS + 2, optimizer, init=nn.init.ones_),
    "unfreeze": lambda layers, optimizer: unfreeze(layers[0], [2]),
}


@pytest.fixture
def hide_errors(interpret, monkeypatch):
    """Hide the errors of lookups from code that doesn't wait, as if the GPU was far behind."""
    interpret()
    from hotrow.kernels.triton.id_check import IdCheck

    take_error = IdCheck.take_error
    patch = pytest.MonkeyPatch()
    patch.setattr(
        IdCheck, "take_error", lambda self, wait=False: take_error(self) if wait else None
    )
    yield patch
    patch.undo()


def look_up_bad_id(layers, optimizer):
    """Take a step with an id out of range, and another step; neither of them waits."""
    step(optimizer, (layers[0], torch.tensor([1, ROWS + 3])), (layers[1], torch.tensor([3])))
    train(layers, optimizer, 1)


def assert_same_training(ours, expected):
    for layer, twin in zip(ours[0], expected[0], strict=True):
        assert_same_bits(layer.weight.detach(), twin.weight.detach())
        found, state = ours[1].state[layer.weight], expected[1].state[twin.weight]
        assert found.keys() == state.keys()
        for name in state:
            assert_same_bits(found[name], state[name])


@pytest.mark.filterwarnings("ignore:SGD updates every row")
@pytest.mark.parametrize("name", OPERATIONS)
def test_operations_wait_for_an_unknown_error(name, hide_errors, monkeypatch):
    if name == "step with a full ledger":
        monkeypatch.setattr("hotrow.optim.lag.MAX_LEDGER_ENTRIES", 4)
    operate = OPERATIONS[name]
    training, twin = make_training(), make_training()
    look_up_bad_id(*training)
    with pytest.raises(HotrowError, match=r"input\[1\]"):
        operate(*training)
    training[1].zero_grad()
    training[1].param_groups[0]["maximize"] = False
    assert_same_training(training, twin)
    for each in (training, twin):
        operate(*each)
        train(*each, 1, seed=5)
        unfreeze(each[0][0])
        train(*each, 1, seed=6)
    assert_same_training(training, twin)


def test_an_interrupted_step_keeps_an_unknown_error(hide_errors, monkeypatch):
    training, twin = make_training(), make_training()
    look_up_bad_id(*training)

    def interrupt(*args):
        raise MemoryError

    with monkeypatch.context() as patch:
        patch.setattr(updater, "step_together", interrupt)
        with pytest.raises(MemoryError):
            train(*training, 1)
    train(*training, 1)
    hide_errors.undo()
    with pytest.raises(HotrowError, match=r"input\[1\]"):
        train(*training, 1)
    training[1].zero_grad()
    for each in (training, twin):
        train(*each, 1, seed=5)
    assert_same_training(training, twin)
