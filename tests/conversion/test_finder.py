"""`convert` finds the one-hots in a model's own code and leaves everything else unchanged."""

import copy
import dataclasses
import io
import pickle
import threading
from collections import OrderedDict, namedtuple

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._dynamo.backends.common import aot_autograd
from torch.autograd import forward_ad
from torch.overrides import _get_current_function_mode_stack
from torch.utils.checkpoint import checkpoint

import hotrow
from hotrow import HotrowError, convert
from hotrow.conversion import outputs
from hotrow.conversion.report import NOTHING_FOUND
from hotrow.onehot.encoding import one_hot
from hotrow.onehot.tensor import OneHot
from hotrow.table.parameter import Table
from tests.support.exhaustive import exhaustive, grid
from tests.support.onehots import IDS, LargestAllocation, assert_alike, outcome
from tests.support.tolerance import assert_same_bits

pytestmark = pytest.mark.usefixtures("small_tables")


class Model(nn.Module):
    """A base model with the members that the tested expressions use."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)
        self.table = nn.Parameter(torch.randn(5, 4))
        self.register_buffer("eye", torch.eye(5))
        self.calls = 0


def with_forward(text):
    """Return a class whose forward runs statements that use `x` and returns the last value."""
    *before, result = [part.strip() for part in text.split(";")]
    code = "".join(f"    {each}\n" for each in before)
    names = {"torch": torch, "F": F, "nn": nn, "checkpoint": checkpoint}
    exec(f"def forward(self, x):\n{code}    return {result}", names)
    return type("Written", (Model,), {"forward": names["forward"]})


def forwards(text):
    return pytest.mark.parametrize("text", [line.strip() for line in text.strip().splitlines()])


def assert_same_model(text):
    """Assert that conversion changes no output or gradient; return the converted model."""
    model = with_forward(text)()
    other = convert(copy.deepcopy(model))
    for _ in range(2):
        outputs = []
        for each in (model, other):
            torch.manual_seed(3)
            outputs.append(outcome(each, IDS))
        assert_alike(outputs[1], outputs[0])
        assert not _get_current_function_mode_stack()
        assert not isinstance(outputs[1], OneHot)
        if isinstance(outputs[0], torch.Tensor) and outputs[0].requires_grad:
            for output in outputs:
                (output * torch.arange(output.numel()).reshape(output.shape)).sum().backward()
            for one, two in zip(model.parameters(), other.parameters(), strict=True):
                assert (one.grad is None) == (two.grad is None)
                if one.grad is not None:
                    torch.testing.assert_close(two.grad.to_dense(), one.grad, equal_nan=True)
    return other


# --- Patterns ------------------------------------------------------------------------------


@forwards(
    """
    self.linear(F.one_hot(x, 5).float())
    self.linear(F.one_hot(x).float())
    self.linear(F.one_hot(x, num_classes=5).to(torch.float32))
    self.linear(F.one_hot(x, 5).type_as(self.table))
    F.one_hot(x, 5).float() @ self.table
    F.one_hot(x, 5).float().sum(1) @ self.table
    torch.einsum("bsv,vd->bsd", F.one_hot(x, 5).float(), self.table)
    self.linear(torch.eye(5)[x])
    self.linear(self.eye[x])
    self.linear(self.eye[x.int()])
    self.linear(self.eye[x - 5])
    self.linear(torch.eye(5).double()[x].float())
    self.linear(self.eye.index_select(0, x[0]))
    self.linear(torch.index_select(self.eye, 0, x[0]))
    self.linear(torch.index_select(self.eye, dim=0, index=x[0].int()))
    self.linear(torch.index_select(input=self.eye, dim=0, index=x[0]))
    self.linear(F.embedding(x, self.eye))
    self.linear(F.embedding(input=x, weight=self.eye))
    self.linear(F.embedding(x, self.eye, padding_idx=0))
    self.linear((x[..., None] == torch.arange(5)).float())
    self.linear((x.unsqueeze(-1) == torch.arange(5)).float())
    self.linear((torch.arange(5) == x[..., None]).float())
    self.linear(torch.eq(x[..., None], torch.arange(5)).float())
    self.linear(torch.eq(input=x[..., None], other=torch.arange(5)).float())
    self.linear(x[..., None].eq(torch.arange(5)).float())
    self.linear((x[..., None] == torch.arange(5)[None, None]).float())
    self.linear((x[..., None].int() == torch.arange(5)).float())
    self.linear((x[..., None] + 3 == torch.arange(5)).float())
    self.linear((x[..., None] - 3 == torch.arange(5)).float())
    self.linear((x[..., None] + 9 == torch.arange(5)).float())
    self.linear((x.reshape(-1, 1) == torch.arange(5)).float())
    self.linear((x[..., None].float() == torch.arange(5)).float())
    self.linear((x[..., None].half() == torch.arange(5.0)).float())
    self.linear((x[..., None] == torch.arange(5.0)).float())
    self.linear((x[..., None] - 0.5 == torch.arange(5.0)).float())
    self.linear((x[..., None] / 0 == torch.arange(5)).float())
    self.linear(torch.zeros(2, 5).scatter_(1, x[:, :1], 0.5))
    self.linear(torch.zeros(2, 5).scatter_(1, x, 0.5))
    self.linear(torch.zeros(2, 5).scatter_(1, x[:1].expand(2, -1), self.table[:2, :3]))
    self.linear(torch.zeros(2, 3, 5).scatter_(-1, x[..., None], 1))
    self.linear(torch.zeros(2, 3, 5).scatter_(2, x.unsqueeze(2), 1.0))
    self.linear(torch.zeros(2, 3, 5).scatter(-1, x[..., None], 1))
    self.linear(torch.zeros(2, 3, 5).scatter_(dim=-1, index=x[..., None], value=1))
    self.linear(torch.zeros(2, 3, 5).scatter_(-1, x[..., None], torch.ones(2, 3, 1)))
    self.linear(torch.zeros((2, 5)).scatter_(1, x, 1))
    self.linear(torch.zeros(size=(2, 5), dtype=torch.float32).scatter_(1, x, 1))
    self.linear(self.table.new_zeros(2, 5).scatter_(1, x, 1))
    self.linear(torch.zeros_like(torch.ones(2, 5)).scatter_(1, x, 1))
    z = torch.zeros(2, 5); z.scatter_(1, x, 1); self.linear(z)
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0]] = 1; self.linear(z)
    self.linear(torch.zeros(2, 5, 3).scatter_(1, x[:, None], 1).mT)
    self.linear(torch.zeros(5, 2).scatter(0, x.T, 1).T)
    z = torch.zeros(2, 5); z[range(2), x[:, 0]] = 1.0; self.linear(z)
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0] - 5] = 1; self.linear(z)
    z = torch.zeros(2, 5); i = x.clone(); z.scatter_(1, i, 1); i.zero_(); self.linear(z)
    z = torch.zeros(2, 5); z.scatter_(1, x[:, :1], self.table[:2, :1]); self.linear(z)
    self.linear(torch.zeros(2, 5).index_fill_(1, x[0], 1))
    self.linear(torch.zeros(2, 5).index_fill(-1, x[1, :1], 0.5))
    self.linear(torch.full((2, 5), 0.0).scatter_(1, x[:, :1], 0.9))
    self.linear(torch.full_like(torch.ones(2, 5), 0).scatter_(1, x, 1))
    self.linear(torch.eye(320)[x][..., :5])
    self.linear(1 - (x[..., None] != torch.arange(5)).float())
    self.linear(1 - (x[..., None] + 3 != torch.arange(5)).float())
    self.linear(1 - torch.ne(torch.arange(5), x[..., None]).long().float())
    self.linear((x[..., None].expand(2, 3, 5) == torch.arange(5).expand(2, 3, 5)).float())
    self.linear(torch.arange(5).expand(2, 5).eq(x[:, :1].expand(2, 5)).float())
    self.linear(1 - torch.ones(2, 5).scatter_(1, x[:, :1], 0))
    self.linear(1 - torch.scatter(torch.ones_like(self.eye[:2]), 1, x[:, :1], 0))
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0]] = torch.ones(2); self.linear(z)
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0]] = torch.tensor(0.5); self.linear(z)
    z = torch.zeros(2, 5); z.index_put_((torch.arange(2), x[:, 0]), torch.ones(2)); self.linear(z)
    i = torch.arange(2), x[:, 0]; z = torch.zeros(2, 5).index_put_(i, x[0, 0] + 1.0); self.linear(z)
    y = F.one_hot(x, 5).float(); y[x > 1] = 0; self.linear(y)
    y = F.one_hot(x, 5).float(); y[..., 2] = 0; self.linear(y)
    y = torch.zeros(2, 5); y.scatter_(1, x, 1).index_fill_(0, x[0, 1:2], 0); self.linear(y)
    y = torch.zeros(2, 5); y.scatter_(1, x, 1).zero_().scatter_(1, x[:, :1], 1); self.linear(y)
    y = F.one_hot(x, 5).float(); y *= 3; y.div_(2); self.linear(y)
    """
)
def test_pattern_is_found(text):
    report = str(convert.report(assert_same_model(text)))
    assert "looked up" in report
    assert "every column" not in report


@forwards(
    """
    z = torch.full((2, 5), 0.1); z.scatter_(1, x[:, :1], 0.9); z * self.eye[:2]
    z = torch.zeros(2, 5); z.fill_(0.1); z.scatter_(1, x[:, :1], 0.9); (z * self.eye[:2]).sum(-1)
    z = torch.zeros(2, 5).fill_(1).fill_(0.1); z.scatter_(1, x[:, :1], 1); (z * self.eye[:2]).sum()
    z = torch.full_like(self.eye[:2], 0.1); (z.scatter(1, x[:, :1], 0.9) * self.eye[:2]).sum(-1)
    z = self.eye.new_full((2, 5), 0.1).scatter_(1, x[:, :1], 0.9); (z * self.eye[:2]).sum()
    z = torch.full(size=(2, 5), fill_value=1).scatter_(1, x[:, :1], 4); z * self.eye[:2]
    """
)
def test_label_smoothing_with_scatter_is_found(text):
    report = str(convert.report(assert_same_model(text)))
    assert "computed from the ids" in report
    assert "every column" not in report


@forwards(
    """
    self.linear(self.eye[x.float()])
    self.linear(self.eye[x + 5])
    self.linear(self.eye[x - 6])
    self.linear(self.eye[x, :])
    self.linear(self.eye[x.tolist()])
    self.linear(self.eye[x.bool()[0, 0]])
    (torch.eye(400, device="meta") * 2).shape
    (1 - torch.zeros(2, 5, device="meta").scatter_(1, x[:, :1].to("meta"), 1)).shape
    e = torch.eye(5); r = e[x[0, 0]]; r.mul_(2); self.linear(e + r)
    self.linear(self.eye.index_select(1, x[0]))
    self.linear(self.eye.index_select(0, x))
    self.linear(self.eye.index_select(0, x[0, 0]))
    self.linear(self.eye.index_select(0, x[0] - 9))
    self.linear(self.eye.index_select(0, x[0].float()))
    self.linear((2 * self.eye)[x])
    self.linear((-self.eye)[x])
    self.linear(self.eye.flip(0)[x])
    self.linear(torch.eye(6)[x][..., :5])
    e = torch.eye(5); e[3, 4] = 1; self.linear(e[x])
    e = torch.eye(5); e[1, 1] = 2; self.linear(e[x])
    e = torch.eye(5); e[3, 4] = 0.5; e[2, 2] = 0.5; self.linear(e[x])
    e = torch.eye(5); e[[0, 1]] = e[[1, 0]]; self.linear(e[x])
    e = torch.eye(5); a = e[x]; e[3, 4] = 1; self.linear(a + e[x])
    e = torch.eye(5); a = e[x]; e.data[3, 4] = 1; self.linear(a + e[x])
    e = torch.eye(5); a = e[x]; e.numpy()[3, 4] = 1; self.linear(a + e[x])
    e = self.eye.clone(); e.add_(self.calls); self.calls += 1; self.linear(e[x])
    self.eye.add_(1 if self.calls else 0); self.calls += 1; self.linear(self.eye[x])
    torch.eye(5, requires_grad=True)[x]
    torch.eye(5, dtype=torch.bool)[x]
    torch.eye(5, dtype=torch.int64)[x]
    torch.eye(5, 4)[x.clamp(max=3)]
    torch.eye(1)[x * 0]
    torch.eye(5)[0]
    torch.eye(5)[x[0], x[0]]
    self.linear(F.embedding(x - 9, self.eye))
    self.linear(F.embedding(x + 9, self.eye))
    self.linear(F.embedding(x.float(), self.eye))
    self.linear(F.embedding(x, self.eye.clone(), max_norm=0.5))
    self.linear(F.embedding(x, self.eye, scale_grad_by_freq=True))
    self.linear((x[..., None] == torch.arange(1, 6)).float())
    self.linear((x[..., None] == torch.tensor([0, 1, 3, 4, 5])).float())
    self.linear((x[..., None] == torch.tensor([0, 1, 2, 2, 4])).float())
    self.linear((x[..., None] == torch.tensor([0, 2, 1, 3, 4])).float())
    self.linear((x[..., None].float() == torch.arange(5)).float())
    self.linear((x[..., None] == torch.arange(5.0)).float())
    self.linear((x[..., None] != torch.arange(5)).float())
    self.linear((x[..., None] >= torch.arange(5)).float())
    self.linear((x[:1, :1].expand(2, 5) == torch.arange(5).expand(2, 5)).float())
    self.linear((x[0, 0].expand(2, 5) == torch.arange(5).expand(2, 5)).float())
    self.linear((x[..., None] != torch.arange(1, 6)).float())
    (x[..., None] / 0 != torch.arange(5)).sum(1)
    torch.ne(x[..., None], 2), x != x, x[0, 0] != x[0, 1]
    self.linear((1 - torch.eye(320))[x][..., :5])
    torch.eye(320, 321)[x], torch.eye(320, dtype=torch.int64)[x], torch.eye(320.0)
    e = torch.eye(320); e[1, 3] = 4; e[x]
    e = torch.eye(320); y = e[x]; e.mul_(2); y + e[x]
    e = torch.eye(320, requires_grad=True); e[x]
    (torch.eye(320) + 1).sum(), torch.eye(320).inverse()[x], torch.eye(320).diagonal()
    z = torch.zeros(2, 5); z.index_put_((x[0, 1:], x[:, 0]), torch.ones(2)); z
    z = torch.zeros(2, 5); z.index_put_((torch.arange(2), x[:, 0]), torch.ones(2), True); z
    z = torch.zeros(2, 5); z.index_put_((torch.arange(2), x[:, 0]), torch.ones(2).double()); z
    z = torch.zeros(2, 5); z.index_put_((torch.arange(2), x[:, 0] + 9), torch.ones(2)); z
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0]] = torch.ones(2).double(); z
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0]] = self.table[:2, 0]; z * 2
    z = torch.zeros(2, 5).long(); z[torch.arange(2), x[:, 0]] = 1.5; z
    z = torch.zeros(2, 5).bool(); z.index_put_((torch.arange(2), x[:, 0]), torch.tensor(True)); z
    y = F.one_hot(x, 5).float(); y[x > 1] = 3; y
    y = F.one_hot(x, 5).float(); y[x[0]] = 0; y
    y = F.one_hot(x, 5).float(); y[x[0] * 0 - 1] = 0; y
    y = F.one_hot(x, 5).float(); y[0] = 0; y
    y = F.one_hot(x, 5).float(); y[0, 1] = 0; y
    y = F.one_hot(x, 5).float(); y[0, 1, 2] = 0; y
    y = F.one_hot(x, 5).float(); y[..., 2] = 1; y
    y = F.one_hot(x, 5).float(); y[..., 7] = 0; y
    y = F.one_hot(x, 5).float(); y[:, 1] = 0; y
    y = F.one_hot(x, 5).float(); z = y[0]; y[x > 1] = 0; z
    y = F.one_hot(x, 5).float(); y[y > 0] = 7; y
    y = F.one_hot(x, 5).bool(); y[x > 1] = 0; y.masked_fill_(x[..., None] > 2, False)
    y = F.one_hot(x, 5).float() * 0.9 + 0.02; y[..., 0] = 0; y
    y = F.one_hot(x, 5).float() * 0.9 + 0.02; y[x > 1] = 0; y.fill_(2)
    y = F.one_hot(x, 5).float(); y.mul_(self.table.T[:2, None, :1]); y.clamp_(max=0.5); y.exp()
    y = F.one_hot(x, 5).float(); y /= 2; y += y; y -= 0.5 * y; y.masked_fill_(x[..., None] > 1, 2)
    y = F.one_hot(x, 5); y &= x[..., None] > 1; y
    y = F.one_hot(x, 5); y.mul_(0.5); y
    (x[..., None] == torch.arange(5)) & (x[..., None] > 1)
    (x[..., None] == torch.arange(5)).sum(1)
    (x[..., None] == torch.arange(5)).any(-1)
    (x[..., None] + 3 == torch.arange(5)).float().argmax(-1)
    (x[..., None] + 3 == torch.arange(5)).float().sum(-1)
    ~(x[..., None] == torch.arange(5))
    torch.where(x[..., None] == torch.arange(5), 1.0, 2.0)
    x == x
    x[0] == torch.arange(3)
    x[..., None] == torch.arange(1)
    x[..., None] == x[0]
    self.linear(torch.zeros(2, 5).scatter_(1, x, 2))
    z = torch.zeros(2, 5); z[torch.arange(2), x[:, 0]] = 2; self.linear(z)
    z = torch.zeros(2, 5); z[torch.arange(2).flip(0), x[:, 0]] = 1; self.linear(z)
    z = torch.zeros(2, 5); z[torch.arange(1), x[:, 0]] = 1; self.linear(z)
    z = torch.zeros(2, 5); z[torch.arange(2), 3] = 1; self.linear(z)
    z = torch.zeros(2, 5); z[:, torch.arange(2)] = 1; self.linear(z)
    z = torch.zeros(2, 5); i = torch.arange(2); z[i, x[:, 0]] = 1; z[i, x[:, 1]] = 1; self.linear(z)
    self.linear(torch.zeros(2, 5).scatter_(1, x, 0))
    self.linear(torch.zeros(2, 5).scatter_(1, x, 1.5))
    self.linear(torch.zeros(2, 5).scatter_(1, x, float("nan")))
    self.linear(torch.zeros(2, 5).scatter_(1, x, torch.arange(6.0).view(2, 3)))
    self.linear(torch.zeros(2, 5).scatter_(1, x, 1, reduce="add"))
    self.linear(torch.zeros(2, 5).scatter_add_(1, x, torch.ones(2, 3)))
    self.linear(torch.zeros(2, 5).scatter_add_(1, x[:, [0, 0]], self.table[:2, :2]))
    self.linear(torch.zeros(2, 5).scatter_add_(1, x[:, [0, 0, 1]], torch.rand(2, 3)))
    self.linear(torch.zeros(2, 5).scatter_add_(1, x, torch.ones(2, 4)))
    self.linear(torch.zeros(2, 5).scatter_add_(1, x, torch.ones(2, 3).double()))
    self.linear(torch.zeros(2, 5).scatter_add_(0, x.clamp(max=1), torch.rand(2, 3)))
    torch.zeros(5, 3).scatter_add_(0, x, torch.rand(2, 3))
    z = torch.zeros(2, 5).scatter_add_(1, x, torch.ones(2, 3)); z.scatter_add_(1, x, z[:, :3]); z
    torch.full((2, 5), 0.5).scatter_add_(1, x[:, :1], torch.rand(2, 1))
    torch.full((2, 5), 0.5).scatter_(1, x, 0.25)
    torch.full((2, 5), -torch.inf).scatter_(1, x, self.table[:2, :3]).softmax(-1)
    torch.full((2, 5), -torch.inf).scatter_(1, x[:, :1], self.table[:2, :1]).softmax(-1)
    torch.full((2, 5), 1).scatter_(1, x[:, :1], 2) / 3
    torch.full((2, 5), True).scatter_(1, x[:, :1], False)
    torch.full((2, 5), 7, dtype=torch.uint8).scatter_(1, x[:, :1], 2)
    torch.full((2, 5), 0.1, dtype=torch.complex64).scatter_(1, x[:, :1], 0.9) * 2
    torch.full((2, 5), 0.1, dtype=torch.bfloat16).scatter_(1, x[:, :1], 0.9) * 3
    torch.full((2, 5), 300, dtype=torch.uint8).scatter_(1, x[:, :1], 2)
    torch.full((2, 5), torch.tensor(0.5)).scatter_(1, x[:, :1], 2)
    z = torch.full((2, 5), 0.5); y = z[0]; z.scatter_(1, x[:, :1], 1); y
    z = torch.zeros(2, 5); y = z[0]; z.fill_(0.5); z.scatter_(1, x[:, :1], 1); y
    z = torch.zeros(2, 5); z.scatter_(1, x[:, :1], 1); z.fill_(0.5); z
    z = torch.zeros(2, 5); z.fill_(torch.tensor(0.5)); z.scatter_(1, x[:, :1], 1); z
    self.linear(torch.zeros(2, 5).index_fill_(0, x[0, :1] * 0, 1))
    self.linear(torch.zeros(2, 5).index_fill_(1, x[0] + 5, 1))
    self.linear(torch.zeros(2, 5).index_fill_(1, x[0] - 5, 1))
    self.linear(torch.zeros(2, 5).index_fill_(1, x[0, 0], 1))
    self.linear(torch.zeros(2, 5).index_fill_(1, x[0], self.table[0, 0].detach()))
    self.linear(torch.zeros(2, 5).index_fill_(1, x[0, [0, 0]], 0.5))
    torch.ones(2, 5).scatter_(1, x, 1).index_fill_(1, x[0], 3)
    self.linear(torch.zeros(2, 3, 5).scatter_(1, x.clamp(max=2)[..., None], 1))
    self.linear(torch.zeros(3, 5).scatter_(1, x, 1))
    self.linear(torch.zeros(2, 5).scatter_(1, x + 5, 1))
    self.linear(torch.zeros(2, 5).scatter_(1, x - 5, 1))
    self.linear(torch.zeros(2, 5).scatter_(1, x.float(), 1))
    self.linear(torch.ones(2, 5).scatter_(1, x, 1))
    self.linear(torch.zeros(2, 5).scatter_(1, x, 1).scatter_(1, (x + 1) % 5, 1))
    z = torch.zeros(2, 5); z.scatter_(1, x, 1); z[0, 0] = 7; self.linear(z)
    z = torch.zeros(2, 5); y = z[0]; z.scatter_(1, x, 1); self.linear(y)
    z = torch.zeros(2, 5); y = z.detach(); z.scatter_(1, x, 1); self.linear(y)
    z = torch.zeros(2, 5); y = z.data; z.scatter_(1, x, 1); self.linear(y)
    z = torch.zeros(2, 5); y = z.numpy(); z.scatter_(1, x, 1); self.linear(torch.from_numpy(y))
    z = torch.zeros(2, 5); y = z.view(10); z.scatter_(1, x, 1); self.linear(y.view(2, 5))
    z = torch.zeros(2, 5); y = z.clone(); z.scatter_(1, x, 1); y
    s = torch.ones(2, 1); y = torch.zeros(2, 5); y.scatter_(1, x[:, :1], s); s.zero_(); y + 0
    s = torch.ones(2, 1); y = torch.zeros(2, 5).scatter(1, x[:, :1], s); s.zero_(); y @ self.table
    z = torch.zeros(2, 5); z.scatter_; z.requires_grad, z.is_leaf, z.stride(), z.shape
    z = torch.zeros(2, 5); z.scatter_; z += 1; self.linear(z)
    z = torch.zeros(2, 5); z.scatter_; z @ self.table
    z = torch.zeros(2, 5); z.scatter_; z.sum(0) @ self.table
    z = torch.zeros(2, 5); z.scatter_; self.linear(z)
    z = torch.zeros(2, 5); z.scatter_; torch.cat([z, self.eye[x[:, 0]]]) @ self.table
    torch.zeros(2, 5, dtype=torch.bool).scatter_(1, x, True)
    torch.zeros(2, 5, dtype=torch.int64).scatter_(1, x, 1)
    torch.zeros(2, 5, requires_grad=True).scatter(1, x, 1)
    torch.zeros(2, 0, 5).scatter_(2, x[:, :0, None], 1)
    y = torch.zeros(3, 5); torch.index_select(self.eye, 0, x[0], out=y); self.linear(y)
    y = x[:, :0] > 0; torch.eq(x[:, :1], torch.arange(5), out=y); self.linear(y.float())
    y = x[:, :0] > 0; torch.ne(x[:, :1], torch.arange(5), out=y); self.linear(y.float())
    self.linear(torch.ne(input=x[:, :1], other=torch.arange(5)).float())
    F.one_hot(x.int(), 5)
    F.one_hot(x.float(), 5)
    F.one_hot(x, 3)
    F.one_hot(x - 3, 5)
    F.one_hot(x, 0)
    F.one_hot(x, -2)
    F.one_hot(x[:0])
    F.one_hot(x[:0], 5)
    F.one_hot(x[:0], 0)
    F.one_hot(x, 5.0)
    F.one_hot(x.tolist(), 5)
    F.one_hot(x > 1, 2)
    F.one_hot(x, 5)
    F.one_hot(x, 5).float()[0]
    F.one_hot(x, 5).shape
    [F.one_hot(x, 5), (F.one_hot(x, 5).float(),)]
    F.one_hot(x, 5).float().softmax(-1)
    F.one_hot(x, 5).float().mul_(3)
    F.one_hot(x, 5).float().requires_grad_()
    isinstance(F.one_hot(x, 5), torch.LongTensor)
    nn.Flatten()(F.one_hot(x, 5).float())
    self.linear(F.one_hot(x, 5).float()) if F.one_hot(x, 5).sum() > 3 else None
    self.linear(F.one_hot(x, 5).float()) if F.one_hot(x, 5)[0, 0, 1] else None
    """
)
def test_other_code_gives_the_same_results(text):
    assert_same_model(text)


@pytest.mark.parametrize(
    "text",
    [
        "self.linear((2 * self.eye)[x])",
        "self.linear((x[..., None] == torch.tensor([0, 1, 2, 2, 4])).float())",
        "self.linear((x[..., None].float() == torch.arange(1, 6)).float())",
        "self.linear(self.eye[x, :])",
        "F.one_hot(x.int(), 5)",
    ],
)
def test_similar_code_does_not_appear_in_the_report(text):
    report = str(convert.report(assert_same_model(text)))
    assert report == NOTHING_FOUND


def test_error_for_a_missing_class_names_the_line():
    model = convert(with_forward("F.one_hot(x, 3)")())
    with pytest.raises(RuntimeError, match=r"ids\[0, 2\] = 4, but the one-hot has 3 classes") as e:
        model(IDS)
    assert isinstance(e.value, HotrowError)
    assert "<string>:2" in str(e.value)
    assert not _get_current_function_mode_stack()


def test_l1_loss_keeps_its_weight():
    rows = "self.linear(self.eye[x])"
    assert_same_model(f"F.l1_loss({rows}, {rows} * 2, weight={rows} * 3)")
    assert_same_model("F.l1_loss(F.one_hot(x, 5).float(), self.eye[x] * 2, weight=self.eye[x])")


class Sampler(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.codes = nn.Linear(3, 5), nn.Parameter(torch.randn(5, 4))

    def forward(self, x):
        return F.gumbel_softmax(self.linear(x), hard=True) @ self.codes


def test_hard_gumbel_softmax_is_a_lookup():
    model = Sampler().double()
    other = convert(copy.deepcopy(model))
    outputs = []
    for each in (model, other):
        torch.manual_seed(1)
        outputs.append(each(torch.ones(6, 3, dtype=torch.float64)))
        outputs[-1].square().sum().backward()
    torch.testing.assert_close(outputs[1], outputs[0], rtol=1e-12, atol=1e-12)
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad, rtol=1e-12, atol=1e-12)
    (finding,) = convert.report(other).findings
    assert finding.how == "matmul(5, 4) looked up"


def test_hard_gumbel_softmax_has_a_tangent():
    model, found = Sampler().double(), []
    primal, direction = torch.randn(2, 6, 3, dtype=torch.float64)
    for each in model, convert(copy.deepcopy(model)):
        torch.manual_seed(1)
        with forward_ad.dual_level():
            result = each(forward_ad.make_dual(primal, direction))
            found.append(forward_ad.unpack_dual(result).tangent)
        torch.manual_seed(1)
        found.append(torch.func.jvp(each, (primal,), (direction,))[1])
    for tangent in found[1:]:
        torch.testing.assert_close(tangent, found[0], rtol=1e-12, atol=1e-12)


# --- The report ----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "ends"),
    [
        ("self.linear(F.one_hot(x, 5).float())", "linear(5, 4) looked up"),
        ("F.one_hot(x, 5).float() @ self.table", "matmul(5, 4) looked up"),
        ("F.one_hot(x, 5).argmax(-1)", "  not used"),
        ("F.one_hot(x, 5).sum()", "  sum computed from the ids"),
        ("(F.one_hot(x, 5) * self.eye[0]).sum(-1)", "  sum computed from the ids"),
        (
            "F.one_hot(x, 5).float().flatten(0, 1).T @ self.table[x].flatten(0, 1)",
            "  sum of rows by id (matmul) computed from the ids",
        ),
        (
            "F.one_hot(x, 5)",
            "  is returned as a dense one-hot: convert the code that uses it too",
        ),
        ("F.one_hot(x, 5).amax()", "  falls back to a dense one-hot: amax needs every column"),
        (
            "y = F.one_hot(x, 5); y.cummax(0)[0] + y.cumprod(0)",
            "  falls back to a dense one-hot: cummax, cumprod need every column",
        ),
        (
            "y = F.one_hot(x, 5).float(); self.linear(y) + y.amax()",
            "linear(5, 4) looked up; falls back to a dense one-hot: amax needs every column",
        ),
    ],
)
def test_report_gives_the_outcome_of_each_one_hot(text, ends):
    model = convert(with_forward(text)())
    assert str(convert.report(model)) == NOTHING_FOUND
    for _ in range(2):
        model(IDS)
    (finding,) = convert.report(model).findings
    assert str(finding).startswith("(the model)  ")
    assert "one_hot, 5 columns, <string>:" in str(finding)
    assert str(finding).endswith(ends)
    assert finding.converted == ("looked up" in ends or "from the ids" in ends)


def test_report_names_the_module():
    model = nn.Sequential(OrderedDict(first=nn.Identity(), second=Outer()))
    convert(model)(IDS)
    first = str(convert.report(model)).splitlines()[0]
    assert first.startswith("second  one_hot, 5 columns, ")
    assert "test_finder.py:" in first


# --- Models of several modules -------------------------------------------------------------


class Inner(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)

    def forward(self, x):
        return self.linear(x)


class Outer(nn.Module):
    def __init__(self):
        super().__init__()
        self.inner = Inner()
        self.table = nn.Parameter(torch.randn(5, 4))
        self.kept = []

    def forward(self, x):
        return self.inner(F.one_hot(x, 5).float())

    def again(self, x, times=2):
        return self(x) if not times else self.again(x, times - 1)

    def product(self, x):
        return F.one_hot(x, 5).float() @ self.table

    @property
    def own(self):
        return F.one_hot(IDS, 5).float() @ self.table

    @staticmethod
    def plainly(x):
        return F.one_hot(x, 5)

    @classmethod
    def of_class(cls, x):
        return F.one_hot(x, 5)

    def rows(self, x):
        for row in x:
            yield F.one_hot(row, 5).float() @ self.table

    def list(self):
        return self.kept

    def fails(self, x):
        F.one_hot(x, 5)
        raise KeyError("on purpose")

    def extra_repr(self):
        return "with extras"


Pair = namedtuple("Pair", "one other")


def both():
    model = Outer()
    return model, convert(copy.deepcopy(model))


def assert_same(model, other):
    assert_alike(other(IDS), model(IDS))


def test_every_method_gives_the_same_results():
    model, other = both()
    assert_same(model, other)
    for name in ("again", "product", "plainly", "of_class"):
        assert_alike(getattr(other, name)(IDS), getattr(model, name)(IDS))
    assert_alike(list(other.rows(IDS)), list(model.rows(IDS)))
    assert_alike(other.own, model.own)
    assert repr(other) == repr(model)


def test_converted_module_is_an_instance_of_its_class():
    model, other = both()
    assert isinstance(other, Outer)
    assert (type(other).__name__, type(other).__module__) == ("Outer", Outer.__module__)
    assert type(other).__doc__ == Outer.__doc__
    assert [type(m).__name__ for m in other.modules()] == ["Outer", "Inner", "Linear"]
    assert list(other.state_dict()) == list(model.state_dict())


def test_wide_one_hot_is_looked_up_not_multiplied():
    class Wide(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.Linear(100_000, 1)

        def forward(self, x):
            return self.linear(F.one_hot(x, 100_000).float())

    model = convert(Wide())
    with LargestAllocation() as largest:
        model(torch.zeros(64, dtype=torch.int64))
    assert largest.size <= 2 * model.linear.weight.nbytes


def test_output_without_one_hots_is_the_same_object():
    """A list, dict or torch.Size without a one-hot is returned unchanged."""
    other = both()[1]
    assert other.list() is other.kept
    for value in ([1], {"b": 1, "a": 2}, OrderedDict(b=1, a=2), torch.Size([2]), Pair(1, 2)):

        class Returns(nn.Module):
            def forward(self, x, value=value):
                return value

        assert convert(Returns())(IDS) is value


@pytest.mark.parametrize(
    "wrap",
    [
        lambda x: (x, x),
        lambda x: [x],
        lambda x: {"b": x, "a": 1},
        lambda x: OrderedDict(b=x, a=1),
        lambda x: Pair(x, 1),
        lambda x: {1: [{"x": (x,)}]},
        lambda x: Pair(x.shape, x),
    ],
    ids=["tuple", "list", "dict", "ordered", "named", "nested", "size"],
)
def test_returned_one_hots_are_plain_tensors(wrap):
    class Returns(nn.Module):
        def forward(self, x):
            return wrap(F.one_hot(x, 5))

    found, expected = convert(Returns())(IDS), Returns()(IDS)
    assert type(found) is type(expected)
    leaves, shape = torch.utils._pytree.tree_flatten(found)
    others, other_shape = torch.utils._pytree.tree_flatten(expected)
    assert shape == other_shape
    for one, other in zip(leaves, others, strict=True):
        assert type(one) is type(other)
        assert torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def test_one_hot_stored_on_the_model():
    class Keeps(Outer):
        def __init__(self):
            super().__init__()
            self.register_buffer("last", torch.zeros(2, 3, 5))

        def forward(self, x):
            self.last = F.one_hot(x, 5).float()
            self.note = F.one_hot(x, 5)
            return x

    model, other = Keeps(), convert(Keeps())
    model(IDS), other(IDS)
    assert_alike(other.note, model.note)
    state = other.state_dict()
    assert_alike(state["last"], model.state_dict()["last"])
    model.load_state_dict(state)
    copy.deepcopy(other)
    other.double()
    assert other.last.dtype == torch.float64


def test_one_hot_passed_as_an_argument():
    grads = []
    for model, make in zip(both(), (F.one_hot, one_hot), strict=True):
        x = make(IDS, 5).float().requires_grad_()
        model.inner(x).sum().backward()
        grads.append(x.grad)
    torch.testing.assert_close(grads[1], grads[0])


def test_exception_turns_the_mode_off():
    other = both()[1]
    for _ in range(2):
        with pytest.raises(KeyError, match="on purpose"):
            other.fails(IDS)
        assert not _get_current_function_mode_stack()
        assert type(F.one_hot(IDS, 5)) is torch.Tensor
        other(IDS)


def test_code_outside_the_model_is_unaffected():
    other = both()[1]
    other(IDS)
    assert type(F.one_hot(IDS, 5)) is torch.Tensor
    assert type(torch.eye(5)[IDS]) is torch.Tensor
    assert type(Outer().plainly(IDS)) is torch.Tensor


@pytest.mark.filterwarnings("ignore:Full backward hook is firing")
def test_hooks_get_tensors_that_behave_like_dense_ones():
    seen = []
    for model in both():
        model.inner.register_forward_pre_hook(lambda module, given: (given[0] * 2,))
        model.inner.register_forward_hook(
            lambda module, given, out: seen.append(
                (given[0].sum().item(), given[0].shape, given[0].dtype, given[0].mean().item())
            )
        )
        model.inner.linear.register_forward_hook(
            lambda module, given, out: seen.append((given[0].norm().item(), out.sum().item()))
        )
        model.inner.linear.register_full_backward_hook(
            lambda module, into, out: seen.append((into[0] is None, out[0].shape))
        )
        model(IDS).sum().backward()
    assert seen[:3] == seen[3:]


def test_hook_that_stores_its_input():
    kept = []
    for model in both():
        model.inner.register_forward_hook(lambda module, given, out: kept.append(given[0]))
        model(IDS)
    assert_alike(kept[1], kept[0])
    assert torch.equal(torch.stack(kept[1:]).mean(0), kept[0])


def test_concurrent_threads_give_the_same_results():
    model, other = both()
    expected, results = model(IDS), []

    def work():
        for _ in range(20):
            same = torch.equal(other(IDS), expected)
            results.append(same and type(F.one_hot(IDS, 5)) is torch.Tensor)

    workers = [threading.Thread(target=work) for _ in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert results == [True] * 80


# --- Saved, copied and converted again -----------------------------------------------------


@pytest.mark.parametrize("way", ["deepcopy", "pickle", "torch.save", "copy"])
def test_copy_is_converted(way):
    model, other = both()
    other(IDS)
    if way == "torch.save":
        buffer = io.BytesIO()
        torch.save(other, buffer)
        buffer.seek(0)
        again = torch.load(buffer, weights_only=False)
    else:
        ways = {
            "deepcopy": copy.deepcopy,
            "copy": copy.copy,
            "pickle": lambda x: pickle.loads(pickle.dumps(x)),
        }
        again = ways[way](other)
    assert type(again) is type(other)
    assert_same(model, again)
    assert "looked up" in str(convert.report(again))
    if way != "copy":
        assert again.table is not other.table


def test_state_dict_loads_in_both_directions():
    model, other = Outer(), convert(Outer())
    other.load_state_dict(model.state_dict())
    assert_same(model, other)
    fresh = Outer()
    fresh.load_state_dict(other.state_dict())
    assert_same(fresh, other)
    assert type(other.state_dict()["table"]) is torch.Tensor


def test_converting_again_changes_nothing():
    model, other = both()
    kind = type(other)
    assert convert(other) is other
    assert type(other) is kind
    assert_same(model, other)
    part = Outer()
    convert(part.inner)
    assert_same(part, convert(copy.deepcopy(part)))


def test_train_and_eval_mode():
    class Drops(Outer):
        def __init__(self):
            super().__init__()
            self.dropout = nn.Dropout(0.5)

        def forward(self, x):
            return self.inner(self.dropout(F.one_hot(x, 5).float()))

    model = Drops()
    other = convert(copy.deepcopy(model))
    for train in (True, False):
        outputs = []
        for each in (model, other):
            each.train(train)
            assert each.inner.training is train
            torch.manual_seed(0)
            outputs.append(each(IDS))
        assert_alike(outputs[1], outputs[0])


def test_inherited_forward_methods():
    class Below(Outer):
        def forward(self, x):
            return super().forward(x) + super().product(x)

    class Chain(nn.Sequential):
        def forward(self, x):
            return super().forward(F.one_hot(x, 5).float())

    class Layer(nn.Linear):
        def forward(self, x):
            return super().forward(F.one_hot(x, 5).float())

    for model in (Below(), Chain(nn.Linear(5, 4), nn.ReLU()), Layer(5, 4)):
        other = convert(copy.deepcopy(model))
        assert_same(model, other)
    assert len(convert(Chain(nn.Linear(5, 4), nn.ReLU()))[:1]) == 1


def test_classes_with_init_subclass():
    class Plugin(nn.Module):
        known = []  # noqa: RUF012

        def __init_subclass__(cls, *, name, **keywords):
            super().__init_subclass__(**keywords)
            Plugin.known.append(name)

    class Mine(Plugin, name="mine"):
        def forward(self, x):
            return F.one_hot(x, 5)

    assert_alike(convert(Mine())(IDS), F.one_hot(IDS, 5))
    assert Plugin.known == ["mine"]


def test_code_that_compares_its_exact_class():
    class Asks(nn.Module):
        def __init__(self):
            super().__init__()
            self.parts = nn.ModuleList([Inner()])

        def forward(self, x):
            return isinstance(self, Asks), [isinstance(part, Inner) for part in self.parts]

    assert convert(Asks())(IDS) == (True, [True])


def test_forward_replaced_on_the_object_or_the_class():
    model = Outer()
    model.forward = lambda x: F.one_hot(x, 5).float()
    assert type(convert(model)(IDS)) is torch.Tensor

    class Changes(nn.Module):
        def forward(self, x):
            return x

    other = convert(Changes())
    Changes.forward = lambda self, x: x + 1  # like a monkeypatch or a rerun notebook cell
    assert torch.equal(other(IDS), IDS + 1)


def test_parametrizations():
    class Normed(nn.Module):
        def __init__(self):
            super().__init__()
            self.linear = nn.utils.parametrizations.weight_norm(nn.Linear(5, 4))

        def forward(self, x):
            return self.linear(F.one_hot(x, 5).float())

    model = Normed()
    other = convert(copy.deepcopy(model))
    assert_same(model, other)
    for each in (model, other):
        each(IDS).sum().backward()
    for one, two in zip(model.parameters(), other.parameters(), strict=True):
        torch.testing.assert_close(two.grad, one.grad)


# --- Training and other torch features -----------------------------------------------------


def test_training_matches_the_unconverted_model():
    model, other = both()
    start = copy.deepcopy(model.state_dict())
    for each, make in ((model, torch.optim.AdamW), (other, hotrow.optim.AdamW)):
        optimizer = make(each.parameters(), lr=0.1)
        for at in range(6):
            optimizer.zero_grad()
            (each(IDS[:, at % 3]) + each.product(IDS[:, at % 2])).pow(2).sum().backward()
            optimizer.step()
    for name, value in model.state_dict().items():
        assert not torch.equal(value, start[name])
        torch.testing.assert_close(other.state_dict()[name], value)
    assert isinstance(other.inner.linear.weight, Table)
    assert isinstance(other.table, Table)


@pytest.mark.parametrize("reentrant", [False, True])
@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad")
def test_activation_checkpointing(reentrant):
    class Recomputes(Outer):
        def forward(self, x):
            return checkpoint(self.inner, F.one_hot(x, 5).float(), use_reentrant=reentrant)

    model = Recomputes()
    other = convert(copy.deepcopy(model))
    outputs = [each(IDS) for each in (model, other)]
    assert_alike(outputs[1], outputs[0])
    if not reentrant:
        for output in outputs:
            output.sum().backward()
        weights = [each.inner.linear.weight.grad for each in (model, other)]
        torch.testing.assert_close(weights[1].to_dense(), weights[0])


def test_functional_call_and_function_transforms():
    model, other = both()
    parameters = {name: torch.randn_like(p) for name, p in model.named_parameters()}

    def loss(each):
        return lambda p, x: torch.func.functional_call(each, p, (x,)).pow(2).sum()

    for transform in (
        lambda f: f(parameters, IDS),
        lambda f: torch.func.grad(f)(parameters, IDS),
        lambda f: torch.func.jacrev(f)(parameters, IDS),
    ):
        expected = transform(loss(model))
        torch.testing.assert_close(transform(loss(other)), expected)


@exhaustive
def test_vmap_inside_the_model():
    """This test runs in a subprocess, because the code once crashed the interpreter."""
    import subprocess
    import sys

    code = """
import copy, torch, torch.nn.functional as F
from torch import nn
from hotrow import convert
class Maps(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(5, 4)
    def forward(self, x):
        return self.linear(torch.vmap(lambda i: F.one_hot(i, 5).float())(x))
model, x = Maps(), torch.tensor([[1, 0, 4], [2, 2, 3]])
assert torch.equal(convert(copy.deepcopy(model))(x), model(x))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-500:]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["trace", "export"])
def test_tracing_and_export(way):
    model, other = both()
    other_ids = torch.tensor([[0, 0, 1], [4, 3, 1]])
    if way == "trace":
        traced = torch.jit.trace(other, (IDS,))
    else:
        traced = torch.export.export(other, (IDS,)).module()
    torch.testing.assert_close(traced(other_ids), model(other_ids))


class DependsOnIds(nn.Module):
    """Operations for which hotrow's own computation depends on properties of the ids."""

    def forward(self, ids, q):
        valid = ids.clamp(min=0)
        count = F.one_hot(valid, 30).sum(1)
        return (
            count.clamp(max=1),
            F.binary_cross_entropy_with_logits(q, F.one_hot(valid, 30).amax(1).float()),
            torch.where(F.one_hot(valid, 30).bool().any(1), q / 2, q).sum(1),
            torch.zeros(2, 30).scatter_(1, valid, 1.0) @ q.T,
            (ids[..., None] == torch.arange(30)).float().sum(1) @ q.T,
            torch.eye(30)[valid].sum(1),
        )


@pytest.mark.filterwarnings("ignore::torch.jit.TracerWarning")
def test_trace_is_correct_for_ids_that_differ_from_the_example():
    model = convert(DependsOnIds(), min_entries=0)
    q = torch.randint(-3, 4, (2, 30)).float()
    traced = torch.jit.trace(model, (torch.arange(8).reshape(2, 4), q))
    for ids in torch.tensor([[5, 5, 5, 1], [9, 2, 2, 9]]), torch.tensor([[-1, 3, 3, 0]] * 2):
        for ours, theirs in zip(traced(ids, q), DependsOnIds()(ids, q), strict=True):
            assert torch.equal(ours, theirs)


def test_trace_inside_a_converted_method():
    class Traces(nn.Module):
        def forward(self, ids):
            def total(ids):
                return F.one_hot(ids, 30).sum(1).clamp(max=1)

            return torch.jit.trace(total, torch.arange(8).reshape(2, 4))(ids)

    ids = torch.tensor([[5, 5, 5, 1], [9, 2, 2, 9]])
    assert torch.equal(convert(Traces(), min_entries=0)(ids), Traces()(ids))


def test_other_modes_and_devices():
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.utils.flop_counter import FlopCounterMode

    other = both()[1]
    expected = other(IDS)
    with torch.device("cpu"):
        assert_alike(other(IDS), expected)
    with FlopCounterMode(display=False):
        assert_alike(other(IDS), expected)
    with torch.inference_mode():
        assert torch.equal(other(IDS), expected)
    with torch.autocast("cpu", torch.bfloat16):
        assert_alike(other(IDS), both_in_bfloat16(other))
    with FakeTensorMode(allow_non_fake_inputs=True):
        assert other(torch.zeros(2, 3, dtype=torch.int64)).shape == (2, 3, 4)
    assert convert(Outer().to("meta"))(IDS.to("meta")).shape == (2, 3, 4)


def both_in_bfloat16(converted):
    plainly = Outer()
    plainly.load_state_dict(converted.state_dict())
    return plainly(IDS)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16, torch.float16], ids=str)
def test_other_dtypes(dtype):
    class Follows(Outer):
        def forward(self, x):
            return self.inner(F.one_hot(x, 5).to(self.table.dtype))

    model = Follows().to(dtype)
    other = convert(copy.deepcopy(model))
    assert_same_bits(other(IDS), model(IDS))


class Fields(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(10, 4)

    def forward(self, x, y, columns):
        hot = F.one_hot(x, 5).float()
        return self.linear(torch.cat([hot, F.one_hot(y, 3).float(), columns], -1))


@exhaustive
@pytest.mark.parametrize("dynamic", grid([None, True], bool), ids=["static", "dynamic"])
def test_torch_compile_gives_the_same_results(dynamic):
    model = Fields()
    other = convert(copy.deepcopy(model))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    for size in (2, 5, 7):
        x, y = torch.randint(0, 5, (size, 3)), torch.randint(0, 3, (size, 3))
        columns = torch.randn(size, 3, 2)
        outputs, grads = [], []
        for run, parameters in ((model, model), (compiled, other)):
            parameters.zero_grad()
            leaf = columns.clone().requires_grad_()
            outputs.append(run(x, y, leaf))
            outputs[-1].pow(2).sum().backward()
            grads.append([leaf.grad, *(p.grad for p in parameters.parameters())])
        assert type(outputs[1]) is torch.Tensor
        torch.testing.assert_close(outputs[1], outputs[0])
        torch.testing.assert_close(grads[1], grads[0])
    with pytest.raises(Exception, match="5"):
        compiled(x + 5, y, columns)


@pytest.mark.parametrize(
    "text",
    grid(
        [
            "F.one_hot(x, 5)",
            "F.one_hot(x, 5).float().exp()",
            "F.pad(F.one_hot(x, 5).float(), (0, 5))[..., :5]",
            "F.one_hot(x, 5).float() @ self.table",
            "F.one_hot(x, 5).float().sum(1) @ self.table",
            "(F.one_hot(x, 5) * self.table[:1, :1]) @ self.table",
            "self.linear(F.one_hot(x, 5).float().flatten(0, 1))",
            "self.linear(self.eye[x])",
            "self.linear((x[..., None] == torch.arange(5)).float())",
            "self.linear(torch.zeros(2, 3, 5).scatter_(-1, x[..., None], 1))",
            "F.one_hot(x, 5).argmax(-1)",
        ],
        lambda text: "@" in text or "eye" in text,
    ),
)
def test_torch_compile_with_each_pattern(text):
    model = with_forward(text)()
    other = convert(copy.deepcopy(model))
    compiled = torch.compile(other, fullgraph=True, backend="aot_eager")
    outputs = [each(IDS) for each in (model, compiled)]
    torch.testing.assert_close(outputs[1], outputs[0])
    assert type(outputs[1]) is torch.Tensor
    if outputs[0].requires_grad:
        for output in outputs:
            output.pow(2).sum().backward()
        for one, two in zip(model.parameters(), other.parameters(), strict=True):
            assert (one.grad is None) == (two.grad is None)
            if one.grad is not None:
                torch.testing.assert_close(two.grad.to_dense(), one.grad)


@pytest.mark.parametrize(
    "text",
    grid(
        [
            "self.linear(y)",
            "(y * 2) @ self.table",
            "(y * self.table[:1, :1]) @ self.table",
            "y.view(2, 3, 5).sum(1) @ self.table",
            "y.mean(0) @ self.table",
            "y.double().float() @ self.table",
            "torch.cat([y, y], -1) @ torch.cat([self.table, self.table])",
            "torch.einsum('nc,cd->nd', y, self.table)",
            "y[1:].unsqueeze(0) @ self.table",
            "torch.addmm(self.table[:1], y, self.table)",
            "y.repeat(2, 1) @ self.table",
            "torch.stack([y, y]) @ self.table",
            "y.sum(-1)",
            "y.sum(0) @ self.table",
            "y.argmax(-1)",
            "(y * (self.table @ self.table.T)[x.flatten()]).sum(-1)",
        ],
        lambda text: any(part in text for part in ("linear", "view", "einsum", "addmm", "argmax")),
    ),
)
def test_compiled_graph_keeps_the_ids(text):
    allocations = graph_sizes(f"y = F.one_hot(x.flatten(), 5).float(); {text}", zeros="scatter")
    assert not allocations


@pytest.mark.parametrize("text", ["y.T @ y", "y.cumsum(0) * y", "y.softmax(-1)"])
def test_compiled_graph_of_other_operations_is_dense(text):
    assert graph_sizes(f"y = F.one_hot(x.flatten(), 5).float(); {text}", zeros="scatter")


def graph_sizes(text, zeros):
    """Return the sizes of the dense one-hots in the compiled forward pass."""
    torch._dynamo.reset()
    found = []

    def compiler(graph, inputs):
        nodes = [node for node in graph.graph.nodes if zeros in str(node.target)]
        found.extend(node.meta["val"].numel() for node in nodes)
        return graph.forward

    backend = aot_autograd(fw_compiler=compiler, bw_compiler=lambda graph, _: graph.forward)
    model = with_forward(text)()
    other = convert(copy.deepcopy(model))
    compiled = torch.compile(other, fullgraph=True, backend=backend)
    torch.testing.assert_close(compiled(IDS), model(IDS))
    return found


def test_report_lists_only_one_hots():
    class Scatters(nn.Module):
        def forward(self, values, ids):
            summed = torch.zeros(9, 4).scatter_add(0, ids[:, None].expand(-1, 4), values)
            other = torch.zeros(5, 5).scatter_(0, ids[None, :5], 1)  # along another dimension
            return summed.sum() + torch.zeros(7, 7).sum() + other.sum()

    model = convert(Scatters(), min_entries=0)
    model(torch.randn(6, 4), torch.tensor([1, 2, 2, 0, 4, 1]))
    (finding,) = convert.report(model).findings
    assert "zeros.scatter, 5 columns" in finding.what
    assert finding.how == "sum computed from the ids"


class GraphBreaksInLoop(nn.Module):
    """torch.compile runs the loop in eager mode, and compiles only the functions that it calls."""

    def __init__(self):
        super().__init__()
        self.items = nn.Embedding(7, 3)
        self.linear = nn.Linear(7, 3)

    def forward(self, ids):
        total = 0
        for n in range(2):
            torch._dynamo.graph_break()
            rows = self.items((ids + n) % 7) * (n + 1)
            total = total + rows + self.linear(F.one_hot(ids, 7).float())
        return total


@pytest.mark.filterwarnings("ignore:The .grad attribute")  # raised at a graph break
@pytest.mark.parametrize("to", ["lookup", "matmul"])
def test_compiled_model_with_a_graph_break_in_a_loop(to):
    model = GraphBreaksInLoop()
    other = convert(copy.deepcopy(model), to, min_entries=0)
    compiled = torch.compile(other, backend="eager")
    ids = torch.tensor([[1, 6], [0, 2]])
    for _ in range(2):
        torch.testing.assert_close(compiled(ids), model(ids))


def test_compiled_model_trains():
    model, other = both()
    compiled = torch.compile(other, backend="aot_eager")
    for run, make, each in (
        (model, torch.optim.Adam, model),
        (compiled, hotrow.optim.Adam, other),
    ):
        optimizer = make(each.parameters(), lr=0.1)
        for at in range(4):
            optimizer.zero_grad()
            run(IDS[:, at % 3]).pow(2).sum().backward()
            optimizer.step()
    weights = [each.inner.linear.weight.detach() for each in (model, other)]
    torch.testing.assert_close(weights[1], weights[0])


def test_checkpoint_of_a_local_function():
    """No method of the model runs during recomputation, so the block's one-hots stay dense."""

    class Checkpointed(Outer):
        def forward(self, x):
            def block(i):
                one_hot = F.one_hot(i, 5).float()
                return self.inner.linear(one_hot) + self.inner(F.one_hot(i, 5).float())

            twice = F.one_hot(x, 5).float()
            return checkpoint(block, x, use_reentrant=False) + self.inner.linear(twice)

    plain = Checkpointed()
    model = convert(copy.deepcopy(plain))
    outputs = [each(IDS) for each in (plain, model)]
    assert_same_bits(outputs[1].detach(), outputs[0].detach())
    for output in outputs:
        output.square().sum().backward()
    for a, b in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(b.grad, a.grad)
    assert len(convert.report(model).findings) == 1  # the one-hot outside the checkpoint


def test_line_found_through_two_modules_is_reported_once():
    model = convert(Outer())
    model(IDS)
    model.inner(F.one_hot(IDS, 5).float())
    model.product(IDS)
    lines = str(convert.report(model)).splitlines()
    assert len(lines) == len(set(lines))


class Initialized(nn.Module):
    """A module with methods that make parameters from one-hots."""

    def __init__(self):
        super().__init__()
        self.proj = nn.Linear(400, 400)

    def assign_data(self):
        self.proj.weight.data = torch.eye(400)

    def assign_data_of_a_scattered_tensor(self):
        zeros = torch.zeros(400, 400)
        self.proj.weight.data = zeros
        zeros.scatter_(1, torch.arange(400).unsqueeze(1), 1.0)

    def create(self):
        self.proj.weight = nn.Parameter(torch.eye(400))

    def create_frozen(self):
        self.proj.weight = nn.Parameter(torch.eye(400), requires_grad=False)

    def forward(self, x):
        return self.proj(x)


@pytest.mark.parametrize(
    "method", ["assign_data", "assign_data_of_a_scattered_tensor", "create", "create_frozen"]
)
def test_a_parameter_made_from_a_one_hot_is_an_ordinary_parameter(method):
    plain = Initialized()
    model = convert(copy.deepcopy(plain))
    for each in plain, model:
        getattr(each, method)()
    weight = model.proj.weight
    assert type(weight) is nn.Parameter
    assert weight.requires_grad == plain.proj.weight.requires_grad
    assert_same_bits(weight.detach(), torch.eye(400))
    x = torch.randn(2, 400)
    assert_same_bits(model(x).detach(), plain(x).detach())
    model.double()
    assert weight.dtype == torch.float64
    assert "1." in repr(weight)


@torch.jit.script
def _scripted(x):
    return x * 0.5 + 1


def test_a_scripted_function_gets_the_dense_tensor():
    class Scripted(nn.Module):
        def forward(self, ids):
            return _scripted(F.one_hot(ids, 500).float())

    model = convert(Scripted())
    result = model(IDS)
    assert type(result) is torch.Tensor
    assert_same_bits(result, Scripted()(IDS))
    assert len(convert.report(model).findings) == 1


@dataclasses.dataclass(frozen=True)
class Output:
    one_hot: torch.Tensor
    others: list
    inner: object = None


def test_one_hots_in_a_returned_dataclass_become_plain_tensors():
    class Returning(nn.Module):
        def forward(self, ids):
            x = F.one_hot(ids, 5).float()
            inner = Output(x, [{"a": (x * 2,)}])
            result = Output(x, [inner, 3], inner)
            object.__setattr__(inner, "inner", result)  # a cycle
            return [result]

    (output,) = convert(Returning())(IDS)
    (expected,) = Returning()(IDS)
    assert type(output) is Output
    assert output.others[0] is output.inner
    assert output.inner.inner is output
    pairs = [
        (output.one_hot, expected.one_hot),
        (output.inner.one_hot, expected.inner.one_hot),
        (output.inner.others[0]["a"][0], expected.inner.others[0]["a"][0]),
    ]
    for one, other in pairs:
        assert type(one) is torch.Tensor
        assert_same_bits(one, other)


def test_an_output_keeps_the_lists_and_dicts_of_the_module():
    class Node(nn.Module):
        def __init__(self):
            super().__init__()
            self.codes = []
            self.history, self.tree = [Output(torch.ones(1), [])], {"name": "root"}
            self.tree["children"] = [{"parent": self.tree}]

        def forward(self, ids):
            x = F.one_hot(ids, 5).float()
            shared = [x]
            return {"new": [x, shared, shared], "history": self.history, "tree": self.tree}

        def buffer(self):
            return self.history

        def observe(self, ids):
            self.codes.append({"x": F.one_hot(ids, 5).float()})
            return self.codes

    model = convert(Node())
    for count in range(12):
        output = model(IDS)
        assert type(output["new"][0]) is torch.Tensor
        assert type(output["new"][1][0]) is torch.Tensor
        assert output["new"][1] is output["new"][2]
        assert output["tree"] is model.tree
        assert output["history"] is model.history is model.buffer()
        codes = model.observe(IDS)
        assert codes is model.codes
        codes[-1]["x"] *= 2
        assert model.codes[-1]["x"].sum() == 2 * IDS.numel()
        model.buffer().append(Output(torch.ones(1), [count]))
    assert len(model.history) == 13
    assert len(model.codes) == 12


@dataclasses.dataclass
class Move:
    parent: object
    value: torch.Tensor
    children: list


def test_each_object_of_a_returned_graph_is_visited_a_few_times(monkeypatch):
    class Search(nn.Module):
        def forward(self, ids):
            root = Move(None, F.one_hot(ids, 5).float(), [])
            for _ in range(30):
                child = Move(root, F.one_hot(ids, 5).float(), root.children)
                root.children.append(child)
            return root

    visits = []
    visit = outputs._materialize_fields
    monkeypatch.setattr(
        outputs, "_materialize_fields", lambda value, *_: visits.append(value) or visit(value, *_)
    )
    root = convert(Search())(IDS)
    assert len(visits) < 100
    for move in [root, *root.children]:
        assert type(move.value) is torch.Tensor


@pytest.mark.parametrize("make", [lambda: torch.eye(400), lambda: F.one_hot(IDS, 400).float()])
def test_a_tied_parameter_made_from_a_one_hot_stays_tied(make):
    class Tied(nn.Module):
        def __init__(self):
            super().__init__()
            self.a, self.b = nn.Linear(400, 400), nn.Linear(400, 400)

        def tie(self):
            self.a.weight = self.b.weight = self.own = nn.Parameter(make())

    model = convert(Tied())
    model.tie()
    assert type(model.a.weight) is nn.Parameter
    assert model.a.weight is model.b.weight is model.own


@dataclasses.dataclass
class Items(OrderedDict):
    """Like an output of Hugging Face's models: the attributes are also items."""

    codes: torch.Tensor = None

    def __post_init__(self):
        self["codes"] = self.codes

    def __setattr__(self, name, value):
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


def test_items_of_a_returned_dataclass_become_plain_tensors():
    class Returning(nn.Module):
        def forward(self, ids):
            return Items(F.one_hot(ids, 5).float())

    output = convert(Returning())(IDS)
    assert type(output.codes) is torch.Tensor
    assert output["codes"] is output.codes
