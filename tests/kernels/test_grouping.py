"""Distinct ids match `torch.unique`, selected rows match torch's, and bad ids raise errors."""

import gc

import numpy as np
import pytest
import torch
import torch.nn.functional as F

import hotrow
from hotrow.errors import HotrowError, HotrowIndexError
from hotrow.kernels.batch import DistinctIds
from hotrow.kernels.cpu.grouping import number_ids
from hotrow.kernels.grouping import find_distinct
from hotrow.table import reading
from hotrow.table.autograd import storage_use_count
from hotrow.table.parameter import Table

SIZES = [0, 1, 2, 3, 7, 8, 64, 1000, 70_000]


@pytest.mark.parametrize("rows", [1, 2, 9, 1000, 10**6, 2**31 + 5, 2**40, 2**62])
@pytest.mark.parametrize("count", SIZES)
def test_distinct_ids_match_torch_unique(rows, count):
    ids = torch.randint(rows, (count,), generator=torch.Generator().manual_seed(count))
    distinct = find_distinct(ids, rows)
    assert distinct.are_in_range
    rows, inverse = torch.unique(ids, return_inverse=True)
    assert torch.equal(distinct.sort()[0], rows)
    assert torch.equal(distinct.sort()[1], inverse)
    assert torch.equal(distinct.rows[distinct.inverse], ids)
    assert torch.equal(distinct.ids(), ids)
    groups = distinct.groups
    assert groups.rows.tolist() == distinct.rows.tolist()
    assert groups.inverse.tolist() == distinct.inverse.reshape(-1).tolist()
    inverse, order, offsets = groups.inverse, groups.order, groups.offsets
    assert order.tolist() == np.argsort(inverse, stable=True).tolist()
    counts = np.bincount(inverse, minlength=len(distinct.rows))
    assert offsets.tolist() == [0, *counts.cumsum().tolist()]


def test_distinct_ids_are_in_order_of_first_appearance():
    ids = torch.tensor([[5, 9, 5], [1, 9, 5]])
    for each in ids, ids.int(), torch.stack([ids.t(), ids.t()], 2)[..., 0].t():
        distinct = find_distinct(each, 10)
        assert distinct.rows.tolist() == [5, 9, 1]
        assert distinct.inverse.tolist() == [[0, 1, 0], [2, 1, 0]]
        assert distinct.ids().tolist() == [5, 9, 5, 1, 9, 5]
        assert distinct.groups.order.tolist() == [0, 2, 5, 1, 4, 3]


def test_both_ways_to_order_a_batch_by_row_agree():
    distinct = find_distinct(torch.tensor([[5, 9, 5], [1, 9, 5]]), 10)
    again = DistinctIds(distinct.rows, distinct.inverse)
    assert torch.equal(again.ids(), distinct.ids())
    for name in ("rows", "inverse", "order", "offsets"):
        one, other = getattr(again.groups, name), getattr(distinct.groups, name)
        assert one.tolist() == other.tolist()


@pytest.mark.parametrize("stride", [1, 2**10, 2**20, 46_368, 832_040, 3**10])
def test_regularly_spaced_ids_rarely_collide_in_the_hash_table(stride):
    class CountingTable(np.ndarray):
        reads = 0

        def __getitem__(self, position):
            CountingTable.reads += 1
            return super().__getitem__(position)

    ids = np.arange(0, 1000 * stride, stride)
    table = np.full(2 << 10, -1, np.int32).view(CountingTable)
    with np.errstate(over="ignore"):  # the hash is meant to overflow
        count = number_ids.py_func(ids, table, np.empty_like(ids), np.empty_like(ids))
    assert count == 1000
    assert CountingTable.reads < 2000


@pytest.mark.parametrize("wrong", [-1, -(2**63), 10, 2**31 + 3, 2**57 + 5, 2**63 - 1])
@pytest.mark.parametrize("position", [0, 63])
def test_out_of_range_ids_are_detected(wrong, position):
    ids = torch.arange(64) % 10
    assert find_distinct(ids, 10).are_in_range
    ids[position] = wrong
    assert not find_distinct(ids, 10).are_in_range


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("trained", [False, True])
def test_rows_that_are_not_stale_match_torch(dtype, trained, compiled, monkeypatch, threads):
    if compiled:
        torch.set_num_threads(3)
        monkeypatch.setattr(reading, "MIN_COMPILED_BYTES", 1)
    for rows, columns, shape in (
        (7, 3, ()), (7, 3, (0,)), (5, 0, (4,)), (300, 17, (40, 3)), (1000, 256, (2000,)),
    ):  # fmt: skip
        values = torch.randn(rows, columns).to(dtype)
        table = Table.adopt(torch.nn.Parameter(values.clone(), requires_grad=trained))
        ids = torch.randint(rows, shape)
        for given in (ids, ids.int(), ids.t().contiguous().t() if ids.ndim == 2 else ids):
            found = F.embedding(given, table)
            assert found.requires_grad == trained
            assert torch.equal(found, F.embedding(given, values))


@pytest.mark.parametrize("wrong", [-1, 300, 2**57 + 5, -(2**63)])
@pytest.mark.parametrize("stale", [False, True])
@pytest.mark.parametrize("compiled", [False, True])
def test_an_out_of_range_id_raises_and_changes_nothing(wrong, stale, compiled, monkeypatch):
    if compiled:
        monkeypatch.setattr(reading, "MIN_COMPILED_BYTES", 1)
    layer = hotrow.convert(torch.nn.Embedding(300, 4), min_entries=0)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    for t in range(3 * stale):
        optimizer.zero_grad()
        layer(torch.arange(t, t + 9)).sum().backward()
        optimizer.step()
    assert layer.weight.has_stale_rows == stale
    lag = layer.weight.lag
    before = layer.weight.raw_data.clone(), lag.row_steps.clone() if stale else None
    ids = torch.arange(0, 300, 7)
    ids[5] = wrong
    for context in (torch.enable_grad, torch.no_grad):
        with context(), pytest.raises(HotrowIndexError, match=rf"^input\[5\] = {wrong}, but"):
            layer(ids)
    assert torch.equal(layer.weight.raw_data, before[0])
    assert not stale or torch.equal(lag.row_steps, before[1])


def test_ids_are_checked_in_a_table_without_columns():
    layer = hotrow.convert(torch.nn.Embedding(9, 0), min_entries=0)
    assert layer(torch.tensor([3, 8])).shape == (2, 0)
    with pytest.raises(HotrowIndexError, match=r"^input\[1\] = 9, but"):
        layer(torch.tensor([3, 9]))


@pytest.mark.parametrize("ids", [[1, 2], 3, None])
def test_ids_that_are_not_a_tensor_raise(ids):
    layer = hotrow.convert(torch.nn.Embedding(9, 2), min_entries=0)
    with pytest.raises(HotrowError, match=f"^input is a {type(ids).__name__}"):
        layer(ids)


def test_a_negated_view_of_ids_is_looked_up():
    layer = hotrow.convert(torch.nn.Embedding(9, 2), min_entries=0)
    ids = torch._neg_view(torch.tensor([-3, -8]))
    assert torch.equal(layer(ids), layer(torch.tensor([3, 8])))


def test_an_error_leaves_no_reference_to_the_table():
    layer = hotrow.convert(torch.nn.Embedding(9, 2, max_norm=1.0), min_entries=0)
    gc.disable()
    try:
        with pytest.raises(HotrowIndexError):
            layer(torch.tensor([9]))
        assert storage_use_count(layer.weight) == 1
    finally:
        gc.enable()


def test_ids_with_the_negative_bit():
    negated = torch._neg_view(torch.tensor([-1, -3, -1]))
    assert negated.is_neg()
    distinct = find_distinct(negated, 4)
    assert distinct.rows.tolist() == [1, 3]
    assert distinct.rows[distinct.inverse].tolist() == [1, 3, 1]
