"""Test that check and compare accept hotrow's operations on a one-hot, and detect mutants."""

import json

import pytest
import torch
from torch import nn

from hotrow import HotrowError, check, compare
from hotrow.onehot.encoding import one_hot
from hotrow.verify import compare as compare_module
from hotrow.verify import reference, sides
from hotrow.verify.compare import estimate_bytes
from hotrow.verify.measure import measure_peak_memory
from hotrow.verify.sides import OPERATIONS
from tests.support.cases import DTYPES
from tests.support.exhaustive import grid
from tests.support.onehots import LargestAllocation

NEW = [name for name in OPERATIONS if name != "lookup"]
IDS = [[2, 3, 1, 2], [5, 2, 2, 0]]


def verdicts(report):
    return {each.name: each.verdict for each in report.agreements}


@pytest.mark.parametrize(
    ("dtype", "name"),
    grid([(dtype, name) for dtype in DTYPES for name in OPERATIONS], lambda t, n: t.itemsize == 4),
)
def test_operations_equal_the_literal_arithmetic(dtype, name):
    table = torch.randn(7, 3).to(dtype)
    report = check(table, name, IDS)
    assert report
    assert report.b == name
    results = {"gather": "gradient of scores", "scatter": "gradient of rows", "lookup": "gradient"}
    assert list(verdicts(report)) == ["output", *filter(None, [results.get(name)])]
    assert all(each.value_count for each in report.agreements)


@pytest.mark.parametrize("name", ["scatter", "count"])
def test_hotrow_never_writes_the_one_hot(name):
    table, batch = torch.randn(500, 3), sides.Batch(torch.arange(40))
    side = sides.make_operation_sides(name, table, batch, 0)
    with LargestAllocation() as largest:
        side.by_ids.compute_results(torch.ones(side.shape))
    assert 0 < largest.size <= 4 * 500 * 3
    with LargestAllocation() as largest:
        side.literal.compute_results(torch.ones(side.shape))
    assert largest.size >= 4 * 500 * 40


@pytest.mark.parametrize("name", OPERATIONS)
def test_no_ids_are_equal(name):
    assert check(torch.randn(7, 3), name, [])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32], ids=str)
def test_sums_in_another_order_are_equal_within_rounding(monkeypatch, dtype):
    real = reference.scatter
    monkeypatch.setattr(
        reference, "scatter", lambda ids, rows, count: real(ids.flip(0), rows.flip(0), count)
    )
    report = check(torch.randn(4, 40, dtype=dtype), "scatter", torch.randint(0, 3, (5000,)))
    assert report
    assert verdicts(report) == {"output": "rounding", "gradient of rows": "bitwise"}


def test_a_scatter_whose_rounding_could_hide_an_error_is_inconclusive(monkeypatch):
    def add_in_bfloat16(ids, rows, count):
        total = rows[0]
        for row in rows[1:]:
            total = total + row
        return total[None]

    monkeypatch.setattr(reference, "scatter", add_in_bfloat16)
    table, ids = torch.ones(1, 40).to(torch.bfloat16), torch.zeros(300, dtype=torch.int64)
    report = check(table, "scatter", ids)
    assert not report
    assert verdicts(report) == {"output": "unsure", "gradient of rows": "bitwise"}


WRONG = {
    "next id": lambda ids, classes, dtype: one_hot((ids + 1) % classes, classes, dtype),
    "a lost id": lambda ids, classes, dtype: one_hot(ids, classes, dtype) * (ids != 2)[:, None],
    "a scaled id": lambda ids, classes, dtype: one_hot(ids, classes, dtype) * (1 + 1e-6),
    "equal ids count once": lambda ids, classes, dtype: (
        one_hot(ids, classes, dtype) * ~(ids[:, None] == ids).tril(-1).any(1, keepdim=True)
    ),
}


@pytest.mark.parametrize("name", NEW)
@pytest.mark.parametrize("mutant", WRONG)
def test_a_wrong_output_is_not_equal(monkeypatch, name, mutant):
    monkeypatch.setattr(sides, "one_hot", WRONG[mutant])
    report = check(torch.randn(7, 3), name, IDS)
    assert not report
    assert "NOT equal" in str(report)
    assert verdicts(report)["output"] == "different"


@pytest.mark.parametrize("name", ["gather", "scatter"])
def test_a_wrong_gradient_is_not_equal(monkeypatch, name):
    real = getattr(reference, name)

    def doubled(ids, values, *rest):
        output = real(ids, values, *rest)
        return output + (output - output.detach())

    monkeypatch.setattr(reference, name, doubled)
    report = check(torch.randn(7, 3), name, IDS)
    assert not report
    output, gradient = report.agreements
    assert output.equal
    assert gradient.verdict == "different"


@pytest.mark.parametrize(
    ("a", "b", "ids", "message"),
    [
        (torch.ones(7, 3), "gathr", [1], "'gathr' is not an operation on a one-hot"),
        (nn.Embedding(7, 3), "gather", [1], "pass the weight: check(layer.weight, 'gather', ids)"),
        (torch.ones(7, 3), "count", [7], "ids[0] = 7, but the table has 7 rows"),
        (torch.ones(7), "count", [1], "but a table must be 2-D"),
    ],
)
def test_operations_that_cannot_be_checked_raise(a, b, ids, message):
    with pytest.raises(HotrowError) as caught:
        check(a, b, ids)
    assert message in str(caught.value)


@pytest.mark.parametrize("name", NEW)
def test_compare_measures_both_sides(name):
    table = torch.randn(50, 8)
    found = compare(table, IDS, operation=name, seconds=0)
    assert found
    assert found.cost is None
    assert (found.operation, found.check.b) == (name, name)
    assert f"\n{found.literal_name} " in str(found)
    content = json.loads(json.dumps(found.to_dict()))
    assert content["operation"] == name
    assert content[name]["median_ms"] == found.lookup.median_ms
    assert content["matmul"]["measured_bytes_peak"] == found.matmul.bytes_peak
    assert found.lookup.bytes_peak < found.matmul.bytes_peak


def test_compare_reports_a_wrong_operation(monkeypatch):
    monkeypatch.setattr(sides, "one_hot", WRONG["next id"])
    assert not compare(torch.randn(7, 3), IDS, operation="count", seconds=0)
    with pytest.raises(HotrowError, match="'sum' is not an operation on a one-hot: use one of"):
        compare(torch.randn(7, 3), IDS, operation="sum")


@pytest.mark.parametrize(
    ("dtype", "sizes", "name"),
    grid(
        [
            (dtype, sizes, name)
            for dtype in DTYPES
            for sizes in [(3000, 20, 1), (3000, 20, 500), (3000, 1, 500), (2, 1, 20_000)]
            for name in NEW
        ],
        lambda dtype, sizes, name: dtype == torch.float32 and sizes == (3000, 20, 500),
    ),
)
def test_memory_estimate_is_an_upper_bound(monkeypatch, dtype, sizes, name):
    rows, columns, count = sizes
    table, ids = torch.randn(rows, columns).to(dtype), torch.randint(0, rows, (count,))
    # Profilers can't be nested, so measure the whole call and disable compare's own measurement.
    monkeypatch.setattr(compare_module, "measure_peak_memory", lambda work, device: (work(), 0))
    found, used = measure_peak_memory(lambda: compare(table, ids, operation=name, seconds=0))
    assert used <= found.needed_bytes == estimate_bytes(table, count, name)


@pytest.mark.parametrize("name", NEW)
def test_budget_allows_as_many_ids_as_fit(name):
    table, ids = torch.randn(500, 3), torch.arange(400)
    fixed = estimate_bytes(table, 0, name)
    budget = fixed + (estimate_bytes(table, 400, name) - fixed) // 2
    found = compare(table, ids, operation=name, budget=budget, seconds=0)
    assert found.compared_count == 200
    with pytest.raises(HotrowError, match=f"the one-hot {name} needs .* but the budget is"):
        compare(table, ids, operation=name, budget=fixed)
