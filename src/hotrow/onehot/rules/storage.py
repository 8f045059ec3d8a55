"""Operations that need the whole dense tensor, such as array access, pickling and printing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.registry import record_fallback, rule
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import find_instances


# Torch's version counter misses direct writes to memory, so the dense tensor replaces the parts.
@rule(
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_),
    Tensor.data.__get__,  # type: ignore[attr-defined]
    any_layout=True,
)
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    x.materialize(permanent=True)
    return NotImplemented


@rule(Tensor.data.__set__, any_layout=True)  # type: ignore[attr-defined]
def _(func: Any, x: Any, values: Any) -> Any:
    if is_compiling():
        return NotImplemented
    record_fallback(func, list(find_instances((x, values), OneHot)))
    dense = values.materialize(permanent=True) if isinstance(values, OneHot) else values
    if isinstance(x, OneHot):
        x.replace_memory(lambda t: func(t, dense))
    else:
        func(x, dense)


@rule(Tensor.__repr__, any_layout=True)
def _(func: Any, x: OneHot, **kwargs: Any) -> Any:
    return func(_dense_leaf(x), **kwargs) if x.is_grad_leaf else NotImplemented


@rule(Tensor.__deepcopy__, Tensor.__reduce_ex__, any_layout=True)
def _(func: Any, x: OneHot, memo_or_protocol: Any) -> Any:
    """Copy or pickle the dense tensor."""
    record_fallback(func, [x])
    dense = x.materialize(permanent=func is Tensor.__reduce_ex__)  # `copy.copy` shares the memory
    if x.is_grad_leaf or not x.requires_grad:
        dense = _dense_leaf(x)
    if func is Tensor.__deepcopy__:  # which identifies copied tensors by their `id()`
        memo_or_protocol.setdefault(id(memo_or_protocol), []).append(dense)
    return func(dense, memo_or_protocol)


def _dense_leaf(x: OneHot) -> Tensor:
    """Return the dense leaf tensor that plain PyTorch would have in place of the one-hot."""
    leaf = x.materialize().detach().requires_grad_(x.is_grad_leaf)
    leaf.grad = x.grad
    return leaf
