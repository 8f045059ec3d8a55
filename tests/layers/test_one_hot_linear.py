"""Test that `OneHotLinear` on ids equals a linear layer on the one-hots of those ids."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from hotrow import OneHotLinear
from hotrow.verify import reference
from tests.support.cases import case_table
from tests.support.tolerance import assert_no_worse, assert_same_bits


@case_table
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.filterwarnings("ignore:Initializing zero-element tensors")  # on "meta", too
def test_linear_on_ids_equals_linear_on_their_one_hots(case, bias):
    ids = case.ids()
    linear = nn.Linear(case.rows, case.columns, bias=bias, device="meta")
    linear.weight = nn.Parameter(case.table().t().contiguous())
    linear.bias = nn.Parameter(torch.randn(case.columns)) if bias else None
    layer = OneHotLinear.from_linear(linear)
    one_hot = reference.one_hot(ids, case.rows, torch.float32)
    assert_same_bits(layer(ids), F.linear(one_hot, layer.weight, layer.bias))
    assert_same_bits(layer(one_hot), F.linear(one_hot, layer.weight, layer.bias))


@pytest.mark.parametrize("bias", [True, False])
def test_gradients_match_the_linear_layer(bias):
    ids = torch.randint(0, 5, (50,))
    ours = OneHotLinear(11, 6, bias=bias)
    theirs = ours.to_linear()
    output_gradient = torch.randn(50, 6)
    ours(ids).backward(output_gradient)
    theirs(reference.one_hot(ids, 11, torch.float32)).backward(output_gradient)
    truth = reference.one_hot(ids, 11, torch.float64).T @ output_gradient.double()
    assert_no_worse(ours.weight.grad, theirs.weight.grad, truth.T)
    if bias:
        assert_same_bits(ours.bias.grad, theirs.bias.grad)


def test_from_linear_keeps_the_bias():
    linear = nn.Linear(7, 3)
    layer = OneHotLinear.from_linear(linear)
    assert_same_bits(layer(torch.arange(7)), linear(torch.eye(7)))
    assert layer.bias.data_ptr() != linear.bias.data_ptr()


def test_autocast_matches_torch():
    layer = OneHotLinear(7, 3)
    ids = torch.tensor([1, 6, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = layer(ids), layer.to_linear()(torch.eye(7)[ids])
    assert output.dtype == torch.bfloat16
    assert_same_bits(output, expected)


def test_autocast_keeps_float64():
    layer = OneHotLinear(7, 3, dtype=torch.float64)
    ids = torch.tensor([1, 6, 1])
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output, expected = layer(ids), layer.to_linear()(torch.eye(7, dtype=torch.float64)[ids])
    assert_same_bits(output, expected)


def test_conversion_keeps_requires_grad_of_each_parameter():
    linear = nn.Linear(7, 3)
    linear.bias.requires_grad_(False)
    layer = OneHotLinear.from_linear(linear)
    assert (layer.weight.requires_grad, layer.bias.requires_grad) == (True, False)
