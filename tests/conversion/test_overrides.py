"""Classes and modes that replace torch's functions work as they do before `convert`."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import hotrow
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table


class Rounded(nn.Parameter):
    """A weight whose lookups and products see rounded values, as in quantization."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (F.embedding, F.linear):
            first, weight, *rest = args
            with torch._C.DisableTorchFunctionSubclass():
                return func(first, (weight * 4).round() / 4, *rest, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class Degrees(Tensor):
    """A tensor that is converted to another unit before a sum or a product."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func in (Tensor.add, Tensor.mul, Tensor.matmul, Tensor.__matmul__):
            args = [a.as_subclass(Tensor).deg2rad() if isinstance(a, Degrees) else a for a in args]
            return func(*args, **(kwargs or {}))
        return super().__torch_function__(func, types, args, kwargs or {})


class Named(Tensor):
    """A tensor with torch's functions, whose results have the same class."""


class Smoothing(TorchFunctionMode):
    def __torch_function__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        return result * 0.9 + 0.02 if func is F.one_hot else result


class OneHotModel(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 2, bias=False)

    def forward(self, ids):
        return self.layer(F.one_hot(ids, 5).float())


IDS = torch.tensor([0, 4])


@pytest.mark.parametrize("make", [lambda: nn.Embedding(5, 2), OneHotModel])
def test_a_weight_of_a_class_with_its_own_functions_keeps_them(make):
    model = make()
    layer = model if isinstance(model, nn.Embedding) else model.layer
    layer.weight = Rounded(torch.randn(layer.weight.shape))
    expected = model(IDS)
    hotrow.convert(model, min_entries=0)
    assert type(layer.weight) is Rounded
    assert torch.equal(model(IDS), expected)
    assert torch.equal(4 * expected, (4 * expected).round())


def test_a_weight_whose_class_selects_its_options_keeps_the_class():
    class NoDecay(nn.Parameter):
        pass

    model = nn.Embedding(5, 2)
    model.weight = NoDecay(torch.randn(5, 2))
    hotrow.convert(model, min_entries=0)
    assert type(model.weight) is NoDecay


def test_the_report_names_the_class_of_the_weight():
    model = nn.Embedding(5, 2)
    model.weight = Rounded(torch.randn(5, 2))
    report = str(hotrow.convert.report(hotrow.convert(model, min_entries=0)))
    assert "stays plain PyTorch: its weight is a Rounded" in report


@pytest.mark.parametrize("kind", [Degrees, Named])
@pytest.mark.parametrize(
    "use",
    [
        lambda weight, other: weight + other,
        lambda weight, other: other + weight,
        lambda weight, other: weight @ other.mT,
        lambda weight, other: torch.cat([weight, other]),
    ],
)
def test_a_tensor_of_another_class_uses_its_functions_on_tables_and_one_hots(use, kind):
    other = torch.full((3, 5), 180.0).as_subclass(kind)
    layer = nn.Embedding(3, 5)
    optimizer = hotrow.optim.Adam(hotrow.convert(layer, min_entries=0).parameters())
    assert isinstance(layer.weight, Table)
    for ids in ([0, 1], [2]):
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
    assert layer.weight.has_stale_rows
    found = use(layer.weight, other)
    dense = nn.Parameter(layer.weight.detach().clone())
    assert torch.equal(found.as_subclass(Tensor), use(dense, other).as_subclass(Tensor))
    assert type(found) is type(use(dense, other))
    ids = torch.tensor([1, 4, 0])
    found = use(hotrow.one_hot(ids, 5, dtype=torch.float32), other)
    expected = use(F.one_hot(ids, 5).float(), other)
    assert torch.equal(found.as_subclass(Tensor), expected.as_subclass(Tensor))
    assert type(found) is type(expected)


class Masked(Tensor):
    """Ids, and rows at these ids, whose sum leaves out the first one."""

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        if func is Tensor.sum:
            return args[0].as_subclass(Tensor)[1:].sum()
        return super().__torch_function__(func, types, args, kwargs or {})


@pytest.mark.parametrize("kind", [Named, Masked])
@pytest.mark.parametrize(
    "look_up", [F.embedding, lambda ids, weight: F.embedding_bag(ids.reshape(-1, 1), weight)]
)
def test_the_rows_at_ids_of_another_class_have_this_class(look_up, kind):
    layer = nn.Embedding(5, 2)
    optimizer = hotrow.optim.Adam(hotrow.convert(layer, min_entries=0).parameters())
    assert isinstance(layer.weight, Table)
    for ids in ([0, 1, 4], [2], [0]):
        optimizer.zero_grad()
        layer(torch.tensor(ids)).sum().backward()
        optimizer.step()
    optimizer.zero_grad()
    assert layer.weight.has_stale_rows
    ids = torch.tensor([3, 4, 4]).as_subclass(kind)
    found = look_up(ids, layer.weight)
    dense = nn.Parameter(layer.weight.detach().clone())
    expected = look_up(ids, dense)
    assert type(found) is type(expected) is kind
    assert torch.equal(found.as_subclass(Tensor), expected.as_subclass(Tensor))
    found.sum().backward()
    expected.sum().backward()
    assert torch.equal(layer.weight.grad + 0, dense.grad.as_subclass(Tensor))
    assert isinstance(layer.weight.grad, RowGradient) == (kind is Named)


def test_a_mode_around_a_model_sees_the_calls_of_the_model():
    model = OneHotModel()
    converted = hotrow.convert(copy.deepcopy(model), min_entries=0)
    with Smoothing():
        assert torch.equal(converted(IDS), model(IDS))
    with torch.device("cpu"):  # also a mode
        converted(IDS)
    assert "looked up" in str(hotrow.convert.report(converted))
