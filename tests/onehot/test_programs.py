"""Programs of three operations on bags with repeated ids, compared with the same dense programs.

There are more classes than ids. Otherwise, hotrow would compute many of these programs densely.
"""

import itertools
import warnings

import pytest
import torch
import torch.nn.functional as F

from hotrow.onehot.encoding import one_hot
from hotrow.onehot.tensor import OneHot
from tests.support.exhaustive import grid
from tests.support.onehots import outcome, to_dense

CLASSES = 40
IDS = torch.tensor([[3, 3, 3, 1, 9, 3], [2, 2, 5, 5, 2, 7], [8, 8, 8, 8, 8, 8], [6, 4, 0, 1, 2, 3]])
_NUMBERS = torch.Generator().manual_seed(0)


def _small(*shape):
    return torch.randint(-3, 4, shape, generator=_NUMBERS).double()


TRAINED = {"Q": _small(4, CLASSES), "W": _small(CLASSES, 3), "U": _small(4, 6, 1) / 10}
FIXED = {"torch": torch, "F": F, "N": _small(4, 6, 1).long() * 900_000_000}

CREATIONS = """
    x
    x.float()
    x.double()
    x.bfloat16()
    x.bool()
    x.byte()
    x.short() * 15000
    x.int()
    1 - x.double()
    x.double() * U
    x.int() * N.int()
    torch.cat([x.double(), x.double()], -1)[..., 5:45]
"""
BAGS = """
    x
    x.sum(1)
    x.mean(1)
    x.any(1)
    x.amax(1)
    x.sum(1, keepdim=True)
    x[:, 0] + x[:, 1]
    x[:, 0] | x[:, 1]
    x[:, 0] - x[:, 2]
    x.transpose(0, 1).sum(0)
    x.sum(1).sum(0)
    x[:, :2].sum(1).t()
"""
OPERATIONS = """
    x
    x * Q
    x + Q
    x * 0.5
    x * -1
    x - 1
    -x
    x / 3
    torch.div(x, 2, rounding_mode="floor")
    torch.div(x, 2, rounding_mode="trunc")
    x.clone().div_(2, rounding_mode="floor")
    x // 2
    x % 2
    x ** 2
    2 ** x
    x * x
    x + x
    x - x.flip(0)
    x > 0
    x == 1
    x >= 1
    x != 0
    x == x.max(-1, keepdim=True)[0]
    x.clamp(max=1)
    x.clamp(-1, 2)
    x.abs()
    x.sign()
    x.floor()
    x.round()
    x.double().exp()
    x.logical_not()
    x & 1
    ~x
    x.bool()
    x.byte()
    x.short()
    x.int()
    x.long()
    x.bfloat16()
    x.double()
    torch.where(x > 0, Q, 0)
    torch.where(x != 0, 1.5, Q)
    Q.masked_fill(x.bool(), 3.0)
    Q - 0.5 * (x > 0)
    torch.maximum(x, x.flip(0))
    torch.add(x, x, alpha=2)
    x.softmax(-1)
    x.cumsum(0)
    x.flatten()
    x.reshape(-1, 5)
    x.unsqueeze(0)
    x[1:]
    x[..., :9]
    x.t()
    torch.stack([x, x])
    torch.cat([x, x * 2], -1)
"""
ENDS = """
    x
    x.sum(-1)
    x.sum(0)
    x.double()
    x > 0
    x.double() @ W
    x * x
"""


def _lines(text):
    return [line.strip() for line in text.strip().splitlines()]


def _compiled(lines):
    return {line: compile(line, line, "eval") for line in lines}


def _run(code, names, x):
    return outcome(eval, code, {**FIXED, **names, "x": x})


def _is_same(found, expected, eps):
    if isinstance(expected, Exception):
        return isinstance(found, Exception)
    if isinstance(found, Exception):
        return False
    found, expected = to_dense(found).detach(), expected.detach()
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        return False
    if not expected.is_floating_point():
        return torch.equal(found, expected)
    bound = 8 * max(eps, torch.finfo(expected.dtype).eps)
    return torch.allclose(found, expected, rtol=bound, atol=bound, equal_nan=True)


def _gradients(result, leaves):
    """Return the gradients of the leaves, or None if torch can't compute them."""
    if isinstance(result, Exception) or not result.requires_grad:
        return None
    weights = torch.arange(1.0, 1 + result.numel(), dtype=torch.float64).reshape(result.shape) % 5
    loss, inputs = (result * weights.to(result.dtype)).sum(), list(leaves.values())
    found = outcome(lambda: torch.autograd.grad(loss, inputs, retain_graph=True, allow_unused=True))
    return None if isinstance(found, Exception) else found


def _describe(found, expected):
    return " ".join(f"{to_dense(found)!r:.80} instead of {expected!r:.80}".split())


@pytest.mark.parametrize(
    ("creation", "bag"),
    grid(
        itertools.product(_lines(CREATIONS), _lines(BAGS)),
        lambda creation, bag: bag == "x.sum(1)" and creation in _lines(CREATIONS)[::3],
    ),
)
def test_programs_with_repeated_ids_match_dense_programs(creation, bag):
    operations, ends = _compiled(_lines(OPERATIONS)), _compiled(_lines(ENDS))
    sides = []
    for x in (F.one_hot(IDS, CLASSES), one_hot(IDS, CLASSES, torch.int64)):
        leaves = {name: value.clone().requires_grad_() for name, value in TRAINED.items()}
        start = _run(creation, leaves, x)
        sides.append((leaves, start, _run(bag, leaves, start)))
    (plain_leaves, _, plain), (leaves, start, ours) = sides
    if isinstance(plain, Exception):
        assert isinstance(ours, Exception)
        return
    assert isinstance(start, OneHot)
    eps = torch.finfo(plain.dtype).eps if plain.is_floating_point() else 0.0
    wrong = []
    with warnings.catch_warnings(action="ignore"):
        for (operation, first), (end, last) in itertools.product(operations.items(), ends.items()):
            results = []
            for names, x in ((plain_leaves, plain), (leaves, ours)):
                middle = _run(first, names, x)
                failed = isinstance(middle, Exception)
                results.append(middle if failed else _run(last, names, middle))
            expected, found = results
            if not _is_same(found, expected, eps):
                wrong.append(f"{operation}; {end}: {_describe(found, expected)}")
                continue
            gradients = _gradients(expected, plain_leaves), _gradients(found, leaves)
            for theirs, own in zip(*(each or (None,) * 3 for each in gradients), strict=True):
                zeros = torch.zeros(())
                theirs, own = (zeros if g is None else to_dense(g) for g in (theirs, own))
                if not torch.allclose(own, theirs, rtol=1e-6, atol=1e-6, equal_nan=True):
                    wrong.append(f"{operation}; {end}, gradient: {_describe(own, theirs)}")
    assert not wrong, "\n".join([f"{len(wrong)} programs differ", *wrong])
