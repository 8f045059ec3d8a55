"""Compare the dense reference with simple loops."""

import pytest
import torch

from hotrow.verify import reference
from tests.support.cases import case_table
from tests.support.tolerance import assert_no_worse, assert_same_bits


@case_table
def test_one_hot_matches_torch(case):
    ids = case.ids()
    expected = torch.nn.functional.one_hot(ids.long(), case.rows).float()
    assert_same_bits(reference.one_hot(ids, case.rows, torch.float32), expected)


def test_embedding_is_the_sum_of_all_products():
    ids, table = torch.tensor([2, 3, 1]), torch.randn(4, 5)
    output = reference.embedding(ids, table)
    for n, id in enumerate(ids.tolist()):
        for d in range(5):
            total = torch.tensor(0.0)
            for v in range(4):
                total = total + (1.0 if v == id else 0.0) * table[v, d]
            assert output[n, d] == total


@pytest.mark.parametrize(
    ("mode", "expected"),
    [
        ("sum", [[16.0, 28.0], [0.0, 0.0], [6.0, 16.0], [5.0, 6.0]]),
        ("mean", [[16 / 3, 28 / 3], [0.0, 0.0], [6.0, 16.0], [5.0, 6.0]]),
        ("max", [[6.0, 16.0], [0.0, 0.0], [6.0, 16.0], [5.0, 6.0]]),
    ],
)
def test_bag(mode, expected):
    table = torch.tensor([[6.0, 16.0], [5.0, 6.0]])
    ids, offsets = torch.tensor([0, 1, 1, 0, 1]), torch.tensor([0, 3, 3, 4])
    output = reference.bag(ids, offsets, table, mode)
    expected = torch.tensor(expected)
    assert_no_worse(output, expected, expected.double())


def test_weighted_bag():
    table = torch.tensor([[1.0, 10.0], [5.0, 6.0]])
    weights = torch.tensor([0.5, 2.0])
    output = reference.bag(torch.tensor([0, 1]), torch.tensor([0]), table, "sum", weights)
    assert output.tolist() == [[10.5, 17.0]]
