"""Test that compare_tensors finds and counts every difference."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hotrow import HotrowError
from hotrow.verify import agreement as agreement_module
from hotrow.verify.agreement import compare_tensors


def next_up(x, steps=1):
    for _ in range(steps):
        x = torch.nextafter(x, torch.full_like(x, math.inf))
    return x


def test_equal_tensors():
    x = torch.randn(4, 5)
    found = compare_tensors("output", x, x.clone())
    assert (found.verdict, found.equal, found.bitwise_count, found.value_count) == (
        "bitwise",
        True,
        20,
        20,
    )
    assert (found.max_ulp, found.max_error, found.first_difference) == (0, 0.0, None)
    assert str(found) == "equal, 20 of 20 values bit for bit"


@pytest.mark.parametrize("steps", [1, 2, 7])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.float16, torch.bfloat16])
def test_one_value_off_by_some_ulp(steps, dtype):
    a = torch.randn(4, 5).to(dtype)
    b = a.clone()
    b[2, 3] = next_up(a[2, 3], steps)
    found = compare_tensors("output", a, b)
    assert not found.equal
    assert found.verdict == "different"
    assert found.max_ulp == steps
    assert found.bitwise_count == 19
    assert found.first_difference.position == (2, 3)
    assert found.max_error == abs(float(b[2, 3]) - float(a[2, 3]))
    assert str(found).startswith(
        f"NOT equal, 19 of 20 values bit for bit; max {steps} ulp, max err"
    )
    assert "first difference at [2, 3]: " in str(found)


@given(st.floats(width=32, allow_nan=False), st.floats(width=32, allow_nan=False))
def test_ulp_distance_counts_the_floats_between(x, y):
    a, b = torch.tensor([x], dtype=torch.float32), torch.tensor([y], dtype=torch.float32)
    found = compare_tensors("x", a, b)

    def place(value):  # ranks a float among all floats by its sign and magnitude bits
        bits = int(torch.tensor(value, dtype=torch.float32).view(torch.int32))
        return bits if bits >= 0 else -(bits & 0x7FFFFFFF)

    assert found.max_ulp == abs(place(x) - place(y))
    assert found.equal == (x == y)


def test_float64_at_opposite_ends_does_not_overflow():
    big = torch.tensor([1.7e308], dtype=torch.float64)
    found = compare_tensors("x", big, -big)
    assert found.max_ulp > 2**62
    assert not found.equal


def test_flushed_denormals_are_not_zeros():
    a, b = torch.tensor([1e-40]), torch.tensor([7e-40])
    if not torch.set_flush_denormal(True):
        pytest.skip("this processor cannot flush denormals")
    try:
        found = compare_tensors("x", a, b)
        zeros = compare_tensors("x", torch.tensor([0.0]), torch.tensor([-0.0]))
    finally:
        torch.set_flush_denormal(False)
    assert (found.verdict, found.equal) == ("different", False)
    assert zeros.verdict == "zeros"


def test_signs_of_zeros():
    found = compare_tensors("output", torch.tensor([0.0, 1.0]), torch.tensor([-0.0, 1.0]))
    assert (found.verdict, found.equal, found.max_ulp, found.bitwise_count) == ("zeros", True, 0, 1)
    assert "the others are zeros of opposite sign, first at [0]: 0.0 against -0.0" in str(found)


@pytest.mark.parametrize("other", [1.0, math.inf, -math.inf])
def test_nan_on_one_side_is_a_difference(other):
    a, b = torch.tensor([math.nan, 2.0]), torch.tensor([other, 2.0])
    for found in (compare_tensors("x", a, b), compare_tensors("x", b, a)):
        assert not found.equal
        assert found.max_error == math.inf
        assert found.to_dict()["max_ulp"] is None
        assert "NaN ulp" in str(found)


def test_infinities():
    inf = torch.tensor([math.inf])
    assert compare_tensors("x", inf, inf.clone()).equal
    assert not compare_tensors("x", inf, -inf).equal
    assert compare_tensors("x", inf, -inf).max_error == math.inf


def test_nans_with_different_bits_are_equal():
    a = torch.tensor([0x7FC00000, 0x7FC00000], dtype=torch.int32).view(torch.float32)
    b = torch.tensor([0x7FC00000, 0x7FC00001], dtype=torch.int32).view(torch.float32)
    found = compare_tensors("x", a, b)
    assert (found.equal, found.bitwise_count, found.max_error) == (True, 1, 0.0)


def test_bound_permits_rounding_only_where_it_is_large_enough():
    a = torch.ones(3, 2)
    b = a.clone()
    b[1, 0] += 1e-3
    b[2, 1] += 1e-3

    def bound(places):
        return torch.where(places[:, 0] == 1, 1e-2, 0.0).double()

    found = compare_tensors("x", a, b, bound)
    assert found.verdict == "different"
    assert found.first_difference.position == (2, 1)  # the difference at (1, 0) is within the bound
    b[2, 1] = 1.0
    found = compare_tensors("x", a, b, bound)
    assert (found.verdict, found.equal, found.first_difference.position) == (
        "rounding",
        True,
        (1, 0),
    )
    assert str(found).startswith("equal within rounding, 5 of 6 values bit for bit")


def test_infinite_bound_makes_the_result_inconclusive():
    a, b = torch.ones(2, 1), torch.tensor([[1.0], [2.0]])

    def bound(places):
        return torch.full((len(places),), math.inf, dtype=torch.float64)

    found = compare_tensors("x", a, b, bound)
    assert (found.verdict, found.equal, found.first_difference.position) == (
        "unsure",
        False,
        (1, 0),
    )
    assert str(found).startswith("inconclusive, 1 of 2 values bit for bit; ")
    assert compare_tensors("x", a, a.clone(), bound).equal


def test_nan_is_never_within_a_bound():
    a, b = torch.ones(1, 1, dtype=torch.float64), torch.full((1, 1), math.nan).double()
    assert not compare_tensors(
        "x", a, b, lambda places: torch.full((1,), 1e300, dtype=torch.float64)
    ).equal


@pytest.mark.parametrize("chunk", [1, 3, 7, 100])
def test_chunks_are_combined(monkeypatch, chunk):
    monkeypatch.setattr(agreement_module, "_CHUNK", chunk)
    a = torch.randn(5, 4)
    b = a.clone()
    b[1, 2] += 2
    b[4, 3] += 1
    zeros = compare_tensors("x", torch.tensor([1.0, 0.0]), torch.tensor([2.0, -0.0]))
    assert zeros.verdict == "different"
    found = compare_tensors("x", a, b)
    assert found.first_difference.position == (1, 2)
    assert found.bitwise_count == 18
    assert math.isclose(found.max_error, 2, rel_tol=1e-5)


@pytest.mark.parametrize("shape", [(0,), (0, 5), (5, 0), ()])
def test_empty_and_scalar_tensors(shape):
    assert compare_tensors("x", torch.zeros(shape), torch.zeros(shape)).equal
    if not shape:
        assert (
            compare_tensors("x", torch.tensor(1.0), torch.tensor(2.0)).first_difference.position
            == ()
        )


@pytest.mark.parametrize(
    ("a", "b", "message"),
    [
        (torch.zeros(2), torch.zeros(3), "output: cannot compare shape (2,) with (3,)"),
        (
            torch.zeros(2),
            torch.zeros(2, dtype=torch.float64),
            "dtype torch.float32 with",
        ),
        (
            torch.zeros(2),
            torch.zeros(2, device="meta"),
            "output: cannot compare device cpu with meta",
        ),
    ],
)
def test_different_shapes_dtypes_and_devices_raise(a, b, message):
    with pytest.raises(HotrowError) as caught:
        compare_tensors("output", a, b)
    assert message in str(caught.value)


def test_infinity_is_a_string_in_json():
    found = compare_tensors("x", torch.tensor([math.inf]), torch.tensor([1.0])).to_dict()
    assert found["max_error"] == "inf"
    assert found["first_difference"] == {"position": [0], "a": "inf", "b": 1.0}
