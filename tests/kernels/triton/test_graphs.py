"""A step replayed by a CUDA graph reads its scalars from the ledger on the GPU.

Without a GPU, no real graph can be captured. The graphs in these tests record the operations and
kernel launches of a step, and repeat them on the same memory.
"""

import pytest
import torch

from hotrow import HotrowError
from tests.kernels.triton.test_training import values_of
from tests.support.exhaustive import exhaustive
from tests.support.gpu_model import ROWS, batches, make_training
from tests.support.tolerance import assert_same_bits

pytestmark = exhaustive
OPTIONS = [
    ("AdamW", {"weight_decay": 0.1}),
    ("NAdam", {}),
    ("SGD", {"lr": 0.1, "momentum": 0.9}),
    ("Adamax", {}),
    ("Rprop", {}),
    ("Adagrad", {}),
]


def forward_and_backward(layers, optimizer, ids):
    optimizer.zero_grad()
    scale = torch.arange(30.0).view(6, 5).cos()
    torch.stack([(layer(ids) * scale).sum() for layer in tables_of(layers)]).sum().backward()


def tables_of(layers):
    return [layer for layer in layers if isinstance(layer, torch.nn.Embedding)]


def set_learning_rate(optimizer, t):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + t % 3)


@pytest.fixture
def gpu(monkeypatch):
    pytest.importorskip("triton", reason="needs Triton: run make test-all")
    from tests.support.fake_cuda import use_fake_cuda

    use_fake_cuda(monkeypatch)


class CapturedStep:
    """A training step in a CUDA graph."""

    def __init__(self, layers, optimizer):
        self.optimizer, self.graph = optimizer, torch.cuda.CUDAGraph()
        self.ids = torch.zeros(6, dtype=torch.int64)
        optimizer.prepare_capture()
        with torch.cuda.graph(self.graph):
            forward_and_backward(layers, optimizer, self.ids)
            optimizer.step()

    def replay(self, ids):
        self.ids.copy_(ids)
        self.optimizer.replay(self.graph)


def train_eagerly(layers, optimizer, all_ids, start=0):
    for t, ids in enumerate(all_ids, start):
        set_learning_rate(optimizer, t)
        forward_and_backward(layers, optimizer, ids)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options", "tables"),
    [(*each, 1) for each in OPTIONS] + [("AdamW", {}, 2)],
    ids=str,
)
def test_replays_take_the_same_steps(name, options, tables, gpu):
    layers, optimizer = make_training(name, options, tables=tables)
    rival, other = make_training(name, options, tables=tables)
    all_ids = batches(10)
    train_eagerly(layers, optimizer, all_ids[:3])
    train_eagerly(rival, other, all_ids[:3])
    step = CapturedStep(layers, optimizer)
    addresses = None
    for t, ids in enumerate(all_ids[3:8], 3):
        set_learning_rate(optimizer, t)
        if t % 2:
            optimizer.zero_grad()  # the replay computes the gradients again
        step.replay(ids)
        train_eagerly(rival, other, [ids], t)
        if t == 5:  # reading the norms settles all rows of both tables
            assert_same_bits(layers[0].weight.norm(), rival[0].weight.norm())
        (copy,) = layers[0].weight.lag.ledger._copies.values()
        now = [each.data_ptr() for each in (copy.clock, copy.entries, copy.numbers, *copy.arrays)]
        assert addresses in (None, now)
        addresses = now
    train_eagerly(layers, optimizer, all_ids[8:], 8)
    train_eagerly(rival, other, all_ids[8:], 8)
    for ours, expected in zip(tables_of(layers), tables_of(rival), strict=True):
        assert_same_bits(ours.weight.detach(), expected.weight.detach())
    for ours, expected in zip(values_of(layers, optimizer), values_of(rival, other), strict=True):
        assert_same_bits(ours, expected)


def test_an_alias_is_up_to_date_after_a_replay(gpu):
    layers, optimizer = make_training()
    train_eagerly(layers, optimizer, batches(2))
    step = CapturedStep(layers, optimizer)
    alias = layers[0].weight.data
    version = layers[0].weight._version
    step.replay(batches(1)[0])
    assert layers[0].weight._version > version
    copy = alias.clone()
    del alias
    assert_same_bits(copy, layers[0].weight.detach())


def test_without_a_gradient_nothing_can_be_captured_or_replayed(gpu):
    layers, optimizer = make_training()
    train_eagerly(layers, optimizer, batches(2))
    optimizer.zero_grad()
    with pytest.raises(HotrowError, match="no table has a gradient"):
        optimizer.prepare_capture()
    with pytest.raises(HotrowError, match="no table is part of a CUDA graph"):
        optimizer.replay(torch.cuda.CUDAGraph())
    assert layers[0].weight.lag.ledger.length == 2


def test_a_captured_step_needs_all_tables_that_step_together(gpu):
    layers, optimizer = make_training(tables=2)
    train_eagerly(layers, optimizer, batches(2))
    message = "2 tables .* together, but the captured step has gradients for only 1 of them"
    with pytest.raises(HotrowError, match=message):
        CapturedStep(layers[:2], optimizer)


def test_a_replay_needs_all_captured_tables(gpu):
    layers, optimizer = make_training(tables=2)
    train_eagerly(layers, optimizer, batches(2))
    step = CapturedStep(layers, optimizer)
    optimizer.zero_grad()
    layers[2].weight.lag.close()
    with pytest.raises(HotrowError, match="cannot be replayed"):
        step.replay(batches(1)[0])


def test_a_step_that_was_not_captured_cannot_be_replayed(gpu):
    layers, optimizer = make_training()
    train_eagerly(layers, optimizer, batches(2))
    with pytest.raises(HotrowError, match="cannot be replayed: it was not captured"):
        optimizer.replay(torch.cuda.CUDAGraph())


def test_a_failed_replay_records_no_step(gpu):
    layers, optimizer = make_training()
    rival, other = make_training()
    all_ids = batches(5)
    train_eagerly(layers, optimizer, all_ids[:2])
    step = CapturedStep(layers, optimizer)
    step.graph.calls.clear()
    with pytest.raises(AssertionError):
        step.replay(all_ids[2])
    assert layers[0].weight.lag.ledger.length == 2
    train_eagerly(layers, optimizer, all_ids[3:], 2)
    train_eagerly(rival, other, all_ids[:2] + all_ids[3:])
    assert layers[0].weight.lag.alias_steps == 0  # nothing else refers to the table
    for ours, expected in zip(values_of(layers, optimizer), values_of(rival, other), strict=True):
        assert_same_bits(ours, expected)


def test_a_table_that_took_no_step_cannot_be_captured(gpu):
    layers, optimizer = make_training()
    forward_and_backward(layers, optimizer, torch.arange(6) % ROWS)
    with pytest.raises(HotrowError, match="cannot be captured in a CUDA graph"):
        optimizer.prepare_capture()


def test_a_replay_after_a_change_of_the_state_raises(gpu):
    layers, optimizer = make_training()
    train_eagerly(layers, optimizer, batches(2))
    step = CapturedStep(layers, optimizer)
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(HotrowError, match="cannot be"):
        step.replay(batches(1)[0])
    train_eagerly(layers, optimizer, batches(1))
    layers[0].weight.lag._updater = None  # as if the table's memory had changed
    with pytest.raises(HotrowError, match="has changed since the last step"):
        optimizer.prepare_capture()


def test_a_replay_after_an_id_out_of_range_raises(gpu):
    layers, optimizer = make_training("Adam", {"weight_decay": 0.1})  # this rule has no closed form
    train_eagerly(layers, optimizer, batches(2))
    step = CapturedStep(layers, optimizer)
    step.replay(batches(1)[0])
    with pytest.raises(HotrowError, match="input"):
        layers[0](torch.tensor([ROWS]))
    with pytest.raises(HotrowError, match="cannot be replayed"):  # its ledger is no longer in use
        step.replay(batches(1)[0])
