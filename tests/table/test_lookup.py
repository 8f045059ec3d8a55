"""Outputs and gradients of lookups in plain tensors equal torch's embedding bit for bit."""

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from hotrow.onehot.scatter_add import scatter_columns, scatter_rows
from hotrow.table.lookup import look_up

SIZES = [(1, 1, 1), (5, 7, 3), (40, 6, 1), (300, 12, 16), (200, 9, 33), (3, 500, 20), (0, 4, 2)]
DTYPES = torch.float32, torch.float64, torch.bfloat16


def _batch(count: int, classes: int, columns: int, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Return ids with many duplicates, and the gradient of their rows."""
    generator = torch.Generator().manual_seed(count)
    ids = (torch.rand(count, generator=generator) ** 2 * classes).long()
    return ids, torch.randn(count, columns, generator=generator).to(dtype)


def _embedding_gradient(ids: Tensor, gradient: Tensor, classes: int) -> Tensor:
    weight = torch.zeros(classes, gradient.shape[1], dtype=gradient.dtype, requires_grad=True)
    F.embedding(ids, weight).backward(gradient)
    assert weight.grad is not None
    return weight.grad


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize(("count", "classes", "width"), SIZES)
def test_output_and_gradient_equal_those_of_embedding(
    count: int, classes: int, width: int, columns: bool, dtype: torch.dtype
) -> None:
    ids, gradient = _batch(count, classes, width, dtype)
    table = torch.randn(classes, width, dtype=dtype)
    weight = (table.t().contiguous() if columns else table.clone()).requires_grad_()
    rows = look_up(weight, ids, columns)
    assert torch.equal(rows, F.embedding(ids, table))
    assert rows.is_contiguous()
    rows.backward(gradient)
    assert weight.grad is not None
    if dtype != torch.bfloat16:
        assert weight.grad.is_contiguous()
    ours = weight.grad.t() if columns else weight.grad
    assert torch.equal(ours, _embedding_gradient(ids, gradient, classes))


@pytest.mark.parametrize("columns", [False, True])
def test_shape_of_the_ids_is_kept(columns: bool) -> None:
    table = torch.randn(7, 3)
    weight = table.t().contiguous() if columns else table
    for ids in (torch.tensor(4), torch.tensor([[1, 1], [6, 0]]), torch.zeros(2, 0, 3).long()):
        assert torch.equal(look_up(weight, ids, columns), F.embedding(ids, table))
        assert torch.equal(look_up(weight, ids.int(), columns), F.embedding(ids, table))


@pytest.mark.parametrize("columns", [False, True])
def test_second_derivatives(columns: bool) -> None:
    ids = torch.tensor([2, 0, 2, 2])
    weight = torch.randn(3, 3, dtype=torch.float64, requires_grad=True)
    assert torch.autograd.gradgradcheck(lambda w: look_up(w, ids, columns) ** 3, (weight,))


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)
@pytest.mark.parametrize(("count", "classes", "width"), SIZES)
def test_sums_of_rows_with_equal_ids_equal_the_gradient_of_embedding(
    count: int, classes: int, width: int, dtype: torch.dtype
) -> None:
    ids, rows = _batch(count, classes, width, dtype)
    expected = _embedding_gradient(ids, rows, classes)
    if width == 1:  # these sums are computed in float64, then rounded
        exact = _embedding_gradient(ids, rows.double(), classes).to(dtype)
        expected = exact if classes <= 4 * count else expected
    assert torch.equal(scatter_rows(ids, rows, classes), expected)
    assert torch.equal(scatter_columns(ids, rows, classes), expected.t())
