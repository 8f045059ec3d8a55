"""Test `Embedding`, and the behavior that it shares with `OneHotLinear`."""

import copy
import pickle
import shutil

import hypothesis.strategies as st
import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from torch import nn

import hotrow
from hotrow import Embedding, HotrowError, OneHotLinear
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from hotrow.verify import reference
from tests.support.cases import DTYPES, bad_input_table, case_table
from tests.support.exhaustive import exhaustive, grid
from tests.support.tolerance import assert_no_worse, assert_same_bits, assert_same_numbers

OPTIONS = [{}, {"padding_idx": 2}, {"max_norm": 1.5}, {"max_norm": 1.0, "norm_type": 1.0}]


def twins(*size, **options):
    """Return a hotrow embedding and a torch embedding with the same table."""
    ours, torchs = Embedding(*size, **options), nn.Embedding(*size, **options)
    ours.load_state_dict(torchs.state_dict())
    return ours, torchs


def converted_twins(*size, **options):
    """Return an embedding whose weight is a table, and a torch embedding with the same values."""
    torchs = nn.Embedding(*size, **options)
    ours = hotrow.convert(copy.deepcopy(torchs), min_entries=0)
    assert isinstance(ours.weight, Table)
    return ours, torchs


def dense(gradient):
    return gradient.to_dense() if gradient.is_sparse else gradient


# --- Same output -------------------------------------------------------------------------


@case_table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_output_equals_the_one_hot_matmul_bit_for_bit(case, dtype):
    table, ids = case.table(dtype), case.ids()
    layer = Embedding.from_pretrained(table)
    assert_same_bits(layer(ids), reference.embedding(ids, table))


@given(
    ids=st.lists(st.integers(0, 5), max_size=8),
    values=st.lists(
        st.floats(width=32, allow_nan=False, allow_infinity=False), min_size=12, max_size=12
    ),
)
def test_output_equals_the_one_hot_matmul_for_any_finite_table(ids, values):
    table = torch.tensor(values, dtype=torch.float32).reshape(6, 2)
    ids = torch.tensor(ids, dtype=torch.int64)
    assert_same_numbers(
        Embedding.from_pretrained(table)(ids.unsqueeze(-1)).squeeze(1),
        reference.embedding(ids, table),
    )


@case_table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_one_hot_input_matches_ids(case, dtype):
    table, ids = case.table(dtype), case.ids()
    layer = Embedding.from_pretrained(table)
    assert_same_bits(layer(reference.one_hot(ids, case.rows, dtype)), layer(ids))


def test_probabilities_mix_rows():
    table = torch.randn(40, 9)
    probabilities = torch.rand(6, 40).softmax(-1)
    output = Embedding.from_pretrained(table)(probabilities)
    truth = probabilities.double() @ table.double()
    assert_no_worse(output, probabilities @ table, truth)


# --- Same gradient -----------------------------------------------------------------------


@case_table
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradient_matches_torchs_dense_gradient_bit_for_bit(case, dtype):
    table, ids = case.table(dtype), case.ids()
    output_gradient = torch.randn(*case.shape, case.columns).to(dtype)
    ours = Embedding.from_pretrained(table, freeze=False)
    ours(ids).backward(output_gradient)
    theirs = table.clone().requires_grad_()
    F.embedding(ids, theirs).backward(output_gradient)
    assert_same_bits(ours.weight.grad, theirs.grad)


def test_gradient_adds_repeated_ids_in_batch_order():
    ids, output_gradient = torch.randint(0, 4, (200,)), torch.randn(200, 5)
    expected = torch.zeros(9, 5)
    for id, row in zip(ids.tolist(), output_gradient, strict=True):
        expected[id] += row
    for sparse in (False, True):
        layer = Embedding(9, 5, sparse=sparse)
        layer(ids).backward(output_gradient)
        assert_same_bits(dense(layer.weight.grad), expected)


@case_table
def test_gradient_is_as_accurate_as_the_matmuls(case):
    table, ids = case.table(), case.ids()
    output_gradient = torch.randn(*case.shape, case.columns)
    grads = []
    for run, dtype in (
        (lambda t: Embedding.forward(_holding(t), ids), torch.float32),
        (lambda t: reference.embedding(ids, t), torch.float32),
        (lambda t: reference.embedding(ids, t), torch.float64),
    ):
        leaf = table.to(dtype, copy=True).requires_grad_()
        run(leaf).backward(output_gradient.to(dtype))
        grads.append(leaf.grad)
    assert_no_worse(*grads)


def _holding(leaf):
    layer = Embedding(*leaf.shape)
    del layer.weight
    layer.weight = leaf
    return layer


def test_probability_input_gets_a_gradient():
    layer = Embedding(5, 3)
    soft = torch.rand(4, 5, requires_grad=True)
    layer(soft).sum().backward()
    assert_no_worse(
        soft.grad,
        layer.weight.detach().sum(1).expand(4, 5),
        layer.weight.detach().double().sum(1).expand(4, 5),
    )


def test_gradcheck_and_second_derivatives():
    layer = Embedding(5, 3, dtype=torch.float64)
    ids = torch.tensor([1, 1, 4])
    linear = OneHotLinear(5, 3, dtype=torch.float64)

    def through(w, c, b):
        rows = torch.func.functional_call(layer, {"weight": w}, (ids,))
        columns = torch.func.functional_call(linear, {"weight": w.t(), "bias": b}, (ids,))
        return (rows.sin() * c).sum(0) + columns.cos().sum(0)

    inputs = [torch.randn(s, dtype=torch.float64, requires_grad=True) for s in ((5, 3), (3, 3), 3)]
    assert torch.autograd.gradcheck(through, inputs)
    assert torch.autograd.gradgradcheck(through, inputs)


# --- torch's options ---------------------------------------------------------------------


@pytest.mark.parametrize(
    "options", [*OPTIONS, {"scale_grad_by_freq": True}, {"sparse": True}], ids=str
)
def test_options_match_torch(options):
    ours, torchs = twins(7, 3, **options)
    ids, output_gradient = torch.tensor([[1, 2, 2], [5, 2, 0]]), torch.randn(2, 3, 3)
    results = []
    for layer in (ours, torchs):
        output = layer(ids)
        output.backward(output_gradient)
        assert layer.weight.grad.is_sparse == bool(options.get("sparse"))
        results.append((output, dense(layer.weight.grad), layer.weight))
    for ours_result, torchs_result in zip(*results, strict=True):
        assert_same_bits(ours_result, torchs_result)


@pytest.mark.parametrize("kind", ["lookup", "bag"])
@pytest.mark.parametrize("shape", [(7, 0), (0, 3)], ids=str)
def test_a_table_without_columns_or_rows_trains(shape, kind):
    layer = nn.Embedding(*shape) if kind == "lookup" else nn.EmbeddingBag(*shape, mode="sum")
    hotrow.convert(layer, min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.AdamW(layer.parameters())
    for _ in range(2):
        layer(torch.zeros((2, 5) if shape[0] else (0, 5), dtype=torch.long)).sum().backward()
        optimizer.step()
    assert layer.weight.shape == layer.weight.grad.shape == shape


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("padding_idx", [None, 2])
@pytest.mark.parametrize("compiled", grid([False, True], (False).__eq__))
def test_frequent_ids_get_the_same_bits_as_in_torch(dtype, padding_idx, compiled):
    options = {"padding_idx": padding_idx, "scale_grad_by_freq": True}
    ours, torchs = converted_twins(9, 5, dtype=dtype, **options)
    look_up = torch.compile(ours, backend="aot_eager") if compiled else ours
    for size in (0, 1, 60):
        ids, output_gradient = torch.randint(7, (size,)), torch.randn(size, 5, dtype=dtype)
        for layer, output in ((ours, look_up(ids)), (torchs, torchs(ids))):
            layer.weight.grad = None
            output.backward(output_gradient)
        assert isinstance(ours.weight.grad, RowGradient)
        assert_same_bits(ours.weight.grad.as_dense(), torchs.weight.grad)


def test_the_second_derivative_with_frequencies_matches_torch():
    results = []
    for layer in converted_twins(7, 3, scale_grad_by_freq=True):
        factor = torch.arange(1.0, 6.0, requires_grad=True)
        loss = (layer(torch.tensor([1, 1, 4, 1, 0])) * factor[:, None].sin()).sum()
        (gradient,) = torch.autograd.grad(loss, layer.weight, create_graph=True)
        results.append((dense(gradient.detach()), *torch.autograd.grad(gradient.sum(), factor)))
    for ours_result, torchs_result in zip(*results, strict=True):
        assert_same_bits(ours_result, torchs_result)


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_options_apply_to_one_hot_input_too(options):
    soft, hard = twins(7, 3, **options)
    ids, output_gradient = torch.tensor([[1, 2], [5, 2]]), torch.randn(2, 2, 3)
    output, expected = soft(reference.one_hot(ids, 7, torch.float32)), hard(ids)
    assert_same_bits(output, expected)
    output.backward(output_gradient)
    expected.backward(output_gradient)
    # No row is used more than twice, so the order of summation doesn't matter.
    assert_same_bits(soft.weight.grad, hard.weight.grad)
    assert_same_bits(soft.weight, hard.weight)


def test_scale_grad_by_freq_refuses_one_hot_input():
    with pytest.raises(HotrowError, match="but scale_grad_by_freq counts ids"):
        Embedding(7, 3, scale_grad_by_freq=True)(torch.eye(7))


# --- Conversions -------------------------------------------------------------------------


def test_from_linear_copies_and_keeps_the_function():
    linear = nn.Linear(7, 3, bias=False)
    layer = Embedding.from_linear(linear)
    assert_same_bits(layer(torch.arange(7)), linear(torch.eye(7)))
    with torch.no_grad():
        layer.weight.zero_()
    assert linear.weight.abs().sum() > 0
    assert layer.weight.is_contiguous()


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_to_linear_copies_and_keeps_the_function(kind):
    layer = kind(7, 3)
    linear = layer.to_linear()
    assert type(linear) is nn.Linear
    assert_same_bits(linear(torch.eye(7)), layer(torch.arange(7)))
    before = layer.weight.detach().clone()
    with torch.no_grad():
        linear.weight.zero_()
    assert_same_bits(layer.weight, before)


@pytest.mark.parametrize(
    "share",
    [
        lambda: (lambda a: (a, Embedding.from_linear(a, copy=False)))(nn.Linear(7, 3, bias=False)),
        lambda: (lambda a: (a, a.to_linear(copy=False)))(Embedding(7, 3)),
        lambda: (lambda a: (a, a.to_linear(copy=False)))(OneHotLinear(7, 3)),
        lambda: (lambda a: (a, OneHotLinear.from_linear(a, copy=False)))(nn.Linear(7, 3)),
    ],
    ids=["from_linear", "to_linear", "OneHotLinear.to_linear", "OneHotLinear.from_linear"],
)
def test_copy_false_shares_storage(share):
    first, second = share()
    assert first.weight.data_ptr() == second.weight.data_ptr()
    with torch.no_grad():
        first.weight.fill_(3.0)
    assert (second.weight == 3.0).all()


def test_conversions_keep_dtype_and_requires_grad():
    linear = nn.Linear(7, 3, bias=False, dtype=torch.float64).requires_grad_(False)
    layer = Embedding.from_linear(linear, padding_idx=2)
    assert layer.weight.dtype == torch.float64
    assert not layer.weight.requires_grad
    assert layer.padding_idx == 2
    assert not OneHotLinear.from_linear(linear).weight.requires_grad


@pytest.mark.parametrize(
    ("convert", "message"),
    [
        (lambda: Embedding.from_linear(nn.Linear(7, 3)), "Linear(7, 3) has a bias"),
        (lambda: Embedding.from_linear(nn.Embedding(7, 3)), "linear is of type Embedding, but"),
        (lambda: OneHotLinear.from_linear(nn.Embedding(7, 3)), "linear is of type Embedding, but"),
        (lambda: Embedding(7, 3, padding_idx=0).to_linear(), "padding_idx=0"),
        (lambda: Embedding(7, 3, max_norm=1.0).to_linear(), "max_norm=1.0"),
        (lambda: Embedding(7, 3, scale_grad_by_freq=True).to_linear(), "scale_grad_by_freq=True"),
    ],
)
def test_conversions_that_would_change_training_raise(convert, message):
    with pytest.raises(HotrowError) as caught:
        convert()
    assert message in str(caught.value)


# --- Errors ------------------------------------------------------------------------------


@bad_input_table
@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_bad_input_raises_one_clear_error(kind, bad):
    with pytest.raises(HotrowError) as caught:
        kind(7, 3)(bad.input())
    assert isinstance(caught.value, bad.error)
    assert bad.message in str(caught.value)


@bad_input_table
def test_bad_input_changes_nothing(bad):
    layer = Embedding(7, 3, max_norm=0.1)  # max_norm rescales the rows that a forward pass reads
    before = layer.weight.detach().clone()
    with pytest.raises(HotrowError):
        layer(bad.input())
    assert_same_bits(layer.weight, before)


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_input_that_is_not_a_tensor_raises(kind):
    with pytest.raises(HotrowError, match=r"input is a list, .*: use torch.tensor\(input\)"):
        kind(7, 3)([1, 2])


@pytest.mark.parametrize(
    ("rows", "ids"),
    [
        (2, [[0, 1], [1, 0]] * 20),  # with two rows, these values could also be ids
        (3, [0, 1, 0]),  # so few ids may look like a one-hot by chance
        (4, [0, 0, 1, 0]),
        (3, [[0, 1, 0]]),
        (3, [[0, 1, 1]] * 20),  # two ones
        (3, [[0, 2, 1]] * 20),
        (4, [[0, 0, 1]] * 20),  # the width differs from the number of rows
        (3, [[[0], [0], [1]]] * 20),  # the error message suggests this shape
    ],
)
def test_ids_that_only_resemble_a_one_hot_are_looked_up(rows, ids):
    ids = torch.tensor(ids)
    assert Embedding(rows, 5)(ids).shape == (*ids.shape, 5)


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
@pytest.mark.parametrize(
    ("rows", "ids"), [(3, [0, 1]), (4, [2]), (4, [2, 3, 1]), (7, 5), (50_257, 9)]
)
def test_integer_one_hot_raises_unless_it_may_be_chance(kind, rows, ids):
    one_hot = F.one_hot(torch.tensor(ids), rows)
    with pytest.raises(HotrowError, match="looks like a one-hot in int64"):
        kind(rows, 2)(one_hot)
    assert kind(rows, 2)(one_hot.float()).shape == (*torch.tensor(ids).shape, 2)


# --- Other PyTorch features --------------------------------------------------------------


@pytest.mark.parametrize(("ours", "torchs"), [(Embedding, nn.Embedding), (OneHotLinear, nn.Linear)])
def test_checkpoints_load_in_both_directions(ours, torchs):
    first, second = ours(7, 3), torchs(7, 3)
    assert list(first.state_dict()) == list(second.state_dict())
    first.load_state_dict(second.state_dict())
    assert_same_bits(first.weight, second.weight)
    third = torchs(7, 3)
    third.load_state_dict(first.state_dict())
    assert_same_bits(third.weight, second.weight)
    assert isinstance(first, torchs)


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_initial_values_match_torch(kind):
    torch.manual_seed(5)
    ours = kind(7, 3)
    torch.manual_seed(5)
    assert_same_bits(ours.weight, kind.__bases__[-1](7, 3).weight)


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
@pytest.mark.parametrize("clone", [copy.deepcopy, lambda m: pickle.loads(pickle.dumps(m))])
def test_copies_and_pickles(kind, clone):
    layer = kind(7, 3)
    other = clone(layer)
    assert type(other) is kind
    assert_same_bits(other(torch.arange(7)), layer(torch.arange(7)))


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_compiles_without_a_graph_break_and_still_checks(kind):
    layer = kind(7, 3)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    ids = torch.tensor([1, 6, 1])
    assert_same_bits(compiled(ids), layer(ids))
    compiled(ids).sum().backward()
    gradient, layer.weight.grad = layer.weight.grad, None
    layer(ids).sum().backward()
    assert_same_bits(gradient, layer.weight.grad)
    with pytest.raises(IndexError, match=r"input\[2\] = 7"):
        compiled(torch.tensor([1, 6, 7]))


@exhaustive
@pytest.mark.skipif(not shutil.which("g++"), reason="torch.compile needs a C++ compiler")
def test_compiles_with_the_default_backend():
    layer = nn.Sequential(Embedding(7, 3), nn.Linear(3, 2))
    ids = torch.tensor([[1, 6], [1, 0]])
    compiled = torch.compile(layer, fullgraph=True)
    output, expected = compiled(ids), layer(ids)
    assert_no_worse(output, expected, expected.double())
    with pytest.raises(HotrowError, match="the table has 7 rows"):
        compiled(torch.tensor([[1, 6], [7, 0]]))


def test_torch_export():
    layer = Embedding(7, 3)
    ids = torch.tensor([1, 6, 1])
    exported = torch.export.export(layer, (ids,)).module()
    assert_same_bits(exported(ids), layer(ids))


@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_function_transforms(kind):
    layer = kind(7, 3)
    weights = {name: p.detach() for name, p in layer.named_parameters()}
    ids = torch.tensor([[1, 2], [6, 6]])

    def total(weights, ids):
        return torch.func.functional_call(layer, weights, (ids,)).sum()

    assert_same_bits(torch.vmap(layer)(ids), layer(ids))
    each = torch.vmap(torch.func.grad(total), in_dims=(None, 0))(weights, ids)
    one_by_one = [torch.func.grad(total)(weights, row)["weight"] for row in ids]
    assert_same_bits(each["weight"], torch.stack(one_by_one))
    with pytest.raises(HotrowError, match="= 7"):
        torch.vmap(layer)(torch.tensor([[1, 2], [6, 7]]))


def test_meta_ids_pass_the_checks():
    assert Embedding(7, 3, device="meta")(
        torch.empty(2, 4, dtype=torch.long, device="meta")
    ).shape == (2, 4, 3)


@pytest.mark.parametrize("padding_idx", [None, 0])
def test_soft_input_autocasts(padding_idx):
    layer = Embedding(7, 3, padding_idx=padding_idx)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert layer(torch.eye(7)).dtype == torch.bfloat16


def test_jagged_ids_are_looked_up_and_checked():
    layer = Embedding(7, 3)
    parts = [torch.tensor([1, 2]), torch.tensor([6, 0, 3])]
    ids = torch.nested.nested_tensor(parts, layout=torch.jagged)
    for output, part in zip(layer(ids).unbind(), parts, strict=True):
        assert_same_bits(output, layer(part))
    parts[1][0] = 7
    with pytest.raises(HotrowError, match="= 7, but the table has 7 rows"):
        layer(torch.nested.nested_tensor(parts, layout=torch.jagged))


def test_jagged_ids_settle_the_rows_of_a_table():
    layer, parts = Embedding(7, 3), [torch.tensor([1, 2]), torch.tensor([6, 0, 3])]
    hotrow.convert(layer, min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    for ids in ([1, 6], [4], [5]):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
    assert layer.weight.has_stale_rows
    ids = torch.nested.nested_tensor(parts, layout=torch.jagged)
    output = layer(ids)
    assert output.shape[:2] == ids.shape
    optimizer.zero_grad()
    output.values().sum().backward()
    assert isinstance(layer.weight.grad, RowGradient)
    for found, part in zip(output.unbind(), parts, strict=True):
        assert_same_bits(found, layer(part))
    swapped = layer(torch.stack([ids, ids], 2).transpose(1, 2))
    assert_same_bits(swapped.unbind()[1][0], layer(parts[1]))


# --- Determinism -------------------------------------------------------------------------


@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("kind", [Embedding, OneHotLinear])
def test_results_do_not_depend_on_the_number_of_threads(kind):
    layer = kind(5_000, 64)
    ids, output_gradient = torch.randint(0, 500, (4_000,)), torch.randn(4_000, 64)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        output = layer(ids)
        (gradient,) = torch.autograd.grad(output, layer.weight, output_gradient)
        results.append((output, gradient))
    for other in results[1:]:
        assert_same_bits(other[0], results[0][0])
        assert_same_bits(other[1], results[0][1])
