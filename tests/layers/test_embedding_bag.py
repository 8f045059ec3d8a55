"""Test that EmbeddingBag matches torch for ids, and `@` for multi-hots and probabilities."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from hotrow import EmbeddingBag, HotrowError
from hotrow.table.parameter import Table
from hotrow.verify import reference
from tests.support.cases import BAD_INPUTS, bag_table
from tests.support.tolerance import assert_no_worse, assert_rounded, assert_same_bits

IDS = torch.tensor([[4, 1, 1], [0, 6, 2]])
modes = pytest.mark.parametrize("mode", ["sum", "mean", "max"])


def run(layer, output_gradient, *inputs, **options):
    output = layer(*inputs, **options)
    output.backward(output_gradient)
    gradient = layer.weight.grad
    return output, gradient.to_dense() if gradient.is_sparse else gradient, layer.weight


def assert_all_same_bits(actual, expected):
    for each, other in zip(actual, expected, strict=True):
        assert_same_bits(each, other)


@bag_table
@pytest.mark.parametrize(
    ("mode", "weighted"), [("sum", False), ("sum", True), ("mean", False), ("max", False)]
)
def test_ids_match_torch_bit_for_bit(case, mode, weighted):
    ids, table = case.ids(), case.table()
    bags, members = case.shape
    weights = torch.randn(case.shape) if weighted else None
    output_gradient = torch.randn(bags, case.columns)
    ours = EmbeddingBag.from_pretrained(table.clone(), freeze=False, mode=mode)
    theirs = nn.EmbeddingBag.from_pretrained(table.clone(), freeze=False, mode=mode)
    actual = run(ours, output_gradient, ids, per_sample_weights=weights)
    if members:
        expected = run(theirs, output_gradient, ids, per_sample_weights=weights)
    else:  # torch fails on (B, 0), but accepts the same bags with offsets
        expected = run(theirs, output_gradient, ids.flatten(), torch.zeros(bags, dtype=torch.long))
    assert_all_same_bits(actual, expected)


def dense_bag(case, mode, ids, table, output_gradient):
    """Return the float64 output and gradient, and the number and size of the terms in each sum."""
    offsets = torch.arange(case.shape[0]) * case.shape[1]
    flat = ids.reshape(-1)

    def through(table, output_gradient, mode):
        leaf = table.double().requires_grad_()
        output = reference.bag(flat, offsets, leaf, mode)
        gradient = torch.autograd.grad(output, leaf, output_gradient.double())[0]
        return output.detach(), gradient

    truths = through(table, output_gradient, mode)
    sizes = through(table.abs(), output_gradient.abs(), "sum")
    counts = torch.bincount(flat, minlength=case.rows)[:, None]
    return zip(truths, (case.shape[1], counts), sizes, strict=True)


@bag_table
@modes
def test_bags_equal_the_multi_hot_matmul_within_rounding(case, mode):
    ids, table = case.ids(), case.table()
    output_gradient = torch.randn(case.shape[0], case.columns)
    layer = EmbeddingBag.from_pretrained(table.clone(), freeze=False, mode=mode)
    found = run(layer, output_gradient, ids)
    for actual, expected in zip(
        found[:2], dense_bag(case, mode, ids, table, output_gradient), strict=True
    ):
        assert_rounded(actual, *expected)


@bag_table
@modes
@pytest.mark.parametrize("padding_idx", [None, 0])
def test_one_hot_input_matches_ids(case, mode, padding_idx):
    options = {"mode": mode, "padding_idx": padding_idx}
    hard = EmbeddingBag.from_pretrained(case.table(), freeze=False, **options)
    soft = copy.deepcopy(hard)
    ids = case.ids()
    one_hots = reference.one_hot(ids, case.rows, torch.float32)
    output_gradient = torch.randn(case.shape[0], case.columns)
    output, gradient, _ = run(soft, output_gradient, one_hots)
    expected, expected_gradient, _ = run(hard, output_gradient, ids)
    assert_same_bits(output, expected)
    _, (_, terms, sizes) = dense_bag(case, "sum", ids, case.table(), output_gradient)
    assert_rounded(gradient, expected_gradient.double(), 2 * terms, sizes)


@modes
@pytest.mark.parametrize("include_last_offset", [False, True])
def test_offsets_work_for_ids_and_one_hots(mode, include_last_offset):
    ids = torch.tensor([4, 1, 1, 0, 6, 2])
    offsets = torch.tensor([0, 2, 2, 5, *([6] if include_last_offset else [])])
    options = {"mode": mode, "include_last_offset": include_last_offset}
    ours, theirs = EmbeddingBag(7, 3, **options), nn.EmbeddingBag(7, 3, **options)
    ours.load_state_dict(theirs.state_dict())
    assert_same_bits(ours(ids, offsets), theirs(ids, offsets))
    assert_same_bits(ours(torch.eye(7)[ids], offsets), theirs(ids, offsets))


@pytest.mark.parametrize("soft", [False, True])
def test_per_sample_weights_scale_rows_and_have_a_gradient(soft):
    ids, output_gradient = torch.tensor([[4, 1, 1], [0, 6, 2]]), torch.randn(2, 3)
    ours, theirs = EmbeddingBag(7, 3, mode="sum"), nn.EmbeddingBag(7, 3, mode="sum")
    ours.load_state_dict(theirs.state_dict())
    weights = [torch.randn(2, 3, requires_grad=True) for _ in range(2)]
    weights[1].data.copy_(weights[0].data)
    input = torch.eye(7)[ids] if soft else ids
    actual = run(ours, output_gradient, input, per_sample_weights=weights[0])
    expected = run(theirs, output_gradient, ids, per_sample_weights=weights[1])
    for each, other in zip(actual, expected, strict=True):
        assert_no_worse(each.detach(), other.detach(), other.detach().double())
    assert_no_worse(weights[0].grad, weights[1].grad, weights[1].grad.double())


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("padding_idx", [None, 2])
def test_multi_hot_input_matches_ids(mode, padding_idx):
    ids = torch.tensor([[4, 1, 1], [0, 6, 2], [2, 2, 2]])
    layer = EmbeddingBag(7, 3, mode=mode, padding_idx=padding_idx)
    multi_hot = reference.one_hot(ids, 7, torch.float32).sum(1)
    expected = layer(ids).detach()
    assert_no_worse(layer(multi_hot).detach(), expected, expected.double())


def test_probability_members_mix_rows():
    members = torch.rand(4, 5, 7).softmax(-1)
    layer = EmbeddingBag(7, 3, mode="sum")
    table = layer.weight.detach()
    expected = (members @ table).sum(1)
    truth = (members.double() @ table.double()).sum(1)
    assert_no_worse(layer(members).detach(), expected, truth)


@pytest.mark.parametrize(
    "options",
    [
        {"max_norm": 1.0},
        {"scale_grad_by_freq": True},
        {"sparse": True, "mode": "sum"},
        {"padding_idx": 2},
        {"padding_idx": -1, "mode": "sum"},
    ],
    ids=str,
)
def test_options_match_torch(options):
    ours, theirs = EmbeddingBag(7, 3, **options), nn.EmbeddingBag(7, 3, **options)
    ours.load_state_dict(theirs.state_dict())
    ids, output_gradient = torch.tensor([[1, 2, 2], [5, 6, 0]]), torch.randn(2, 3)
    assert_all_same_bits(run(ours, output_gradient, ids), run(theirs, output_gradient, ids))


@pytest.mark.parametrize("bad", BAD_INPUTS, ids=lambda bad: bad.name)
def test_bad_input_raises_one_clear_error_and_changes_nothing(bad):
    layer = EmbeddingBag(7, 3, max_norm=0.1)
    before = layer.weight.detach().clone()
    with pytest.raises(HotrowError) as caught:
        layer(bad.input())
    assert isinstance(caught.value, bad.error)
    assert bad.message in str(caught.value)
    assert_same_bits(layer.weight, before)


@pytest.mark.parametrize("soft", [False, True])
@pytest.mark.parametrize("last", [False, True])
def test_batch_of_empty_bags(soft, last):
    layer = EmbeddingBag(7, 3, include_last_offset=last)
    input = torch.zeros(2, 0, 7) if soft else torch.zeros(2, 0, dtype=torch.int64)
    assert_same_bits(layer(input), torch.zeros(2, 3))


def test_batch_of_padding_ids_is_not_taken_for_a_multi_hot():
    layer = EmbeddingBag(10, 3, padding_idx=0)
    assert_same_bits(layer(torch.zeros(4, 10, dtype=torch.int64)), torch.zeros(4, 3))


def test_autocast_bags_accept_weights_of_the_tables_dtype():
    layer = EmbeddingBag(7, 3, mode="sum", padding_idx=2)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        output = layer(torch.eye(7)[IDS], per_sample_weights=torch.ones(2, 3))
    assert output.dtype == torch.bfloat16


def test_integer_multi_hot_raises():
    with pytest.raises(HotrowError, match="looks like a multi-hot in int64"):
        EmbeddingBag(4, 3)(torch.tensor([[0, 1, 1, 0]] * 3))
    flat = EmbeddingBag(4, 3)(torch.tensor([0, 1, 1, 0] * 3), torch.tensor([0]))
    assert flat.shape == (1, 3)
    by_chance = EmbeddingBag(4, 3)(torch.tensor([[0, 1, 1, 0]]))
    assert by_chance.shape == (1, 3)


@pytest.mark.parametrize(
    ("mode", "input", "options", "message"),
    [
        ("max", torch.ones(2, 7), {}, 'mode="max" needs the individual members of each bag'),
        (
            "sum",
            torch.ones(2, 7),
            {"per_sample_weights": torch.ones(2)},
            "per_sample_weights needs",
        ),
        (
            "sum",
            torch.ones(7),
            {},
            "a bag takes ids of shape (B, L) without offsets or (N,) with offsets, but got () "
            "without offsets",
        ),
        ("sum", torch.ones(2, 2, 2, 7), {}, "got (2, 2, 2) without"),
        ("sum", torch.ones(2, 2, 7), {"offsets": torch.tensor([0])}, "got (2, 2) with"),
        ("sum", torch.tensor([1, 2]), {"offsets": torch.tensor([0, 3])}, "offsets[1] = 3"),
        ("sum", torch.ones(2, 7), {"offsets": torch.tensor([1])}, "offsets[0] = 1"),
        ("sum", torch.ones(2, 7), {"offsets": [0]}, "offsets is a list"),
        ("sum", torch.tensor([1, 2]), {}, "got (2,) without"),
        ("sum", IDS, {"offsets": torch.tensor([0])}, "got (2, 3) with"),
        ("mean", IDS, {"per_sample_weights": torch.ones(2, 3)}, "the bag has mode='mean'"),
        ("max", torch.eye(7)[IDS], {"per_sample_weights": torch.ones(2, 3)}, "has mode='max'"),
        ("sum", IDS, {"per_sample_weights": torch.ones(3)}, "(3,), but the ids have shape (2, 3)"),
        ("sum", IDS, {"per_sample_weights": torch.ones(2, 3).double()}, "weights is float64, but"),
        ("sum", IDS, {"per_sample_weights": [1.0]}, "per_sample_weights is a list"),
    ],
)
def test_invalid_bags_raise(mode, input, options, message):
    layer = EmbeddingBag(7, 3, mode=mode, max_norm=0.1)
    before = layer.weight.detach().clone()
    with pytest.raises(HotrowError) as caught:
        layer(input, **options)
    assert message in str(caught.value)
    assert_same_bits(layer.weight, before)


def test_conversions_from_and_to_linear():
    linear = nn.Linear(7, 3, bias=False)
    layer = EmbeddingBag.from_linear(linear, mode="sum")
    assert layer.mode == "sum"
    multi_hot = torch.tensor([[1.0, 0, 0, 2, 0, 0, 1]])
    assert_no_worse(
        layer(multi_hot).detach(),
        linear(multi_hot).detach(),
        F.linear(multi_hot.double(), linear.weight.detach().double()),
    )
    assert layer.weight.data_ptr() != linear.weight.data_ptr()
    assert_same_bits(layer.to_linear().weight, linear.weight)


def test_checkpoints_load_in_both_directions():
    ours, theirs = EmbeddingBag(7, 3), nn.EmbeddingBag(7, 3)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    ours.load_state_dict(theirs.state_dict())
    assert_same_bits(ours.weight, theirs.weight)


def test_compiles_without_a_graph_break():
    layer = EmbeddingBag(7, 3)
    ids, offsets = torch.tensor([1, 6, 1]), torch.tensor([0, 2])
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(ids, offsets), layer(ids, offsets))
    with pytest.raises(HotrowError, match="offsets"):
        compiled(ids, torch.tensor([0, 4]))


@pytest.mark.usefixtures("threads")
@modes
def test_results_do_not_depend_on_the_number_of_threads(mode):
    layer = EmbeddingBag(5_000, 64, mode=mode)
    ids, output_gradient = torch.randint(0, 500, (800, 11)), torch.randn(800, 64)
    results = []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        output = layer(ids)
        (gradient,) = torch.autograd.grad(output, layer.weight, output_gradient)
        results.append((output, gradient))
    for other in results[1:]:
        assert_all_same_bits(other, results[0])


@modes
def test_jagged_ids_settle_the_rows_of_a_table(mode):
    layer, parts = EmbeddingBag(7, 3, mode=mode), [torch.tensor([1, 2]), torch.tensor([6, 0, 3])]
    hotrow.convert(layer, min_entries=0)
    assert isinstance(layer.weight, Table)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    for ids in ([1, 6], [4], [5]):
        optimizer.zero_grad()
        layer(torch.tensor([ids])).sum().backward()
        optimizer.step()
    assert layer.weight.has_stale_rows
    found = layer(torch.nested.nested_tensor(parts, layout=torch.jagged))
    assert_same_bits(found, torch.cat([layer(part[None]) for part in parts]))
