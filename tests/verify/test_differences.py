"""Test the documented differences between the dense product and the lookup."""

import pytest
import torch

from hotrow import Embedding, HotrowError, check
from hotrow.verify import reference
from tests.support.tolerance import assert_same_bits

IDS = torch.tensor([2, 0])


@pytest.mark.parametrize("value", [torch.inf, -torch.inf, torch.nan])
def test_non_finite_value_spreads_in_the_matmul_but_not_in_the_lookup(value):
    table = torch.randn(4, 3)
    table[3, 1] = value  # no id selects this row
    assert reference.embedding(IDS, table)[:, 1].isnan().all()
    assert Embedding.from_pretrained(table)(IDS).isfinite().all()
    assert not check(table, Embedding.from_pretrained(table), IDS)


def test_non_finite_value_stays_in_its_row():
    table = torch.randn(4, 3)
    table[2, 1] = torch.inf
    output = Embedding.from_pretrained(table)(IDS)
    assert output[0, 1] == torch.inf
    assert output[1].isfinite().all()


def test_negative_zero_loses_its_sign_in_the_matmul():
    table = torch.tensor([[-0.0], [1.0], [-0.0]])
    assert torch.signbit(Embedding.from_pretrained(table)(IDS)).all()
    assert not torch.signbit(reference.embedding(IDS, table)).any()
    assert check(table, Embedding.from_pretrained(table), IDS).agreements[0].verdict == "zeros"


def test_id_out_of_range_raises_instead_of_giving_a_row_of_zeros():
    ids = torch.tensor([2, 9])
    table = torch.randn(4, 3)
    by_comparison = (ids[:, None] == torch.arange(4)).float()  # a common way to write a one-hot
    assert (by_comparison @ table)[1].tolist() == [0.0, 0.0, 0.0]
    with pytest.raises(HotrowError):
        Embedding.from_pretrained(table)(ids)


def test_lookup_adds_repeated_ids_in_batch_order():
    ids, gradient = torch.zeros(500, dtype=torch.int64), torch.randn(500, 3)
    sums = []
    for order in (torch.arange(500), torch.arange(500).flip(0)):
        layer = Embedding(4, 3)
        layer(ids).backward(gradient[order])
        sums.append(layer.weight.grad[0])
    assert not torch.equal(*sums)
    expected = torch.zeros(3)
    for row in gradient:
        expected += row
    assert_same_bits(sums[0], expected)


def test_low_precision_gradients_round_at_each_addition():
    table = torch.zeros(4, 1, dtype=torch.bfloat16)
    gradient = torch.ones(1000, 1, dtype=torch.bfloat16)
    ids = torch.zeros(1000, dtype=torch.int64)
    layer = Embedding.from_pretrained(table, freeze=False)
    layer(ids).backward(gradient)
    leaf = table.clone().requires_grad_()
    reference.embedding(ids, leaf).backward(gradient)
    assert layer.weight.grad[0] == 256  # 256 + 1 rounds to 256 with 8 significant bits
    assert leaf.grad[0] == 1000  # the matmul adds in float32 and rounds once


def test_gradient_of_a_row_used_at_most_twice_is_equal_bit_for_bit():
    table, ids = torch.randn(4, 3), torch.tensor([1, 3, 1])
    report = check(table, Embedding.from_pretrained(table), ids)
    assert [each.verdict for each in report.agreements] == ["bitwise", "bitwise"]
    assert_same_bits(Embedding.from_pretrained(table)(ids), table[ids])


def test_single_id_gives_the_matmuls_gradient_negative_zeros():
    table = torch.randn(4, 3)
    report = check(table, Embedding.from_pretrained(table), [2])
    assert report  # 0 x -c is -0.0, and stays -0.0 unless a library adds it to 0.0
    assert report.agreements[1].verdict in ("bitwise", "zeros")
    assert report.agreements[1].max_error == 0
