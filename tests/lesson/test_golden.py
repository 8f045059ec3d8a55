"""Compute the published numbers of the lesson's examples A, B and C with this library."""

import pytest
import torch

from hotrow import Embedding, OneHotLinear, check, compare
from hotrow.inputs.examples import A, seeded_table
from hotrow.verify import reference
from tests.support.tolerance import assert_same_bits

TABLE_A = """
 0.3374 -0.1778 -0.3035 -0.5880  1.5810
 1.3010  1.2753 -0.2010 -0.1606 -0.4015
 0.6957 -1.8061 -1.1589  0.3255 -0.6315
-2.8400 -0.7849 -1.4096 -0.4076  0.7953
"""
LINEAR_A = """
-0.2039  0.0166 -0.2483  0.1886
-0.4260  0.3665 -0.3634 -0.3975
-0.3159  0.2264 -0.1847  0.1871
-0.4244 -0.3034 -0.1836 -0.0983
-0.3814  0.3274 -0.1179  0.1605
"""
TABLE_B = """
 0.3374 -0.1778 -0.1690
 0.9178  1.5810  1.3010
 1.2753 -0.2010 -0.1606
-0.4015  0.9666 -1.1481
-1.1589  0.3255 -0.6315
-2.8400 -0.7849 -1.4096
"""


def shown(tensor):
    """Format every number with four decimals, as the lesson does."""
    return [[f"{x:.4f}" for x in row] for row in tensor.tolist()]


def numbers(text):
    return [line.split() for line in text.strip().splitlines()]


def test_example_a_table():
    assert shown(A.table()) == numbers(TABLE_A)
    torch.manual_seed(123)
    assert_same_bits(Embedding(4, 5).weight, A.table())


def test_example_a_linear_layer_has_different_initial_values():
    torch.manual_seed(123)
    assert shown(OneHotLinear(4, 5, bias=False).weight) == numbers(LINEAR_A)


def test_example_a_one_hot():
    expected = [[0, 0, 1, 0], [0, 0, 0, 1], [0, 1, 0, 0]]
    assert reference.one_hot(torch.tensor(A.ids), 4, torch.float32).tolist() == expected


def test_example_a_lookup():
    layer = Embedding.from_pretrained(A.table())
    rows = numbers(TABLE_A)
    assert shown(layer(torch.tensor([1]))) == [rows[1]]
    assert shown(layer(torch.tensor(A.ids))) == [rows[2], rows[3], rows[1]]


def test_example_a_linear_layer_equals_lookup():
    report = check(Embedding.from_pretrained(A.table()).to_linear(), A.table(), A.ids)
    assert str(report.agreements[0]) == "equal, 15 of 15 values bit for bit"
    assert str(report.agreements[1]) == "equal, 20 of 20 values bit for bit"


def test_example_b_table_and_lookup():
    table = seeded_table(6, 3)
    rows = numbers(TABLE_B)
    assert shown(table) == rows
    layer = Embedding.from_pretrained(table)
    assert shown(layer(torch.tensor([3]))) == [rows[3]]
    assert shown(layer(torch.tensor([2, 3, 5, 1]))) == [rows[2], rows[3], rows[5], rows[1]]
    assert compare(table, [2, 3, 5, 1])


@pytest.mark.parametrize("rows", [50_257])
def test_example_c_sum_of_two_lookups_is_one_linear_layer_over_two_one_hots(rows):
    torch.manual_seed(123)
    tokens, positions = Embedding(rows, 256), Embedding(4, 256)
    ids = torch.randint(0, rows, (8, 4))
    output = tokens(ids) + positions(torch.arange(4))
    assert tokens(ids).shape == output.shape == (8, 4, 256)
    assert positions(torch.arange(4)).shape == (4, 256)
    both = torch.cat(
        [
            reference.one_hot(ids, rows, torch.float32),
            reference.one_hot(torch.arange(4), 4, torch.float32).expand(8, 4, 4),
        ],
        -1,
    )
    # A sum of two terms does not depend on their order.
    assert_same_bits(both @ torch.cat([tokens.weight, positions.weight]), output)


def test_seeded_table_leaves_the_global_seed_unchanged():
    torch.manual_seed(5)
    before = torch.get_rng_state()
    seeded_table(4, 5)
    assert torch.equal(torch.get_rng_state(), before)
