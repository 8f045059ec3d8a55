"""A step that a CUDA graph replays takes its scalars from the ledger on the GPU.

Without a GPU, no graph can be captured. These tests run the step's code as during a capture, once
for each replay: this code must read the step's number and scalars from the device, and must not
change the ledger in Python.
"""

import pytest
import torch

from hotrow import HotrowError
from hotrow.kernels import devices
from hotrow.kernels.triton.ledger import DeviceLedger
from hotrow.kernels.triton.operators import TritonRows
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
    (layers[0](ids) * torch.arange(30.0).view(6, 5).cos()).sum().backward()


def set_learning_rate(optimizer, t):
    optimizer.param_groups[0]["lr"] = 0.01 * (1 + t % 3)


class Replay:
    """Run a step's code as during a graph capture, and reject what a graph can't replay."""

    is_recorded = True

    def __init__(self, monkeypatch):
        self.monkeypatch = monkeypatch

    def capture(self, layers, optimizer, ids):
        """Do the same without running the kernels of the step."""
        with self.monkeypatch.context() as patch:
            patch.setattr(TritonRows, "step_together", classmethod(lambda *args: None))
            patch.setattr(self, "is_recorded", False)
            self(layers, optimizer, ids)

    def __call__(self, layers, optimizer, ids):
        def refuse(*args):
            raise AssertionError("a graph cannot upload new values")

        with self.monkeypatch.context() as patch:
            patch.setattr(devices, "is_capturing", lambda tensor: True)
            patch.setattr(DeviceLedger, "_upload", refuse)
            ledger = layers[0].weight.lag.ledger
            length = ledger.length - self.is_recorded  # `prepare_replay` has recorded the step
            patch.setattr(ledger, "length", length)
            forward_and_backward(layers, optimizer, ids)
            optimizer.step()
            assert ledger.length == length


def train_eagerly(layers, optimizer, all_ids, start=0):
    for t, ids in enumerate(all_ids, start):
        set_learning_rate(optimizer, t)
        forward_and_backward(layers, optimizer, ids)
        optimizer.step()


@pytest.mark.parametrize(("name", "options"), OPTIONS, ids=str)
def test_replays_take_the_same_steps(name, options, interpret, monkeypatch):
    interpret()
    layers, optimizer = make_training(name, options)
    rival, other = make_training(name, options)
    all_ids = batches(14)
    train_eagerly(layers, optimizer, all_ids[:3])
    train_eagerly(rival, other, all_ids)
    optimizer.prepare_capture()
    replay = Replay(monkeypatch)
    replay.capture(layers, optimizer, all_ids[3])
    addresses = None
    for t, ids in enumerate(all_ids[3:12], 3):
        set_learning_rate(optimizer, t)
        optimizer.prepare_replay()
        replay(layers, optimizer, ids)
        (copy,) = layers[0].weight.lag.ledger._copies.values()
        now = [each.data_ptr() for each in (copy.clock, copy.entries, copy.numbers, *copy.arrays)]
        assert addresses in (None, now)
        addresses = now
    train_eagerly(layers, optimizer, all_ids[12:], 12)
    for ours, expected in zip(values_of(layers, optimizer), values_of(rival, other), strict=True):
        assert_same_bits(ours, expected)


def test_a_step_that_was_not_captured_cannot_be_replayed(interpret):
    interpret()
    layers, optimizer = make_training()
    train_eagerly(layers, optimizer, batches(2))
    with pytest.raises(HotrowError, match="cannot be replayed: it was not captured"):
        optimizer.prepare_replay()


def test_a_table_that_took_no_step_cannot_be_captured(interpret):
    interpret()
    layers, optimizer = make_training()
    forward_and_backward(layers, optimizer, torch.arange(6) % ROWS)
    with pytest.raises(HotrowError, match="cannot be captured in a CUDA graph"):
        optimizer.prepare_capture()


def test_a_replay_after_a_change_of_the_state_raises(interpret, monkeypatch):
    interpret()
    layers, optimizer = make_training()
    train_eagerly(layers, optimizer, batches(2))
    optimizer.prepare_capture()
    Replay(monkeypatch).capture(layers, optimizer, batches(1)[0])
    optimizer.load_state_dict(optimizer.state_dict())
    with pytest.raises(HotrowError, match="cannot be"):
        optimizer.prepare_replay()
