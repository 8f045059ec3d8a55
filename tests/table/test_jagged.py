"""Operations of a table and a jagged tensor read settled rows, as in dense training."""

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import hotrow
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.tolerance import assert_same_bits, assert_same_numbers


def jagged(*parts):
    return torch.nested.nested_tensor(list(parts), layout=torch.jagged)


def stale_layer(values):
    """Train an embedding, so that its weight becomes a table with stale rows."""
    layer = hotrow.convert(nn.Embedding.from_pretrained(values.clone(), False), min_entries=0)
    optimizer = hotrow.optim.Adam(layer.parameters(), lr=0.1)
    for ids in ([1, 6], [4], [5]):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).square().sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    assert isinstance(layer.weight, Table)
    assert layer.weight.has_stale_rows
    return layer


def twins():
    """Return a table with stale rows, and a plain parameter with the values of dense training."""
    values = torch.randn(7, 3)
    return stale_layer(values).weight, nn.Parameter(stale_layer(values).weight.detach().clone())


IDS = jagged(torch.tensor([1, 2]), torch.tensor([6, 0, 3]))
STRIDED = torch.nested.nested_tensor_from_jagged(
    torch.tensor([1, 4, 2, 6, 0]), torch.tensor([0, 3, 5]), torch.tensor([2, 1])
)
WEIGHTS = torch.nested.nested_tensor_from_jagged(torch.randn(5), IDS.offsets())
PRODUCTS = {
    "linear": lambda w: F.linear(jagged(torch.ones(2, 3), torch.ones(3, 3)), w),
    "matmul": lambda w: jagged(torch.ones(2, 7), torch.ones(3, 7)) @ w,
}
LOOKUPS = {
    "embedding": lambda w: F.embedding(IDS, w),
    "padding": lambda w: F.embedding(IDS, w, padding_idx=3),
    "frequencies": lambda w: F.embedding(IDS, w, scale_grad_by_freq=True),
    "lengths": lambda w: F.embedding_bag(STRIDED, w),
    "bag": lambda w: F.embedding_bag(IDS, w),
    "largest": lambda w: F.embedding_bag(IDS, w, mode="max", padding_idx=3),
    "weighted": lambda w: F.embedding_bag(IDS, w, mode="sum", per_sample_weights=WEIGHTS),
}


@pytest.mark.parametrize("name", PRODUCTS | LOOKUPS)
def test_the_numbers_are_those_of_a_plain_parameter(name):
    table, plain = twins()
    outputs = []
    for weight in (table, plain):
        output = (PRODUCTS | LOOKUPS)[name](weight)
        (output.values() if output.is_nested else output).tanh().sum().backward()
        outputs.append(output.detach())
    found, expected = outputs
    assert found.is_nested == expected.is_nested
    for each, other in zip(found.unbind(), expected.unbind(), strict=True):
        assert_same_numbers(each, other)
    assert isinstance(table.grad, RowGradient) == (name in LOOKUPS)
    assert_same_numbers(table.grad + 0, plain.grad)


def test_an_evaluation_settles_only_the_rows_of_the_ids():
    layer = stale_layer(torch.randn(7, 3))
    with torch.no_grad():
        layer(jagged(torch.tensor([1]), torch.tensor([1, 2])))
    assert layer.weight.has_stale_rows


def test_the_result_has_the_lengths_of_the_ids():
    layer = stale_layer(torch.randn(7, 3))
    output = layer(IDS)
    assert output.shape[:2] == IDS.shape
    swapped = layer(torch.stack([IDS, IDS], 2).transpose(1, 2))
    assert_same_bits(swapped.unbind()[1][0], output.unbind()[1])


@pytest.mark.parametrize(
    "ids",
    [IDS, torch.nested.nested_tensor_from_jagged(IDS.values(), IDS.offsets())],
    ids=["known", "unknown"],
)
def test_the_result_is_padded_to_the_same_length(ids):
    outputs = [F.embedding(ids, weight) for weight in twins()]
    for _ in range(2):
        found, expected = (torch.nested.to_padded_tensor(each, 0.0) for each in outputs)
        assert_same_bits(found, expected)
        ids._get_max_seqlen()  # stores the length, but only in these ids


@pytest.mark.parametrize(
    "look_up",
    [
        lambda w: F.embedding_bag(torch.stack([IDS, IDS], 2), w),
        lambda w: F.embedding_bag(IDS, w, mode="sum", per_sample_weights=torch.ones(5)),
    ],
)
def test_invalid_arguments_raise(look_up):
    for weight in twins():
        with pytest.raises(ValueError, match=r"2D Tensor|ids of shape|per_sample_weights"):
            look_up(weight)


def test_a_compiled_function_reads_settled_rows():
    found, expected = map(torch.compile(PRODUCTS["linear"], backend="eager"), twins())
    assert_same_numbers(found.values(), expected.values())


def test_operations_without_tables_are_those_of_torch():
    assert_same_bits((IDS + 1).values(), IDS.values() + 1)
    plain = nn.Embedding(7, 3)
    assert_same_bits(plain(IDS).values(), plain(IDS.values()))
