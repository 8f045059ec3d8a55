"""Autograd: requires_grad and related attributes, and backward passes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hotrow.onehot.registry import overloads, record_fallback, rule
from hotrow.onehot.tensor import OneHot
from hotrow.table.backward import BACKWARD_FUNCTIONS, backward_signature, run_backward
from hotrow.table.nested import map_instances


@rule(*BACKWARD_FUNCTIONS, any_layout=True)
def _(func: Any, *args: Any, **kwargs: Any) -> Any:
    # The graph contains leaf one-hots directly, but other one-hots only as dense tensors.
    bound = backward_signature(func).bind(*args, **kwargs)
    inputs = bound.arguments.pop("inputs", None)
    outputs, named = map_instances(
        (bound.args, bound.kwargs), OneHot, lambda x: x if x.is_grad_leaf else x.materialize()
    )
    if inputs is not None:
        is_retained = func is not torch.autograd.grad  # `backward` calls `retain_grad`
        named["inputs"] = map_instances(
            inputs, OneHot, lambda x: x if x.has_own_grad else _gradient_source(x, is_retained)
        )
    return run_backward(func, outputs, named, OneHot)


def _gradient_source(x: OneHot, is_retained: bool) -> Tensor:
    """Return `x.gradient_source()`; if the caller makes it retain its `grad`, x has this `grad`."""
    source = x.gradient_source(includes_later_uses=is_retained)
    if is_retained and source is x._grad_proxy:
        x.grad_holder = source
    return source


@rule(Tensor.requires_grad.__get__, any_layout=True)  # type: ignore[attr-defined]
def _(func: Any, x: OneHot) -> Any:
    if x.is_grad_leaf or not x.is_modified:
        return x.needs_grad
    return x.materialize().requires_grad


@rule(Tensor.is_leaf.__get__, any_layout=True)  # type: ignore[attr-defined]
def _(func: Any, x: OneHot) -> Any:
    if not (x.is_modified or x.needs_grad):
        return True
    return _own_attribute(func, x)


@rule(Tensor.grad_fn.__get__, any_layout=True)  # type: ignore[union-attr]
def _(func: Any, x: OneHot) -> Any:
    return _own_attribute(func, x) if x.is_modified or x.needs_grad else None


@rule(Tensor.grad_dtype.__get__, any_layout=True)  # type: ignore[union-attr]
def _(func: Any, x: OneHot) -> Any:
    return _own_attribute(func, x)


def _own_attribute(func: Any, x: OneHot) -> Any:
    """Return the attribute of the one-hot itself, if the one-hot is part of autograd's graph."""
    if not x.has_own_grad:
        return NotImplemented
    with torch._C.DisableTorchFunctionSubclass():
        return func(x)


@rule(Tensor.requires_grad_, Tensor.requires_grad.__set__, any_layout=True)  # type: ignore[attr-defined]
def _(func: Any, x: OneHot, requires_grad: bool = True) -> Any:
    if not x.is_grad_leaf:
        if x.requires_grad:
            return NotImplemented  # torch raises an error for False
        if not requires_grad:
            return x
    if requires_grad != x.is_grad_leaf and x.attached_views:
        raise RuntimeError(
            "requires_grad of a one-hot cannot change while the one-hot has views, such as x[1:]; "
            "change it before you create the views, or use x.clone() or x.detach()"
        )
    with torch._C.DisableTorchFunctionSubclass():
        result = func(x, requires_grad)
    if requires_grad and x.grad_holder is not None:  # from before `detach_`
        gradient, x.grad_holder = x.grad_holder.grad, None
        x.grad = gradient
    x.is_grad_leaf = requires_grad
    x.was_grad_leaf |= requires_grad
    return result


@rule(*overloads("detach_"), any_layout=True)
def _(func: Any, x: OneHot) -> Any:
    if x._parent is not None:
        return NotImplemented  # torch raises an error
    if x.has_views:
        raise RuntimeError("detach_ cannot detach a one-hot that has views; use x = x.detach()")
    x.detach_in_place()
    return x


@rule(Tensor.retain_grad, Tensor.register_hook, any_layout=True)
def _(func: Any, x: OneHot, *args: Any) -> Any:
    if x.has_own_grad:
        with torch._C.DisableTorchFunctionSubclass():
            return func(x, *args)
    source = x.gradient_source(includes_later_uses=True)
    if source is not x._grad_proxy:  # the dense tensor has replaced the parts
        record_fallback(func, [x])
        x.connect()
    elif func is Tensor.retain_grad:
        x.grad_holder = source
    return func(source, *args)


_GRAD: Any = Tensor.grad


@rule(
    *(_GRAD.__get__, _GRAD.__set__, _GRAD.__delete__),
    Tensor.retains_grad.__get__,  # type: ignore[attr-defined]
    any_layout=True,
)
def _(func: Any, x: Any, *value: Any) -> Any:
    if isinstance(x, OneHot):
        if x.grad_holder is not None:
            return func(x.grad_holder, *value)
        if x.is_modified and not x.has_own_grad:
            dense = x.materialize(for_view=True)
            is_used_leaf = dense.is_leaf and (dense.requires_grad or dense.grad is not None)
            if is_used_leaf or dense.retains_grad:
                return func(dense, *value)
    with torch._C.DisableTorchFunctionSubclass():
        return func(x, *value)
