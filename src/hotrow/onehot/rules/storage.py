"""Operations that need the whole dense tensor, such as array access, pickling and printing."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from hotrow.kernels.tracing import is_compiling
from hotrow.onehot.registry import rule
from hotrow.onehot.tensor import OneHot
from hotrow.table.nested import find_instances


# Torch's version counter misses direct writes to memory, so the dense tensor replaces the parts.
@rule(
    *(Tensor.numpy, Tensor.__array__, Tensor.__dlpack__, Tensor.data_ptr, Tensor.set_),
    *(Tensor.untyped_storage, Tensor.storage, Tensor.share_memory_),
    *(Tensor.data.__get__, Tensor.data.__set__),  # type: ignore[attr-defined]
    any_layout=True,
)
def _(func: Any, x: Any, *args: Any, **kwargs: Any) -> Any:
    for one_hot in find_instances((x, args), OneHot):
        one_hot.materialize(permanent=not is_compiling())
        if func in _REPLACES_MEMORY and not is_compiling():
            one_hot.materialize_views()
    return NotImplemented


_REPLACES_MEMORY = {Tensor.set_, Tensor.data.__set__}  # type: ignore[attr-defined]


@rule(Tensor.__repr__, Tensor.__deepcopy__, Tensor.__reduce_ex__, any_layout=True)
def _(func: Any, x: OneHot, *args: Any, **kwargs: Any) -> Any:
    return func(_dense_leaf(x), *args, **kwargs) if x.is_grad_leaf else NotImplemented


def _dense_leaf(x: OneHot) -> Tensor:
    """Return the dense leaf tensor that plain PyTorch would have in place of the one-hot."""
    leaf = x.materialize().detach().requires_grad_()
    leaf.grad = x.grad
    return leaf
