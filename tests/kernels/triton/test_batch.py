"""The ids of a batch on a GPU. This code doesn't need Triton."""

import pytest
import torch

from hotrow.kernels.triton.batch import DeviceIds


def device_ids(ids, **options):
    flat = torch.tensor(ids, dtype=torch.int32)
    return DeviceIds(flat, flat.shape, **options)


@pytest.mark.parametrize(
    ("row_count", "dtype"), [(2**30 - 1, torch.int32), (2**30, torch.int64)], ids=str
)
def test_the_joined_ids_of_several_tables_are_distinct(row_count, dtype):
    ids = [0, 7, -1, row_count - 1, 7], [7, row_count - 1, -1]
    joined = DeviceIds.join([device_ids(each) for each in ids], row_count)
    assert joined.flat.dtype == dtype
    found = joined.flat.tolist()
    expected = [(k, each) for k, own in enumerate(ids) for each in own]
    assert all(
        each < 0 if row < 0 else divmod(each, 2) == (row, k)
        for each, (k, row) in zip(found, expected, strict=True)
    )
    assert not joined.is_merged


def test_joined_merged_ids_stay_merged():
    merged = [device_ids([3, -1], is_merged=True), device_ids([-1, 3], is_merged=True)]
    assert DeviceIds.join(merged, 4).is_merged
    assert not DeviceIds.join([*merged, device_ids([1, 1])], 4).is_merged
