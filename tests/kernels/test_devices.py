"""The plain torch kernels train tables on devices without compiled kernels.

The tests run this code on CPU tensors. Every storage on a GPU counts as shared with other
processes, so the tests also make every storage count as shared.
"""

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.kernels.default import rows as default_rows
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.other_device import Waits, other_device
from tests.support.tolerance import assert_same_bits

__all__ = ["other_device"]
ROWS, COLUMNS = 60, 4


def make_training(name="Adam", options=None, package=hotrow.optim):
    torch.manual_seed(0)
    layers = nn.Sequential(nn.Embedding(ROWS, COLUMNS), nn.Linear(COLUMNS, 2))
    if package is hotrow.optim:
        hotrow.convert(layers, min_entries=0)
        assert isinstance(layers[0].weight, Table)
    return layers, getattr(package, name)(layers.parameters(), **options or {})


def train(layers, optimizer, steps=8):
    random = torch.Generator().manual_seed(1)
    for _ in range(steps):
        ids = torch.randint(0, ROWS // 2, (6,), generator=random)
        optimizer.zero_grad()
        layers(ids).pow(2).sum().backward()
        assert isinstance(layers[0].weight.grad, RowGradient)
        optimizer.step()


@pytest.mark.parametrize(
    ("name", "options"),
    [("AdamW", {"weight_decay": 0.1}), ("SGD", {"lr": 0.1, "momentum": 0.9}), ("Adagrad", {})],
)
def test_training_matches_torch(name, options, other_device):
    layers, optimizer = make_training(name, options)
    rival, other = make_training(name, options, torch.optim)
    train(layers, optimizer)
    dense = rival[0].weight
    random = torch.Generator().manual_seed(1)
    for _ in range(8):
        ids = torch.randint(0, ROWS // 2, (6,), generator=random)
        other.zero_grad()
        rival(ids).pow(2).sum().backward()
        other.step()
    torch.testing.assert_close(layers[0].weight.detach(), dense.detach(), rtol=1e-5, atol=1e-6)


def test_a_changed_step_count_is_noticed_without_reading_it(other_device, monkeypatch):
    layers, optimizer = make_training()
    layers[1].requires_grad_(False)  # otherwise, torch's Adam would read its step count
    train(layers, optimizer)
    optimizer.state[layers[0].weight]["step"].fill_(3.0)
    with monkeypatch.context() as patch:
        patch.setattr(torch.Tensor, "__float__", None)
        train(layers, optimizer, steps=5)
    assert float(optimizer.state[layers[0].weight]["step"]) == 3 + 5


def test_a_step_leaves_untouched_rows_stale(other_device):
    layers, optimizer = make_training()
    train(layers, optimizer)
    lag = layers[0].weight.lag
    assert lag.has_stale_rows
    assert lag.alias_steps == 0
    assert int((lag.row_steps == 0).sum()) >= ROWS // 2


def test_an_alias_is_noticed(other_device):
    layers, optimizer = make_training()
    train(layers, optimizer)
    alias = layers[0].weight.data
    train(layers, optimizer)
    assert not layers[0].weight.lag.has_stale_rows
    assert_same_bits(alias, layers[0].weight.detach())


def test_a_table_sent_to_another_process_is_an_alias(other_device):
    from multiprocessing.reduction import ForkingPickler

    layers, optimizer = make_training()
    train(layers, optimizer)
    ForkingPickler.dumps(layers[0].weight)
    train(layers, optimizer)
    assert not layers[0].weight.lag.has_stale_rows


def test_backward_does_not_merge_a_gradient_that_only_autograd_uses(other_device):
    layers, _ = make_training()
    layers(torch.tensor([1, 2, 1])).sum().backward()
    assert not layers[0].weight.grad.row_storage.is_merged


def test_settling_all_rows_copies_few_rows_at_a_time(other_device, monkeypatch):
    monkeypatch.setattr(default_rows, "CHUNK_ENTRIES", 5 * COLUMNS)
    layers, optimizer = make_training()
    train(layers, optimizer)
    expected = layers[0].weight.lag.ledger.length
    with Waits() as waits:
        layers[0].weight.lag.settle(None)
    assert waits.largest < ROWS * COLUMNS
    assert not layers[0].weight.lag.has_stale_rows
    assert set(layers[0].weight.lag.row_steps.tolist()) == {expected}


def test_a_bad_id_raises_before_anything_changes(other_device):
    layers, optimizer = make_training()
    train(layers, optimizer)
    before = layers[0].weight.lag.row_steps.clone()
    with pytest.raises(HotrowError, match=rf"input\[1\] = {ROWS}, but the table has {ROWS} rows"):
        layers(torch.tensor([1, ROWS]))
    with pytest.raises(HotrowError, match=r"input\[0\] = -2"):
        layers(torch.tensor([-2, 3]))
    assert_same_bits(layers[0].weight.lag.row_steps, before)


def test_a_lookup_of_settled_rows_checks_the_ids_once(other_device, monkeypatch):
    layers, _ = make_training()
    reads = []
    real = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: reads.append(self) or real(self))
    monkeypatch.setattr(torch.Tensor, "is_cpu", False)
    with torch.no_grad(), Waits() as waits:
        layers[0](torch.tensor([1, 2, 1]))
    assert waits.calls == ["tolist"]
    assert [each.numel() for each in reads] == [2]  # the smallest and the largest id


def test_scaling_a_gradient_by_a_tensor_does_not_wait(other_device):
    layers, _ = make_training()
    layers(torch.tensor([1, 2, 1])).sum().backward()
    gradient = layers[0].weight.grad.merge()
    expected = gradient.as_dense() * 0.5
    with Waits() as waits:
        gradient.mul_(torch.tensor(0.5))
        norm = torch.linalg.vector_norm(gradient)
    assert waits.calls == []
    assert_same_bits(gradient.as_dense(), expected)
    torch.testing.assert_close(norm, expected.norm())
