"""Compare the cost formulas with counted products and measured allocations."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import HotrowError, cost
from hotrow.verify.measure import measure_peak_memory
from hotrow.verify.sides import Batch, make_lookup_side, make_matmul_side


@given(st.integers(1, 6), st.integers(0, 4), st.integers(0, 5))
def test_formulas_match_counted_products(rows, columns, count):
    ids = torch.randint(0, rows, (count,))
    one_hot = torch.nn.functional.one_hot(ids, rows)
    products = by_zero = 0
    for factors, width in ((one_hot, columns), (one_hot.T, columns)):  # forward, gradient
        for factor in factors.flatten().tolist():
            products += width
            by_zero += width * (factor == 0)
    found = cost(rows, columns, count)
    assert found.matmul.multiplications == products
    assert found.matmul.by_zero == by_zero
    assert found.lookup.multiplications == found.lookup.by_zero == 0


def test_example_a():
    found = cost(4, 5, 3)
    assert (found.matmul.multiplications, found.matmul.by_zero) == (120, 90)
    # forward: 3 x 5 sums of 4 terms; gradient: 4 x 5 sums of 3 terms
    assert found.matmul.additions == 3 * 3 * 5 + 4 * 2 * 5
    assert found.matmul.bytes_written == 4 * (3 * 4 + 3 * 5 + 4 * 5)
    assert found.lookup.bytes_written == 4 * (15 + 15) + 8 * 3


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
def test_bytes_match_torchs_allocations(dtype):
    table, ids = torch.randn(1000, 40).to(dtype), torch.arange(300)
    gradient = torch.randn(300, 40).to(dtype)
    found = cost(1000, 40, 300, dtype=dtype)
    matmul, lookup = make_matmul_side(table, Batch(ids)), make_lookup_side(table, Batch(ids))
    _, dense = measure_peak_memory(lambda: matmul.compute_results(gradient))
    if dtype == torch.bfloat16:  # the bfloat16 matmul allocates converted copies
        assert dense >= found.matmul.bytes_written
    else:
        assert dense == found.matmul.bytes_written
    _, rows = measure_peak_memory(lambda: lookup.compute_results(gradient))
    # torch also allocates a checked copy of the ids, and temporaries for sorting them.
    assert found.lookup.bytes_written <= rows <= found.lookup.bytes_written + 8 * 8 * 300


def test_gpt2_sized_table_writes_over_100x_fewer_bytes():
    found = cost(50_257, 768, 300)
    assert found.matmul.bytes_written / found.lookup.bytes_written > 100


def test_empty_sizes_cost_nothing():
    for sizes in ((0, 5, 3), (4, 5, 0), (4, 0, 3)):
        found = cost(*sizes)
        assert min(found.matmul.by_zero, found.matmul.additions, found.lookup.additions) >= 0
    assert cost(4, 5, 0).matmul.additions == 0
    assert cost(np.int64(4), 5, 3) == cost(4, 5, 3)


@pytest.mark.parametrize("bad", [-1, 2.0, True, "4", None])
def test_invalid_counts_raise(bad):
    with pytest.raises(HotrowError, match=r"D = .*, but it must be a non-negative int"):
        cost(4, bad, 3)


def test_prints_within_80_columns():
    assert max(map(len, str(cost(10**9, 4096, 65_536)).splitlines())) <= 80
    assert cost(4, 5, 3).to_dict()["matmul"]["by_zero"] == 90
