"""Code that bypasses the one-hot rules or overwrites an operand of a one-hot operation."""

import copy
import functools
import gc
import itertools
import pickle
import warnings
import weakref

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils.checkpoint import checkpoint

from hotrow import convert
from hotrow.onehot.encoding import one_hot
from hotrow.onehot.tensor import OneHot
from tests.support.exhaustive import exhaustive, grid
from tests.support.onehots import assert_alike, outcome

IDS = torch.tensor([2, 0, 1, 3, 3])


class Reverse(torch.autograd.Function):
    """The identity function with a negated gradient."""

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
    """A function whose forward pass creates a one-hot."""

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


class InPlace(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        x.mul_(2)
        ctx.mark_dirty(x)
        return x

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 2


class OwnGraph(torch.autograd.Function):
    """A function that records a graph in its forward pass but defines its own backward pass."""

    @staticmethod
    def forward(ctx, x, v):
        with torch.enable_grad():
            return x * v

    @staticmethod
    def backward(ctx, gradient):
        return None, gradient.sum(1, keepdim=True) * 7


class First(torch.autograd.Function):
    """A function with two results; only the first has a gradient."""

    @staticmethod
    def forward(ctx, x):
        ctx.set_materialize_grads(False)
        return x * 2, x * 3

    @staticmethod
    def backward(ctx, first, second):
        return None if first is None else first * 2


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


@torch.jit.script
def doubled(x):
    return x.mul_(2.0)


@torch.jit.script
def increased(x):
    return torch.add(x, 1.0, out=x)


class Encoded(torch.autograd.Function):
    @staticmethod
    def forward(ctx, p, encode):
        return encode(p.argmax(-1), 4).double()

    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3, None


FUNCTIONS = {each.__name__: each.apply for each in (Reverse, Double, InPlace, OwnGraph, First)} | {
    "doubled": doubled,
    "increased": increased,
}


def statements(text, names_of_arguments="x, q, v, W"):
    """Parametrize a test with one case per line: statements with `x`, then the value to compare."""
    cases = []
    for line in text.strip().splitlines():
        *before, result = [part.strip() for part in line.split(";")]
        names = {"torch": torch, "F": F, "IDS": IDS, "checkpoint": checkpoint, **FUNCTIONS}
        code = "".join(f"    {each}\n" for each in before)
        exec(f"def run({names_of_arguments}, made=None):\n{code}    return {result}", names)
        cases.append(pytest.param(names["run"], id=line.strip()))
    return pytest.mark.parametrize("run", cases)


def _encode(encode, p):
    return Encoded.apply(p, encode)


def both(run):
    """Return torch's and hotrow's results, each with the gradients of the operands."""
    results = []
    for encode in (F.one_hot, one_hot):
        x = encode(IDS, 4).double()
        generator = torch.Generator().manual_seed(3)
        q, v, w = (
            torch.randint(-3, 4, shape, generator=generator).double().requires_grad_()
            for shape in ((5, 4), (5, 1), (4, 2))
        )
        made = functools.partial(_encode, encode)
        result = outcome(functools.partial(run, made=made), x, q, v, w)
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
    x.mul_(q); x, x.requires_grad, x.is_leaf, Double(x)
    x.mul_(q); x @ W
    x.add_(q); torch.cat([x, q], 1)
    y = x.mul_(q); x, y is x
    x += q; x, Double(x)
    x[0] = q[0]; x @ W, Double(x)
    x.copy_(q); x, Double(x)
    y = x[:2]; x.mul_(v); y, y @ W
    y, *z = x; x[0] = q[0]; x[1] = 2 * q[1]; x, x @ W
    y = x.repeat_interleave(2, 0); x.mul_(3); x[1] = 0; y, x
    y = x.view(x.dtype); x.mul_(3); y
    y = x.view(x.dtype); y.mul_(3); x
    z = v * 2; y = x.T @ z; z -= 1; y
    y, z = x.chunk(2); x[0] = q[0]; x[3] = 2 * q[3]; x, x @ W
    y = made(q); y * 2, y[1:], y.t(), -y
    y = made(q); y.sum(0), y.mean(0), y.float().double(), y.clone(), y.detach()
    y = made(q); y.view(20), y.unsqueeze(0), y.expand(2, 5, 4), y[torch.tensor([1, 0])]
    y = made(q); y.unbind(0)[1], y.split(2)[0], torch.stack([y, y]), torch.cat([y, y], 1)
    y = made(q); y[1:] @ W, (y * v) @ W
    y = Reverse(x * v); y[1:] @ W, y * q
    x = x * v; y = x[:2]; y.mul_(3 * q[:2]); Double(x), x @ W, y
    x = x * v; y = x[:2]; x.mul_(3 * q); Double(y), y @ W, x
    y = made(q); y.mul_(q); y @ W, y, Double(y)
    y = made(q); z = y[:2]; z.mul_(q[:2]); y @ W, z, Double(y)
    y = made(q); y.cumsum(1); y.mul_(q); y.cumsum(1), Double(y)
    y = made(q); z = y[:2]; z.cumsum(1); z.mul_(q[:2]); y.cumsum(1), z.cumsum(1)
    x = x * v; x[:, ::2].mul_(3); Double(x), x @ W
    x[:, ::2].mul_(q[:, ::2]); Double(x), x @ W
    x = x * v; x.unflatten(1, (2, 2))[:, 0].mul_(3); Double(x)
    x = x * v; x.as_strided((5,), (4,)).mul_(3); checkpoint(lambda t: t * 2, x, use_reentrant=True)
    x = x * v; x.unfold(1, 2, 2).mul_(3); torch.func.vmap(torch.sum)(x)
    y = x[:, ::2]; y.requires_grad_(); Double(y).sum().backward(); y.grad
    y = x[None]; x.set_(torch.zeros(3, 7, dtype=x.dtype)); x, y
    y = x[None]; x.data = q.detach(); x, y
    x.diagonal().mul_(q[:4, 0]); torch.func.grad(lambda t: t.square().sum())(x)
    y = x[1:]; torch.func.vmap(torch.sin)(y); x[1:] = q[1:]; y, y @ W, x
    y = x.t(); torch.func.grad(lambda t: t.sin().sum())(y); x.mul_(q); y @ q, Double(x)
    y = x[:, ::2]; x.requires_grad_(False); x[1:] = q[1:]; y * 3, x
    x.data; y = x[1:]; x.requires_grad = False; x[1:] = q[1:]; y * 3, x
    doubled(x); x, x.cumsum(1), x @ W
    torch.ops.aten.mul_.Tensor(x, v); x @ W, Double(x)
    x = x * q; torch.ops.aten.mul_.Tensor(x, v); x @ W, Double(x)
    torch.ops.aten.add.out(x, v, out=x); x @ W
    increased(x); x, x.cumsum(1), x @ W
    y = InPlace(x * v); y @ W, y
    y = InPlace(x); y @ W, y
    y = x * v; z = torch.no_grad()(lambda: y[1:])(); InPlace(y); y @ W, y
    OwnGraph(x, v).sum(1), OwnGraph(x, v) @ W
    y, z = First(x * v); z
    x = x * v; x.register_hook(lambda g: g * 2); Double(x), x.cumsum(0)
    x = x * v; x.retain_grad(); Double(x).sum().backward(); x.grad
    y = made(q); y.register_hook(lambda g: g * 2); Double(y), y @ W
    x = x - 1; F.relu(x, inplace=True); x, x.sum()
    x = x * -q; x.cumsum(1); F.relu(x, inplace=True); x
    y = F.relu(x, inplace=True); y is x, x
    y = (x + x.flip(0)) * v; y.detach_(); y.exp(), y
    x.requires_grad_(); y = x.detach(); y.mul_(2); x, x @ W
    checkpoint(lambda t: t.cumsum(1) * 2, x * v, use_reentrant=True)
    torch.func.grad(lambda a: (x * a).sum())(v.detach())
    torch.func.grad(lambda a: torch.cat([x, a], 1).square().sum())(v.detach())
    torch.func.grad(lambda a: torch.cat([x, a], 1)[:, 4:].square().sum())(v.detach())
    torch.func.grad(lambda a: (torch.cat([x, a], 1)[:, :4] * q.detach() * a).sum())(v.detach())
    torch.func.grad(lambda a: F.binary_cross_entropy_with_logits(a, x))(q.detach())
    torch.func.hessian(lambda a: (x * a).sum() ** 2)(v.detach())
    torch.func.vmap(lambda a: x * a)(torch.stack([v, v]).detach())
    torch.func.jvp(lambda a: (x * a).sum(1), (q.detach(),), (q.detach(),))[1]
    """
)
def test_graph_of_a_written_or_returned_one_hot_matches_torch(run):
    dense, ours = both(run)
    assert_alike(ours, dense, strides=False)


@pytest.mark.parametrize("name", ["SGD", "Adam"])
def test_fused_step_of_a_one_hot(name):
    results = []
    for x in (F.one_hot(IDS, 4).double(), one_hot(IDS, 4, torch.float64)):
        x.requires_grad_().sum().backward()
        getattr(torch.optim, name)([x], lr=0.1, fused=True).step()
        results.append((x @ torch.ones(4, 1).double()).detach())
    torch.testing.assert_close(results[1], results[0])


def test_dense_tensor_read_in_inference_mode_does_not_stay():
    results = []
    for x in (F.one_hot(IDS, 4).double(), one_hot(IDS, 4, torch.float64)):
        with torch.inference_mode():
            x.cumsum(1)
        x.mul_(2)
        factor = torch.full((5, 4), 3.0, dtype=torch.float64, requires_grad=True)
        (x.tril() * factor).sum().backward()
        results.append(factor.grad)
    torch.testing.assert_close(results[1], results[0])


def _reentrant():
    x = one_hot(IDS, 4, torch.float64) * torch.ones(5, 1, requires_grad=True)
    checkpoint(lambda t: t.cumsum(1), x, use_reentrant=True).sum().backward()
    return x


def _leaf():
    x = one_hot(IDS, 4, torch.float64, requires_grad=True)
    x.cumsum(1).sum().backward()
    return x


def _late_leaf():
    x = one_hot(IDS, 4, torch.float64)
    x.cumsum(1)
    x.requires_grad_().cumsum(1).sum().backward()
    return x


def _written():
    x = one_hot(IDS, 4, torch.float64)
    y = x[:2]
    y.mul_(torch.ones(2, 1, requires_grad=True))
    x.cumsum(1).sum().backward()
    return x


def _returned():
    x = _encode(one_hot, torch.ones(5, 4, requires_grad=True))
    x.mul_(2)
    x.cumsum(1).sum().backward()
    return x


@pytest.mark.parametrize("make", [_reentrant, _leaf, _late_leaf, _written, _returned])
def test_one_hot_is_freed(make):
    reference = weakref.ref(make())
    gc.collect()
    assert reference() is None


@statements(
    """
    torch.cat([x, v], 1)
    x * q
    x * v
    (x * v).sum(0)
    (x + x.flip(0)) * v
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
    def inside(x, q, v, W, made):
        y = x * v
        with mode():
            result = run(x, q, v, y)
        outside = result * 2.0, result.cumsum(0)  # a sum has no rule
        return result.requires_grad, *(each.requires_grad for each in outside), result

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
    """torch.compile compiles the code before and after the graph break separately."""

    def __init__(self, change):
        super().__init__()
        self.linear, self.change = nn.Linear(4, 2), change

    def forward(self, ids):
        x = self.change(F.one_hot(ids, 4).float())
        torch._dynamo.graph_break()
        return self.linear(x), x


@exhaustive
@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised at a graph break
@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
@pytest.mark.parametrize(
    "change", [lambda x: x, lambda x: x * 2, lambda x: x.t().t(), lambda x: 1 - x]
)
def test_graph_break_with_a_one_hot(change, backend):
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


# --- The gradient of an intermediate one-hot that has already been used ---------------------------


def _grad(x, loss, q):
    return torch.autograd.grad(loss, x, retain_graph=True)[0]


def _second_grad(x, loss, q):
    (gradient,) = torch.autograd.grad(loss, [x], create_graph=True)
    return torch.autograd.grad(gradient.square().sum(), q)[0]


def _retained_grad(x, loss, q):
    x.retain_grad()
    x.retain_grad()
    assert x.grad is None
    loss.backward(retain_graph=True)
    loss.backward()
    return x.grad


def _gradients_seen_by_a_hook(x, loss, q):
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient) or 0.5 * gradient)
    handle = x.register_hook(lambda gradient: 3 * gradient)
    handle.remove()
    loss.backward()
    return [*seen, q.grad]


REQUESTS = [_grad, _second_grad, _retained_grad, _gradients_seen_by_a_hook]


def _used(encode, is_straight_through, before):
    """Return a one-hot that depends on q, a loss computed from it, and q."""
    generator = torch.Generator().manual_seed(0)
    q = torch.randn(5, 4, generator=generator, dtype=torch.float64, requires_grad=True)
    p = q.softmax(-1)
    x = encode(p.argmax(-1), 4).double()
    x = x - p.detach() + p if is_straight_through else x * p
    before(x)
    weight = torch.randn(4, 3, generator=generator, dtype=torch.float64)
    # a lookup, a sum by id, and an operation that needs the dense tensor
    loss = (x @ weight).square().sum() + (x.T @ q.detach()).square().sum() + x.exp().sum()
    return x, loss, q


@pytest.mark.parametrize("request_gradient", REQUESTS)
def test_the_gradient_of_a_used_straight_through_one_hot(request_gradient):
    found = []
    for encode in F.one_hot, one_hot:
        used = _used(encode, True, lambda x: None)
        found.append(request_gradient(*used))
    assert type(used[0]) is OneHot
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("request_gradient", REQUESTS)
def test_the_gradient_of_a_used_weighted_one_hot_is_refused_or_requested_before(request_gradient):
    used = _used(one_hot, False, lambda x: None)
    assert type(used[0]) is OneHot
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        request_gradient(*used)
    found = [
        request_gradient(*_used(encode, False, lambda x: x.retain_grad()))
        for encode in (F.one_hot, one_hot)
    ]
    torch.testing.assert_close(found[1], found[0])


def _hooked_gradients(x, loss, leaf):
    seen = []
    x.register_hook(lambda gradient: seen.append(gradient) or 3 * gradient)
    loss.backward()
    return [*seen, leaf.grad]


SCALINGS = {
    "doubled": lambda x: x * 2,
    "third": lambda x: x / 3,
    "negative": lambda x: -x,
    "factors": lambda x: x * torch.arange(1.0, 5).double(),
}


@pytest.mark.parametrize("request_gradient", [_grad, _retained_grad, _hooked_gradients])
@pytest.mark.parametrize("is_dense_first", [False, True])
@pytest.mark.parametrize("scaling", SCALINGS.values(), ids=SCALINGS)
def test_the_gradient_of_a_scaled_multi_hot_includes_dense_uses(
    scaling, is_dense_first, request_gradient
):
    ids, weight, found = torch.tensor([[2, 0], [1, 1], [3, 0]]), torch.ones(4, 2).double(), []
    for encode in F.one_hot, one_hot:
        leaf = encode(ids, 4).double().sum(1).requires_grad_()
        x = scaling(leaf)
        uses = [lambda x: x.exp().sum(), lambda x: (x @ weight).square().sum()]
        first, second = uses if is_dense_first else uses[::-1]
        loss = first(x) + second(x)
        assert encode is F.one_hot or not x.is_modified
        found.append(request_gradient(x, loss, leaf))
    torch.testing.assert_close(found[1], found[0], rtol=0, atol=0)


# --- The gradient of a view -----------------------------------------------------------------------

VIEWS = {
    "slice": lambda x: x[1:],
    "transposed": lambda x: x.t(),
    "joined": lambda x: x.view(2, -1),
    "unsqueezed": lambda x: x[None],
    "view of a view": lambda x: x[1:].t()[None],
    "columns": lambda x: x[:, :3],
    "diagonal": lambda x: x.diagonal(),  # has no rule
}
USES = {
    "lookup": lambda x: (x @ torch.arange(1.0, 1 + x.shape[-1]).double()).square().sum(),
    "tanh": lambda x: (x - 0.5).tanh().square().sum(),  # needs the dense tensor
    "function": lambda x: Double.apply(x).exp().sum(),
    "view": lambda x: x[1:].exp().sum(),
    "unfold": lambda x: x.unfold(0, 1, 1).exp().sum(),  # a view without a rule
    "write": lambda x: x.data.mul_(2).sum() + x.exp().sum(),
}


def _leaf_gradients(encode, view, uses, request_gradient, is_late):
    """Return the gradients of a view of a leaf, and of the leaf."""
    leaf = encode(torch.tensor([2, 0, 1, 3]), 4).double().requires_grad_()
    x, seen = view(leaf), []
    loss = USES[uses[0]](x) if is_late else 0
    if request_gradient == "hook":
        x.register_hook(lambda gradient: seen.append(gradient) or 3 * gradient)
    if request_gradient == "retain_grad":
        x.retain_grad()
    for use in uses[is_late:]:
        loss = loss + USES[use](x)
    if request_gradient == "grad":
        return torch.autograd.grad(loss, x)
    loss.backward()
    return (*seen, leaf.grad, *([x.grad] if request_gradient == "retain_grad" else []))


@pytest.mark.parametrize("is_late", grid([False, True], bool), ids=["before", "between"])
@pytest.mark.parametrize("request_gradient", ["hook", "retain_grad", "grad"])
@pytest.mark.parametrize(
    ("first_use", "second_use"),
    grid(itertools.product(USES, USES), lambda *uses: "lookup" in uses or uses[0] == uses[1]),
)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_gradient_of_a_view_of_a_leaf(view, first_use, second_use, request_gradient, is_late):
    uses = first_use, second_use
    expected = _leaf_gradients(F.one_hot, view, uses, request_gradient, is_late)
    found = _leaf_gradients(one_hot, view, uses, request_gradient, is_late)
    assert all(type(gradient) is torch.Tensor for gradient in found)
    torch.testing.assert_close(found, expected)


def test_a_hook_of_a_view_of_a_leaf_keeps_the_ids():
    view = one_hot(IDS, 4).float().requires_grad_()[1:]
    view.register_hook(lambda gradient: 3 * gradient)
    assert not view.is_modified


def test_the_gradient_of_a_view_that_was_used_in_two_ways_is_refused():
    view = (one_hot(IDS, 4).double().requires_grad_() * 2)[1:]
    loss = (view @ torch.ones(4, 2).double()).sum()
    torch.autograd.grad(loss, view, retain_graph=True)
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        view.register_hook(lambda gradient: 3 * gradient)
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        loss.backward(inputs=[view])
    loss = loss + view.tanh().sum()
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        torch.autograd.grad(loss, view)


TRANSFORMS = {
    "function": Double.apply,
    "vmap": torch.func.vmap(lambda t: t * t),
    "grad": torch.func.grad(lambda t: (t**3).sum()),
}


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_gradient_of_a_view_of_a_written_one_hot_includes_functions(transform):
    found = []
    for encode in F.one_hot, one_hot:
        q = torch.arange(20.0).view(5, 4).double().requires_grad_()
        x = encode(IDS, 4).double()
        x[1:] = q[1:]
        view = x[2:]
        assert encode is F.one_hot or type(view) is OneHot
        loss = transform(view).square().sum() + (view * 3).sum()
        found.append(torch.autograd.grad(loss, [view, q]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_backward_with_a_one_hot_that_a_function_used_as_input(transform):
    found = []
    for encode in F.one_hot, one_hot:
        x = encode(IDS, 4).double().requires_grad_().clone()
        transform(x).sum().backward(inputs=[x])
        found.append(x.grad)
    assert type(x) is OneHot
    torch.testing.assert_close(found[1], found[0])
    x = one_hot(IDS, 4).double() * torch.ones(5, 1).double().requires_grad_()
    loss = transform(x).sum()
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        loss.backward(inputs=[x])


@pytest.mark.parametrize("read", [lambda x: x.data, lambda x: x.diagonal(), lambda x: None])
@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
def test_the_gradient_of_a_dense_one_hot_that_a_function_used_is_refused(transform, read):
    x = one_hot(IDS, 4).double() * torch.ones(5, 1).double().requires_grad_()
    read(x)
    loss = transform(x).sum() + x.exp().sum()
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        torch.autograd.grad(loss, x)


@pytest.mark.parametrize("transform", TRANSFORMS.values(), ids=TRANSFORMS)
@pytest.mark.parametrize("is_retained", [False, True])
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_the_gradient_of_a_view_after_a_write_without_grad(view, is_retained, transform):
    found = []
    for encode in F.one_hot, one_hot:
        q = torch.arange(20.0).view(5, 4).double().requires_grad_()
        x = encode(IDS, 4).double() * q
        v = view(x[:4])
        if is_retained:
            v.retain_grad()
        with torch.no_grad():
            x[0] = 2
        loss = transform(v).sum() + (v.exp() * 2).sum()
        if is_retained:
            loss.backward()
        found.append((v.grad, q.grad) if is_retained else torch.autograd.grad(loss, [v, q]))
    torch.testing.assert_close(found[1], found[0])


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "change",
    [
        lambda x: None,
        lambda x: x.detach().numpy(),
        lambda x: x.retain_grad(),
        lambda x: x.mul_(2),
        lambda x: x.diagonal(),
        torch.no_grad()(lambda x: x.mul_(2)),
    ],
)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_view_created_without_grad_is_constant(view, change, mode):
    found = []
    for encode in F.one_hot, one_hot:
        q = torch.arange(20.0).view(5, 4).double().requires_grad_()
        x = encode(IDS, 4).double() * q
        change(x)
        with mode():
            v = view(x[:4])
        if encode is one_hot and view is not VIEWS["diagonal"]:
            assert type(v) is OneHot or x.is_modified
        loss = (v * 3).sum() + v.exp().sum() + Double.apply(v).square().sum() + x.sin().sum()
        loss.backward()
        with torch.no_grad():
            v.mul_(3)
            found.append((v.clone(), x.clone(), q.grad))
    assert_alike(found[1], found[0], strides=False)


def test_a_recorded_write_and_a_view_created_without_grad():
    q = torch.ones(5, 4, requires_grad=True)
    x = one_hot(IDS, 4) * q
    with torch.no_grad():
        v = x[1:]
    with pytest.raises(RuntimeError, match="view was created in no_grad mode"):
        v.mul_(2)  # as in torch
    x = one_hot(IDS, 4) * q
    with torch.no_grad():
        v = x[1:]
    x.mul_(2)  # in torch, later uses of the view raise an error
    (v.exp().sum() + x.sum()).backward()
    assert torch.equal(v.detach(), x.detach()[1:])
    with torch.no_grad():
        v.mul_(2)
    assert torch.equal(v.detach(), x.detach()[1:])
    assert torch.equal(q.grad, 2 * F.one_hot(IDS, 4))


def test_a_write_to_a_detached_one_hot_keeps_the_graph():
    found = []
    for encode in F.one_hot, one_hot:
        x = encode(IDS, 4).double().requires_grad_().clone()
        y = x * 2
        x.detach().mul_(3)
        found.append(torch.autograd.grad(y.sum() + x.sum(), x))
    torch.testing.assert_close(found[1], found[0])


def test_the_gradient_of_a_column_that_was_read_is_refused():
    weights = torch.ones(5, 1).double().requires_grad_()
    x = one_hot(IDS, 4).double() * weights - one_hot(IDS.flip(0), 4).double()
    column = x[..., 1]
    loss = column.sin().sum()
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        torch.autograd.grad(loss, column)


def test_a_one_hot_cannot_be_written_while_a_view_requires_grad():
    x = one_hot(IDS, 4).double()
    view = x[:, ::2].requires_grad_()
    for write in (lambda: x.mul_(2), lambda: x.fill_diagonal_(2), lambda: F.relu_(x)):
        with pytest.raises(RuntimeError, match="if the one-hot or a view of it requires grad"):
            write()
    with torch.no_grad():
        x.mul_(2)
    assert view.sum() == 2 * (IDS % 2 == 0).sum()
    detached = x.detach().requires_grad_()
    del view
    x.mul_(2)
    assert torch.equal(detached, x)


@pytest.mark.parametrize("is_trained", [False, True])
@pytest.mark.parametrize(
    "prepare",
    [
        lambda x: (x, x[1:]),
        lambda x: (x[1:], x),
        lambda x: (x, x[1:].t()),
        lambda x: (x[1:].t(), x),
    ],
)
def test_a_function_cannot_change_a_one_hot_with_views(prepare, is_trained):
    x = one_hot(IDS, 4).double()
    x = x * torch.ones(5, 1).double().requires_grad_() if is_trained else x.clone()
    written, other = prepare(x)
    with pytest.raises(RuntimeError, match="cannot change a one-hot in place in an autograd"):
        InPlace.apply(written)
    assert torch.equal(x, F.one_hot(IDS, 4).double())
    assert not any(each.is_modified for each in (x, written, other))


@pytest.mark.parametrize("retains", [False, True])
@pytest.mark.parametrize(
    "view", [lambda x: x[1:], lambda x: x.view(-1), lambda x: x.t()[1:], torch.diagonal]
)
@pytest.mark.parametrize("is_view_written", [False, True])
def test_views_of_a_result_of_a_function_use_the_values_of_later_writes(
    view, is_view_written, retains
):
    found = []
    for encode in (F.one_hot, one_hot):
        v = torch.arange(1.0, 6).view(5, 1).requires_grad_()
        k = torch.tensor(1.5, requires_grad=True)
        x = InPlace.apply(encode(IDS, 4).float() * v)
        first, second = view(x), view(x)
        assert isinstance(first, OneHot) == (encode is one_hot)
        if retains:
            x.retain_grad()
            second.retain_grad()
        (first if is_view_written else x).mul_(2).add_(k)
        ((second**2).sum() + x.sum()).backward()
        found.append([second, v.grad, k.grad, *([x.grad, second.grad] if retains else [])])
    for ours, dense in zip(*found[::-1], strict=True):
        assert torch.equal(ours, dense)


@pytest.mark.parametrize("dtype", [torch.bool, torch.int64])
@pytest.mark.parametrize("view", [torch.t, lambda x: x.view(-1), lambda x: x[1:]])
def test_a_reentrant_checkpoint_may_change_a_mask_with_views(dtype, view):
    found = []
    for encode in (F.one_hot, one_hot):
        x, w = encode(IDS, 4).to(dtype), torch.ones(4, 2, requires_grad=True)
        seen = view(x)
        assert isinstance(seen, OneHot) == (encode is one_hot)

        def run(w, x=x):
            x[:, 3] = 0
            return x.float() @ w

        checkpoint(run, w, use_reentrant=True).sum().backward()
        found.append([x, seen, w.grad])
    for ours, dense in zip(*found[::-1], strict=True):
        assert torch.equal(ours, dense)


def test_a_function_cannot_change_a_one_hot_that_retains_its_gradient():
    x = one_hot(IDS, 4).double() * torch.ones(5, 1).double().requires_grad_()
    x.retain_grad()
    with pytest.raises(RuntimeError, match="cannot change a one-hot in place in an autograd"):
        InPlace.apply(x)
    assert torch.equal(x, F.one_hot(IDS, 4).double())


def test_the_gradient_of_a_read_one_hot_that_became_dense_is_refused():
    q = torch.randn(5, 4, requires_grad=True)
    x = one_hot(q.argmax(-1), 4) * q
    loss = (x @ torch.randn(4, 3)).sum()
    x.data.mul_(2)
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        torch.autograd.grad(loss + x.exp().sum(), x)
    x.mul_(2)  # torch returns the gradient of the new values
    gradient = torch.autograd.grad(loss + x.exp().sum(), x)[0]
    assert torch.equal(gradient, x.exp())


class Threshold(torch.autograd.Function):
    """A straight-through estimator that reads its input only as `read` does."""

    @staticmethod
    def forward(ctx, x, read):
        return read(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


@pytest.mark.parametrize(
    "read", [lambda x: (x.detach() > 0).float(), lambda x: torch.ones(x.shape)]
)
@pytest.mark.parametrize(
    "ask",
    [
        lambda loss, x: x.retain_grad(),
        lambda loss, x: x.register_hook(print),
        lambda loss, x: loss.backward(inputs=[x]),
        lambda loss, x: torch.autograd.grad(loss, x, allow_unused=True),
    ],
)
def test_a_detached_read_in_a_function_is_a_use(read, ask):
    x = one_hot(IDS, 4) * torch.ones(5, 1, requires_grad=True)
    loss = Threshold.apply(x, read).sum()
    assert isinstance(x, OneHot)
    assert not x.is_modified
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        ask(loss, x)


def test_a_detached_read_of_a_weighted_one_hot_is_not_a_use():
    q = torch.randn(5, 4, requires_grad=True)
    x = one_hot(q.argmax(-1), 4) * q
    x.detach().sum()
    x.retain_grad()
    x.sum().backward()
    assert torch.equal(x.grad, torch.ones(5, 4))


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize(
    "read", [lambda x: x.argmax(-1), lambda x: x.sum(), repr, lambda x: x.isnan(), lambda x: x[1:]]
)
def test_a_read_without_grad_is_not_a_use(read, mode):
    found = []
    for encode in F.one_hot, one_hot:
        p = torch.arange(1.0, 6).double().requires_grad_()
        x = encode(IDS, 4).double() * p[:, None]
        with mode():
            read(x)
        x.retain_grad()
        x.square().sum().backward()
        found.append((x.grad, p.grad))
    torch.testing.assert_close(found[1], found[0])


class ReadsWithoutGrad(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        with torch.no_grad():
            return x.sum(0)

    @staticmethod
    def backward(ctx, gradient):
        return gradient.expand(5, 4)


def test_a_read_in_a_function_is_a_use():
    x = one_hot(IDS, 4).double() * torch.ones(5, 1).double().requires_grad_()
    loss = ReadsWithoutGrad.apply(x).sum()
    with pytest.raises(RuntimeError, match="gradient of this one-hot is unknown"):
        torch.autograd.grad(loss, x)


def test_only_a_view_from_an_operation_without_a_rule_replaces_the_ids():
    x, empty = one_hot(IDS, 4), one_hot(IDS[:0], 4)
    x.sinh(), x.tolist(), x[0].tolist(), x.to_dense(), empty.sinh()
    assert not any(each.is_modified for each in (x, empty))
    x.diagonal()
    assert x.is_modified


@pytest.mark.parametrize("detach", [lambda x: x.detach_(), lambda x: x.requires_grad_(False)])
def test_trained_write_to_a_former_leaf_is_refused(detach):
    """The backward pass of `rows` would end the process; torch raises an error there."""
    x, factor = one_hot(IDS, 4).float().requires_grad_(), torch.ones(5, 4, requires_grad=True)
    rows = x[IDS > 0]
    detach(x)
    with pytest.raises(RuntimeError, match="required grad before"):
        x.mul_(factor)
    rows.sum().backward()


def _set_data(x, values):
    x.data = values


def _set_memory(x, values):
    with torch.no_grad():
        x.set_(values)


REPLACEMENTS = {
    "same": torch.randn(5, 4),
    "transposed": torch.randn(4, 5).t(),
    "shape": torch.randn(3, 7),
    "axes": torch.randn(2, 3, 4),
}


@pytest.mark.parametrize("replace", [_set_data, _set_memory])
@pytest.mark.parametrize(
    ("kind", "values"),
    [
        *((False, values) for values in REPLACEMENTS.values()),
        *((True, REPLACEMENTS[name]) for name in ("same", "transposed")),
        *(("function", REPLACEMENTS[name]) for name in ("same", "transposed")),
    ],
)
def test_replaced_data_are_used_as_in_torch(replace, kind, values):
    found = []
    for encode in F.one_hot, one_hot:
        leaf = encode(IDS, 4).float().requires_grad_(bool(kind))
        x = Double.apply(leaf) if kind == "function" else leaf
        view, new = x[1:], torch.empty_strided(values.shape, values.stride()).copy_(values)
        replace(x, new)
        results = [x.detach().clone(), view, x.sum(0), x @ torch.ones(x.shape[-1], 2), x[1:], x * 2]
        if kind:
            (x.exp().sum() + results[3].square().sum()).backward()
            results.append(leaf.grad)
        new.mul_(2)
        results += [x, x.exp(), (x.shape, x.stride(), x.requires_grad, x.is_leaf)]
        found.append(results)
    assert type(x) is OneHot
    for ours, expected in zip(found[1], found[0], strict=True):
        assert torch.equal(ours, expected) if torch.is_tensor(expected) else ours == expected


@pytest.mark.parametrize("replace", [_set_data, _set_memory])
def test_data_of_another_shape_are_refused_if_a_one_hot_requires_grad(replace):
    x = one_hot(IDS, 4).float().requires_grad_()
    with pytest.raises(RuntimeError, match=r"same shape, dtype and device, but these are \(3, 7\)"):
        replace(x, torch.randn(3, 7))
    assert torch.equal(x, F.one_hot(IDS, 4).float())


def test_a_loop_that_assigns_data_matches_torch():
    found = []
    for encode in F.one_hot, one_hot:
        x = encode(IDS, 4).double().requires_grad_()
        for _ in range(3):
            (x @ torch.arange(8).double().view(4, 2)).square().sum().backward()
            x.data = x.data - 0.001 * x.grad
        found.append(x)
    assert torch.equal(found[1], found[0])


def _copies(encode, requires_grad):
    """Return copies of a one-hot and of a view, after writes to some of them."""
    x = encode(IDS, 4).float().requires_grad_(requires_grad)
    if requires_grad:
        x.sum().backward()
    view = x.detach()[1:]
    shallow = copy.copy(x)
    one, other, same, held = copy.deepcopy((x, view, x, {"x": [x.detach()]}))
    with torch.no_grad():
        shallow[0, 0] = 4
        one[1] = 5
    tensors = x, view, shallow, one, other, held["x"][0], pickle.loads(pickle.dumps(x))
    return *tensors, *(each.grad for each in tensors), one is same


@pytest.mark.parametrize("requires_grad", [False, True])
def test_copies_share_memory_as_in_torch(requires_grad):
    expected, found = (_copies(encode, requires_grad) for encode in (F.one_hot, one_hot))
    for ours, dense in zip(found, expected, strict=True):
        assert torch.equal(ours, dense) if torch.is_tensor(dense) else ours is dense


def test_deepcopy_of_many_leaves_never_confuses_them():
    leaves = [one_hot((IDS + i) % 4, 4).float().requires_grad_() for i in range(50)]
    for ours, leaf in zip(copy.deepcopy(leaves), leaves, strict=True):
        assert torch.equal(ours, leaf)


@pytest.mark.parametrize("scale", [None, 0.5])
def test_to_dense_returns_an_ordinary_tensor_that_shares_memory(scale):
    x = one_hot(torch.tensor([1, 3]), 5).float()
    x = x if scale is None else x * scale
    dense = x.to_dense()
    assert type(dense) is torch.Tensor
    assert torch.equal(dense, x + 0)
    dense[0, 0] = 7
    assert x[0, 0] == 7
    assert x.to_dense(dtype=torch.float64).dtype == torch.float64


@pytest.mark.parametrize("uses", [lambda x, z: torch.cat([x, z], -1), lambda x, z: 2 * x + z.sum()])
def test_a_gradient_penalty_of_a_dense_one_hot(uses):
    found = []
    for encode in F.one_hot, one_hot:
        z = torch.tensor([[0.5], [2.0]], dtype=torch.float64, requires_grad=True)
        leaf = encode(torch.tensor([1, 3]), 5).double().requires_grad_()
        x = leaf.to_dense()
        (gradient,) = torch.autograd.grad(uses(x, z).exp().sum(), x, create_graph=True)
        gradient.square().sum().backward()
        found.append((gradient.detach(), z.grad, leaf.grad))
    torch.testing.assert_close(found[1], found[0])


def test_to_dense_in_a_compiled_model():
    class Model(torch.nn.Module):
        def forward(self, ids):
            x = F.one_hot(ids, 5).float().to_dense()
            return x.exp()

    ids = torch.tensor([1, 3])
    model = torch.compile(convert(Model()), backend="aot_eager")
    assert torch.equal(model(ids), Model()(ids))


def test_the_log_of_a_weighted_one_hot_times_a_trained_tensor():
    found = []
    for encode in F.one_hot, one_hot:
        p = torch.full((2, 3), 2.0, requires_grad=True)
        q = torch.tensor([[0.5, 2, 3], [4, 5, 6]], requires_grad=True)
        y = (encode(torch.tensor([1, 0]), 3) * p).log() * q
        y.logsumexp(1).sum().backward()
        found.append((y.detach(), q.grad))
    torch.testing.assert_close(found[1], found[0], equal_nan=True)


@pytest.mark.parametrize(
    "read",
    [
        lambda x: x[:, 1],
        lambda x: x[torch.arange(5), torch.tensor([1, 2, 0, 3, 1])],
        lambda x: x.gather(1, torch.tensor([[1], [2], [0], [3], [1]])),
    ],
)
def test_an_infinite_slope_at_an_unselected_entry_is_ignored(read):
    class Gates(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.router = torch.nn.Linear(3, 4)

        def forward(self, z):
            top, ids = self.router(z).softmax(-1).topk(2, -1)
            return read(torch.zeros(5, 4).scatter_(1, ids, top)).sqrt().sum()

    plain, z = Gates(), torch.randn(5, 3)
    model = convert(copy.deepcopy(plain), min_entries=0)
    for each in plain, model:
        each(z).backward()
    assert convert.report(model).findings[0].converted
    assert plain.router.weight.grad.isfinite().all()
    torch.testing.assert_close(model.router.weight.grad, plain.router.weight.grad)


def test_jit_trace_of_a_model_with_trained_weights():
    class Model(torch.nn.Module):
        def forward(self, ids, q):
            return (F.one_hot(ids, 4) * q).sum(-1)

    ids, q = torch.tensor([1, 3, 0]), torch.randn(3, 4, requires_grad=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", torch.jit.TracerWarning)
        traced = torch.jit.trace(convert(Model(), min_entries=0), (ids, q))
    for each in (ids, ids.flip(0)):
        assert torch.equal(traced(each, q), Model()(each, q))


@pytest.mark.parametrize(
    "run",
    [
        lambda x: x.sum(1).clamp(max=1).float(),
        lambda x: x[:, :3].flatten(1) * 2,
        lambda x: x.mul_(3).sum(1) - x[:, 1],
        lambda x: (x.sum(1) > 1).long() @ torch.arange(20),
    ],
)
def test_jit_trace_of_one_hots_is_correct_for_other_ids(run):
    example, ids = torch.arange(8).reshape(2, 4), torch.tensor([[5, 5, 5, 1], [9, 2, 2, 9]])
    expected = run(F.one_hot(ids, 20))
    of_ids = torch.jit.trace(lambda ids: run(one_hot(ids, 20)), example)
    assert torch.equal(of_ids(ids), expected)
    of_one_hot = torch.jit.trace(run, one_hot(example, 20))
    assert torch.equal(of_one_hot(one_hot(ids, 20)), expected)


@pytest.mark.parametrize("prepare", [lambda x: x, lambda x: x * 2, lambda x: (x * 2)[1:]])
@pytest.mark.parametrize(
    "run",
    [
        lambda x, w: (x.cumsum(0) * x) @ w,
        lambda x, w: (x * 2) @ w,
        lambda x, w: x.clone().mul_(2) @ w,
    ],
)
@pytest.mark.filterwarnings("ignore:Attempted to insert a get_attr Node")
def test_linearize_of_a_captured_one_hot_matches_torch(prepare, run):
    w = torch.arange(1.0, 9).reshape(4, 2)
    found = []
    for encode in (F.one_hot, one_hot):
        x = prepare(encode(IDS, 4).float())
        assert isinstance(x, OneHot) == (encode is one_hot)
        function = functools.partial(run, x)
        (out, tangent), graph = torch.func.linearize(function, w), make_fx(function)(w)
        found.append([out, tangent(w), tangent(2 * w), graph(w), graph(2 * w)])
    for ours, dense in zip(*found[::-1], strict=True):
        assert torch.equal(ours, dense)


@pytest.mark.parametrize(
    ("apply", "sizes"),
    [
        (lambda x, sizes: x.repeat(sizes), [2, 1]),
        (lambda x, sizes: torch.tile(x, dims=sizes), [2, 1]),
        (lambda x, sizes: torch.reshape(x, shape=sizes), [1, 5, 4]),
    ],
)
def test_the_caller_may_change_a_list_of_sizes_before_the_backward_pass(apply, sizes):
    found = []
    for encode in (F.one_hot, one_hot):
        x, given = encode(IDS, 4).float().requires_grad_(), list(sizes)
        result = apply(x, given)
        assert isinstance(result, OneHot) == (encode is one_hot)
        given[:] = [1, 2]
        (result**2).sum().backward()
        found.append(x.grad)
    assert torch.equal(*found)


def test_jit_trace_checks_ids():
    traced = torch.jit.trace(lambda ids: one_hot(ids, 20).sum(1), torch.tensor([[3, 4]]))
    with pytest.raises(RuntimeError, match="Class values"):
        traced(torch.tensor([[20, 0]]))
