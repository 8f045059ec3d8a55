"""Code that bypasses the rules, or writes to a tensor that a one-hot was computed from."""

import copy

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint

from hotrow import convert
from hotrow.onehot.tensor import OneHot, one_hot
from tests.support.onehots import assert_alike, outcome

IDS = torch.tensor([2, 0, 1, 3, 3])


class Reverse(torch.autograd.Function):
    """The identity, with the opposite gradient."""

    @staticmethod
    def forward(ctx, x):
        return x.view_as(x)

    @staticmethod
    def backward(ctx, gradient):
        return -gradient


class Double(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x * 2

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class StraightThrough(torch.autograd.Function):
    """The forward pass creates a one-hot."""

    @staticmethod
    def forward(ctx, p):
        return F.one_hot(p.argmax(-1), p.shape[-1]).to(p.dtype)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Scattered(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p):
        hot = torch.zeros_like(p).scatter_(1, p.argmax(-1, keepdim=True), 1.0)
        ctx.save_for_backward(hot)
        return hot

    @staticmethod
    def backward(ctx, gradient):
        (hot,) = ctx.saved_tensors
        return gradient * hot


class Model(nn.Module):
    def __init__(self, forward):
        super().__init__()
        self.f, self.l, self.d = nn.Linear(3, 4), nn.Linear(4, 2), nn.Linear(8, 2)
        self.run = forward

    def forward(self, v):
        return self.run(self, v, F.one_hot(IDS, 4).to(v.dtype))


@torch.jit.script
def scripted(x, weight):
    return x @ weight.t()


def backward_hook(m, v, x):
    handle = m.d.register_full_backward_hook(lambda module, into, out: (into[0] * 3,))
    result = m.d(torch.cat([x, m.f(v)], 1))
    handle.remove()
    return result


def written(m, v, x):
    x = x * 1
    x *= m.f(v)
    return Double.apply(x)


def written_view(m, v, x):
    x = x * m.f(v)
    x[:2] *= m.f(v)[2:4]
    return Double.apply(x) + x


def through_checkpoint(m, v, x):
    p = m.f(v).softmax(-1)
    return checkpoint(lambda t: m.l(t).relu(), x - p.detach() + p, use_reentrant=True)


FORWARDS = {
    "concatenated": lambda m, v, x: m.d(Reverse.apply(torch.cat([x, m.f(v)], 1))),
    "two paths": lambda m, v, x: m.d(Double.apply(torch.cat([m.f(v), x], 1))) + m.l(m.f(v)),
    "masked": lambda m, v, x: Reverse.apply(x * m.f(v)).sum(1),
    "permuted": lambda m, v, x: Double.apply((x * m.f(v)).t()),
    "a view": lambda m, v, x: Double.apply((x * m.f(v))[1:]),
    "both ways": lambda m, v, x: (y := x * m.f(v)).sum(1) + Double.apply(y).sum(1),
    "outer product": lambda m, v, x: Reverse.apply(
        torch.bmm(x.unsqueeze(2), m.f(v).unsqueeze(1)).view(-1, 16)
    ),
    "straight-through": lambda m, v, x: Reverse.apply(x - m.f(v).detach() + m.f(v)),
    "gumbel": lambda m, v, x: m.l(Reverse.apply(F.gumbel_softmax(m.f(v), hard=True))),
    "created inside": lambda m, v, x: m.l(StraightThrough.apply(m.f(v))),
    "scattered inside": lambda m, v, x: m.l(Scattered.apply(m.f(v))),
    "created inside, then masked": lambda m, v, x: StraightThrough.apply(m.f(v)) * m.f(v),
    "created inside, then read": lambda m, v, x: StraightThrough.apply(m.f(v)).cumsum(1),
    "written": written,
    "written view": written_view,
    "checkpoint": through_checkpoint,
    "script": lambda m, v, x: scripted(torch.cat([x, m.f(v)], 1), m.d.weight),
    "module hook": backward_hook,
}


@pytest.mark.filterwarnings("ignore:`torch.jit.script")
@pytest.mark.parametrize("forward", FORWARDS.values(), ids=FORWARDS)
def test_gradient_without_rules_matches_torch(forward):
    torch.manual_seed(1)
    model = Model(forward).double()
    found = []
    for each in (model, convert(copy.deepcopy(model), min_entries=0)):
        torch.manual_seed(2)
        v = torch.randn(5, 3, dtype=torch.float64, requires_grad=True)
        result = each(v)
        (result * torch.arange(1.0, result.numel() + 1).view(result.shape)).sum().backward()
        grads = [v.grad, *(p.grad for p in each.parameters())]
        found.append([result + 0, *(g if g is None else g + 0 for g in grads)])
    assert found[0][1] is not None
    for ours, dense in zip(found[1], found[0], strict=True):
        assert (ours is None) == (dense is None)
        if dense is not None:
            torch.testing.assert_close(ours, dense)


def statements(text, names_of_arguments="x, q, v, W"):
    """Parametrize a test with one case per line: statements with `x`, then the value to compare."""
    cases = []
    for line in text.strip().splitlines():
        *before, result = [part.strip() for part in line.split(";")]
        names = {"torch": torch, "F": F, "IDS": IDS}
        code = "".join(f"    {each}\n" for each in before)
        exec(f"def run({names_of_arguments}):\n{code}    return {result}", names)
        cases.append(pytest.param(names["run"], id=line.strip()))
    return pytest.mark.parametrize("run", cases)


def both(run):
    """Return torch's and hotrow's results, each with the gradients of the operands."""
    results = []
    for x in (F.one_hot(IDS, 4).double(), one_hot(IDS, 4, torch.float64)):
        generator = torch.Generator().manual_seed(3)
        q, v, w = (
            torch.randint(-3, 4, shape, generator=generator).double().requires_grad_()
            for shape in ((5, 4), (5, 1), (4, 2))
        )
        result = outcome(run, x, q, v, w)
        tensors = result if isinstance(result, tuple) else (result,)
        sums = [t.sum() for t in tensors if isinstance(t, torch.Tensor) and t.requires_grad]
        if sums:
            sum(sums).backward()
        values = [t.detach() + 0 if isinstance(t, torch.Tensor) else t for t in tensors]
        results.append([*values, q.grad, v.grad, w.grad])
    assert type(x) is OneHot
    return results


@statements(
    """
    d = torch.zeros(5, 1).double(); t = torch.cat([x, d], 1); d += 9; t
    d = torch.zeros(5, 4).double(); t = torch.cat([d, x, x.long()], 1); d += 9; t, t.sum(1)
    t = torch.cat([x, v * 1], 1) @ torch.ones(5, 2).double(); v.detach().zero_(); t
    x *= 2; t = torch.cat([x, torch.ones(5, 1).double()], 1); x.zero_(); t
    x *= 2; t = torch.cat([x], 1); x.zero_(); t
    x *= 2; t = torch.stack([x, x]); x.zero_(); t
    x *= 2; t = x.to(torch.float64, copy=True); x.zero_(); t
    x *= 2; t = x.clone(); x.zero_(); t, x
    d = torch.ones(5, 1).double(); t = x * d; d.zero_(); t
    i = torch.tensor([0, 2]); t = x[i]; i.zero_(); t
    i = IDS.clone(); t = torch.zeros(5, 4).scatter(1, i[:, None], 1); i.zero_(); t
    t = (x * q).detach_(); t, t.requires_grad
    t = x * q; t.detach_(); t.requires_grad, t.is_leaf, (t * q).sum(1)
    t = x * q; s = t.sum(1); t.detach_(); s
    l = q * 1; s = (l * x).sum(1); l.mul_(2); s, l
    l = q * 1; s = torch.where(x > 0, l, 0.0); l.mul_(2); s
    l = q * 1; s = torch.einsum("nc,nc->n", l, x); F.relu(l, inplace=True); s
    l = q * 1; l[x.bool()] -= 0.5; l
    l = q * 1; s = l[x.bool()]; l.masked_fill_(x > 0, 7.0); s, l
    l = q * 1; s = (l.t() * x.t()).sum(); l.zero_(); s
    l = q * 1; l[x.bool()] = 3; l
    l = q * 1; l[x > 0] = v.flatten(); l
    l = q * 1; l[x > 0] = v.flatten()[:1]; l
    l = q * 1; l[x[:, 1:].bool().any(1)] = 2.0; l
    l = q * 1; l[:, 1:][x[:, 1:].bool()] = 2.0; l
    l = q * 1; l[x > 0] = True; l
    l = q.long(); l[x.bool()] = 2.7; l
    l = q > 0; l[x.bool()] = True; l
    l = q * 1; l -= x * v; l
    l = q * 1; l += x * q; l
    l = q * 1; l -= 1 - x; l
    l = q.long(); l.sub_(x.long(), alpha=3); l
    l = q.long(); l.sub_(x.long(), alpha=0.5); l
    l = torch.zeros(1).double().expand(5, 4); l.add_(x); l
    q.add_(x); q
    q[x.bool()] = 1.0; q
    l = q * 1; l[x.bool()] = [1.0, 2.0]; l
    y = x[:, 1:]; y.zero_(); x, y
    x[:, 1:] = 2.0; x
    x = x * 1; x.t_(); x, x.shape, x @ torch.ones(5, 2).double()
    x.unsqueeze_(0); x, x @ W
    x.unsqueeze_(1).squeeze_(1); x @ W
    x.transpose_(0, 1); x.sum(1), x.stride()
    x.swapaxes_(0, 1).swapdims_(0, 1); x
    x.mul_(2); x.t_(); x, x.sum(0)
    x.cumsum(0); x.t_(); x.cumsum(0)
    y = x[:2]; y.t_(); y, x
    y = x * q; y.t_(); y @ torch.ones(5, 2).double()
    z = torch.zeros(5, 4).scatter_(1, IDS[:, None], 1).squeeze_(0); z
    """
)
def test_write_after_the_use_matches_torch(run):
    dense, ours = both(run)
    assert_alike(ours, dense, strides=False)


@statements(
    """
    torch.cat([x, v], 1)
    x * q
    x * v
    (x * v).sum(0)
    (x * q).t()
    x - q.detach() + q
    y.to(torch.float64, copy=True)
    y.to(torch.float64, copy=True).sum(0)
    torch.stack([y, y])
    y.clone()
    torch.cat([y, y], 1)
    """,
    "x, q, v, y",
)
@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_result_without_grad_matches_torch(run, mode):
    def inside(x, q, v, W):
        y = x * v
        with mode():
            result = run(x, q, v, y)
        return result.requires_grad, (result * 2.0).requires_grad, result

    dense, ours = both(inside)
    assert_alike(ours, dense, strides=False)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.int8], ids=str)
def test_overflow_raises_as_in_torch(dtype):
    results = [
        outcome(lambda x: torch.zeros(5, 4, dtype=dtype).masked_fill(x > 0, -1e9) + 0, x)
        for x in (F.one_hot(IDS, 4), one_hot(IDS, 4))
    ]
    assert_alike(results[1], results[0])


class Breaks(nn.Module):
    """torch.compile compiles the code before and after the break separately."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 2), change

    def forward(self, ids):
        x = self.change(F.one_hot(ids, 4).float())
        torch._dynamo.graph_break()
        return self.linear(x), x


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # Dynamo's, at a graph break
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: x * 2, lambda x: x.t().t(), lambda x: 1 - x]
)
def test_graph_break_with_a_one_hot(change, backend):
    torch._dynamo.reset()
    model = Breaks(change)
    results = [
        torch.compile(each, backend=backend)(IDS.clone())
        for each in (model, convert(copy.deepcopy(model), min_entries=0))
    ]
    for ours, dense in zip(results[1], results[0], strict=True):
        torch.testing.assert_close(ours + 0, dense + 0)


def test_shape_of_a_one_hot_with_views_cannot_change_in_place():
    x = one_hot(IDS, 4)
    _ = x[:2]
    with pytest.raises(RuntimeError, match=r"use x = x.t\("):
        x.t_()
    assert x.shape == (5, 4)
