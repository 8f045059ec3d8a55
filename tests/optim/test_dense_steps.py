"""Tables that share memory or whose gradient has another dtype take torch's step, or none."""

import copy
import itertools
import warnings

import pytest
import torch
from torch import nn

import hotrow
from hotrow import HotrowError
from hotrow.optim import dense_steps
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table
from tests.support.exhaustive import grid
from tests.support.tolerance import assert_same_bits

DECAY = {"AdamW": {"lr": 0.05, "weight_decay": 0.5}, "SGD": {"lr": 0.1, "weight_decay": 0.2}}


def pair(values, library=hotrow):
    """Return two embeddings whose memory the test joins."""
    model = nn.ModuleList(
        nn.Embedding(*values.shape, dtype=values.dtype, _weight=values.clone()) for _ in range(2)
    )
    return hotrow.convert(model, min_entries=0) if library is hotrow else model


def share_data(a, b):
    b.weight.data = a.weight.data


def share_parameter(a, b):
    b.weight = nn.Parameter(a.weight)


def share_rows(a, b):
    memory = torch.cat([a.weight.detach(), b.weight.detach()])
    a.weight.data, b.weight.data = memory[: len(a.weight)], memory[3 : len(b.weight) + 3]


@pytest.mark.parametrize("share", [share_data, share_parameter, share_rows])
@pytest.mark.parametrize("name", DECAY)
@pytest.mark.parametrize("is_reversed", [False, True])
def test_parameters_that_share_memory_step_one_after_the_other(name, share, is_reversed):
    generator = torch.Generator().manual_seed(2)
    values = torch.randn(6, 3, generator=generator, dtype=torch.float64)
    results = []
    for library in (torch, hotrow):
        a, b = pair(values, library)
        share(a, b)
        parameters = [a.weight, b.weight]
        optimizer = getattr(library.optim, name)(
            parameters[:: -1 if is_reversed else 1], **DECAY[name]
        )
        for t in range(12):
            optimizer.zero_grad()
            ids = torch.randint(6, (2, 2), generator=torch.Generator().manual_seed(t))
            (a(ids[0]).sum() + 2 * b(ids[1]).sin().sum()).backward()
            if library is hotrow:
                assert type(a.weight.grad) is RowGradient
                assert type(a.weight) is type(b.weight) is Table
            optimizer.step()
        results.append(torch.stack([a.weight.detach(), b.weight.detach()]))
    assert_same_bits(*results)


def test_memory_is_compared_only_if_it_is_shared(monkeypatch):
    a, b = pair(torch.randn(6, 3))
    compared = []
    overlaps = dense_steps._overlaps
    monkeypatch.setattr(dense_steps, "_overlaps", lambda *p: compared.append(p) or overlaps(*p))
    optimizer = hotrow.optim.AdamW([a.weight, b.weight])
    for t in range(4):
        optimizer.zero_grad()
        (a(torch.tensor([1])).sum() + b(torch.tensor([2])).sum()).backward()
        alias = a.weight.data if t == 3 else None
        optimizer.step()
        assert bool(compared) == (t == 3), alias


def test_slices_of_one_buffer_that_do_not_overlap_take_row_steps():
    a, b = pair(torch.randn(6, 3))
    memory = torch.randn(12, 3)
    a.weight.data, b.weight.data = memory[:6], memory[6:]
    optimizer = hotrow.optim.AdamW([a.weight, b.weight])
    for _ in range(2):
        optimizer.zero_grad()
        (a(torch.tensor([1])).sum() + b(torch.tensor([2])).sum()).backward()
        optimizer.step()
        assert a.weight.lag is not None
        assert b.weight.lag is not None


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_gradient_of_another_dtype_is_used_as_in_torch(dtype):
    weights = []
    for library in (torch, hotrow):
        layer = nn.Embedding(6, 3, _weight=torch.ones(6, 3, dtype=dtype))
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        layer.weight.grad_dtype = torch.float64
        optimizer = library.optim.SGD(layer.parameters(), lr=0.5)
        layer(torch.tensor([1, 2, 2])).sum().backward()
        assert layer.weight.grad.dtype == torch.float64
        optimizer.step()
        weights.append(layer.weight.detach().clone())
    assert_same_bits(*weights)


def set_data(values):
    def change(layer, optimizer):
        layer.weight.data = values

    return change


@pytest.mark.parametrize(
    ("change", "text"),
    [
        (set_data(torch.zeros(4, 3)), "shape"),
        (set_data(torch.zeros(9, 2)), "shape"),
        (set_data(torch.zeros(9, 3, dtype=torch.float64)), "dtype torch.float32, but needs"),
    ],
)
@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_a_gradient_from_before_a_change_is_refused(change, text, name):
    layer = hotrow.convert(nn.Embedding(9, 3), min_entries=0)
    other = nn.Parameter(torch.ones(2))
    optimizer = getattr(hotrow.optim, name)([*layer.parameters(), other], lr=0.1)
    (layer(torch.tensor([1, 8])).sum() + other.sum()).backward()
    change(layer, optimizer)
    assert type(layer.weight) is Table
    before = copy.deepcopy([layer.weight.detach(), other.detach()])
    with pytest.raises(HotrowError, match=f"the gradient of a .* table has {text}"):
        optimizer.step()
    for actual, expected in zip([layer.weight, other], before, strict=True):
        assert_same_bits(actual, expected)
    optimizer.zero_grad()
    layer(torch.tensor([1])).sum().backward()
    optimizer.step()


def test_rows_that_share_memory_with_each_other_take_torch_s_step():
    outcomes = []
    for library in (hotrow, torch):
        layer = nn.Embedding(30, 4)
        # Each row begins inside another.
        layer.weight = nn.Parameter(torch.arange(80.0).as_strided((30, 4), (2, 1)))
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        optimizer = library.optim.SGD(layer.parameters(), lr=0.1, momentum=0.9)
        for t in range(4):
            optimizer.zero_grad()
            layer(torch.tensor([t, 2 * t])).sum().backward()
            optimizer.step()
        outcomes.append(layer.weight.detach().clone())
    assert torch.equal(*outcomes)


@pytest.mark.parametrize(
    ("name", "is_two_groups"),
    grid(
        itertools.product(hotrow.optim.__all__, [False, True]),
        lambda name, _: name in ("SGD", "Adam"),
    ),
)
def test_a_table_that_is_listed_twice_takes_torch_s_steps(name, is_two_groups):
    """As if tied layers pass `[*a.parameters(), *b.parameters()]`; torch only warns."""
    found = []
    plain = nn.Embedding(30, 4)
    for library in (hotrow, torch):
        layer = copy.deepcopy(plain)
        if library is hotrow:
            layer = hotrow.convert(layer, min_entries=0)
            assert type(layer.weight) is Table
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            optimizer = getattr(library.optim, name)([layer.weight] * 2, lr=0.1)
        if is_two_groups:
            optimizer.param_groups[0]["params"].pop()
            optimizer.param_groups.append({**optimizer.param_groups[0], "lr": 0.2})
        for t in range(4):
            optimizer.zero_grad()
            layer(torch.tensor([t, 2 * t])).square().sum().backward()
            optimizer.step()
        found.append(layer.weight.detach())
    torch.testing.assert_close(*found)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_expanded_rows_raise_torch_s_error(name):
    layer = nn.Embedding(30, 4)
    layer.weight = nn.Parameter(torch.ones(4).expand(30, 4))
    layer = hotrow.convert(layer, min_entries=0)
    assert type(layer.weight) is Table
    layer(torch.tensor([3])).sum().backward()
    with pytest.raises(RuntimeError, match="refers to a single memory location"):
        getattr(hotrow.optim, name)(layer.parameters()).step()
