"""Find the user's code on the call stack, for warnings and reports."""

from __future__ import annotations

import sys
from types import CodeType, FrameType


def is_library_frame(frame: FrameType) -> bool:
    """Return whether the frame runs code of torch or hotrow."""
    return str(frame.f_globals.get("__name__")).startswith(("torch.", "hotrow."))


def caller_stack_level() -> int:
    """Return the `stacklevel` of the user's code, for a warning raised by the caller."""
    level, frame = 1, sys._getframe(1)
    while frame.f_back and is_library_frame(frame):
        level, frame = level + 1, frame.f_back
    return level


def location_of(frame: FrameType) -> str:
    """Return the file and line of the user's code that called this frame."""
    while frame.f_back is not None and is_library_frame(frame):
        frame = frame.f_back
    return f"{frame.f_code.co_filename}:{frame.f_lineno}"


def is_called_by(code: CodeType, frame: FrameType | None) -> bool:
    """Return whether the frame or one of its 16 nearest callers runs this code.

    Torch function modes, such as `torch.device("cpu")`, run between torch and a table's
    `__torch_function__`. The search ends at `get_extra_state`: it is a module's own code, although
    torch calls it while it saves the module.
    """
    for _ in range(16):
        if frame is None or frame.f_code is code or frame.f_code.co_name == "get_extra_state":
            break
        frame = frame.f_back
    return frame is not None and frame.f_code is code
