"""Test the results, memory budget and report of `compare`."""

import json

import pytest
import torch

import hotrow
from hotrow import HotrowError, compare
from hotrow.verify import compare as compare_module
from hotrow.verify.compare import estimate_bytes
from hotrow.verify.measure import measure_peak_memory
from tests.support.cases import DTYPES
from tests.support.exhaustive import grid


def test_example_a_is_equal():
    torch.manual_seed(123)
    found = compare(torch.nn.Embedding(4, 5).weight, [2, 3, 1], tokens=["b", "c", "a"])
    assert found
    assert found.equal
    assert [str(each) for each in found.check.agreements] == [
        "equal, 15 of 15 values bit for bit",
        "equal, 20 of 20 values bit for bit",
    ]
    assert found.compared_count == 3
    assert found.cost == hotrow.cost(4, 5, 3)
    half = compare(torch.randn(4, 5).half(), [2], seconds=0)
    assert half.cost == hotrow.cost(4, 5, 1, dtype=torch.float16)
    assert 1 <= len(found.matmul.milliseconds) == len(found.lookup.milliseconds) <= 7
    assert found.ratio == found.matmul.median_ms / found.lookup.median_ms
    assert found.matmul.bytes_peak == found.cost.matmul.bytes_written


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_every_dtype_is_equal(dtype):
    table = torch.randn(60, 8).to(dtype)
    found = compare(table, torch.randint(0, 9, (5, 20)), seconds=0)
    assert found
    assert found.check.agreements[0].verdict == "bitwise"
    assert len(found.matmul.milliseconds) == 1


def test_different_gradient_or_table_is_not_equal():
    table = torch.randn(6, 3)
    table[5, 0] = torch.inf
    found = compare(table, [1, 2])
    assert not found
    assert "NOT equal" in str(found)
    assert found.check.notes


@pytest.mark.parametrize(("columns", "ids"), [(3, []), (0, [1, 2]), (0, [])])
def test_comparison_of_no_values_raises(columns, ids):
    with pytest.raises(HotrowError, match="there are no values to compare"):
        compare(torch.randn(6, columns), ids)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.999])
def test_budget_allows_as_many_ids_as_fit(share):
    table, ids = torch.randn(500, 3), torch.arange(400)
    fixed = estimate_bytes(table, 0)
    budget = fixed + int(share * (estimate_bytes(table, 400) - fixed))
    found = compare(table, ids, budget=budget, seconds=0)
    assert 0 < found.compared_count < 400
    assert (
        estimate_bytes(table, found.compared_count)
        <= budget
        < estimate_bytes(table, found.compared_count + 1)
    )
    assert found.needed_bytes == estimate_bytes(table, 400) > budget
    assert found.check.agreements[0].value_count == found.compared_count * 3
    assert len(found.ids) == 400


def test_compared_ids_are_the_first():
    table, ids = torch.randn(500, 3), torch.arange(100, 500)
    fixed, per_id = compare_module._fixed_and_per_id_bytes(table)
    seen = []
    real = compare_module.make_operation_sides

    def spy(name, table, batch, seed):
        seen.append(batch.ids.tolist())
        return real(name, table, batch, seed)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compare_module, "make_operation_sides", spy)
        compare(table, ids, budget=fixed + 5 * per_id, seconds=0)
    assert seen == [[100, 101, 102, 103, 104]]


def test_default_budget_is_half_of_the_free_memory(monkeypatch):
    monkeypatch.setattr(compare_module, "free_memory", lambda device: 2_000_001)
    assert compare(torch.randn(6, 3), [1], seconds=0).budget == 1_000_000


def test_times_belong_to_their_method(monkeypatch):
    def time_interleaved(works, seconds, max_rounds, device):
        assert [set(work()) for work in works] == [{"output", "gradient"}] * 2
        assert [work()["gradient"].is_sparse for work in works] == [False, True]
        yield [30.0, 3.0]
        yield [50.0, 5.0]

    monkeypatch.setattr(compare_module, "time_interleaved", time_interleaved)
    found = compare(torch.randn(6, 3), [1, 2])
    assert found.matmul.milliseconds == (30.0, 50.0)
    assert found.lookup.milliseconds == (3.0, 5.0)
    assert found.ratio == 10


def test_sufficient_budget_allows_all_ids():
    table = torch.randn(500, 3)
    assert (
        compare(table, torch.arange(400), budget=estimate_bytes(table, 400)).compared_count == 400
    )


def test_budget_below_one_id_raises():
    with pytest.raises(HotrowError, match=r"for a single id in this 500 x 3 table, but the budg"):
        compare(torch.randn(500, 3), [1], budget=1000)


@pytest.mark.parametrize("dtype", grid(DTYPES, lambda dtype: dtype == torch.float16), ids=str)
@pytest.mark.parametrize(
    ("rows", "columns", "count"), [(3000, 20, 1), (3000, 20, 500), (3000, 1, 500), (2, 1, 50_000)]
)
def test_memory_estimate_is_an_upper_bound(monkeypatch, rows, columns, count, dtype):
    table, ids = torch.randn(rows, columns).to(dtype), torch.randint(0, rows, (count,))
    found = compare(table, ids, seconds=0)
    assert found.matmul.bytes_peak <= found.needed_bytes
    # Profilers can't be nested, so measure the whole call and disable compare's own measurement.
    monkeypatch.setattr(compare_module, "measure_peak_memory", lambda work, device: (work(), 0))
    _, used = measure_peak_memory(lambda: compare(table, ids, seconds=0))
    assert used <= found.needed_bytes


def test_out_of_memory_raises_hotrow_error(monkeypatch):
    def refuse(ids, table):
        return torch.empty(2**60)

    monkeypatch.setattr("hotrow.verify.reference.embedding", refuse)
    with pytest.raises(HotrowError, match="out of memory: "):
        compare(torch.randn(6, 3), [1, 2])


def test_other_errors_are_not_caught(monkeypatch):
    def fail(ids, table):
        raise RuntimeError("something else")

    monkeypatch.setattr("hotrow.verify.reference.embedding", fail)
    with pytest.raises(RuntimeError, match="something else"):
        compare(torch.randn(6, 3), [1, 2])


def test_progress_goes_from_zero_to_the_total():
    seen = []
    compare(torch.randn(6, 3), [1, 2], progress=lambda *step: seen.append(step))
    done = [step for _, step, _ in seen]
    assert done == sorted(done)
    assert done[0] == 0
    assert {total for _, _, total in seen} == {10}
    assert done[-1] == 10


def test_table_is_not_changed():
    table = torch.nn.Parameter(torch.randn(6, 3))
    before = table.detach().clone()
    compare(table, [1, 2, 2])
    assert table.grad is None
    assert torch.equal(table, before)


def test_result_is_json():
    found = json.loads(json.dumps(compare(torch.randn(6, 3), [1, 2, 2]).to_dict()))
    assert found["equal"] is True
    assert found["ids"] == [1, 2, 2]
    assert found["output"]["bitwise"] == found["output"]["values"] == 9
    assert found["gradient"]["values"] == 18
    assert found["matmul"]["multiplications"] == 2 * 3 * 6 * 3
    assert found["matmul"]["measured_bytes_peak"] == 4 * (18 + 9 + 18)
    assert found["lookup"]["median_ms"] > 0


def test_result_prints_as_a_report():
    found = compare(torch.randn(6, 3), [1, 2], title="mine")
    assert str(found) == repr(found)
    assert str(found).startswith("mine\none-hot @ table and lookup: equal\noutput")
    assert "<pre>" in found._repr_html_()


@pytest.mark.parametrize(
    ("table", "ids", "options", "message"),
    [
        (torch.ones(3), [1], {}, "the table has shape (3,), but a table must be 2-D (rows,"),
        (torch.ones(3, 2, 1), [1], {}, "but a table must be 2-D"),
        (torch.ones(3, 2).long(), [1], {}, "the table is int64, but the dtype of a table must be"),
        (torch.ones(3, 2), [3], {}, "ids[0] = 3, but the table has 3 rows (valid ids: 0..2)"),
        (torch.ones(3, 2), [0.5], {}, "ids is float32"),
        (torch.ones(3, 2), [1, 2], {"tokens": ["a"]}, "there are 1 tokens for 2 ids"),
        (torch.ones(3, 2), [1, 2], {"tokens": "ab"}, "tokens is a str"),
        (torch.ones(3, 2), [1], {"budget": "2GB"}, "budget is '2GB', but it must be an int"),
        (torch.ones(3, 2), [1], {"budget": 1e9}, "but it must be an int, in bytes"),
        (torch.ones(3, 2, device="meta"), [1], {}, "but a table must be dense and have values"),
    ],
)
def test_invalid_arguments_raise(table, ids, options, message):
    with pytest.raises(HotrowError) as caught:
        compare(table, ids, **options)
    assert message in str(caught.value)
