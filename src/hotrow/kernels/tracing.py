"""Whether `torch.compile` is at work."""

from __future__ import annotations

import torch
from torch._guards import TracingContext


def _is_compiling() -> bool:
    return torch.compiler.is_compiling() or TracingContext.try_get() is not None


# Also true in what torch runs in order to compile it, and does not trace itself (a tensor class, or
# a function that is allowed in the graph). Before 2.13 torch's own function is false there.
is_compiling = (
    torch.compiler.is_compiling
    if hasattr(torch.compiler, "_compile_session_context")
    else _is_compiling
)
