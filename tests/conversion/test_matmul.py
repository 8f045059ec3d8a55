"""`convert(model, to="matmul")` computes every lookup as the product of a one-hot and the table."""

import copy
from collections import Counter

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow import HotrowError, convert
from hotrow.table.parameter import Table
from tests.support.cases import bag_table, case_table
from tests.support.onehots import outcome
from tests.support.tolerance import assert_rounded, assert_same_bits


class Model(nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, *arguments, **keywords):
        return self.layer(*arguments, **keywords)


def twins(layer):
    """Return a plain model and a converted copy."""
    model = Model(layer)
    return model, convert(copy.deepcopy(model), to="matmul")


class Operations(TorchDispatchMode):
    def __init__(self):
        super().__init__()
        self.met = Counter()

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.met[func.overloadpacket.__name__] += 1
        return func(*args, **(kwargs or {}))


def multiplies(model, *arguments):
    with Operations() as operations:
        model(*arguments)
    met = operations.met
    return bool(met["mm"] + met["bmm"] + met["addmm"]) and not met["embedding"]


def assert_same_training(model, other, *arguments):
    """Assert equal outputs. Gradients may differ by rounding, because a matmul reorders sums."""
    outputs = [each(*arguments) for each in (model, other)]
    assert_same_bits(outputs[1], outputs[0])
    cotangent = torch.randn(outputs[0].shape).to(outputs[0].dtype)
    for output in outputs:
        output.backward(cotangent)
    expected = model.layer.weight.grad
    expected = expected.to_dense() if expected.is_sparse else expected
    found = other.layer.weight.grad
    assert not found.is_sparse
    assert found.dtype == expected.dtype
    truth, sizes = (gradient_in_float64(model, arguments, c) for c in (cotangent, cotangent.abs()))
    assert_rounded(found, truth, 2 * arguments[0].numel(), sizes)


def gradient_in_float64(model, arguments, cotangent):
    exact = copy.deepcopy(model).double()
    exact.zero_grad()
    exact(*arguments).backward(cotangent.double())
    gradient = exact.layer.weight.grad
    return gradient.to_dense() if gradient.is_sparse else gradient


@case_table
def test_embedding_trains_like_the_lookup(case):
    layer = nn.Embedding.from_pretrained(case.table(), freeze=False)
    model, other = twins(layer)
    assert_same_training(model, other, case.ids())
    assert multiplies(other, case.ids())


@pytest.mark.parametrize(
    "options", [{}, {"padding_idx": 2}, {"padding_idx": -1}, {"sparse": True}], ids=str
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16], ids=str)
def test_embedding_options_and_dtypes(options, dtype):
    model, other = twins(nn.Embedding(7, 3, **options, dtype=dtype))
    assert_same_training(model, other, torch.tensor([[1, 0, 6], [2, 2, 3]]))


@bag_table
@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
def test_bags_train_like_the_lookup(case, mode):
    layer = nn.EmbeddingBag.from_pretrained(case.table(), freeze=False, mode=mode)
    model, other = twins(layer)
    ids = case.ids()
    if not ids.shape[1]:  # torch rejects empty bags in a 2-D input
        assert type(outcome(other, ids)) is type(outcome(model, ids))
        return
    assert_same_training(model, other, ids)
    assert multiplies(other, ids)


IDS = torch.tensor([[1, 0, 6], [2, 2, 3]])
OFFSETS = torch.tensor([0, 2, 2])


@pytest.mark.parametrize("mode", ["sum", "mean", "max"])
@pytest.mark.parametrize(
    ("options", "arguments"),
    [
        ({"padding_idx": 2}, (IDS,)),
        ({"padding_idx": -5}, (IDS,)),
        ({"padding_idx": 6}, (IDS,)),
        ({}, (IDS.flatten(), OFFSETS)),
        ({}, (IDS.flatten().int(), OFFSETS.int())),
        ({"padding_idx": 2}, (IDS.flatten(), OFFSETS)),
        ({"include_last_offset": True}, (IDS.flatten(), torch.tensor([0, 2, 2, 6]))),
        ({}, (IDS[0, :0], torch.tensor([0, 0]))),
    ],
    ids=str,
)
def test_bag_options(mode, options, arguments):
    model, other = twins(nn.EmbeddingBag(7, 3, mode=mode, **options))
    assert_same_training(model, other, *arguments)


@pytest.mark.parametrize("options", [{}, {"padding_idx": 2}, {"sparse": True}], ids=str)
def test_bag_weights(options):
    model, other = twins(nn.EmbeddingBag(7, 3, mode="sum", **options))
    grads = []
    for each in (model, other):
        weights = torch.full((2, 3), 0.5, requires_grad=True)
        each(IDS, per_sample_weights=weights).pow(2).sum().backward()
        grads.append(weights.grad)
    torch.testing.assert_close(grads[1], grads[0])


@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
@pytest.mark.parametrize(
    ("option", "message"),
    [
        ({"max_norm": 1.0}, "max_norm=1.0, which a one-hot product does not support"),
        ({"scale_grad_by_freq": True}, "scale_grad_by_freq=True, which a one-hot product"),
    ],
    ids=str,
)
def test_unsupported_options_raise(kind, option, message):
    other = twins(kind(7, 3, **option))[1]
    with pytest.raises(HotrowError, match=message):
        other(IDS)


@pytest.mark.parametrize("ids", [IDS + 1, IDS - 1, IDS.float()], ids=["large", "negative", "float"])
@pytest.mark.parametrize("kind", [nn.Embedding, nn.EmbeddingBag])
def test_bad_ids_raise(kind, ids):
    model, other = twins(kind(7, 3))
    expected, found = outcome(model, ids), outcome(other, ids)
    assert isinstance(found, HotrowError)
    if isinstance(expected, IndexError):
        assert isinstance(found, IndexError)


def test_module_and_state_dict_keys_stay_the_same():
    model = Model(nn.Embedding(7, 3))
    weight, keys, name = model.layer.weight, list(model.state_dict()), type(model).__name__
    assert convert(model, to="matmul") is model
    assert model.layer.weight is weight
    assert type(weight) is nn.Parameter
    assert list(model.state_dict()) == keys
    assert type(model).__name__ == name
    assert str(convert.report(model)) == "layer  Embedding(7, 3)  one-hot matmul"


def test_converting_again_changes_nothing():
    model = convert(Model(nn.Embedding(7, 3)), to="matmul")
    kind, expected = type(model), model(IDS)
    assert type(convert(model, to="matmul")) is kind
    assert_same_bits(model(IDS), expected)


def test_converts_in_both_directions():
    model = Model(nn.Embedding(7, 3))
    expected = model(IDS)
    looking = type(convert(copy.deepcopy(model)))
    convert(model, to="matmul")
    assert multiplies(model, IDS)
    convert(model)
    assert type(model) is looking
    assert isinstance(model.layer.weight, Table)
    assert not multiplies(model, IDS)
    assert_same_bits(model(IDS), expected)
    assert str(convert.report(model)) == "layer  Embedding(7, 3)  table"
    convert(model, to="matmul")
    assert multiplies(model, IDS)
    assert_same_bits(model(IDS), expected)


@pytest.mark.parametrize(
    "build",
    [
        lambda: nn.Embedding(7, 3),
        lambda: nn.Sequential(nn.Embedding(7, 3), nn.Linear(3, 2)),
        lambda: nn.Sequential(nn.Sequential(nn.Embedding(7, 3))),
        lambda: hotrow.Embedding(7, 3),
        lambda: Model(hotrow.Embedding(7, 3)),
        lambda: nn.Sequential(Model(nn.Embedding(7, 3))),
    ],
    ids=["itself", "sequential", "nested", "ours", "ours inside", "own class inside"],
)
def test_converts_embeddings_anywhere_in_the_model(build):
    model = build()
    other = convert(copy.deepcopy(model), to="matmul")
    assert_same_bits(other(IDS), model(IDS))
    assert multiplies(other, IDS)
    assert isinstance(other, type(model))


def test_training_matches_the_embedding():
    model, other = twins(nn.Embedding(7, 3, padding_idx=0))
    for each in (model, other):
        optimizer = torch.optim.AdamW(each.parameters(), lr=0.1)
        for start in range(3):
            optimizer.zero_grad()
            each((IDS + start) % 7).pow(2).sum().backward()
            optimizer.step()
    torch.testing.assert_close(other.layer.weight, model.layer.weight)


def test_autocast_leaves_the_product_in_the_tables_dtype():
    model, other = twins(nn.Embedding(7, 3))
    with torch.autocast("cpu", torch.bfloat16):
        assert_same_bits(other(IDS), model(IDS))


def test_a_checkpointed_layer_stays_a_lookup():
    class Recomputes(Model):
        def forward(self, ids):
            return checkpoint(self.layer, ids, use_reentrant=False) + self.layer(ids)

    model = Recomputes(nn.Embedding(6, 2))
    other = convert(copy.deepcopy(model), to="matmul")
    with Operations() as operations:
        for each in (model, other):
            each(torch.tensor([1, 4])).square().sum().backward()
    torch.testing.assert_close(other.layer.weight.grad, model.layer.weight.grad)
    assert operations.met["embedding"] == 3  # two in the plain model
    assert operations.met["mm"] == 2  # in the forward and the backward pass


def test_torch_compile():
    model, other = twins(nn.Embedding(7, 3))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(IDS), model(IDS))


def test_bag_rounding_is_within_the_bound_of_its_terms():
    ids = torch.randint(0, 30, (4, 40))
    other = twins(nn.EmbeddingBag(30, 5, mode="sum"))[1]
    table = other.layer.weight.detach().double()
    rows = table[ids]
    assert_rounded(other(ids), rows.sum(1), 40, rows.abs().sum(1))


@pytest.mark.parametrize("to", ["lookups", None, 3])
def test_unknown_direction_raises(to):
    with pytest.raises(HotrowError, match="but it must be 'lookup' or 'matmul'"):
        convert(Model(nn.Embedding(7, 3)), to=to)
