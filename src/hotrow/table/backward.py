"""Run backward passes outside `__torch_function__`.

Torch passes `autograd.grad(loss, [table])` and `loss.backward(inputs=[table])` to the table's
`__torch_function__`. This method is disabled while it calls torch. But a backward pass can run
Python code, such as a hook that looks up another table, and that code would then read stale rows.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge

from hotrow.table.nested import find_instances, map_instances

BACKWARD_FUNCTIONS = {torch.autograd.grad, torch.autograd.backward, Tensor.backward}
backward_signature = functools.cache(inspect.signature)


class _Alias(torch.autograd.Function):
    """Return a tensor of the same shape that passes on its gradient; its values are never read."""

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return torch.empty((), dtype=x.dtype, device=x.device).expand(x.shape)

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        """Save nothing."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Tensor:
        return gradient


def _alias_of(tensor: Tensor) -> Tensor:
    if not tensor.requires_grad:
        return tensor  # torch raises an error for this tensor
    with torch._C.DisableTorchFunctionSubclass(), torch.enable_grad():
        alias: Tensor = _Alias.apply(tensor)  # type: ignore[no-untyped-call]
        return alias


def _edge_of(tensor: Tensor) -> Any:
    """Return the edge of autograd's graph that receives the tensor's gradient."""
    if not tensor.requires_grad:
        return tensor
    alias = _alias_of(tensor)  # keep it alive: in torch 2.11, its node alone is invalid
    node: Any = alias.grad_fn
    return GradientEdge(*node.next_functions[0])


def run_backward(
    func: Callable[..., Any],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    cls: type[Tensor],
) -> Any:
    """Call a function in `BACKWARD_FUNCTIONS` after replacing all instances of `cls`.

    Edges of autograd's graph replace the inputs, and aliases replace the outputs.
    """
    bound = backward_signature(func).bind(*args, **kwargs)
    options = bound.arguments
    inputs, (first, outputs) = options.pop("inputs", None), next(iter(options.items()))
    options[first] = map_instances(outputs, cls, _alias_of)
    if inputs is not None:
        options["inputs"] = map_instances(inputs, cls, _edge_of)
    fills_missing = options.get("materialize_grads", False)
    if fills_missing:  # torch can't create a zero gradient for an edge
        options.update(materialize_grads=False, allow_unused=True)
    if next(find_instances([options[first], options.get("inputs")], cls), None) is None:
        result = func(*bound.args, **bound.kwargs)
    else:  # otherwise, torch would call `__torch_function__` again before it raises its error
        with torch._C.DisableTorchFunctionSubclass():
            result = func(*bound.args, **bound.kwargs)
    if not fills_missing:
        return result
    requires_grad = options.get("create_graph", False)
    return tuple(
        torch.zeros_like(each, requires_grad=requires_grad) if gradient is None else gradient
        for gradient, each in zip(result, inputs, strict=True)
    )
