"""Detect tracing, compiling and transforms, and keep `torch.compile` from compiling handlers."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._C import _functorch
from torch._C._dynamo import eval_frame as _eval_frame
from torch._compile import _disable_dynamo
from torch._guards import TracingContext
from torch.autograd import forward_ad

_Function = TypeVar("_Function", bound=Callable[..., Any])


def never_compile_alone(handler: _Function) -> _Function:
    """Keep `torch.compile` from compiling a handler on its own.

    A handler is a `__torch_function__` or `__torch_dispatch__` method. If a loop contains a graph
    break, torch.compile runs the loop in eager mode, but compiles the functions that the loop
    calls. If it compiled a handler this way, the compiled code would also run for operations that
    it wasn't compiled for, and return wrong values. torch.compile still traces the handler as
    part of a function that calls it.
    """
    action = _eval_frame._FrameAction
    strategy = _eval_frame._FrameExecStrategy(action.SKIP, action.SKIP)
    _eval_frame.set_code_exec_strategy(handler.__code__, strategy)
    return handler


def _is_compiling() -> bool:
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


# `is_compiling` also returns true in code that runs during compilation but isn't traced, such as
# methods of a tensor class or functions allowed in the graph. Before torch 2.13,
# `torch.compiler.is_compiling` returns false in such code.
is_compiling = (
    torch.compiler.is_compiling
    if hasattr(torch.compiler, "_compile_session_context")
    else _is_compiling
)


def is_transforming() -> bool:
    """Return whether `torch.func` or forward-mode autograd is active; both need special rules."""
    return torch._C._are_functorch_transforms_active() or forward_ad._current_level >= 0


def is_in_function() -> bool:
    """Return whether the forward pass of an `autograd.Function` is running."""
    # `no_grad` doesn't disable forward-mode autograd, but `autograd.Function` does.
    is_enabled: bool = torch._C._is_fwd_grad_enabled()
    return not (is_enabled or torch.is_grad_enabled() or torch.is_inference_mode_enabled())


def is_jit_tracing() -> bool:
    """Return whether torch.jit.trace is recording."""
    return torch._C._get_tracing_state() is not None  # torch.compile can trace this call


def is_make_fx_tracing() -> bool:
    """Return whether `make_fx` is recording, as in `torch.func.linearize`."""
    if is_compiling() or not torch._C._len_torch_dispatch_stack():
        return False
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    return get_proxy_mode() is not None


def without_make_fx() -> AbstractContextManager[Any]:
    """Suspend `make_fx`, so that its graph uses the tensors created here as constants."""
    if not is_make_fx_tracing():
        return nullcontext()
    from torch.fx.experimental.proxy_tensor import disable_proxy_modes_tracing

    return disable_proxy_modes_tracing()


def is_tracing() -> bool:
    """Return whether torch.jit.trace or `make_fx` is recording."""
    return is_jit_tracing() or is_make_fx_tracing()


def has_derivative(t: Tensor) -> bool:
    """Return whether autograd may compute a derivative with respect to this tensor."""
    return t.requires_grad or torch._C._are_functorch_transforms_active() or has_tangent(t)


def has_tangent(t: Tensor) -> bool:
    """Return whether the tensor has a tangent in forward-mode autograd."""
    if forward_ad._current_level < 0:
        return False
    return forward_ad.unpack_dual(t).tangent is not None  # type: ignore[no-untyped-call]


def transform_level() -> int:
    """Return how many transforms of `torch.func` are active."""
    return _functorch.maybe_current_level() or 0


@contextmanager
def at_transform_level(level: int) -> Iterator[None]:
    """Suspend the inner transforms of `torch.func`, so that only `level` transforms are active.

    Tensors created inside a transform become invalid when it ends. Code that stores a tensor for
    longer must compute it outside of the transform.
    """
    suspended = []
    try:
        while transform_level() > level:
            suspended.append(_functorch.pop_dynamic_layer_stack())
        yield
    finally:
        while suspended:
            _functorch.push_dynamic_layer_stack(suspended.pop())


def is_exporting() -> bool:
    """Return whether `torch.export` is tracing.

    In torch 2.11, `torch.compiler.is_exporting` is always true while `torch.compile` traces.
    """
    return bool(torch.compiler._is_exporting_flag)


@contextmanager
def outside_inference_mode(is_grad_enabled: bool) -> Iterator[None]:
    """Leave the inference mode and set the grad mode, also for `torch.export`.

    While `torch.export` traces an operation of a tensor subclass, it doesn't record by itself that
    the grad mode changes.
    """
    was_enabled = torch.is_grad_enabled()
    with torch.inference_mode(False), torch.set_grad_enabled(is_grad_enabled):
        if was_enabled == is_grad_enabled or not is_exporting():
            yield
            return
        _record_grad_mode(is_grad_enabled)
        try:
            yield
        finally:
            _record_grad_mode(was_enabled)


def _record_grad_mode(is_enabled: bool) -> None:
    from torch.fx.experimental.proxy_tensor import get_proxy_mode

    mode = get_proxy_mode()
    if mode is not None:
        node = mode.tracer.create_node(
            "call_function", torch._C._set_grad_enabled, (is_enabled,), {}
        )
        node.meta["val"] = None


def may_trace() -> bool:
    """Return whether `torch.compile` may trace the functions that the caller calls next.

    The result can be true even if they are not traced: while compiled code runs, torch keeps the
    callback that starts a trace, even during calls to functions that are not compiled.
    """
    return is_compiling() or _eval_frame.get_eval_frame_callback() is not None


def never_trace(function: _Function) -> _Function:
    """Keep `torch.compile` from tracing a function that settles rows.

    The rows to settle differ from run to run, so a compiled graph can't settle them.
    `torch.compiler.disable` also prevents tracing, but it imports the compiler, and each call takes
    3 us longer.
    """
    untraced: Any = _disable_dynamo(function)
    # With `fullgraph=True`, torch.compile shows this reason in its error.
    untraced._torchdynamo_disable = True
    untraced._torchdynamo_disable_msg = (
        "hotrow settles stale rows outside of the graph. To compile with fullgraph=True, use the "
        "table only in lookups without max_norm (for bags, also without padding_idx and "
        "scale_grad_by_freq), and compute the rest outside of the compiled function"
    )

    @functools.wraps(function)
    def run(*args: Any, **kwargs: Any) -> Any:
        return (untraced if may_trace() else function)(*args, **kwargs)

    return run  # type: ignore[return-value]
