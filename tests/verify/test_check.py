"""Test that `check` accepts equal layers and detects every mutant."""

import dataclasses

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

import hotrow
from hotrow import Embedding, EmbeddingBag, HotrowError, OneHotLinear, check
from hotrow.verify.bounds import rounding_bounds
from hotrow.verify.check import draw_cotangent
from hotrow.verify.sides import Batch, make_matmul_side
from tests.support.cases import DTYPES, bag_table, case_table
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits

IDS = torch.tensor([[2, 3, 1, 2], [5, 2, 2, 0]])  # row 2 is used four times


def found(report, what):
    return next(each for each in report.agreements if each.name == what)


@case_table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_lookup_equals_the_matmul(case, dtype):
    table = case.table(dtype)
    report = check(table, Embedding.from_pretrained(table), case.ids())
    assert report
    assert report.equal
    assert found(report, "output").verdict == "bitwise"
    assert found(report, "gradient").value_count == case.rows * case.columns


@pytest.mark.parametrize(
    "pair",
    [
        lambda t: (nn.Embedding.from_pretrained(t), Embedding.from_pretrained(t)),
        lambda t: (nn.Embedding.from_pretrained(t, sparse=True), t),
        lambda t: (Embedding.from_pretrained(t).to_linear(), Embedding.from_pretrained(t)),
        lambda t: (Embedding.from_pretrained(t), OneHotLinear.from_linear(_linear(t))),
        lambda t: (_linear(t), OneHotLinear.from_linear(_linear(t))),
        lambda t: (_linear(t, torch.ones(3)), OneHotLinear.from_linear(_linear(t, torch.ones(3)))),
        lambda t: (t, t.clone()),
    ],
)
def test_pairs_of_equal_layers(pair):
    a, b = pair(torch.randn(7, 3))
    report = check(a, b, IDS)
    assert report
    assert found(report, "output").verdict == "bitwise"


def _linear(table, bias=None):
    linear = nn.Linear(*table.shape, bias=bias is not None)
    with torch.no_grad():
        linear.weight.copy_(table.t())
        if bias is not None:
            linear.bias.copy_(bias)
    return linear


@bag_table
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_equal_the_multi_hot_matmul(case, mode):
    table, ids = case.table(), case.ids()
    bag = EmbeddingBag.from_pretrained(table, mode=mode)
    assert check(table, bag, ids)
    assert check(bag.to_linear(), bag, ids)
    bags, members = case.shape
    assert check(table, bag, ids.flatten(), offsets=torch.arange(bags) * members)


def test_gradient_of_per_sample_weights_is_compared():
    bag = nn.EmbeddingBag(7, 3, mode="sum")
    report = check(bag.weight, bag, IDS, per_sample_weights=torch.randn(2, 4))
    assert report
    assert found(report, "gradient of per_sample_weights").value_count == 8


def test_include_last_offset():
    bag = EmbeddingBag(7, 3, include_last_offset=True)
    assert check(bag.weight, bag, [1, 2, 3], offsets=[0, 1, 3])


# --- Mutants -----------------------------------------------------------------------------


class Mutant(nn.Embedding):
    """An embedding with a deliberate error."""

    def __init__(self, table, fault, dtype=torch.float32):
        super().__init__(*table.shape, _weight=table.clone(), dtype=dtype)
        self.fault = fault

    def forward(self, ids):
        return _Faulty.apply(self.weight, ids, self.fault)


class _Faulty(torch.autograd.Function):
    @staticmethod
    def forward(ctx, weight, ids, fault):
        ctx.save_for_backward(ids)
        ctx.fault, ctx.shape = fault, weight.shape
        output = weight[ids]
        return fault(output, "output") if fault.__name__ == "output_fault" else output

    @staticmethod
    def backward(ctx, gradient):
        (ids,) = ctx.saved_tensors
        rows = gradient.new_zeros(ctx.shape)
        flat, grads = ids.reshape(-1), gradient.reshape(-1, ctx.shape[1])
        if ctx.fault.__name__ == "batch_fault":
            flat, grads = ctx.fault(flat, grads)
        rows.index_add_(0, flat, grads)
        return ctx.fault(rows) if ctx.fault.__name__ == "gradient_fault" else rows, None, None


def one_ulp(values: Tensor, *place: int) -> Tensor:
    values = values.clone()
    values[place] = torch.nextafter(values[place], torch.tensor(torch.inf))
    return values


def healthy_fault(values):
    raise AssertionError("never called")


def output_value(place):
    def output_fault(output, _):
        return one_ulp(output, *place)

    return output_fault


def gradient_entry(row, column, by):
    def gradient_fault(rows):
        rows = rows.clone()
        rows[row, column] += by
        return rows

    return gradient_fault


def gradient_one_ulp(row, column):
    def gradient_fault(rows):
        return one_ulp(rows, row, column)

    return gradient_fault


def swapped_rows(a, b):
    def output_fault(output, _):
        output = output.clone()
        output[0, [a, b]] = output[0, [b, a]]
        return output

    return output_fault


def swapped_gradient_rows():
    def gradient_fault(rows):
        return rows[[0, 1, 3, 2, 4, 5, 6]]

    return gradient_fault


def dropped_duplicate():
    def batch_fault(ids, grads):
        return ids[[0, 1, 2, 4, 5, 6, 7]], grads[[0, 1, 2, 4, 5, 6, 7]]

    return batch_fault


MUTANTS = {
    "one value off by one ulp": (output_value((0, 1, 2)), "output"),
    "the last value off by one ulp": (output_value((1, 3, 2)), "output"),
    "two rows swapped in the output": (swapped_rows(0, 1), "output"),
    "an entry of a row used once, off by one ulp": (gradient_one_ulp(3, 1), "gradient"),
    "an entry of a row used four times, off by one ulp": (gradient_one_ulp(2, 0), "gradient"),
    "a nonzero entry in an unused row": (gradient_entry(6, 2, 1e-30), "gradient"),
    "two rows swapped in the gradient": (swapped_gradient_rows(), "gradient"),
    "one duplicate dropped": (dropped_duplicate(), "gradient"),
}


def test_mutant_without_an_error_is_equal():
    table = torch.randn(7, 3)
    assert check(table, Mutant(table, healthy_fault), IDS)


@pytest.mark.parametrize("name", MUTANTS)
@pytest.mark.parametrize("first", [True, False])
def test_mutant_is_caught(name, first):
    fault, where = MUTANTS[name]
    table = torch.randn(7, 3)
    mutant = Mutant(table, fault)
    report = check(mutant, table, IDS) if first else check(table, mutant, IDS)
    assert not report
    assert [each.name for each in report.agreements if not each.equal] == [where]
    assert "NOT equal" in str(report)


def test_different_bias_is_caught():
    a = nn.Linear(7, 3)
    b = OneHotLinear.from_linear(a)
    b.bias.data = one_ulp(b.bias.data, 1)
    assert not check(a, b, IDS)


@pytest.mark.parametrize(
    ("dtype", "uses"),
    [(torch.float64, 5000), (torch.float32, 5000), (torch.float16, 300), (torch.bfloat16, 40)],
    ids=str,
)
def test_gradient_of_a_row_used_often_is_equal_bit_for_bit(dtype, uses):
    table, ids = torch.randn(7, 5).to(dtype), torch.full((uses,), 2)
    report = check(table, Embedding.from_pretrained(table), ids)
    assert found(report, "gradient").verdict == "bitwise"

    def batch_fault(ids, grads):
        return ids[1:], grads[1:]

    assert not check(table, Mutant(table, batch_fault, dtype), ids)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_half_precision_bag_of_many_ids_is_inconclusive(dtype):
    class Faulty(EmbeddingBag):
        def forward(self, *arguments):
            return super().forward(*arguments) * 0.5

    table, ids = torch.randn(500, 5).to(dtype), torch.randint(0, 500, (4, 300))
    assert check(table, EmbeddingBag.from_pretrained(table, mode="max"), ids)
    report = check(table, Faulty.from_pretrained(table, mode="sum"), ids)
    assert not report
    half = dtype in (torch.bfloat16, torch.float16)
    assert found(report, "output").verdict == ("unsure" if half else "different")
    assert ("inconclusive, " in str(report)) == half


def test_title_line_says_inconclusive_unless_a_result_differs():
    table, ids = torch.randn(500, 5).bfloat16(), torch.randint(0, 500, (4, 300))
    bag = EmbeddingBag.from_pretrained(table, mode="sum")
    report = check(table, bag, ids)
    unsure = dataclasses.replace(found(report, "output"), verdict="unsure")
    report = dataclasses.replace(report, agreements=(unsure, found(report, "gradient")))
    assert str(report).startswith("multi-hot @ table and EmbeddingBag(500, 5): inconclusive\n")
    assert "EmbeddingBag(500, 5): inconclusive</caption>" in report._repr_html_()
    different = dataclasses.replace(unsure, verdict="different")
    report = dataclasses.replace(report, agreements=(unsure, different))
    assert str(report).startswith("multi-hot @ table and EmbeddingBag(500, 5): NOT equal\n")


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("first", [True, False])
def test_different_rows_are_never_within_rounding(mode, first):
    a = torch.randn(7, 3)
    b = one_ulp(a, 2, 1)
    pair = (a, EmbeddingBag.from_pretrained(b, mode=mode))
    assert not check(*(pair if first else pair[::-1]), torch.full((2, 100), 2))
    a, b = torch.zeros(7, 3), torch.zeros(7, 3)
    a[2], b[0], b[1], b[2] = 0.5, 1e8, -1e8, 0.25
    pair = (a, EmbeddingBag.from_pretrained(b, mode=mode))
    assert not check(*(pair if first else pair[::-1]), [[0, 1, 2]])


@pytest.mark.parametrize("mode", ["sum", "mean"])
def test_bag_of_one_id_has_no_rounding(mode):
    a = torch.randn(7, 3)
    b = one_ulp(a, 2, 1)
    assert check(a, EmbeddingBag.from_pretrained(a, mode=mode), [[2], [3]])
    assert not check(a, EmbeddingBag.from_pretrained(b, mode=mode), [[2], [3]])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bags_of_two_ids_are_equal_in_every_dtype(dtype):
    for seed in range(40):
        torch.manual_seed(seed)
        table = torch.randn(7, 3).to(dtype)
        assert check(table, EmbeddingBag.from_pretrained(table, mode="sum"), [[0, 1], [2, 3]])


@given(st.integers(0, 10_000), st.integers(1, 60), st.sampled_from(DTYPES), st.booleans())
def test_every_order_of_adding_is_within_the_bound(seed, count, dtype, mean):
    generator = torch.Generator().manual_seed(seed)
    table = torch.randn(count, 2, generator=generator).to(dtype)
    batch = Batch(torch.arange(count)[None], "mean" if mean else "sum", torch.tensor([0]))
    cotangent = torch.ones(1, 2, dtype=dtype)
    allowed = rounding_bounds(make_matmul_side(table, batch), batch, cotangent)["output"](
        torch.tensor([[0, 0], [0, 1]])
    )
    sums = []
    for way in range(2):
        total = torch.zeros(2, dtype=dtype)
        for place in torch.randperm(count, generator=generator):
            # Compute a mean by dividing the sum or by multiplying each row by 1 / count.
            total = total + (table[place] * (1 / count) if mean and way else table[place])
        sums.append((total / count if mean and not way else total).double())
    assert ((sums[0] - sums[1]).abs() <= allowed).all()
    if count == 1:
        assert (allowed == 0).all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_weighted_bags_of_one_id_are_equal_in_every_dtype(dtype):
    """Torch rounds a bfloat16 product that is halfway between two numbers away from zero."""
    for seed in range(20):
        generator = torch.Generator().manual_seed(seed)
        table = torch.randn(9, 8, generator=generator).to(dtype)
        weights = torch.rand(6, 1, generator=generator).to(dtype)
        ids = torch.randint(9, (6, 1), generator=generator)
        for kind in (torch.nn.EmbeddingBag, EmbeddingBag):
            layer = kind.from_pretrained(table, mode="sum")
            assert check(table, layer, ids, per_sample_weights=weights)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", grid([1, 2, 3, 4], (1).__eq__))
def test_wrong_factor_is_found_in_tables_of_few_columns(columns, dtype):
    table = torch.ones(9, columns, dtype=dtype)
    halved = torch.nn.Embedding.from_pretrained(table, scale_grad_by_freq=True)  # halves row 3
    for seed in range(100):
        assert not check(halved, torch.nn.Embedding.from_pretrained(table), [3, 3, 1, 7], seed=seed)


def test_bound_equals_its_formula():
    """The bound is 2 (k - 1) u sum|x|, with k = 3 and u = 2**-24."""
    table = torch.tensor([[1.0, -2.0], [3.0, 4.0], [-5.0, 6.0]])
    batch = Batch(torch.arange(3)[None], "sum", torch.tensor([0]))
    bounds = rounding_bounds(make_matmul_side(table, batch), batch, torch.ones(1, 2))
    allowed = bounds["output"](torch.tensor([[0, 0], [0, 1]]))
    assert allowed.tolist() == pytest.approx([4 * 2**-24 * 9, 4 * 2**-24 * 12])


@given(st.integers(0, 10_000), st.integers(1, 40), st.sampled_from(DTYPES))
def test_output_gradient_adds_up_exactly_in_any_order(seed, count, dtype):
    batch = Batch(torch.zeros(count, dtype=torch.int64))
    side = make_matmul_side(torch.zeros(3, 2, dtype=dtype), batch)
    terms = draw_cotangent(side, batch, seed)
    assert (terms != 0).all()
    bounds = rounding_bounds(side, batch, terms)["gradient"]
    assert (bounds(torch.tensor([[0, 0], [0, 1], [1, 0]])) == 0).all()
    total = torch.zeros(2, dtype=dtype)
    for place in torch.randperm(count, generator=torch.Generator().manual_seed(seed)):
        total = total + terms[place]
    assert torch.equal(total.double(), terms.double().sum(0))


def test_bias_gradient_is_compared():
    class Faulty(OneHotLinear):
        def forward(self, input):
            return super().forward(input) + (self.bias * 2 - self.bias.detach() * 2)

    a = nn.Linear(7, 3)
    report = check(a, Faulty.from_linear(a), IDS)
    assert [each.name for each in report.agreements if not each.equal] == ["gradient of bias"]


def test_bias_on_one_side_raises():
    linear = _linear(torch.randn(7, 3), torch.zeros(3))
    for pair in ((linear, Embedding(7, 3)), (Embedding(7, 3), linear)):
        with pytest.raises(HotrowError, match="so they train differently"):
            check(*pair, IDS)


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_forward_of_a_linear_layer_is_called(mode):
    class Broken(nn.Linear):
        def forward(self, input):
            return super().forward(input) * 2

    table = torch.randn(7, 3)
    broken = Broken(7, 3, bias=False)
    broken.weight.data = table.t().clone()
    assert not check(broken, EmbeddingBag.from_pretrained(table, mode=mode), [[0, 1], [2, 3]])


def test_works_in_any_torch_mode():
    table = torch.randn(7, 3)
    layer = Embedding.from_pretrained(table)
    with torch.no_grad():
        assert check(table, layer, IDS)
    with torch.inference_mode():
        assert check(table, layer, IDS)
        assert check(table.clone(), Embedding.from_pretrained(table.clone()), IDS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert check(layer.to_linear(), layer, IDS)


# --- Report, errors and side effects -------------------------------------------------------


def test_report_explains_inf_and_nan():
    table = torch.randn(7, 3)
    table[6, 1] = torch.nan
    report = check(table, Embedding.from_pretrained(table), IDS)
    assert not report
    assert report.notes[0].startswith("row 6 of the table contains inf or NaN. 0 x inf is NaN")
    table[4] = torch.inf
    report = check(table, Embedding.from_pretrained(table), IDS)
    assert report.notes[0].startswith("row 4 of the table and 1 more contain inf or NaN")
    table[4] = 1.0
    assert check(table[:6], Embedding.from_pretrained(table[:6]), IDS)


def test_negative_zero_is_equal_except_for_its_sign():
    table = torch.randn(7, 3)
    table[2, 1] = -0.0
    report = check(table, Embedding.from_pretrained(table), IDS)
    assert report
    assert found(report, "output").verdict == "zeros"


def test_result_prints_as_a_report():
    torch.manual_seed(123)
    layer = Embedding(4, 5)
    report = check(layer.to_linear(), layer, [2, 3, 1])
    expected = (
        "Linear(4, 5) on one-hot and Embedding(4, 5): equal\n"
        "output    equal, 15 of 15 values bit for bit\n"
        "gradient  equal, 20 of 20 values bit for bit"
    )
    assert str(report) == repr(report) == expected
    page = report._repr_html_()
    assert "15 of 15 values bit for bit" in page
    assert page.startswith("<table><caption>Linear(4, 5) on one-hot and Embedding(4, 5): equal<")
    assert report.to_dict()["output"]["bitwise"] == 15


def test_layers_are_not_changed():
    for layer in (
        Embedding(7, 3),
        Embedding(7, 3, max_norm=0.1),
        nn.EmbeddingBag(7, 3, max_norm=0.1),
        nn.Embedding(7, 3).requires_grad_(False),
        OneHotLinear(7, 3),
    ):
        before = {name: p.detach().clone() for name, p in layer.named_parameters()}
        frozen = not layer.weight.requires_grad
        state = torch.get_rng_state()
        check(layer, layer, IDS)
        assert torch.equal(torch.get_rng_state(), state)
        assert layer.weight.grad is None
        assert layer.weight.requires_grad != frozen
        for name, p in layer.named_parameters():
            assert_same_bits(p, before[name])


def test_seed_determines_the_output_gradient():
    a, b = torch.randn(7, 3), torch.randn(7, 3)
    reports = [check(a, b, IDS, seed=seed) for seed in (0, 0, 1)]
    assert reports[0] == reports[1]
    table = torch.randn(7, 3)
    mutant = Mutant(table, dropped_duplicate())
    errors = {found(check(table, mutant, IDS, seed=s), "gradient").max_error for s in range(3)}
    assert len(errors) == 3


@pytest.mark.parametrize(
    ("a", "b", "options", "message"),
    [
        (nn.Conv1d(1, 1, 1), torch.ones(7, 3), {}, "check cannot compare a Conv1d"),
        (torch.ones(7), torch.ones(7, 3), {}, "the table has shape (7,), but a table must be 2-D"),
        (
            torch.ones(7, 3).int(),
            torch.ones(7, 3),
            {},
            "the table is int32, but the dtype of a table must be",
        ),
        (torch.ones(7, 3), torch.ones(7, 4), {}, "(2, 4, 4)"),
        (torch.ones(7, 3), torch.ones(8, 3), {}, "gradient: cannot compare shape (7, 3) with"),
        (torch.ones(7, 3), torch.ones(7, 3).double(), {}, "output: cannot compare dtype"),
        (torch.ones(5, 3), torch.ones(7, 3), {}, "ids[1, 0] = 5, but the table has 5 rows"),
        (torch.ones(7, 3), torch.ones(7, 3), {"offsets": [0]}, "need an EmbeddingBag, but neither"),
        (nn.EmbeddingBag(7, 3), torch.ones(7, 3), {"offsets": [0]}, "but got (2, 4) with"),
        (
            torch.nn.utils.parametrizations.weight_norm(nn.Linear(7, 3)),
            torch.ones(7, 3),
            {},
            "the weight of the ParametrizedLinear is computed from other parameters",
        ),
        (nn.Embedding(7, 3, device="meta"), torch.ones(7, 3), {}, "is a strided tensor on meta"),
        (
            nn.EmbeddingBag(7, 3, mode="sum"),
            torch.ones(7, 3),
            {"per_sample_weights": torch.ones(3)},
            "(3,), but the ids have shape (2, 4)",
        ),
    ],
)
def test_sides_that_cannot_be_checked_raise(a, b, options, message):
    with pytest.raises(HotrowError) as caught:
        check(a, b, IDS, **options)
    assert message in str(caught.value)


def test_only_sides_py_imports_the_reference():
    from pathlib import Path

    importers = [
        path.name
        for path in Path(hotrow.__file__).parent.rglob("*.py")
        if "import reference" in path.read_text() or "hotrow.verify.reference" in path.read_text()
    ]
    assert importers == ["sides.py"]


COMPARE_MODELS = (
    "to compare a model before and after convert, run hotrow compare MODEL --inputs BATCH, such as "
    "hotrow compare models:build --inputs models:batch"
)


@pytest.mark.parametrize(
    ("side", "ids", "message"),
    [
        (nn.Sequential(nn.Embedding(7, 3)), IDS, "check cannot compare a Sequential, only a table"),
        (
            nn.Sequential(nn.Embedding(7, 3)),
            (IDS, torch.ones(2, 4)),
            "check cannot compare a Sequential, only a table or one of the layers Linear, Emb",
        ),
        (nn.Embedding(7, 3), (IDS, torch.ones(2)), "ids is a tuple of tensors, but the ids of a"),
        (nn.Embedding(7, 3), [IDS, IDS], "ids is a list of tensors, but the ids of a layer must"),
        (nn.Embedding(7, 3), {"ids": IDS}, "ids is a dict of tensors, but the ids of a layer must"),
    ],
    ids=["model", "model and arguments", "tuple", "list", "dict"],
)
def test_error_for_a_whole_model_names_the_command_that_compares_models(side, ids, message):
    for a, b in ((side, side), (torch.ones(7, 3), side)):
        with pytest.raises(HotrowError) as caught:
            check(a, b, ids)
        assert caught.value.problem.startswith(message)
        assert COMPARE_MODELS in caught.value.fix


def test_list_of_single_ids_is_checked():
    table = torch.randn(7, 3)
    assert check(table, nn.Embedding.from_pretrained(table), [IDS[0, 0], IDS[0, 1]])


def test_inputs_may_come_from_inference_mode():
    with torch.inference_mode():
        ids, offsets, weights = torch.tensor([3, 1, 3]), torch.tensor([0, 2]), torch.rand(3)
    table = torch.rand(5, 2)
    assert check(nn.Embedding.from_pretrained(table), table, ids)
    bag = nn.EmbeddingBag.from_pretrained(table, mode="sum")
    assert check(bag, table, ids, offsets=offsets, per_sample_weights=weights)
