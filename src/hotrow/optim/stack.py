"""Find the user's code on the call stack, for warnings."""

from __future__ import annotations

import sys


def caller_stack_level() -> int:
    """Return the `stacklevel` of the user code that called the optimizer."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and frame.f_globals.get("__name__", "").startswith(("hotrow.", "torch.")):
        level, frame = level + 1, frame.f_back
    return level
