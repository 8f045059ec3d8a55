"""Gathers, scatters, sums and counts use only the ids, and match torch's values and gradients."""

import pytest
import torch
import torch.nn.functional as F
from torch.autograd import forward_ad

from hotrow.onehot.encoding import one_hot
from hotrow.onehot.parts import Field
from hotrow.onehot.tensor import OneHot
from tests.support.exhaustive import grid
from tests.support.onehots import (
    LargestAllocation,
    assert_alike,
    never_materialized,
    outcome,
    to_dense,
    twins,
)
from tests.support.tolerance import assert_rounded

__all__ = ["never_materialized"]  # a fixture

BATCH, CLASSES = (2, 3), 5


class Leaves:
    """Tensors of small integers, so that sums are exact in any order and in any dtype."""

    def __init__(self, dtype=torch.float64, requires_grad=False):
        generator = torch.Generator().manual_seed(3)

        def integers(*shape):
            values = torch.randint(-3, 4, shape, generator=generator).to(dtype)
            return values.requires_grad_(requires_grad and dtype.is_floating_point)

        self.q = integers(*BATCH, CLASSES)  # one number for each entry of the one-hot
        self.w = integers(CLASSES, 4)  # a table
        self.v = integers(*BATCH, 4)  # a row for each id
        self.u = integers(BATCH[0], CLASSES, 4)  # a table for each batch entry
        self.c = integers(CLASSES)  # a number for each class
        self.n = integers(*BATCH, 1)  # a number for each id
        self.e = integers(BATCH[1], CLASSES)

    def all(self):
        return list(vars(self).values())


def expressions(text):
    """Parametrize a test with expressions that use `x` and the leaves `t.q`, ..., one per line."""
    lines = [line.strip() for line in text.strip().splitlines()]
    names = {"torch": torch, "F": F}
    runs = [pytest.param(eval(f"lambda x, t: ({line})", names), id=line) for line in lines]
    return pytest.mark.parametrize("run", runs)


EXACT = """
    x[..., 2] * t.n[..., 0]
    x[0][:, 1] + t.n[0, :, 0]
    (x * t.n).select(-1, -1).sum()
    x[1:, :, 3] > 0
    (x.bool() | x.flip(0).bool()).any(-1)
    x.bool() | x.flip(0).bool()
    x.bool() & ~x.flip(0).bool()
    (~x.bool() & x.flip(0).bool()).sum((0, 1))
    x * (1 - x.flip(0))
    x.bool().any(-1)
    (x[..., 1:] > 0).any(-1, keepdim=True)
    (~x.bool()).mT.any(1)
    torch.addmm(t.v[0], x[0], t.w, beta=2, alpha=-3)
    torch.kron(x[0], t.v[0])
    torch.kron(t.v[0], x[0])
    torch.kron(x[0], t.v[0]) @ torch.ones(20, 2, dtype=t.v.dtype)
    (x.cumsum(1) * x).sum(-1)
    ((x.cumsum(0) - 1) * x).sum(-1)
    ((torch.cumsum(x, -2) - x) * x).sum(-1)
    (x.cumsum(1) * 2 < 3) & x.bool()
    x * (x.cumsum(1) - 1 < 1)
    x * (x.cumsum(1) > t.n.detach().abs())
    (x.flatten(0, 1).cumsum(0)[1:] * x.flatten(0, 1)[1:]).sum(-1)
    x.cumsum(1).transpose(0, 1) * x.transpose(0, 1)
    (x.cumsum(1) * x.flip(1)).sum(-1)
    (lambda y: (y.cumsum(1).transpose(0, 1) * y).sum(-1))(x[:, 1:])
    F.pad(x, (0, 0, 1, 0)).cumsum(-2)[..., :-1, :] * x
    F.pad(x, (0, 0, 0, 1)) @ t.w
    F.pad(x, (1, 2))
    F.pad(x * t.n, (2, 0, 0, 1))[..., 2:] @ t.w
    x.flip(-1)
    x.flip([0, 2]) @ t.w
    (x * t.n).flip(-1, 0)
    x.nonzero()
    x.bool()[..., 1:].cumsum(0)
    (x * t.n).nonzero()[:, 2]
    x[0].nonzero(as_tuple=True)[1]
    x.max(-1)[0]
    x.max(dim=-1, keepdim=True)[1]
    torch.max(x, 2).indices
    (1 - x) * (t.q * 1)
    (0.5 - x.mT) * t.q.mT
    (t.q * 2) * (x.long() * 2 + 1)
    x.cumsum(1)[x > 0]
    torch.where(x > 0, x.cumsum(1), 0)
    x.cumsum(1).gather(-1, torch.tensor([[[1], [2], [3]], [[2], [0], [3]]]))
    x[0].cumsum(0)[torch.arange(3), torch.tensor([1, 0, 4])]
    x.gather(-1, torch.tensor([[[1], [2], [4]], [[2], [0], [3]]]))
    x[0][torch.arange(3), torch.tensor([1, 1, 4])]
    x.amax(1)
    x.amax((0, 1), keepdim=True)
    x.mT.amax(-1)
    x.long().amax(0).to(t.q.dtype) @ t.w
    x.sum(1).clamp(max=1)
    x.long().sum(1).clamp(max=1).to(t.q.dtype) * t.c
    x.long().sum(1).bool()
    (x.sum((0, 1)) + t.c) * 2
    torch.cat([x, x, x], 1).sum(1) - 1
    x.bool().any(1)
    x.any(0)
    torch.any(x, 1, keepdim=True)
    (x.any(1) * t.c).sum(-1)
    torch.einsum("bnc,bn->bnc", x, t.n[..., 0])
    torch.einsum("bnc,bnd->bnd", x, t.v)
    torch.tensordot(x, t.c[1], dims=0)
    (x.any(1) * t.n[:, 0]).sum(-1)
    (t.q[:, 0] * (x[:, 0].bool() | x[:, 1].bool())).sum(-1)
    (x.any(1) * x[:, 0]).sum(-1)
    (x.any(1) & x.long()[:, 0]).sum(-1)
    (x.long().sum(1) & x.long()[:, 0]).sum(-1)
    torch.logical_and(x[:, 0] - x[:, 1], x[:, 0]).sum(-1)
    (x.byte()[:, 0] - x.byte()[:, 1]).sum(-1)
    (x[:, 0] - x.byte()[:, 1]).sum(-1)
    (x.byte()[:, 0] - x[:, 1]) * t.c
    ((x.byte()[:, 0] - x.byte()[:, 1]) * t.c).sum(-1)
    x.repeat(2, 1, 1) @ t.w
    x.repeat(3, 1, 2, 1).sum((0, 1))
    x.tile(2, 1) * 2
    x.tile((2, 1, 1))
    x.repeat_interleave(3, 1)
    x.repeat_interleave(2, dim=0) @ t.w
    x * 3 + (1 - x) * 2
    (1 - x) * (2 - x)
    t.n * x + (1 - x)
    (1 - x) == x
    (1 - x.mT) - x.mT * 2
    (x > 0) | (1 - x > 0)
    torch.maximum(3 * x, 2 - x)
    x[..., 1:]
    x[..., :-1] @ t.w[1:]
    (x * t.q)[..., 1:].sum(-1)
    x[0, :, 1:4].sum(0)
    x.split([1, 4], -1)[1].sum((0, 1))
    x[..., 1:].bool()
    (t.q * 1).sub_(x)
    (t.q * 1).add_(x * t.n, alpha=2)
    (t.q.mT * 1).add_(x.mT)
    (t.q * 1).masked_fill_(x > 0, 3)
    (t.q * 1).masked_fill_(x[..., :2].sum(-1, keepdim=True) > 0, 3)
    (t.q.mT * 1).masked_fill_(x.mT > 0, 3)
    (t.q[..., 1:] * 1).masked_fill_(x[..., 1:] > 0, 3)
    x.mT
    x[0].T
    x[0].t()
    x.permute(2, 0, 1)
    x.movedim(-1, 1).movedim(1, 2)
    x.movedim(-1, 1).contiguous()
    x.movedim(-1, 1) * 2
    x.mT.reshape(2, 5, 3, 1)
    x.mT.unsqueeze(0).flatten(0, 1)
    x.mT.unsqueeze(-1).flatten(2)
    x.permute(2, 0, 1).reshape(5, 6)
    x.permute(2, 0, 1).reshape(5, -1) @ t.v.flatten(0, 1)
    x.unsqueeze(-1)
    x.unflatten(-1, (5, 1)).flatten(-2)
    torch.cat([x, x], -1).unflatten(-1, (2, 5))
    x.bool()
    x > 0
    x == 1
    x != 0
    x.bool().logical_not()
    ~x.bool()
    x.bool() & (t.n > 0)
    x.bool() & (t.q > 0)
    x.bool() & x.flip(0).bool()
    1 - x
    x + 1
    (x + 1) * t.n.sign().abs().add(1).clamp(1, 1)
    x * 2 + 1
    (2 - x) ** 2
    x.clamp(0, 1)
    x.square()
    x.sum(1).clamp(max=1)
    (x.sum(1) * 3).clamp(max=3)
    x * t.q
    t.q * x
    x * t.c
    x * t.e
    x * t.n
    x[:1] * t.q
    t.v[0].sum() * x[0, 0]
    x.mT * t.q.mT
    (x * t.q) * t.q
    (x * t.q).sum(-1)
    (x * t.q).sum(-1, keepdim=True)
    (x * t.q).sum((0, 2))
    (x * t.q).sum()
    (x * t.q).sum(0)
    (x * t.q).sum((0, 1))
    (x.mT * t.q.mT).sum((0, 2))
    (x.mT * t.q.mT).sum(1)
    (x * t.q) @ t.w
    (x * t.q).mT @ t.v
    x * x.flip(0)
    (x * x.flip(0)).sum(-1)
    x + x.flip(0)
    x + x.flip(0) == 2
    (x + x.flip(0) == 2).sum((0, 1))
    (x + x.flip(0) == 2).long()
    (x + x.flip(0) > 0).to(t.q.dtype) @ t.w
    (x.bool() | x.flip(0).bool()).sum(1)
    (x.sum(1) * 2).sum()
    (x * t.q).movedim(-1, 1).sum((0, 2)) * 2 + t.c
    (x * 2).masked_fill_(t.n > 0, 0)
    (x * 2).mul_(t.n) @ t.w
    (x * 2).sub_(x.flip(0))
    (x * 2).clamp_(max=1)
    (x.long() * 2).index_fill_(0, torch.tensor([1]), 0)
    (x * 2).zero_()
    (x > 0).sum((0, 1))
    (x > 0).sum(-1)
    x.bool().sum(0)
    (~x.bool()).sum(-1)
    x - x.flip(0)
    (x - x.flip(0)) @ t.w
    x.sum()
    x.sum(-1)
    x.sum((1, 2))
    x.sum(1).sum(-1)
    (1 - x).sum(-1)
    x.mT.sum(1)
    x.mT.sum(2)
    x.mT.sum((0, 2))
    t.q - x
    x - t.q
    t.q + x
    t.q.mT - x.mT
    t.e - x
    x[0] - t.q
    (1 - x) * t.q
    torch.maximum(x, t.q)
    torch.where(x > 0, t.q, 0)
    torch.where(x > 0, t.q, -9)
    torch.where(x > 0, t.q, t.q * 2)
    torch.where(x > 0, 0, t.q)
    torch.where(x == 0, t.q, 7)
    torch.where(t.q > 0, x, t.q)
    t.q.masked_fill(x > 0, -9)
    t.q.masked_fill(x == 0, -9)
    x.masked_fill(t.n > 0, 0)
    t.q[x > 0]
    t.q[x.bool() & (t.n > 0)]
    t.q.masked_select(x > 0)
    x[0].T @ t.v[0]
    t.v[0].T @ x[0]
    x.mT @ t.v
    t.v.mT @ x
    x[0].T @ t.n[0, :, 0]
    t.n[0, :, 0] @ x[0]
    (x * t.n).mT @ t.v
    x[0].T @ x[1]
    x[0] @ x[1].T
    x @ t.u
    x @ t.w
    torch.bmm(x, t.u)
    torch.bmm(x.flatten(0, 1).unsqueeze(1), t.q.flatten(0, 1).unsqueeze(2))
    torch.mv(x[0], t.c)
    torch.addmm(t.v[0], x[0], t.w)
    torch.addmm(t.w, x[0].T, t.v[0])
    torch.baddbmm(t.v, x, t.u)
    torch.tensordot(x, t.w, 1)
    torch.tensordot(x, t.v, ([0, 1], [0, 1]))
    torch.tensordot(x, t.q, ([0, 2], [0, 2]))
    torch.einsum("bnc,cd->nd", x, t.w)
    torch.einsum("bnc,cd->bdn", x, t.w).contiguous()
    torch.einsum("bnc,bnd->cd", x, t.v)
    torch.einsum("bnc,bnd->bcd", x, t.v)
    torch.einsum("bnd,bnc->dbc", t.v, x).contiguous()
    torch.einsum("bnc,bnd->bc", x, t.v)
    torch.einsum("bnc,bcd->bnd", x, t.u)
    torch.einsum("bnc,bcd->nd", x, t.u)
    torch.einsum("bnc,bnc->bn", x, t.q)
    torch.einsum("bnc,bnc->nb", x, t.q).contiguous()
    torch.einsum("bnc,bnc->c", x, t.q)
    torch.einsum("bnc,bnc->", x, t.q)
    torch.einsum("...c,...c->...", x, t.q)
    torch.einsum("ni,nj->ij", x[0], x[1])
    torch.einsum("bni,bnj->bij", x, x)
    torch.einsum("ni,mi->nm", x[0], x[1])
    torch.einsum("n,nc,nc->nc", t.n[0, :, 0], x[0], t.e)
    torch.einsum("n,nc,nd->ncd", t.n[0, :, 0], x[0], x[1])
    torch.einsum("n,nc,nd,ncd->n", t.n[0, :, 0], x[0], x[1], t.q[0].unsqueeze(2) * t.e.unsqueeze(1))
    torch.einsum("ncd,nv->cdv", x[0].unsqueeze(-1) * x[1].unsqueeze(-2), t.v[0])
    x[0].unsqueeze(-1) * x[1].unsqueeze(-2)
    (x[0].unsqueeze(-1) * x[1].unsqueeze(-2)).bool()
    torch.einsum("nec,nd->ecd", x[0].unflatten(-1, (5, 1)), t.v[0])
    torch.einsum("nec,ecd->nd", x[0].unflatten(-1, (5, 1)), t.w.unsqueeze(1))
"""


FALLBACKS = """
    torch.baddbmm(t.v, x, t.u, beta=0)
    x[..., 2]
    x[..., 2].reshape(-1)
    x[..., 2][0]
    (x * t.n)[..., 1].exp()
    (x * t.n)[..., 1] * t.n[..., 0]
    (1 - x)[..., 1] + 1
    x[[1, 0], :, 2]
    x[0, :, 2]
    x[..., 7]
    x.bool().all(-1)
    (x * 2 - x.flip(0)).any(-1)
    torch.kron(x, t.v)
    torch.kron(x[0], x[1])
    torch.addmm(t.v[0].long(), x[0].long(), t.w.long(), beta=2)
    torch.zeros(2, 5).scatter(1, torch.tensor([[1], [2]]), 0.5)
    (x.cumsum(1) + x.sum(1, keepdim=True)) * x
    x.cumsum(1).add_(x.flip(0).sum(1, keepdim=True)) * x
    ((x.cumsum(1) + x.sum(1, keepdim=True))[1:] * x[1:]).sum(-1)
    x.cumsum(1)
    x.cumsum(1) - x
    (x.cumsum(1) - 1)[:, 1:] + 2
    (x.cumsum(1) + x.sum(1, keepdim=True))[:, 1:]
    x.cumsum(1) + t.q
    (x.cumsum(1) * t.q).sum(-1)
    (x * 0.1).cumsum(1) * x
    (x * t.n).cumsum(1) * x
    x.half().cumsum(1) * x
    x.cumsum(1, dtype=torch.float32) * x
    x.cumsum(1).sum(1)
    x.cumsum(1).max(-1)[1]
    torch.cat([x.cumsum(1), x], -1)
    x.cumsum(1).gather(-1, torch.full((2, 3, 1), 5))
    x.gather(-1, torch.full((2, 3, 1), -1))
    F.pad(x, (-1, 0))
    F.pad(x, (0, 0, 1, 0), value=2)
    x.max()
    (x * t.n.detach()).max(-1)[1]
    torch.max(x, t.q)
    x.max(3)
    (x * t.n.detach()).sum(1).nonzero()
    (1 - x).nonzero()
    x[:, :0].nonzero()
    (1 - x) * t.c
    (1 - x) * t.n
    (1 - x * t.n) * t.q
    F.l1_loss(t.q, x)
    F.mse_loss(t.q, x, weight=t.q.detach().abs())
    F.huber_loss(t.q, x, weight=t.q.detach().abs())
    t.q / x
    x / t.q
    x / t.c
    x**t.q
    torch.xlogy(x, t.q.abs())
    x - 1e9 * t.q.detach() + 1e9 * t.q
    (lambda p: x - p.detach() + p)(1e17 * t.q.abs())
    (lambda p: x - p.detach() + p)(-1e17 * t.q.abs())
    (lambda p: x - p.detach() + p)(t.q / 0)
    x - t.q.detach() * float("nan") + t.q * float("nan")
    (x.long() - t.q.detach() / 8) + t.q / 8
    x.half() - t.q.detach() + t.q
    x.long() - t.q.detach().long() + t.q
    torch.einsum("ab,za->a", x[0].int(), t.q.int()[0, :, :3])
    torch.einsum("ab,ab->", x[0].byte(), t.q[0].byte())
    x.bool().pow(True)
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1), ignore_index=1)
    F.binary_cross_entropy_with_logits(t.q, x, reduction="batchmean")
    (t.q > 0) - x
    x - (t.q > 0)
    x[0, 0].nonzero()
    x[0, 0].nonzero(as_tuple=True)[0]
"""


@expressions(FALLBACKS)
def test_fallback_and_its_gradients_match_torch(run):
    found = []
    for x in twins(torch.float64):
        leaves = Leaves(requires_grad=True)
        result = outcome(run, x, leaves)
        if isinstance(result, Exception):
            found.append(result)
            continue
        result = to_dense(result)
        gradients = ()
        if result.requires_grad:
            cotangent = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape)
            gradients = torch.autograd.grad(result, leaves.all(), cotangent, materialize_grads=True)
        found.append((result.detach(), *(each.detach() for each in gradients)))
    assert_alike(found[1], found[0], strides=False)


@pytest.mark.parametrize("dtype", [torch.float64, torch.int64, torch.bool], ids=str)
@pytest.mark.parametrize("scale", [None, 3, 0], ids=str)
def test_sparse_tensor_matches_torch(dtype, scale, never_materialized):
    dense, ours = twins(dtype)
    n = Leaves(dtype).n if scale == 3 else scale
    theirs, found = (x.to_sparse() if scale is None else (x * n).to_sparse() for x in (dense, ours))
    assert found.is_coalesced()
    assert torch.equal(found.indices(), theirs.indices())
    assert_alike(found.values(), theirs.values())
    if dtype == torch.float64:
        weight = torch.randn(5, 4, dtype=dtype)
        assert torch.equal(torch.sparse.mm(ours[0].to_sparse(), weight), dense[0] @ weight)


@pytest.mark.parametrize("reads", ["mm", "dense"])
def test_second_derivatives_of_a_sparse_tensor_match_torch(reads, never_materialized):
    found = []
    for x in twins(torch.float64):
        torch.manual_seed(0)
        scale = torch.randn(x.shape[:-1], dtype=torch.float64, requires_grad=True)
        weight = torch.randn(x.shape[-1], 4, dtype=torch.float64, requires_grad=True)
        sparse = (x * scale[..., None])[0].to_sparse()
        product = torch.sparse.mm(sparse, weight) if reads == "mm" else sparse.to_dense() @ weight
        (first,) = torch.autograd.grad(product.square().sum(), scale, create_graph=True)
        found.append([first.detach(), *torch.autograd.grad(first.square().sum(), [scale, weight])])
    for theirs, ours in zip(*found, strict=True):
        assert theirs.any()
        torch.testing.assert_close(ours, theirs)


@pytest.mark.parametrize(
    "read",
    [
        lambda sparse, weight: sparse @ weight,
        torch.sparse.mm,
        lambda sparse, weight: (sparse * 2 + sparse).to_dense() @ weight,
        lambda sparse, weight: (torch.ones(sparse.shape) + sparse) @ weight,
    ],
)
@pytest.mark.parametrize("zeros", [[], [0, 2], [0, 1, 2]], ids=str)
def test_gradients_of_zeros_in_a_sparse_tensor_match_torch(read, zeros, never_materialized):
    found = []
    for x in twins(torch.float64):
        torch.manual_seed(0)
        scale = torch.randn(x.shape[:-1], dtype=torch.float64)
        scale[:, zeros] = 0
        scale.requires_grad_()
        weight = torch.randn(x.shape[-1], 4, dtype=torch.float64, requires_grad=True)
        result = read((x * scale[..., None])[0].to_sparse(), weight)
        (result.square() + result).sum().backward()
        found.append([scale.grad, weight.grad])
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs)


MULTI_HOT = """
    F.binary_cross_entropy_with_logits(t.q, x)
    F.binary_cross_entropy(t.q.sigmoid(), x)
    F.mse_loss(t.q, x)
    torch.maximum(x, t.q)
    torch.where(x > 0, t.q, t.q * 2)
    t.q - x
"""


@pytest.mark.parametrize("last", [3, 1], ids=["distinct", "repeated"])
@expressions(MULTI_HOT)
def test_multi_hot_target_matches_torch(run, last):
    ids = torch.tensor([[[1, 0], [4, 1], [2, 0]], [[2, 4], [3, 1], [1, last]]])
    found = []
    no_ids = Field(torch.zeros(2, 3, 0, dtype=torch.int64), None, 5)
    for x in (torch.zeros(2, 3, 5, dtype=torch.float64), OneHot([no_ids], torch.float64)):
        y = x.scatter(-1, ids, 1.0)
        assert type(y) is type(x)
        leaves = Leaves(requires_grad=True)
        result = to_dense(run(y, leaves))
        (gradient,) = torch.autograd.grad(result.pow(2).sum(), [leaves.q])
        found.append((result.detach(), gradient))
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


STRAIGHT_THROUGH = """
    x - t.q.detach() + t.q
    (x - t.q).detach() + t.q
    t.q + (x - t.q).detach()
    (x - t.q.detach() + t.q) @ t.w
    (t.q + (x - t.q).detach()) @ t.w
    ((x - t.q.detach() + t.q) * t.c).sum(-1)
    x - t.q + t.q
    (x - t.q).detach() + 2 * t.q
    (x - t.q).detach() + t.q.clone()
    (x - t.q.detach()).square() + t.q
    (x.mT - t.q.mT.detach() + t.q.mT) * 2
    x[:1] - t.q.detach() + t.q
    t.q + (x[:, :1] - t.q).detach()
    ((x[0] - t.q.detach() + t.q) @ t.w).sum(0)
"""


@expressions(
    """
    t.q.masked_fill(x.mT.bool().mT, 2)
    t.q.mT.contiguous().masked_fill(x.mT.bool(), 2)
    (q := t.q.mT.contiguous() / 4) + (x.mT - q).detach()
    (1 - torch.cat([x, t.q], -1)) * torch.cat([t.q, t.q], -1)
    """
)
def test_strides_of_a_dense_result_match_torch(run):
    dense, ours = twins()
    expected, found = run(dense, Leaves(torch.float32)), run(ours, Leaves(torch.float32))
    assert found.stride() == expected.stride()
    assert found.shape == expected.shape
    torch.testing.assert_close(to_dense(found), expected)


@pytest.mark.parametrize("product", ["nc,nd->cd", "cn,nd->cd"])
def test_autocast_ignores_an_einsum_over_one_entry(product):
    found = []
    for encode in F.one_hot, one_hot:
        x = encode(torch.tensor([3]), 9).float()
        x = x if product[0] == "n" else x.t()
        with torch.autocast("cpu", torch.bfloat16):
            found.append(torch.einsum(product, x, torch.tensor([[1.001, 2.003, 3.007]])))
    assert_alike(found[1], found[0], strides=False)


@expressions(STRAIGHT_THROUGH)
def test_straight_through_matches_torch(run):
    found = []
    for x in twins(torch.float64):
        leaves = Leaves(requires_grad=True)
        leaves.q = (leaves.q / 4).detach().requires_grad_()
        result = to_dense(run(x, leaves))
        cotangent = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape) - 3
        gradients = torch.autograd.grad(result, leaves.all(), cotangent, materialize_grads=True)
        found.append([result.detach(), *gradients])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, theirs)


def test_straight_through_product_is_a_lookup(never_materialized):
    leaves, x = Leaves(requires_grad=True), twins(torch.float64)[1]
    p = leaves.q / 4
    y = x - p.detach() + p
    assert torch.equal(y @ leaves.w, leaves.w[x.argmax(-1)])


def test_straight_through_has_a_tangent():
    tangents = []
    for x in twins(torch.float64):
        with forward_ad.dual_level():
            p = forward_ad.make_dual(Leaves().q / 4, Leaves().e.expand(2, 3, 5))
            tangents.append(forward_ad.unpack_dual(to_dense(x - p.detach() + p)).tangent)
    assert torch.equal(tangents[1], tangents[0])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize(
    "bag",
    [
        lambda x: x[:, ::2].sum(1),
        lambda x: x[..., 0, :].sum(1),
        lambda x: x.unbind(1)[1].sum(1),
        lambda x: x[::2].flatten(1, 2).mean(1),
        lambda x: x[:1].expand(4, -1, -1, -1).sum((0, 1)),
        lambda x: (x.mT.mT[:, 1:] * torch.arange(8.0).reshape(4, 2)[::2, :, None]).sum(1),
    ],
)
@pytest.mark.parametrize("trained", [True, False])
def test_bags_of_ids_with_any_strides_match_torch(bag, dtype, trained):
    ids = torch.arange(2 * 3 * 2).reshape(2, 3, 2) * 5 % 11
    found = []
    for x in twins(dtype, ids=ids, classes=11):
        weight = torch.arange(33.0, dtype=dtype).reshape(11, 3).requires_grad_(trained)
        result = bag(x) @ weight
        gradient = torch.autograd.grad(result.square().sum(), weight)[0] if trained else result
        found.append([result.detach(), gradient])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(to_dense(ours), theirs)


def test_straight_through_notices_a_negated_view():
    z = torch.full((2, 3, CLASSES), 0.25 + 0.25j, dtype=torch.complex128)
    dense, ours = (to_dense(x - z.imag + z.conj().imag) for x in twins(torch.float64))
    assert torch.equal(ours, dense)


@pytest.mark.parametrize("change", [torch.relu_, lambda y: y.__setitem__(0, 0.0)])
@pytest.mark.parametrize("is_leaf", [True, False])
def test_product_can_be_changed_in_place(change, is_leaf):
    gradients = []
    for x in twins(torch.float64, requires_grad=is_leaf):
        leaves = Leaves(requires_grad=True)
        p = leaves.q / 4
        y = (x if is_leaf else x - p.detach() + p) @ leaves.w
        change(y)
        sources = [leaves.w, x if is_leaf else leaves.q]
        gradients.append([y.detach(), *torch.autograd.grad(y.pow(2).sum(), sources)])
    for ours, theirs in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(to_dense(ours), theirs)


def test_straight_through_notices_a_write():
    for x in twins(torch.float64):
        leaves = Leaves()
        difference = x - leaves.q
        leaves.q.add_(1)
        assert torch.equal(to_dense(difference + leaves.q), to_dense(x) + 1)


@expressions(EXACT)
def test_result_equals_torch_without_materializing(run, never_materialized):
    dense, ours = twins(torch.float64)
    result = run(ours, Leaves())
    expected = run(dense, Leaves())
    if isinstance(result, OneHot):
        assert result.stride() == expected.stride()
        assert result.shape == expected.shape
    else:
        assert_alike(result, expected)


@expressions(
    """
    t.n[x.bool()]
    t.n.masked_select(x.bool())
    torch.where(x.bool(), t.n, 0)
    torch.einsum("bnc,bnc->bn", x, t.n)
    """
)
def test_result_with_one_class_is_a_copy(run):
    found = []
    for x in twins(torch.float64, ids=torch.zeros(BATCH, dtype=torch.int64), classes=1):
        leaves = Leaves()
        result = run(x, leaves)
        leaves.n.add_(7)
        found.append(result)
    assert_alike(found[1], found[0])


@expressions(EXACT)
def test_result_keeps_its_values_after_writes_to_the_operands(run):
    found = []
    for x in twins(torch.float64):
        leaves = Leaves()
        result = run(x, leaves)
        for leaf in leaves.all():
            leaf.add_(7)
        found.append(result)
    assert_alike(found[1], found[0], strides=False)


@expressions(
    """
    F.mse_loss(t.q, x, reduction="none")
    F.smooth_l1_loss(t.q, x, reduction="none")
    F.huber_loss(t.q, x, reduction="none")
    F.kl_div(t.q, x, reduction="none")
    F.binary_cross_entropy(t.q.sigmoid(), x, reduction="none")
    F.binary_cross_entropy(t.q.sigmoid(), x, t.c.abs()[:, None], reduction="none")
    F.binary_cross_entropy_with_logits(t.q, x, reduction="none")
    F.binary_cross_entropy_with_logits(t.q, x, pos_weight=t.c.abs()[:, None], reduction="none")
    """
)
@pytest.mark.parametrize("permuted", ["x", "q", "both"])
def test_losses_have_the_strides_of_torch(run, permuted):
    found = []
    for x in twins(torch.float64):
        leaves = Leaves()
        leaves.q = leaves.q.mT if permuted != "x" else leaves.q.mT.contiguous()
        x = x.mT if permuted != "q" else x.mT.contiguous()
        found.append(run(x, leaves))
    assert found[1].stride() == found[0].stride()
    torch.testing.assert_close(to_dense(found[1]), found[0])


@pytest.mark.parametrize(
    "dtype",
    grid(
        [torch.float32, torch.float16, torch.bfloat16, torch.int64, torch.int32],
        lambda dtype: dtype == torch.bfloat16,
    ),
    ids=str,
)
@expressions(EXACT)
def test_each_dtype_matches_torch(run, dtype):
    dense, ours = twins(dtype)
    assert_alike(outcome(run, ours, Leaves(dtype)), outcome(run, dense, Leaves(dtype)))


@pytest.mark.parametrize(
    "dtype", grid([torch.float32, torch.int64], lambda dtype: dtype == torch.float32), ids=str
)
@expressions(EXACT)
def test_mixed_dtypes_match_torch(run, dtype):
    dense, ours = twins(dtype)
    other = torch.float64
    assert_alike(outcome(run, ours, Leaves(other)), outcome(run, dense, Leaves(other)))


@pytest.mark.parametrize("dims", [-1, 0, (0, 1)], ids=str)
def test_bool_bag_counts_equal_ids_once(dims):
    for dense, ours in [twins(), twins(ids=torch.tensor([[1, 1, 2], [3, 3, 3]]))]:
        assert_alike((ours.sum(1) > 0).sum(dims), (dense.sum(1) > 0).sum(dims))
        assert_alike(ours.sum(1).bool().sum(dims), dense.sum(1).bool().sum(dims))


@expressions(
    """
    ((1 - x) - x) == 1
    ((1 - x) - x) != 1
    ((1 - x) - x).mul(1j) * x
    (1 - x).to(x.dtype, copy=True) == 1
    torch.zeros_like(x).fill_(2) == 2
    x.zero_().fill_(2).mul(3) * (x + 1)
    """
)
def test_complex_fill_matches_torch(run):
    dense, ours = twins(torch.complex64)
    assert_alike(run(ours, None), run(dense, None))


def test_bool_bag_of_equal_ids_selects_infinity_once(never_materialized):
    (dense, ours), q = twins(torch.bool, ids=torch.tensor([[1, 1, 1]])), torch.ones(5)
    q[1] = torch.inf
    assert torch.equal((ours.any(1) * q).sum(1), (dense.any(1) * q).sum(1))


@expressions(EXACT)
def test_equal_ids_and_bags_match_torch(run):
    ids = torch.tensor([[1, 1, 1], [4, 1, 4]])
    dense, ours = twins(torch.float64, ids=ids)
    assert_alike(run(ours, Leaves()), run(dense, Leaves()))
    ids = torch.tensor([[[1, 1], [1, 0], [2, 3]], [[4, 4], [0, 4], [0, 0]]])
    dense, ours = twins(torch.float64, ids=ids)
    assert_alike(run(ours.sum(2), Leaves()), run(dense.sum(2), Leaves()))
    assert_alike(run(ours[..., 0, :] * 2, Leaves()), run(dense[..., 0, :] * 2, Leaves()))


BAG_IDS = torch.tensor([[3, 3, 3, 1], [2, 2, 5, 5]])
MANY = 20  # classes, so that a sum of the one-hots of `BAG_IDS` keeps the ids


@expressions(
    """
    torch.div(x.sum(1), 2, rounding_mode="floor").sum(1)
    x.sum(1).div(2, rounding_mode="trunc")
    x.sum(1).div(other=2).sum(1)
    torch.div(x.sum(1), 2, rounding_mode=None).sum(1)
    x.sum(1).double().div(2, rounding_mode="floor") @ torch.arange(20.0).double()
    x.double().sum(1).div_(2, rounding_mode="floor").sum(1)
    x.sum(1).div_(2, rounding_mode="trunc") > 0
    """
)
@pytest.mark.parametrize("dtype", [torch.int64, torch.int32, torch.float32], ids=str)
def test_quotient_of_a_bag_is_rounded_once(run, dtype, never_materialized):
    dense, ours = twins(dtype, ids=BAG_IDS, classes=MANY)
    result = run(ours, None)
    result = result.compute_dense() if isinstance(result, OneHot) else result
    assert torch.equal(result, run(dense, None))


@expressions(
    """
    (x * t).sum(1) > 0
    (x * t).sum(1).double()
    (x * t).sum(1).clamp(max=1000)
    (x * t).sum(1) ** 2
    (x * t).sum(1).T @ x[:, 0].long()
    ((x * t)[:, :1].sum(1) * (x * t)[:, :1].sum(1)).sum(0)
    (x[:, 0] * t[:, 0] + x[:, 0].clone() * t[:, 0]).sum(-1)
    (x[:, 0] * t[:, 0] + x[:, 0].clone() * t[:, 0]) * 0.5
    (x[:, 0] * t[:, 0] + x[:, 0].clone() * t[:, 0]) * torch.arange(20)
    """
)
@pytest.mark.parametrize("dtype", [torch.int32, torch.int16, torch.int8], ids=str)
def test_integer_sums_overflow_as_in_torch(run, dtype):
    dense, ours = twins(dtype, ids=BAG_IDS, classes=MANY)
    weights = torch.full((2, 4, 1), torch.iinfo(dtype).max, dtype=dtype)
    assert isinstance((ours * weights).sum(1).field, Field)
    assert_alike(run(ours, weights), run(dense, weights))


@expressions(
    """
    x.mean(1) == 1
    x.mean(1) >= 5 / 6
    x.mean(1) == x.mean(1).max(-1, keepdim=True)[0]
    x.mean(1).log() < 0
    (x.sum(1) / 6).floor()
    x.mean(1)[:, 4] == 1
    x.mean(1).gather(1, torch.tensor([[4], [2]]))
    x.mean(1)[torch.arange(2), torch.tensor([4, 7])]
    torch.div(x.sum(1), x.sum(1).sum(-1, keepdim=True), rounding_mode="floor")
    torch.where(x.sum(1) / 6 >= 1, t[0], 0)
    (x[:, :3] * t).sum(1).sign()
    (x[:, :3] * t).sum(1) != 0
    torch.logical_and((x[:, :3] * t).sum(1), x[:, 0])
    torch.logical_xor((x[:, :3] * t).sum(1), x[:, 0])
    """
)
def test_step_function_of_a_rounded_bag_matches_torch(run):
    ids = torch.tensor([[4, 4, 4, 4, 4, 4], [7, 7, 7, 7, 7, 2]])
    dense, ours = twins(torch.float64, ids=ids, classes=MANY)
    weights = torch.tensor([[0.1], [0.2], [-0.3]], dtype=torch.float64)
    assert_alike(run(ours, weights), run(dense, weights))


@expressions(
    """
    x.sum(1) >= 2
    x.sum(1) * 2 == 6
    x.sum(1).clamp(max=1) * 0.1 > 0
    torch.where(x.sum(1) > 0, torch.arange(20.0), 0)
    (x[:, :1] * 0.3).sum(1) > 0.2
    (x[:, ::3] * torch.tensor([[0.3], [0.7]])).sum(1) > 0.5
    """
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64], ids=str)
def test_step_function_of_an_exact_bag_uses_the_ids(run, dtype, never_materialized):
    dense, ours = twins(dtype, ids=BAG_IDS, classes=MANY)
    assert torch.equal(run(ours, None).compute_dense(), run(dense, None))


@expressions(EXACT)
def test_gradient_equals_torch(run):
    dense, ours = twins(torch.float64)
    gradients = []
    for x in dense, ours:
        leaves = Leaves(requires_grad=True)
        result = to_dense(run(x * leaves.n, leaves))
        if not result.requires_grad:
            return
        cotangent = torch.arange(result.numel(), dtype=result.dtype).reshape(result.shape) - 3
        gradients.append(
            torch.autograd.grad(result, leaves.all(), cotangent, materialize_grads=True)
        )
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(found, expected)


TANGENTS = """
    x + t.c[0]
    (t.c[0] - x) * t.q
    (1 - x) * t.c[0]
    torch.maximum(x, t.c[0])
    torch.where(x > 0, 1.0, t.c[0])
    torch.where(x > 0, t.q, t.c[0])
    x.cumsum(1) * t.c[0]
    (x.cumsum(0) + t.n) * x
    torch.zeros_like(x[0]).index_put_((torch.arange(3), torch.tensor([4, 0, 1])), t.c[0])
    torch.zeros_like(x[0]).index_put_((torch.arange(3), torch.tensor([4, 0, 1])), t.n[0, :, 0])
    F.cross_entropy(t.q[0], x[0], t.c)
    F.cross_entropy(t.q[0], x[0], t.c, label_smoothing=0.25)
    (x[0] + x[1]) @ t.w
    (x[0] * t.c[0] + x[1]) @ t.w
    x.sum(1) @ t.w
"""


@expressions(EXACT.rstrip() + TANGENTS)
def test_tangents_equal_torch(run):
    found = []
    for x in twins(torch.float64):
        with forward_ad.dual_level():
            leaves = Leaves()
            for name, leaf in vars(leaves).items():
                tangent = torch.arange(leaf.numel(), dtype=leaf.dtype).reshape(leaf.shape) - 3
                setattr(leaves, name, forward_ad.make_dual(leaf, tangent))
            result = to_dense(run(x, leaves))
            if not result.is_floating_point():
                return
            primal, tangent = forward_ad.unpack_dual(result)
            found.append((primal, torch.zeros_like(primal) if tangent is None else tangent))
    assert torch.equal(found[1][0], found[0][0])
    torch.testing.assert_close(found[1][1], found[0][1], rtol=0, atol=0, equal_nan=True)


@expressions(EXACT)
def test_second_derivative_equals_torch(run):
    dense, ours = twins(torch.float64)
    gradients = []
    for x in dense, ours:
        leaves = Leaves(requires_grad=True)
        result = to_dense(run(x * leaves.n, leaves))
        if not result.is_floating_point():
            return
        first = torch.autograd.grad(
            result.pow(2).sum(), leaves.all(), create_graph=True, materialize_grads=True
        )
        total = sum((each**2).sum() for each in first)
        gradients.append(torch.autograd.grad(total, leaves.all(), materialize_grads=True))
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        assert torch.equal(found, expected)


@expressions("""
    (1 - x) * t.q.square()
    (1 - x.mT) * t.q.mT.square()
    (2 - 3 * x) * (t.q * t.q)
    x * t.q.square() + (1 - x) * t.q
    (x + x.flip(0) > 0).to(t.q.dtype) @ t.w.square()
    (x * 3 + x.flip(0)) @ t.w.square()
    (x * 2).mul_(t.n) * t.q
    (x * 2).mul_(t.n).softmax(-1)
    (x * t.q.square()).movedim(-1, 1).sum((0, 2)) * t.c
""")
def test_derivatives_of_a_one_hot_without_weights_match_torch(run):
    found = []
    for x in twins(torch.float64):
        leaves = Leaves(requires_grad=True)
        result = to_dense(run(x, leaves))
        first = torch.autograd.grad(
            result.pow(2).sum(), leaves.all(), create_graph=True, materialize_grads=True
        )
        total = sum((each**2).sum() for each in first)
        second = torch.autograd.grad(total, leaves.all(), materialize_grads=True)
        found.append([result.detach(), *first, *second])
    for ours, theirs in zip(found[1], found[0], strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


ROUNDED = """
    x.exp()
    x.sigmoid()
    x * 0.9 + 0.1 / 5
    x.mean((0, 1))
    x.mean(-1)
    (x * t.q).mean((0, 2))
    t.q * x - t.q.softmax(-1)
    -(x * t.q.log_softmax(-1)).sum(-1).mean()
    -((x * 0.9 + 0.1 / 5) * t.q.log_softmax(-1)).sum(-1)
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1))
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1), reduction="sum")
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1), reduction="none")
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1), t.c)
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1), t.c, label_smoothing=0.1)
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1) * 0.9 + 0.02)
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1) * 0.9 + 0.02, t.c, reduction="none")
    F.cross_entropy(t.q.mT, x.mT)
    F.cross_entropy(t.q.mT, x.mT, t.c, reduction="none")
    F.cross_entropy(t.q[0, 0], x[0, 0])
    torch.nn.CrossEntropyLoss(label_smoothing=0.1)(t.q.flatten(0, 1), x.flatten(0, 1))
    F.mse_loss(t.q, x)
    F.mse_loss(t.q, x, reduction="none")
    F.mse_loss(t.q.mT, x.mT, reduction="sum")
    F.smooth_l1_loss(t.q, x, beta=0.5)
    F.huber_loss(t.q, x, delta=0.5)
    F.binary_cross_entropy(t.q.sigmoid(), x)
    F.binary_cross_entropy(t.q.sigmoid(), x, weight=t.c.detach().abs())
    F.binary_cross_entropy_with_logits(t.q, x)
    F.binary_cross_entropy_with_logits(t.q, x, weight=t.n.detach().abs(), reduction="sum")
    F.binary_cross_entropy_with_logits(t.q, x, pos_weight=t.c.detach().abs())
    F.binary_cross_entropy_with_logits(t.q.mT, x.mT, pos_weight=t.c.detach().abs().unsqueeze(-1))
    F.kl_div(t.q.log_softmax(-1), x, reduction="batchmean")
    F.kl_div(t.q.log_softmax(-1), x, reduction="sum")
    F.cross_entropy(t.q[0], x[0].bool().logical_and(x[0].bool()).to(x.dtype))
    F.kl_div(t.q.log_softmax(-1), x * 0.9 + 0.02, reduction="batchmean")
    (1 - x) * (1 - t.q.sigmoid()) + x * t.q.sigmoid()
    (t.q.softmax(-1) * x).sum((0, 1)) * 2 / (t.q.softmax(-1).sum((0, 1)) + x.sum((0, 1)))
    ((t.q.softmax(-1) - x) ** 2).mean()
    x / (1 + t.c.exp())
    (x.mean((0, 1)) + 1e-10).log()
"""


@expressions(ROUNDED)
def test_rounded_result_and_gradients_match_torch(run):
    dense, ours = twins(torch.float64)
    found = []
    for x in dense, ours:
        leaves = Leaves(requires_grad=True)
        result = to_dense(run(x, leaves))
        first = torch.autograd.grad(
            result.square().sum(), leaves.all(), create_graph=True, materialize_grads=True,
            allow_unused=True,
        ) if result.requires_grad else []  # fmt: skip
        total = sum((each**2).sum() for each in first)
        second = []
        if isinstance(total, torch.Tensor) and total.requires_grad:
            second = torch.autograd.grad(total, leaves.all(), materialize_grads=True)
        found.append([result, *first, *second])
    for ours, theirs in zip(found[1], found[0], strict=True):
        assert ours.shape == theirs.shape
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)


@expressions(ROUNDED)
def test_rounded_result_in_float32_is_as_exact_as_torch(run):
    ours = to_dense(run(twins(torch.float32)[1], Leaves(torch.float32)))
    truth = to_dense(run(twins(torch.float64)[0], Leaves(torch.float64)))
    assert ours.dtype == torch.float32
    assert_rounded(ours, truth, 32, truth.abs() + 1)


@expressions(EXACT + ROUNDED)
def test_empty_batch_matches_torch(run):
    def emptied(leaves):
        for name in "qvun":
            setattr(leaves, name, getattr(leaves, name)[:0])
        return leaves

    dense, ours = (x[:0] for x in twins(torch.float64))
    expected = outcome(run, dense, emptied(Leaves()))
    assert_alike(outcome(run, ours, emptied(Leaves())), expected, strides=False)


@expressions(
    """
    x.mT @ t.v
    t.v.mT @ x
    x @ t.u
    torch.bmm(x, t.u)
    torch.einsum("bnc,bnd->cd", x, t.v)
    torch.einsum("bnc,bnc->bn", x, t.q)
    torch.addmm(t.w, x[0].T, t.v[0])
    (x * t.q).sum(-1)
    F.cross_entropy(t.q.flatten(0, 1), x.flatten(0, 1))
    torch.einsum("bn,bnc->bnc", t.n[..., 0], x)
    torch.einsum("bni,bnj->bnij", x, x)
    torch.einsum("bni,bnj->bnij", t.v, x)
    torch.einsum("bnc,bnc->bnc", x, x)
    torch.einsum("bnc,bnd->bnd", x, t.v)
    torch.einsum("bn,bnc,bnd->bcd", t.n[..., 0], x, t.v)
    torch.einsum("bn,bnc,bnd->bncd", t.n[..., 0], x, t.v)
    torch.mv(x[0], t.c)
    x[0].mv(t.c)
    torch.dot(x[0, 0], t.c)
    x @ t.c
    torch.tensordot(x[0, 0], t.c, 0)
    torch.bmm(t.v.mT.bfloat16(), x)
    t.v.mT.bfloat16() @ x
    torch.baddbmm(torch.zeros(2, 4, 5), t.v.mT.bfloat16(), x)
    torch.einsum("bnc,bnd->bcd", x.bfloat16(), t.v)
    F.kl_div(t.q.bfloat16().log_softmax(-1), x.bfloat16(), reduction="sum")
    F.binary_cross_entropy_with_logits(t.q.bfloat16(), x.bfloat16())
    F.mse_loss(t.q.bfloat16(), x.bfloat16())
    F.cross_entropy(t.q.bfloat16().flatten(0, 1), x.bfloat16().flatten(0, 1) * 0.5 + 0.25)
    torch.addmm(t.v[0], x[0], t.w, beta=2, alpha=-3)
    torch.kron(x[0], t.v[0]) @ torch.ones(20, 2)
    """
)
def test_autocast_matches_torch(run):
    dense, ours = twins(torch.float32)
    with torch.autocast("cpu", torch.bfloat16):
        expected = run(dense, Leaves(torch.float32))
        found = run(ours, Leaves(torch.float32))
    assert found.dtype == expected.dtype
    torch.testing.assert_close(found, expected, rtol=1e-2, atol=1e-2)


@expressions(
    """
    (x.mT @ t.v).sum()
    (x * t.q).sum(-1)
    (1 - x).sum(-1)
    torch.where(x > 0, t.q, 0).sum(-1)
    x.mT.sum(1)
    F.mse_loss(t.q, x)
    x + x.flip(0)
    (x * torch.complex(t.q, t.q + 1).detach()).abs().pow(2)
    (x * torch.complex(t.n, t.n + 1).detach()).imag
    (x * (2 + 1j)).mT.imag
    """
)
def test_one_hot_that_requires_grad_matches_torch(run):
    gradients = []
    for x in twins(torch.float64, requires_grad=True):
        leaves = Leaves(requires_grad=True)
        result = to_dense(run(x, leaves))
        gradients.append(
            torch.autograd.grad(
                result.sum(), [x, leaves.q], materialize_grads=True, allow_unused=True
            )
        )
    for found, expected in zip(gradients[1], gradients[0], strict=True):
        torch.testing.assert_close(to_dense(found), expected)


@pytest.mark.parametrize("shape", [(64, 100_000), (4, 16, 100_000)], ids=str)
def test_no_tensor_of_the_size_of_the_one_hot(shape):
    *batch, classes = shape
    ids = torch.randint(classes, batch)
    rows = torch.randn(*batch, 2)
    weights = torch.randn(classes)
    x = one_hot(ids, classes, torch.float32)
    with LargestAllocation() as largest:
        x.mT @ rows
        (x * weights).sum(-1)
        x.sum(tuple(range(len(batch))))
        x.sum(tuple(range(len(batch)))).materialize()
        (1 - x).sum(-1)
        (x > 0).logical_not()
        place = (x.cumsum(0) - 1) * x
        (place * (place < 2)).sum(-1)
        ((x.cumsum(-2) - x + x.sum(-2, keepdim=True)) * x).sum(-1)
    assert largest.size <= 8 * 8 * classes


def test_results_follow_the_default_dtype():
    ids = torch.tensor([3, 0, 3])
    expressions = [
        lambda x: x / 2,
        lambda x: x * 0.9 + 0.1 / 8,
        lambda x: (x * 0.9 + 0.1 / 8).softmax(-1),
        lambda x: torch.where(x > 0, 1.0, 0.0),
    ]
    default = torch.get_default_dtype()
    try:
        for dtype in torch.float32, torch.float64, torch.float32:
            torch.set_default_dtype(dtype)
            for run in expressions:
                assert_alike(run(one_hot(ids, 8)), run(F.one_hot(ids, 8)), strides=False)
    finally:
        torch.set_default_dtype(default)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_gradient_of_a_weight_with_three_axes_is_contiguous(dtype):
    ids, weight = torch.arange(20) % 7, torch.randn(4, 7, 3, dtype=dtype, requires_grad=True)
    gradients = []
    for x in (one_hot(ids, 7, dtype), F.one_hot(ids, 7).to(dtype)):
        [gradient] = torch.autograd.grad((x @ weight).sum(), [weight])
        assert gradient.is_contiguous()
        gradients.append(gradient)
    torch.testing.assert_close(*gradients)
