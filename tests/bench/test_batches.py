"""Test the batches of ids that benchmarks draw."""

import pytest
import torch

from hotrow.bench.batches import Batches


def test_batches_are_reproducible_and_favor_few_rows():
    batches = Batches(1000, 4096)
    assert torch.equal(batches[3], Batches(1000, 4096)[3])
    assert not torch.equal(batches[3], batches[4])
    counts = torch.bincount(batches[3], minlength=1000)
    assert int(counts.argmax()) == int(batches.ids_of_ranks(torch.tensor([0]).numpy()))
    # Rank 1 is 8^1.1 = 9.8 times as frequent as rank 8.
    rank_8 = batches.ids_of_ranks(torch.tensor([7]).numpy())
    assert 6 < counts.max() / counts[rank_8].float() < 15
    uniform = torch.bincount(Batches(1000, 4096, zipf_exponent=None)[3], minlength=1000)
    assert uniform.max() < 20


def test_a_larger_exponent_favors_fewer_rows():
    distinct = [len(Batches(1000, 4096, exponent)[0].unique()) for exponent in (0.5, 1.1, 2.0)]
    assert distinct == sorted(distinct, reverse=True)
    assert distinct[0] > 2 * distinct[2]


@pytest.mark.parametrize("rows", [1, 2, 7919, 2 * 7919])
def test_every_rank_has_a_different_row(rows):
    ids = Batches(rows, 10).ids_of_ranks(torch.arange(rows).numpy())
    assert torch.equal(ids.sort().values, torch.arange(rows))
