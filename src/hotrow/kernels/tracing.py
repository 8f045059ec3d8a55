"""Detect whether `torch.compile` is tracing or compiling."""

from __future__ import annotations

import torch
from torch._guards import TracingContext


def _is_compiling() -> bool:
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


# Also true in code that torch runs while it compiles but does not trace: a tensor class, or a
# function allowed in the graph. Before 2.13, `torch.compiler.is_compiling` is false there.
is_compiling = (
    torch.compiler.is_compiling
    if hasattr(torch.compiler, "_compile_session_context")
    else _is_compiling
)
