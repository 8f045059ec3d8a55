"""`einsum` and `tensordot`: label the axes, then look up or contract two tensors at a time."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.equation import parse_equation
from hotrow.onehot.registry import rule
from hotrow.onehot.results import sizes_of
from hotrow.onehot.rules.contraction import contract
from hotrow.onehot.rules.products import look_up_product
from hotrow.onehot.tensor import OneHot


@rule(torch.einsum, any_layout=True)
def _(func: Any, equation: Any, *operands: Any) -> Any:
    if len(operands) == 1 and isinstance(operands[0], list | tuple):
        operands = tuple(operands[0])
    if not isinstance(equation, str):
        return NotImplemented
    parsed = parse_equation(equation, operands)
    if parsed is None:
        return NotImplemented
    labels, output = parsed
    if len(operands) < 2:
        return NotImplemented
    remaining, letters = list(operands), list(labels)
    while len(remaining) > 2:  # contract the first two operands, as torch does
        later = {*output, *"".join(letters[2:])}
        kept = "".join(dict.fromkeys(each for each in letters[0] + letters[1] if each in later))
        remaining[:2] = [_contract_pair(func, remaining[:2], letters[:2], kept)]
        letters[:2] = [kept]
        if not isinstance(remaining[0], Tensor):
            return NotImplemented
    return _contract_pair(func, remaining, letters, output)


def _contract_pair(func: Any, operands: Sequence[Any], labels: Sequence[str], output: str) -> Any:
    if not any(isinstance(each, OneHot) for each in operands):
        return torch.einsum(f"{labels[0]},{labels[1]}->{output}", *operands)
    if is_compiling():
        return _look_up(operands, labels, output)
    return _contract_or_look_up(func, operands, labels, output)


def _contract_or_look_up(
    func: Any, operands: Sequence[Any], labels: Sequence[str], output: str
) -> Any:
    result = _look_up(operands, labels, output)
    return contract(func, operands, labels, output) if result is NotImplemented else result


def _look_up(operands: Sequence[Any], labels: Sequence[str], output: str) -> Any:
    """Look up rows, if this is a product of a plain one-hot with a (C, D) or (D, C) weight."""
    if not isinstance(operands[0], OneHot):
        operands, labels = operands[::-1], labels[::-1]
    (x, weight), (batch, other) = operands, (labels[0][:-1], labels[1])
    one = labels[0][-1:]
    if not isinstance(x, OneHot) or isinstance(weight, OneHot) or not x.is_plain:
        return NotImplemented
    if len(other) != 2 or one not in other or other[0] == other[1]:
        return NotImplemented
    columns = other[1] == one
    kept = other[0] if columns else other[1]
    if kept in labels[0] or output != batch + kept or len(labels[0]) != len(x.sizes):
        return NotImplemented
    return look_up_product(x, weight, columns)


@rule(torch.tensordot, any_layout=True)
def _(func: Any, a: Any, b: Any, dims: Any = 2, **kwargs: Any) -> Any:
    if kwargs or not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return NotImplemented
    counts = len(sizes_of(a)), len(sizes_of(b))
    if isinstance(dims, int):
        if not 0 <= dims <= min(counts):
            return NotImplemented  # torch raises an error
        pairs = [*zip(range(counts[0] - dims, counts[0]), range(dims), strict=True)]
    elif isinstance(dims, tuple | list) and len(dims) == 2:
        axes = [[each] if isinstance(each, int) else list(each) for each in dims]
        if len(axes[0]) != len(axes[1]) or not all(
            isinstance(d, int) for d in [*axes[0], *axes[1]]
        ):
            return NotImplemented
        if any(not -n <= d < n for each, n in zip(axes, counts, strict=True) for d in each):
            return NotImplemented  # torch raises an error
        pairs = [(i % counts[0], j % counts[1]) for i, j in zip(*axes, strict=True)]
    else:
        return NotImplemented
    letters = string.ascii_letters[: sum(counts)]
    if len(letters) < sum(counts):
        return NotImplemented
    first, second = list(letters[: counts[0]]), list(letters[counts[0] :])
    for i, j in pairs:
        second[j] = first[i]
    summed = {first[i] for i, _ in pairs}
    output = "".join(letter for letter in (*first, *second) if letter not in summed)
    labels = "".join(first), "".join(second)
    return _contract_or_look_up(func, (a, b), labels, output)
