"""Recurrent layers and convolutions look up rows for a one-hot input."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotrow.onehot.encoding import one_hot
from hotrow.onehot.tensor import OneHot
from tests.support.onehots import never_materialized, outcome, twins

__all__ = ["never_materialized"]  # a fixture

CLASSES = 200


def results(layer, make, *others):
    """Return the outputs and gradients of a layer for torch's and for hotrow's one-hot."""
    found = []
    for x in make():
        each = copy.deepcopy(layer)
        torch.manual_seed(0)
        outputs = torch.utils._pytree.tree_leaves(each(x, *others))
        sum(output.square().sum() for output in outputs).backward()
        found.append([*outputs, *(p.grad for p in each.parameters())])
    return found


def assert_close(layer, make, *others):
    theirs, ours = results(layer, make, *others)
    for one, other in zip(ours, theirs, strict=True):
        assert one.shape == other.shape
        assert one.stride() == other.stride()
        torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)


def sequences(*batch, dtype=torch.float64):
    ids = torch.randint(CLASSES, batch, generator=torch.Generator().manual_seed(1))
    return lambda: twins(dtype, ids=ids, classes=CLASSES)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"bias": False},
        {"batch_first": True},
        {"num_layers": 2, "dropout": 0.5},
        {"bidirectional": True, "num_layers": 2},
    ],
    ids=str,
)
def test_recurrent_layer_matches_torch(layer, options):
    assert_close(layer(CLASSES, 3, **options).double(), sequences(4, 2))
    assert_close(layer(CLASSES, 3, **options).double(), sequences(4))


def test_other_recurrent_layers_match_torch():
    assert_close(nn.LSTM(CLASSES, 5, proj_size=2).double(), sequences(4, 2))
    assert_close(nn.RNN(CLASSES, 3, nonlinearity="relu").double(), sequences(4, 2))
    assert_close(nn.GRU(CLASSES, 3).double(), sequences(4, 2), torch.randn(1, 2, 3).double())
    wide = nn.GRU(CLASSES, 100).double()  # an identity matrix would be larger than the weight
    assert_close(wide, sequences(4, 2))
    packed = nn.utils.rnn.pack_padded_sequence
    for x in sequences(4, 2)():
        output = nn.GRU(CLASSES, 3).double()(packed(x, torch.tensor([4, 2])))
        assert output[0].data.shape == (6, 3)


@pytest.mark.parametrize("layer", [nn.LSTM, nn.GRU, nn.RNN])
def test_recurrent_layer_does_not_materialize(layer, never_materialized):
    layer(CLASSES, 3)(one_hot(torch.zeros(4, 2, dtype=torch.int64), CLASSES, torch.float32))


CHANNELS = 300


@pytest.mark.parametrize(
    "options",
    [{}, {"stride": 2}, {"padding": 1}, {"dilation": 2}, {"bias": False},
     {"stride": 2, "padding": 2, "dilation": 3}, {"padding": "same"}],
    ids=str,
)  # fmt: skip
def test_convolution_matches_torch(options):
    layer = nn.Conv1d(CHANNELS, 5, 3, **options).double()
    ids = torch.randint(CHANNELS, (2, 9))

    def make():
        return [x.transpose(1, 2) for x in twins(torch.float64, ids=ids, classes=CHANNELS)]

    assert_close(layer, make)


def test_convolution_does_not_materialize(never_materialized):
    x = one_hot(torch.zeros(2, 9, dtype=torch.int64), CHANNELS, torch.float32).transpose(1, 2)
    assert isinstance(x, OneHot)
    weight = torch.randn(5, CHANNELS, 3)
    assert F.conv1d(x, weight, padding=1).shape == (2, 5, 9)


def test_convolution_raises_where_torch_raises():
    for weight in (torch.randn(5, 299, 3).double(), torch.randn(5, CHANNELS, 10).double()):
        ids = torch.zeros(2, 9, dtype=torch.int64)
        for x in twins(torch.float64, ids=ids, classes=CHANNELS):
            assert isinstance(outcome(F.conv1d, x.transpose(1, 2), weight), RuntimeError)
