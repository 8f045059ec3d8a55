"""Distinct ids and their places, beside `torch.unique`."""

import pytest
import torch

from hotrow.kernels import adding
from hotrow.kernels.grouping import distinct

SIZES = [0, 1, 2, 3, 7, 8, 64, 1000, 70_000]


@pytest.mark.parametrize("rows", [1, 2, 9, 1000, 10**6, 2**31 + 5, 2**40, 2**62])
@pytest.mark.parametrize("count", SIZES)
def test_they_are_those_of_unique(rows, count):
    ids = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(count))
    at = distinct(ids, rows)
    expected, places = torch.unique(ids, return_inverse=True)
    assert torch.equal(at.rows, expected)
    assert torch.equal(at.places, places)
    order, offsets = at.order
    assert order.tolist() == torch.argsort(places, stable=True).tolist()
    assert offsets.tolist() == [0, *places.bincount(minlength=len(expected)).cumsum(0).tolist()]


def test_the_order_is_the_same_however_it_is_found():
    at = distinct(torch.tensor([[5, 9, 5], [1, 9, 5]]), 10)
    assert at.places.tolist() == [[1, 2, 1], [0, 2, 1]]
    again = adding.by_place(at.places.reshape(-1).numpy(), 3)
    assert [each.tolist() for each in again] == [each.tolist() for each in at.order]
    assert at.order[0].tolist() == [3, 0, 2, 5, 1, 4]


@pytest.mark.parametrize("stride", [1, 2**10, 2**20, 46_368, 832_040, 3**10])
def test_regular_ids_do_not_meet_in_the_hash_table(stride):
    """Counted in Python, as compiled code tells nobody: the places tried for each id."""
    table, seen = [-1] * (2 << 12), 0
    for number, i in enumerate(range(0, 2000 * stride, stride)):
        mixed = i * int(adding.MIX) % 2**64
        at = (mixed ^ (mixed >> 32)) * int(adding.MIX) % 2**64 >> (64 - 13)
        while table[at] >= 0:
            at, seen = (at + 1) % len(table), seen + 1
        table[at] = number
    assert seen < 1000
