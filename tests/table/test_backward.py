"""Backward passes to tables and one-hots match torch's, and settle only the rows that they read."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow.onehot.tensor import OneHot
from hotrow.table.gradient import RowGradient
from hotrow.table.parameter import Table

IDS = torch.arange(4)


def stale_twins():
    """Return two equal pairs of embeddings, torch's and hotrow's; row 0 of hotrow's is stale."""
    torch.manual_seed(0)
    plain = nn.ModuleList([nn.Embedding(10, 3), nn.Embedding(10, 3)])
    rows = hotrow.convert(copy.deepcopy(plain), min_entries=0)
    for model, library in (plain, torch), (rows, hotrow):
        optimizer = library.optim.AdamW(model.parameters(), lr=0.05)
        for start in range(6):
            ids = torch.arange(start, start + 3)
            optimizer.zero_grad()
            (model[0](ids) * model[1](ids)).sum().backward()
            optimizer.step()
        optimizer.zero_grad()
    assert all(type(each.weight) is Table and each.weight.has_stale_rows for each in rows)
    return plain, rows


def grad(loss, weight):
    return torch.autograd.grad(loss, [weight])[0]


def grad_of_one(loss, weight):
    return torch.autograd.grad(loss, inputs=weight)[0]


def backward(loss, weight):
    loss.backward()
    return weight.grad


def backward_of_inputs(loss, weight):
    loss.backward(inputs=[weight])
    return weight.grad


def backward_of_dict(loss, weight):
    loss.backward(inputs={"weight": weight} if torch.__version__ >= "2.13" else weight)
    return weight.grad


CALLS = [grad, grad_of_one, backward, backward_of_inputs, backward_of_dict]


class MultiplyByRows(torch.autograd.Function):
    """A sum whose backward pass looks up rows in another table."""

    @staticmethod
    def forward(ctx, values, embedding):
        ctx.embedding = embedding
        return values.sum()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.embedding(IDS).detach(), None


def loss_with_hook(model):
    output = model[0](IDS)
    output.register_hook(lambda gradient: gradient * model[1](IDS).detach())
    return output.sum()


def loss_with_function(model):
    return MultiplyByRows.apply(model[0](IDS), model[1])


def loss_with_checkpoint(model):
    return checkpoint(lambda ids: model[0](ids).pow(3), IDS, use_reentrant=False).sum()


@pytest.mark.parametrize("loss_of", [loss_with_hook, loss_with_function, loss_with_checkpoint])
@pytest.mark.parametrize("call", CALLS)
def test_python_code_in_a_backward_pass_reads_settled_rows(call, loss_of):
    expected, found = (call(loss_of(each), each[0].weight) for each in stale_twins())
    assert type(found) is RowGradient
    torch.testing.assert_close(found + 0, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("call", CALLS)
def test_a_backward_pass_to_a_table_settles_no_other_rows(call):
    _, rows = stale_twins()
    call(rows[0](IDS).sum(), rows[0].weight)
    assert rows[0].weight.has_stale_rows
    assert rows[0].weight.dense_use is None


@pytest.mark.parametrize("create_graph", [True, False])
def test_missing_gradients_become_zeros(create_graph):
    results = [
        torch.autograd.grad(
            model[0](IDS).pow(2).sum(),
            [model[0].weight, model[1].weight],
            create_graph=create_graph,
            materialize_grads=True,
        )
        for model in stale_twins()
    ]
    for expected, found in zip(*results, strict=True):
        assert found.requires_grad == expected.requires_grad
        torch.testing.assert_close(found + 0, expected, rtol=1e-5, atol=1e-6)


def test_an_unused_table_is_an_error_or_none():
    _, rows = stale_twins()
    unused = rows[1].weight
    with pytest.raises(RuntimeError, match="allow_unused"):
        torch.autograd.grad(rows[0](IDS).sum(), [unused])
    assert torch.autograd.grad(rows[0](IDS).sum(), [unused], allow_unused=True) == (None,)
    unused.requires_grad_(False)
    with pytest.raises(RuntimeError, match="does not require grad"):
        torch.autograd.grad(rows[0](IDS).sum(), [unused])


@pytest.mark.parametrize("through", ["backward", "grad", "batched"])
def test_a_table_as_the_gradient_of_an_output_is_settled(through):
    found = []
    for model in stale_twins():
        x = torch.ones(10, 3, requires_grad=True)
        weight = model[1].weight
        if through == "backward":
            x.pow(2).backward(weight)
            found.append(x.grad)
        elif through == "grad":
            found.append(torch.autograd.grad(x.pow(2), x, grad_outputs=weight)[0])
        else:
            y = x[0].pow(2)
            found.append(torch.autograd.grad(y, x, weight, is_grads_batched=True)[0])
    torch.testing.assert_close(found[1], found[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("gradient", ["ones", "itself"])
def test_a_table_can_be_an_output(gradient):
    weights = []
    for model in stale_twins():
        first, second = (each.weight for each in model)
        first.register_hook(lambda g, model=model: g * model[1](IDS).detach().sum())
        loss = model[0](IDS).sum()
        given = torch.ones(10, 3) if gradient == "ones" else first
        torch.autograd.backward([loss, first], [None, given])
        second.backward(second if gradient == "itself" else given, inputs=[second])
        weights.append((first.grad + 0, second.grad + 0))
    torch.testing.assert_close(weights[1], weights[0], rtol=1e-5, atol=1e-5)


def one_hot_gradient(model, call, min_entries):
    class Model(nn.Module):
        def forward(self, ids):
            one_hot = F.one_hot(ids, 10).float().requires_grad_()
            if min_entries is not None:
                assert type(one_hot) is OneHot
            output = one_hot @ torch.arange(30.0).view(10, 3)
            output.register_hook(lambda gradient: gradient * model[1](ids).detach())
            return call(output.sum(), one_hot)

    module = Model()
    return (module if min_entries is None else hotrow.convert(module, min_entries=0))(IDS)


@pytest.mark.parametrize("call", CALLS)
def test_python_code_in_the_backward_pass_of_a_one_hot_reads_settled_rows(call):
    plain, rows = stale_twins()
    expected = one_hot_gradient(plain, call, None)
    found = one_hot_gradient(rows, call, 0)
    torch.testing.assert_close(found + 0, expected, rtol=1e-5, atol=1e-5)


def test_a_parameter_can_be_made_from_a_table_under_torch_function_modes():
    _, rows = stale_twins()
    with torch.device("cpu"), torch.device("cpu"):
        parameter = nn.Parameter(rows[0].weight)
        copied = nn.Embedding.from_pretrained(rows[1].weight, freeze=False)
        nn.utils.parametrizations.weight_norm(rows[1])
    assert type(parameter) is Table
    assert torch.equal(parameter, rows[0].weight)
    assert copied(IDS).requires_grad


class _Double(torch.autograd.Function):
    """Multiply by 2; the backward pass writes the gradient to the same memory each time."""

    @staticmethod
    def forward(ctx, x, buffer, wrap):
        ctx.buffer, ctx.wrap = buffer, wrap
        return 2 * x

    @staticmethod
    def backward(ctx, gradient):
        np.multiply(gradient.numpy(), 2, out=ctx.buffer)
        return ctx.wrap(ctx.buffer), None, None


@pytest.mark.parametrize("wrap", [torch.from_numpy, torch.from_dlpack, torch.as_tensor])
def test_a_gradient_in_the_memory_of_another_library_may_be_overwritten(wrap):
    gradients = []
    plain = nn.Embedding(9, 2)
    for layer in plain, hotrow.convert(copy.deepcopy(plain), min_entries=0):
        buffer = np.zeros((3, 2), np.float32)
        for factor in 1.0, 10.0:
            (_Double.apply(layer(torch.tensor([1, 3, 5])), buffer, wrap) * factor).sum().backward()
        buffer.fill(7)
        gradients.append(layer.weight.grad.to_dense())
    assert type(layer.weight) is Table
    assert torch.equal(*gradients)


@pytest.mark.parametrize(
    "change",
    [
        lambda g: torch.linalg.vector_norm(g, keepdim=True),
        lambda g: torch.linalg.vector_norm(g, 3, None, True),
        lambda g: torch._foreach_norm([g], 2, dtype=torch.float64)[0],
        lambda g: torch._foreach_norm([g], float("inf"))[0],
        lambda g: (g + g).to_dense(),
        lambda g: g.mul_(1).add_(g).to_dense(),
        lambda g: g.mul_(1).add_(g.detach()).to_dense(),
    ],
)
@pytest.mark.parametrize("ids", [[1, 1, 2], [0, 1, 2]])  # some rows, or all of them
def test_an_operation_on_the_gradient(change, ids):
    found = []
    plain = nn.Embedding(3, 2)
    for layer in plain, hotrow.convert(copy.deepcopy(plain), min_entries=0):
        layer(torch.tensor(ids)).pow(2).sum().backward()
        found.append(change(layer.weight.grad))
    assert type(layer.weight.grad) is RowGradient
    torch.testing.assert_close(found[1], found[0])


def test_second_derivatives_ignore_the_frequency_as_in_torch():
    found = []
    plain = nn.Embedding(5, 2, scale_grad_by_freq=True)
    for layer in plain, hotrow.convert(copy.deepcopy(plain), min_entries=0):
        factor = torch.ones(3, 2, requires_grad=True)
        output = (layer(torch.tensor([1, 1, 3])) * factor).pow(2).sum()
        gradient = torch.autograd.grad(output, layer.weight, create_graph=True)[0]
        gradient.to_dense().pow(2).sum().backward()
        found.append((factor.grad, layer.weight.grad.to_dense()))
    assert type(layer.weight) is Table
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("ids", [[1, 1, 2], [0, 1, 2]])  # some rows, or all of them
def test_a_sum_of_two_gradients_changes_neither(ids):
    layer = hotrow.convert(nn.Embedding(3, 2), min_entries=0)
    gradients = [grad(layer(torch.tensor(each)).sum(), layer.weight) for each in (ids, [1])]
    before = [each.to_dense().clone() for each in gradients]
    for _ in range(2):
        total = gradients[0] + gradients[1]
        assert torch.equal(total.to_dense(), before[0] + before[1])
    for each, expected in zip(gradients, before, strict=True):
        assert type(each) is RowGradient
        assert torch.equal(each.to_dense(), expected)


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(
    "read",
    [
        lambda gradient: gradient.numpy(),
        np.asarray,
        lambda gradient: gradient.cpu().numpy(),
        lambda gradient: gradient.detach().numpy(),
        lambda gradient: gradient.data.numpy(force=True),
        lambda gradient: torch.from_dlpack(gradient).numpy(),
    ],
)
def test_writes_to_the_array_of_a_gradient_change_it(read, columns, small_tables):
    found = []
    for library in (torch, hotrow):
        torch.manual_seed(0)
        layer = hotrow.OneHotLinear(5, 3, bias=False) if columns else nn.Embedding(5, 3)
        if library is hotrow and not columns:
            hotrow.convert(layer, min_entries=0)
        optimizer = library.optim.SGD(layer.parameters(), 0.1, 0.9)
        for t in range(3):
            optimizer.zero_grad()
            layer(torch.tensor([t, 1])).sum().backward()
            if t:
                array = read(layer.weight.grad)
                array[:] = array * 0.5
                array[0, 0] = 7
            optimizer.step()
        assert isinstance(layer.weight, Table) == (library is hotrow)
        found.append(layer.weight.detach())
    torch.testing.assert_close(*found)
