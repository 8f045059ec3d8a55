"""Detect whether `torch.compile` is tracing or compiling."""

from __future__ import annotations

import torch
from torch._guards import TracingContext


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
