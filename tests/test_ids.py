"""Test the checks of ids in lists, arrays and tensors, and of bag offsets."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import HotrowError
from hotrow.ids import as_ids, check_ids, check_offsets


@pytest.mark.parametrize(
    "values",
    [[2, 3, 1], (2, 3, 1), np.array([2, 3, 1]), torch.tensor([2, 3, 1]), np.array([2, 3, 1], "i4")],
)
def test_accepts_integer_lists_arrays_and_tensors(values):
    assert as_ids(values).tolist() == [2, 3, 1]


def test_accepts_scalars_empty_and_nested_lists():
    assert as_ids(5).shape == ()
    assert as_ids([]).dtype == torch.int64
    assert as_ids([[1, 2], [3, 4]]).shape == (2, 2)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ([1.0, 2.0], "ids is float32 of shape (2,), but ids must be int64 or int32"),
        ([True], "ids is bool"),
        (np.array([1], "u1"), "torch indexing treats uint8 as a mask"),
        ([[1, 2], [3]], "ids cannot be converted to a tensor of ids"),
        (["a"], "ids cannot be converted to a tensor of ids"),
        ([2**63], "ids cannot be converted to a tensor of ids"),
        (None, "ids cannot be converted to a tensor of ids"),
        ({"a": 1}, "ids cannot be converted to a tensor of ids"),
    ],
)
def test_invalid_ids_raise(values, message):
    with pytest.raises(HotrowError) as caught:
        as_ids(values)
    assert message in str(caught.value)


@given(st.lists(st.integers(-3, 12), min_size=1), st.integers(1, 9))
def test_error_names_the_first_id_out_of_range(ids, rows):
    wrong = [place for place, id in enumerate(ids) if not 0 <= id < rows]
    tensor = torch.tensor(ids)
    if not wrong:
        assert torch.equal(check_ids(tensor, rows, refused_encoding=""), tensor)
        return
    with pytest.raises(IndexError) as caught:
        check_ids(tensor, rows)
    first = wrong[0]
    expected = (
        f"ids[{first}] = {ids[first]}, but the table has {rows} rows (valid ids: 0..{rows - 1})"
    )
    assert str(caught.value).startswith(expected)
    assert (f"; {len(wrong) - 1} more" in str(caught.value)) == (len(wrong) > 1)


def test_error_gives_the_position_in_every_dimension():
    ids = torch.zeros(5, 20, dtype=torch.int64)
    ids[3, 17] = 50257
    with pytest.raises(HotrowError) as caught:
        check_ids(ids, 50257)
    assert str(caught.value).startswith(
        "ids[3, 17] = 50257, but the table has 50257 rows (valid ids: 0..50256)"
    )
    with pytest.raises(HotrowError, match=r"^ids = 9, but the table has 9 rows"):
        check_ids(torch.tensor(9), 9)


def test_table_without_rows_has_no_valid_id():
    with pytest.raises(IndexError, match=r"table has 0 rows \(no id is valid\)"):
        check_ids(torch.tensor([0]), 0)
    assert check_ids(torch.empty(0, dtype=torch.int64), 0).shape == (0,)


def test_check_ids_returns_a_copy():
    ids = torch.tensor([1, 2])
    check_ids(ids, 3)[0] = 0
    assert ids.tolist() == [1, 2]


@pytest.mark.parametrize(
    ("offsets", "last", "message"),
    [
        ([1, 2], False, "offsets[0] = 1, but the first bag must start at 0"),
        ([0, 3, 2], False, "offsets[1] = 3, but offsets[2] = 2"),
        ([0, 6], False, "offsets[1] = 6, but there are 5 ids"),
        ([0, 4], True, "offsets[-1] = 4, but there are 5 ids"),
        ([], False, "offsets is empty, but there are 5 ids"),
        ([], True, "include_last_offset needs at least the last offset"),
        ([[0, 1]], False, "offsets must be 1-D"),
        ([0.0], False, "offsets is float32"),
    ],
)
def test_invalid_offsets_for_five_ids_raise(offsets, last, message):
    dtype = torch.int64 if not offsets else None
    with pytest.raises(HotrowError) as caught:
        check_offsets(torch.tensor(offsets, dtype=dtype), 5, last)
    assert message in str(caught.value)


@pytest.mark.parametrize(("offsets", "last"), [([0], False), ([0, 0, 5], False), ([0, 5], True)])
def test_valid_offsets_are_returned(offsets, last):
    assert check_offsets(torch.tensor(offsets), 5, last).tolist() == offsets


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_jit_trace_keeps_the_check():
    traced = torch.jit.trace(lambda ids: check_ids(ids, 5) + 1, torch.tensor([1, 2]))
    with pytest.raises(RuntimeError, match="but the table has 5 rows"):  # raised by the tracer
        traced(torch.tensor([1, 5]))
